"""The same inputs through our functions and through transformers and TRL's formulas: largest differences, one JSON line."""

import json
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from bench.ours.toy_models import random_prompts, text_of, write_policy, write_scalar
from rewarden.algos import ppo_loss, ppo_prepare, reward
from rewarden.algos.actors import build_actors
from rewarden.algos.evaluation import sample_and_score
from rewarden.algos.pairs import EncodedPair
from rewarden.algos.ppo_config import PPO
from rewarden.algos.reward import Reward
from rewarden.data.sources import Data
from rewarden.maths import Moments
from rewarden.models.forward import sequence_logp
from rewarden.models.load import Model, load_policy, load_tokenizer
from rewarden.models.reward import load_reward_model
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import commit
from rewarden.text.collate import collate, role_mask
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message, Rollout, TokenBatch

Check = tuple[str, float]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        policy = write_policy(Path(folder) / "policy", never_ends=True)
        scalar, critic = (write_scalar(Path(folder) / f"scalar{seed}", seed=seed) for seed in (1, 2))
        checks = dict([*scores(scalar), *texts(policy), *ppo_losses(policy, scalar, critic)])
    versions = {name: version(name) for name in ("torch", "transformers")}
    print(json.dumps({"ours": "rewarden", "checks": checks, "commit": commit(Path(__file__).parents[2]), "versions": versions}))


def random_rows(lengths: list[int], seed: int) -> TokenBatch:
    """Rows of random words."""
    g = torch.Generator().manual_seed(seed)
    return collate([torch.randint(0, 2000, (length,), generator=g).tolist() for length in lengths])


def scores(folder: str) -> Iterator[Check]:
    """Rewards, pair loss and gradient, against a padded batch with its mask and TRL's loss."""
    tokens = random_rows([30, 256, 77, 120, 31, 64, 200, 90], seed=11)
    ours = load_reward_model(Model(model_name_or_path=folder), device="cpu")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    padded_BT = tokens.ids_BT.masked_fill(~tokens.mask_BT, theirs.config.pad_token_id)  # it finds each row's last token by id
    score_B = theirs(input_ids=padded_BT, attention_mask=tokens.mask_BT.long()).logits[:, 0]
    yield "reward scores", difference(ours.score(tokens)[:, 0], score_B)

    chosen_b, rejected_b = score_B.chunk(2)
    expected = -F.logsigmoid(chosen_b - rejected_b).mean()  # RewardTrainer.compute_loss
    expected.backward()
    rows = [tuple(ids[: int(n)].tolist()) for ids, n in zip(tokens.ids_BT, tokens.length_B, strict=True)]
    pairs = [
        EncodedPair(id=str(i), chosen_ids=a, rejected_ids=b, chosen_length=1, rejected_length=1, preference=1.0, margin=0.0)
        for i, (a, b) in enumerate(zip(rows[:4], rows[4:], strict=True))
    ]
    cfg = Reward(model=Model(model_name_or_path=folder), data=Data(path="unused.jsonl"))
    batch = reward.prepare(pairs, torch.device("cpu"), margin_scale=1.0, num_heads=1)
    term = reward.loss(ours, batch, cfg, None)["preference"]
    loss = term.value_BT.mean()
    loss.backward()
    yield "reward loss", difference(loss, expected)
    yield "reward gradient, relative", gradient_difference(ours.model, theirs)


