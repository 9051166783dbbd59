"""Named groups, schedules, and an optimizer state that goes on exactly."""

import math

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from rewarden.errors import ConfigError, ResumeError
from rewarden.runtime.optim import Group, Optim, Optimizer, lr_factor
from rewarden.spec import check, nearest


def factor(step: int, schedule: str, warmup: int, total: int = 1000, low: float = 0.0) -> float:
    return lr_factor(step, schedule=schedule, warmup_steps=warmup, total_steps=total, min_lr_ratio=low)


def test_inverse_sqrt_is_the_table_of_ppo_max():
    expected = {0: 0.1, 5: 0.1, 50: 0.5, 99: 0.99, 100: 1.0, 400: 0.5, 1000: 0.316228}  # ppomax.md T26, W = 100
    for step, value in expected.items():
        assert factor(step, "inverse_sqrt", 100) == pytest.approx(value, abs=1e-6)
    assert 5e-7 * factor(1000, "inverse_sqrt", 100) == pytest.approx(1.581e-7, abs=1e-10)
    assert 1.5e-6 * factor(1000, "inverse_sqrt", 100) == pytest.approx(4.743e-7, abs=1e-10)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse_sqrt"])
def test_without_warmup_every_schedule_starts_at_the_peak(schedule):
    assert factor(0, schedule, 0) == 1.0
    assert all(0 <= factor(step, schedule, 0) <= 1 for step in range(1200))


def test_inverse_sqrt_without_warmup_is_constant():
    assert [factor(step, "inverse_sqrt", 0) for step in (0, 1, 10, 10**6)] == [1.0] * 4  # ppomax.md T26, H24


def test_linear_and_cosine_agree_with_transformers_after_the_warmup():
    makers = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}
    for name, make in makers.items():
        optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=1.0)
        schedule = make(optimizer, num_warmup_steps=7, num_training_steps=50)
        for step in range(50):
            if step >= 7:
                assert factor(step, name, 7, 50) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
            optimizer.step()
            schedule.step()


def test_warmup_never_wastes_a_step_and_climbs_evenly():
    assert [factor(step, "constant", 3) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_min_lr_ratio_is_where_the_decay_ends():
    assert factor(1000, "cosine", 100, low=0.1) == pytest.approx(0.1)
    assert factor(550, "cosine", 100, low=0.1) == pytest.approx(0.55)  # half way: (1 + 0.1) / 2
    assert factor(5000, "linear", 100, low=0.2) == pytest.approx(0.2)
    assert factor(10**6, "inverse_sqrt", 100, low=0.05) == 0.05


def test_warmup_below_1_is_a_share_of_all_steps():
    assert Optim(learning_rate=1.0, warmup_steps=0.1).num_warmup_steps(105) == 11
    assert Optim(learning_rate=1.0, warmup_steps=7).num_warmup_steps(105) == 7
    with pytest.raises(ConfigError, match="must be whole"):
        check(Optim, {"learning_rate": 1.0, "warmup_steps": 7.5})
    with pytest.raises(ConfigError, match="betas"):
        check(Optim, {"learning_rate": 1.0, "betas": [0.9, 1.0]})


def nets(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), nn.Linear(3, 1)


def make(policy: nn.Module, critic: nn.Module, **options) -> Optimizer:
    return Optimizer(
        [
            Group("policy", list(policy.named_parameters()), Optim(learning_rate=1e-2, lr_scheduler_type="linear", **options)),
            Group(
                "critic",
                list(critic.named_parameters()),
                Optim(learning_rate=3e-2, lr_scheduler_type="inverse_sqrt", warmup_steps=2),
            ),
        ],
        10,
    )


def give_gradients(step: int, *modules: nn.Module) -> None:
    g = torch.Generator().manual_seed(step)
    for module in modules:
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def test_every_group_follows_its_own_schedule():
    optimizer = make(*nets())
    seen = []
    for step in range(4):
        seen.append(optimizer.learning_rates())
        give_gradients(step, *nets())
        optimizer.step()
    assert [rates["policy"] for rates in seen] == pytest.approx([1e-2, 9e-3, 8e-3, 7e-3])
    assert [rates["critic"] for rates in seen] == pytest.approx([3e-3, 1.5e-2, 3e-2, 3e-2 * math.sqrt(2 / 3)])


def test_the_rate_of_each_group_is_the_one_it_steps_with():
    policy, critic = nets()
    before = [p.detach().clone() for p in (*policy.parameters(), *critic.parameters())]
    optimizer = make(policy, critic)
    give_gradients(0, policy, critic)
    optimizer.step()
    after = [p.detach() for p in (*policy.parameters(), *critic.parameters())]
    moved = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    # the first step of Adam moves every weight by the learning rate
    assert moved == pytest.approx([1e-2] * 4 + [3e-3] * 2, rel=1e-3)


def test_it_is_torch_adamw():
    policy, _ = nets()
    twin, _ = nets()
    ours = Optimizer([Group("p", list(policy.named_parameters()), Optim(learning_rate=1e-2))], 10)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(5):
        give_gradients(step, policy)
        give_gradients(step, twin)
        ours.step()
        theirs.step()
    for a, b in zip(policy.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_weight_decay_leaves_norms_and_biases_alone():
    policy, critic = nets()
    optimizer = make(policy, critic, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = dict(policy.named_parameters())
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 1e-2 * 0.5))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[name], before[name])


