"""One optimizer step: exact for any split, clipped per group, untouched by what is not finite."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rewarden.errors import RewardenError
from rewarden.runtime.optim import Group, Optim, Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.step import gradient_norm, scale_down, split_batch, summarize, update
from rewarden.types import Term

ALONE = Ranks.single("cpu")


@dataclass(frozen=True)
class Batch:
    """Rows of 4 positions; "token" counts masked positions, "row" counts rows."""

    x_BTD: Tensor
    mask_BT: Tensor

    def counts(self) -> dict[str, Tensor]:
        return {"token": self.mask_BT.sum(), "row": torch.tensor(len(self)), "extra/abs": self.mask_BT.sum()}

    def rows(self, index_b: Tensor) -> "Batch":
        return Batch(self.x_BTD[index_b], self.mask_BT[index_b])

    def __len__(self) -> int:
        return len(self.x_BTD)


class Watching(Ranks):
    """Remembers the gradients `update` is about to clip."""

    def sum_gradients(self, parameters) -> None:
        super().sum_gradients(parameters)
        self.seen = [p.grad.clone() for p in parameters]


def watching() -> Watching:
    return Watching(rank=0, world=1, device=torch.device("cpu"))


def make_batch(rows: int = 13) -> Batch:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, 3, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, 4, generator=g) > 0.6
    mask[0] = False  # a row without any position
    return Batch(x, mask)


def make_net() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 1, dtype=torch.float64)


def make_loss(net: nn.Module):
    def loss(batch: Batch) -> dict[str, Term]:
        y_BT = net(batch.x_BTD).squeeze(-1)
        return {
            "token": Term(value_BT=(y_BT - 1) ** 2, mask_BT=batch.mask_BT, weight=0.7),
            "row": Term(
                value_BT=y_BT.sum(1, keepdim=True).exp(), mask_BT=torch.ones(len(batch), 1, dtype=torch.bool), weight=0.3
            ),
            "extra/abs": Term(value_BT=y_BT.abs(), mask_BT=batch.mask_BT, weight=0.0),
        }

    return loss


def one_group(params, **options) -> Optimizer:
    return Optimizer([Group("net", list(params), Optim(**{"learning_rate": 0.1, **options}))], 10)


def reference_gradient(batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
    """Straight from the formula, position by position, in one piece."""
    net = make_net()
    token = [(net(batch.x_BTD[b, t]).squeeze() - 1) ** 2 for b in range(len(batch)) for t in range(4) if batch.mask_BT[b, t]]
    row = [sum(net(batch.x_BTD[b, t]).squeeze() for t in range(4)).exp() for b in range(len(batch))]
    size = [net(batch.x_BTD[b, t]).squeeze().abs() for b in range(len(batch)) for t in range(4) if batch.mask_BT[b, t]]
    means = {"token": sum(token) / len(token), "row": sum(row) / len(row), "abs": sum(size) / len(size)}
    (0.7 * means["token"] + 0.3 * means["row"]).backward()
    return [net.weight.grad, net.bias.grad], {name: float(value.detach()) for name, value in means.items()}


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_gradient_is_the_same_for_any_number_of_microbatches(microbatches):
    batch = make_batch()
    expected, means = reference_gradient(batch)
    net, ranks = make_net(), watching()
    parts = [batch.rows(index) for index in torch.arange(len(batch)).tensor_split(microbatches)]
    assert len(parts) == microbatches
    report = update(one_group(net.named_parameters()), parts, make_loss(net), ranks=ranks)
    for got, want in zip(ranks.seen, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert report["loss/token"] == pytest.approx(means["token"], rel=1e-12)
    assert report["loss/row"] == pytest.approx(means["row"], rel=1e-12)
    assert report["extra/abs"] == pytest.approx(means["abs"], rel=1e-12)
    assert report["loss/total"] == pytest.approx(0.7 * means["token"] + 0.3 * means["row"], rel=1e-12)
    assert report["grad_norm/net"] == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in expected)), rel=1e-12)


def test_gradient_does_not_depend_on_the_order_or_size_of_microbatches():
    batch, grads = make_batch(), []
    for order in (torch.arange(13), torch.randperm(13, generator=torch.Generator().manual_seed(3))):
        net, ranks = make_net(), watching()
        update(one_group(net.named_parameters()), split_batch(batch.rows(order), 5), make_loss(net), ranks=ranks)
        grads.append(ranks.seen)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


def test_report_holds_exactly_the_promised_names():
    net = make_net()
    report = update(one_group(net.named_parameters()), [make_batch()], make_loss(net), ranks=ALONE)
    losses = {"loss/token", "loss/row", "loss/total", "extra/abs"}
    assert set(report) == losses | {"grad_norm/net", "lr/net", "skipped_steps", "skipped_in_a_row"}
    assert all(type(value) is float for value in report.values())
    assert report["lr/net"] == 0.1


def test_a_weighted_term_with_a_slash_keeps_its_name_and_a_weightless_one_loses_the_prefix():
    p = Parameter(torch.ones(1, 1))
    one = torch.ones(1, 1, dtype=torch.bool)
    terms = {"a/b": Term(value_BT=p * 2, mask_BT=one), "bare": Term(value_BT=p * 3, mask_BT=one, weight=0.0)}
    report = update(one_group([("p", p)]), [One(terms)], lambda b: b.terms, ranks=ALONE)
    assert (report["a/b"], report["bare"], report["loss/total"]) == (2.0, 3.0, 2.0)
    assert report["grad_norm/net"] == 2.0


@dataclass(frozen=True)
class One:
    """A batch of one position whose terms are given."""

    terms: dict[str, Term]

    def counts(self) -> dict[str, int]:
        return {name: int(term.mask_BT.sum()) for name, term in self.terms.items()}


def along(p: Parameter, gradient: list[float], name: str = "t") -> dict[str, Term]:
    """A loss whose gradient at p is `gradient`."""
    value = (p * torch.tensor(gradient, dtype=p.dtype)).sum().reshape(1, 1)
    return {name: Term(value_BT=value, mask_BT=torch.ones(1, 1, dtype=torch.bool))}


def test_clipping_gradient_3_4_to_norm_1_gives_06_08():
    p = Parameter(torch.zeros(2))  # ppomax.md T34
    p.grad = torch.tensor([3.0, 4.0])
    assert gradient_norm([p]) == 5.0
    scale_down([p], 5.0, 1.0)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]), rtol=0, atol=1e-6)
    scale_down([p], 1.0, None)
    scale_down([p], 0.99, 1.0)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]), rtol=0, atol=1e-6)


def test_the_logged_norm_is_the_one_before_clipping_and_clipping_reaches_the_optimizer():
    p = Parameter(torch.zeros(2))
    optimizer = one_group([("p", p)], max_grad_norm=1.0, betas=(0.9, 0.99))
    report = update(optimizer, [One(along(p, [3.0, 4.0]))], lambda b: b.terms, ranks=ALONE)
    assert report["grad_norm/net"] == 5.0
    moments = optimizer.state_dict()["moments"]["net/p"]  # after one step: (1 - beta1) g and (1 - beta2) g^2
    torch.testing.assert_close(moments["exp_avg"], torch.tensor([0.06, 0.08]))
    torch.testing.assert_close(moments["exp_avg_sq"], torch.tensor([0.0036, 0.0064]))


def test_a_huge_gradient_of_the_critic_does_not_throttle_the_policy():
    policy, critic = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
    groups = [
        Group("policy", [("p", policy)], Optim(learning_rate=0.1)),
        Group("critic", [("p", critic)], Optim(learning_rate=0.1)),
    ]
    optimizer = Optimizer(groups, 10)
    terms = {**along(policy, [0.3, 0.4], "a"), **along(critic, [3e6, 4e6], "b")}
    report = update(optimizer, [One(terms)], lambda b: b.terms, ranks=ALONE)
    assert report["grad_norm/policy"] == pytest.approx(0.5)
    assert report["grad_norm/critic"] == pytest.approx(5e6)
    moments = optimizer.state_dict()["moments"]
    torch.testing.assert_close(moments["policy/p"]["exp_avg"], torch.tensor([0.03, 0.04]))
    torch.testing.assert_close(moments["critic/p"]["exp_avg"], torch.tensor([0.06, 0.08]))


def test_the_norm_of_low_precision_gradients_is_taken_in_float32():
    p = Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    p.grad = torch.full((10_000,), 0.01, dtype=torch.bfloat16)
    assert gradient_norm([p]) == pytest.approx(100 * float(p.grad[0]), rel=1e-5)


def snapshot(optimizer: Optimizer, net: nn.Module) -> list[Tensor]:
    moments = [t.clone() for state in optimizer.state_dict()["moments"].values() for t in state.values()]
    return [p.detach().clone() for p in net.parameters()] + moments


@pytest.mark.parametrize("bad", ["nan loss", "infinite gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(bad):
    net, batch = make_net(), make_batch()
    optimizer = one_group(net.named_parameters(), lr_scheduler_type="linear")
    update(optimizer, [batch], make_loss(net), ranks=ALONE)
    before, rate = snapshot(optimizer, net), optimizer.learning_rates()

    def poisoned(b: Batch) -> dict[str, Term]:
        terms = make_loss(net)(b)
        y = net(b.x_BTD).squeeze(-1)
        # sqrt has value 0 and an infinite slope at 0
        value = y * float("nan") if bad == "nan loss" else (y - y.detach()).abs().sqrt()
        return {**terms, "token": Term(value_BT=value, mask_BT=b.mask_BT)}

    for times in (1, 2):
        report = update(optimizer, split_batch(batch, 4), poisoned, ranks=ALONE)
        assert (report["skipped_steps"], report["skipped_in_a_row"]) == (1.0, float(times))
        assert bad != "infinite gradient" or math.isfinite(report["loss/total"])
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer, net), strict=True))
    assert optimizer.learning_rates() == rate
    assert all(p.grad is None for p in net.parameters())
    report = update(optimizer, [batch], make_loss(net), ranks=ALONE)
    assert (report["skipped_steps"], report["skipped_in_a_row"], optimizer.num_skipped) == (0.0, 0.0, 2)
    assert not torch.equal(before[0], net.weight)


def test_a_statistic_that_is_not_finite_does_not_stop_the_step():
    p = Parameter(torch.ones(1))
    nan = Term(value_BT=torch.full((1, 1), math.nan), mask_BT=torch.ones(1, 1, dtype=torch.bool), weight=0.0)
    report = update(one_group([("p", p)]), [One({**along(p, [1.0]), "s/x": nan})], lambda b: b.terms, ranks=ALONE)
    assert report["skipped_steps"] == 0.0
    assert math.isnan(report["s/x"])


def test_what_stands_at_masked_positions_never_reaches_the_gradient():
    p = Parameter(torch.ones(1, 2))
    value = p * torch.tensor([[2.0, math.nan]])
    terms = {"t": Term(value_BT=value, mask_BT=torch.tensor([[True, False]]))}
    ranks = watching()
    report = update(one_group([("p", p)]), [One(terms)], lambda b: b.terms, ranks=ranks)
    assert report["loss/t"] == 2.0
    assert float(ranks.seen[0][0, 0]) == 2.0


def test_a_term_without_any_position_is_0_without_a_gradient():
    p = Parameter(torch.ones(1))
    empty = Term(value_BT=(p * 5).reshape(1, 1), mask_BT=torch.zeros(1, 1, dtype=torch.bool))
    report = update(one_group([("p", p)]), [One({**along(p, [1.0]), "none": empty})], lambda b: b.terms, ranks=ALONE)
    assert (report["loss/none"], report["loss/t"], report["grad_norm/net"]) == (0.0, 1.0, 1.0)


def test_mistakes_in_a_loss_are_named():
    p = Parameter(torch.ones(1))
    one = torch.ones(1, 1, dtype=torch.bool)
    good = along(p, [1.0])
    with pytest.raises(RewardenError, match="term 'other' that counts\\(\\) does not count; it counts \\['t'\\]"):
        update(one_group([("p", p)]), [One(good)], lambda b: {"other": good["t"]}, ranks=ALONE)
    with pytest.raises(RewardenError, match=r"values of shape \(1, 2\) and a mask of shape \(1, 1\)"):
        update(one_group([("p", p)]), [One(good)], lambda b: {"t": Term(value_BT=torch.ones(1, 2), mask_BT=one)}, ranks=ALONE)
    with pytest.raises(RewardenError, match="reached no parameter"):
        update(one_group([("p", p)]), [One(good)], lambda b: {"t": Term(value_BT=torch.ones(1, 1), mask_BT=one)}, ranks=ALONE)
    with pytest.raises(RewardenError, match="0 microbatches"):
        update(one_group([("p", p)]), [], lambda b: {}, ranks=ALONE)


def test_split_batch_keeps_every_row_once_in_order():
    batch = make_batch(13)
    for size in (1, 4, 13, 100):
        parts = split_batch(batch, size)
        assert torch.equal(torch.cat([part.x_BTD for part in parts]), batch.x_BTD)
        assert all(0 < len(part) <= size for part in parts)
    assert split_batch(batch.rows(torch.arange(0)), 4) == []
    with pytest.raises(RewardenError, match="microbatch of 0 rows"):
        split_batch(batch, 0)


def test_summarize_averages_taken_steps_and_adds_skipped_ones():
    reports = [
        {"loss/total": 1.0, "skipped_steps": 0.0, "skipped_in_a_row": 0.0},
        {"loss/total": math.nan, "skipped_steps": 1.0, "skipped_in_a_row": 1.0},
        {"loss/total": 4.0, "skipped_steps": 0.0, "skipped_in_a_row": 0.0},
    ]
    assert summarize(reports) == {"loss/total": 2.5, "skipped_steps": 1.0, "skipped_in_a_row": 1.0}
    assert math.isnan(summarize(reports[1:2])["loss/total"])
    assert summarize([]) == {}