def texts(folder: str) -> Iterator[Check]:
    """Greedy answers against generate, and log-probs of the sampler and of training against a full forward."""
    model = Model(model_name_or_path=folder)
    template = load_template(load_tokenizer(model))
    policy = load_policy(model, device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = random_prompts(8, 32, seed=12)
    opened = [template.start(Conversation(id=str(i), messages=(said(ids),))) for i, ids in enumerate(prompts)]
    rows = HFSampler(policy, template, Sampling(max_completion_length=32, temperature=0.0)).sample(opened, seeds=range(8))
    ids_BT = torch.tensor(prompts)
    with torch.no_grad():
        greedy_BT = theirs.generate(
            input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=32, do_sample=False
        )
    found_BT = torch.tensor([row.token_ids for row in rows])
    yield "greedy tokens that differ", float((found_BT != greedy_BT).sum())

    mixed = [template.start(Conversation(id=str(i), messages=(said(ids[: 8 + 3 * i]),))) for i, ids in enumerate(prompts)]
    sampled = HFSampler(policy, template, Sampling(max_completion_length=24)).sample(mixed, seeds=range(8))
    tokens, mask_BT = batch_of(sampled)
    expected_BT = direct_logp(theirs, tokens)
    with torch.no_grad():
        found_BT = sequence_logp(policy, tokens, mask_BT, temperature=1.0)
    yield "token log-probs", difference(found_BT[mask_BT], expected_BT[mask_BT])
    sampler_N = torch.tensor([logp for row in sampled for logp in row.logp_sampler])
    yield "the sampler's log-probs", difference(sampler_N, expected_BT[mask_BT])

    same = HFSampler(policy, template, Sampling(max_completion_length=24))
    shared = same.sample([row for row in mixed[::3] for _ in range(4)], seeds=range(12))
    if same.stats.shared_rows != len(shared):
        raise AssertionError(f"{same.stats.shared_rows} of {len(shared)} rows shared their prompt: {same.stats.not_shared}")
    tokens, mask_BT = batch_of(shared)
    sampler_N = torch.tensor([logp for row in shared for logp in row.logp_sampler])
    yield "the sampler's log-probs, prompts shared", difference(sampler_N, direct_logp(theirs, tokens)[mask_BT])


def ppo_losses(policy: str, scalar: str, critic: str) -> Iterator[Check]:
    """Advantages, returns, both losses and their gradients after the policy has moved, against TRL's formulas."""
    cfg = PPO(
        policy=Model(model_name_or_path=policy),
        reward={"kind": "reward_model", "path": scalar},
        critic=Model(model_name_or_path=critic),
        data=Data(path="unused.jsonl"),
        sampling=Sampling(max_completion_length=24),
        beta=0.05,
        vf_coef=0.1,
        reward_norm=False,
        reward_clip=None,
    )
    actors = build_actors(
        policy=cfg.policy,
        reward=cfg.reward,
        critic=cfg.critic,
        critic_head="saved",
        with_critic=True,
        sampling=cfg.sampling,
        head_seed=0,
        ranks=Ranks.single("cpu"),
    )
    prompts = random_prompts(8, 32, seed=13)
    opened = [
        actors.template.start(Conversation(id=str(i), messages=(said(ids[: 8 + 3 * i]),))) for i, ids in enumerate(prompts)
    ]
    scored = sample_and_score(actors, opened, seeds=range(8), policy_version=0)
    batch, _, _ = ppo_prepare.prepare(actors, scored, Moments(), cfg, Ranks.single("cpu"))
    theirs = Theirs(policy, critic)
    old = theirs.prepare(batch.tokens, batch.mask_BT, torch.tensor([item.score.value for item in scored]), cfg)
    mask_BT = batch.mask_BT
    yield "PPO advantages", difference(batch.advantage_BT[mask_BT], old["advantage"][mask_BT])
    yield "PPO returns", difference(batch.return_BT[mask_BT], old["return"][mask_BT])

    assert actors.critic is not None
    for number, (mine, other) in enumerate(((actors.policy, theirs.policy), (actors.critic.model, theirs.critic))):
        move(mine, seed=number)
        move(other, seed=number)
    terms = ppo_loss.loss(actors, batch, cfg)
    means = {name: (terms[name].value_BT * mask_BT).sum() / mask_BT.sum() for name in ("policy", "value")}
    (means["policy"] + cfg.vf_coef * means["value"]).backward()
    expected = theirs.loss(batch.tokens, mask_BT, old, cfg)
    for key in ("policy/clip_fraction", "value/clip_fraction"):
        if not bool(terms[key].value_BT[mask_BT].any()):
            raise AssertionError(f"{key} is 0, so the comparison says nothing of the clip; move the models further")
    (expected["policy"] + cfg.vf_coef * expected["value"]).backward()
    yield "PPO policy loss", difference(means["policy"], expected["policy"])
    yield "PPO value loss", difference(means["value"], expected["value"])
    yield "PPO policy gradient, relative", gradient_difference(actors.policy, theirs.policy)
    yield "PPO critic gradient, relative", gradient_difference(actors.critic.model, theirs.critic)


class Theirs:
    """PPOTrainer.train of TRL 1.12.0 in plain torch on transformers' models, one term after the other.

    Two things are ours on purpose. Whitening divides by the population's variance (TRL's has n - 1 and adds 1e-8), and the
    score falls on the last sampled token (TRL puts it one later when a row ends before the batch's longest).
    """

    def __init__(self, policy: str, critic: str) -> None:
        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(policy).eval() for _ in range(2))
        self.critic = AutoModelForSequenceClassification.from_pretrained(critic).eval()

    def values(self, tokens: TokenBatch) -> Tensor:
        """The critic's value of the state before each token."""
        hidden_BTD = self.critic.model(tokens.ids_BT, attention_mask=tokens.mask_BT.long(), use_cache=False).last_hidden_state
        return F.pad(self.critic.score(hidden_BTD)[:, :-1, 0], (1, 0))

    @torch.no_grad()
    def prepare(self, tokens: TokenBatch, mask_BT: Tensor, score_B: Tensor, cfg: PPO) -> dict[str, Tensor]:
        """logp, value, whitened advantage and return at each sampled token; the recursion runs row by row."""
        logp_BT = direct_logp(self.policy, tokens)
        kl_BT = logp_BT - direct_logp(self.reference, tokens)
        value_BT = self.values(tokens)
        advantage_BT = torch.zeros_like(logp_BT)
        for row, sampled_T in enumerate(mask_BT):
            places = sampled_T.nonzero()[:, 0].tolist()
            last = next_value = 0.0
            for t in reversed(places):
                gained = -cfg.beta * float(kl_BT[row, t]) + (float(score_B[row]) if t == places[-1] else 0.0)
                delta = gained + cfg.gamma * next_value - float(value_BT[row, t])
                last = delta + cfg.gamma * cfg.lam * last
                advantage_BT[row, t], next_value = last, float(value_BT[row, t])
        kept_N = advantage_BT[mask_BT]
        whitened_BT = (advantage_BT - kept_N.mean()) / kept_N.std(correction=0)
        return {"logp": logp_BT, "value": value_BT, "advantage": whitened_BT, "return": advantage_BT + value_BT}

    def loss(self, tokens: TokenBatch, mask_BT: Tensor, old: dict[str, Tensor], cfg: PPO) -> dict[str, Tensor]:
        """Means over the sampled tokens of the larger of the plain and the clipped loss."""
        assert cfg.cliprange is not None
        assert cfg.cliprange_value is not None
        ratio_N = torch.exp(direct_logp(self.policy, tokens) - old["logp"])[mask_BT]
        advantage_N, return_N, old_value_N = (old[key][mask_BT] for key in ("advantage", "return", "value"))
        value_N = self.values(tokens)[mask_BT]
        near_N = torch.clamp(value_N, old_value_N - cfg.cliprange_value, old_value_N + cfg.cliprange_value)
        clipped_N = torch.clamp(ratio_N, 1 - cfg.cliprange, 1 + cfg.cliprange)
        return {
            "policy": torch.max(-advantage_N * ratio_N, -advantage_N * clipped_N).mean(),
            "value": 0.5 * torch.max((value_N - return_N).square(), (near_N - return_N).square()).mean(),
        }