def test_saved_and_loaded_it_goes_on_bit_for_bit(tmp_path):
    straight, stopped = nets(), nets()
    a, b = make(*straight), make(*stopped)
    for step in range(3):
        for optimizer, modules in ((a, straight), (b, stopped)):
            give_gradients(step, *modules)
            optimizer.step()
    b.skip()
    b.save(tmp_path)
    again = nets(seed=5)
    for new, old in zip(again, stopped, strict=True):
        new.load_state_dict(old.state_dict())
    c = make(*again)
    c.load(tmp_path)
    assert (c.num_steps, c.num_skipped, c.skipped_in_a_row) == (3, 1, 1)
    for step in range(3, 6):
        for optimizer, modules in ((a, straight), (c, again)):
            give_gradients(step, *modules)
            optimizer.step()
    for left, right in zip(straight, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(left.parameters(), right.parameters(), strict=True))


def test_state_of_other_parameters_is_refused(tmp_path):
    policy, critic = nets()
    make(policy, critic).save(tmp_path)
    other = Optimizer([Group("policy", list(policy.named_parameters()), Optim(learning_rate=1e-2))], 10)
    with pytest.raises(ResumeError, match="with critic/bias, critic/weight"):
        other.load(tmp_path)
    p = Parameter(torch.zeros(2, 2))
    small = Optimizer([Group("g", [("p", p)], Optim(learning_rate=1e-2))], 10)
    p.grad = torch.ones(2, 2)
    small.step()
    small.save(tmp_path)
    large = Optimizer([Group("g", [("p", Parameter(torch.zeros(3, 2)))], Optim(learning_rate=1e-2))], 10)
    with pytest.raises(ResumeError, match=r"g/p has shape \(2, 2\), not \(3, 2\)"):
        large.load(tmp_path)


def test_a_bfloat16_weight_moves_by_steps_too_small_for_bfloat16(tmp_path):
    p = Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    optimizer = Optimizer([Group("g", [("p", p)], Optim(learning_rate=1e-4))], 200)
    for _ in range(100):
        p.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.step()
    # 100 steps of 1e-4 down from 1; one of them is below bfloat16's spacing of 2^-8 under 1 and would be lost
    assert float(p.detach()) == pytest.approx(0.99, abs=2**-9)
    optimizer.save(tmp_path)
    q = Parameter(p.detach().clone())
    again = Optimizer([Group("g", [("p", q)], Optim(learning_rate=1e-4))], 200)
    again.load(tmp_path)
    for parameter, opt in ((p, optimizer), (q, again)):
        for _ in range(60):
            parameter.grad = torch.ones(1, 1, dtype=torch.bfloat16)
            opt.step()
    assert torch.equal(p, q)
    assert torch.equal(optimizer.state_dict()["copies"]["g/p"], again.state_dict()["copies"]["g/p"])


def test_groups_that_cannot_work_are_refused():
    p, optim = Parameter(torch.zeros(1)), Optim(learning_rate=1.0)
    for groups, words in [
        ([], "at least one group"),
        ([Group("a", [("p", p)], optim), Group("a", [("q", Parameter(torch.zeros(1)))], optim)], "each with its own name"),
        ([Group("a", [("p", p)], optim), Group("b", [("q", p)], optim)], "b/q and a/p are one parameter"),
        ([Group("a", [], optim)], "no trainable parameter"),
        ([Group("a", [("p", Parameter(torch.zeros(1), requires_grad=False))], optim)], "does not require a gradient"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Optimizer(groups, 10)


def test_a_name_that_other_programs_use_leads_to_ours():
    assert nearest("lr", Optim.model_fields) == "did you mean 'learning_rate'?"
    assert nearest("epochs", ["num_ppo_epochs", "eps"]) == "did you mean 'num_ppo_epochs'?"
    assert nearest("lr", ["beta", "gamma"]) == "allowed: beta, gamma"


def test_a_warm_up_that_outlasts_the_run_is_told_in_optimizer_steps_and_rounds():
    group = Group("policy", [("w", torch.nn.Parameter(torch.zeros(2)))], Optim(learning_rate=1.0, warmup_steps=8))
    assert Optimizer([group], 2, made_of="2 rounds of 1").notes == [
        "policy: warmup_steps is 8, beyond the 2 optimizer steps of the run (2 rounds of 1); learning_rate is never reached"
    ]