def said(ids: list[int]) -> Message:
    """A user message of these words."""
    return Message(role="user", text=text_of(ids))


def batch_of(rows: list[Rollout]) -> tuple[TokenBatch, Tensor]:
    """Ids, and which of them were sampled."""
    tokens = collate([row.token_ids for row in rows])
    return tokens, role_mask([row.spans for row in rows], tokens.ids_BT.shape[1], sampled=True)


def direct_logp(model: torch.nn.Module, tokens: TokenBatch) -> Tensor:
    """log p of every token but the first from all logits of a padded batch with its mask."""
    logits_BTV = model(tokens.ids_BT, attention_mask=tokens.mask_BT.long(), use_cache=False).logits
    logp_BTV = F.log_softmax(logits_BTV[:, :-1], dim=-1)
    return F.pad(logp_BTV.gather(2, tokens.ids_BT[:, 1:, None])[..., 0], (1, 0))


@torch.no_grad()
def move(model: torch.nn.Module, *, seed: int) -> None:
    """The same random step on two copies of a model, so that ratios differ from 1 and clips act."""
    g = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        p.add_(torch.randn(p.shape, generator=g) * 3e-3)


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference."""
    return float((found.detach() - expected.detach()).abs().max())


def gradient_difference(mine: torch.nn.Module, other: torch.nn.Module) -> float:
    """Largest difference of any gradient, as a share of that tensor's largest."""
    theirs = dict(other.named_parameters())
    shares = []
    for name, p in mine.named_parameters():
        expected = theirs[name].grad
        if expected is None or p.grad is None:
            raise AssertionError(f"{name} has no gradient on {'their' if expected is None else 'our'} side")
        shares.append(float((p.grad - expected).abs().max() / expected.abs().max()))
    return max(shares)


if __name__ == "__main__":
    main()
