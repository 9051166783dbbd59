"""The models that a run of reward modelling starts from."""

from jaxtyping import Float
from torch import Tensor

from rewarden.algos.reward_config import Reward
from rewarden.models.heads import set_head
from rewarden.models.members import load_adapted_members, start_heads
from rewarden.models.reward import RewardModel, load_reward_model
from rewarden.runtime.ranks import Ranks


def load_start(cfg: Reward, ranks: Ranks) -> RewardModel:
    """What a run starts with: the model of all heads, the trunk with all adapters, or the first member.

    Errors: ConfigError for heads that are not there, too few or too many, or equal.
    """
    if cfg.family == "lora":
        seeds = cfg.seeds
        heads_KD = start_heads(cfg.model, head=cfg.head, seeds=seeds)
        model = load_adapted_members(cfg.model, heads_KD=heads_KD, seeds=seeds, device=ranks.device)
    elif cfg.family == "independent":
        model = load_member(cfg, start_heads(cfg.model, head=cfg.head, seeds=cfg.seeds)[:1], ranks)
    else:
        model = _load_heads(cfg, ranks)
    model.model.to(ranks.device)
    return model


def _load_heads(cfg: Reward, ranks: Ranks) -> RewardModel:
    """One model with all heads; a saved head is checked to have as many rows as are wanted, and no two alike."""
    drawn = cfg.head == "fresh" and cfg.member_seeds is None
    heads_KD = None if drawn else start_heads(cfg.model, head=cfg.head, seeds=cfg.member_seeds or range(cfg.num_heads))
    model = load_reward_model(
        cfg.model,
        num_heads=cfg.num_heads,
        head=cfg.head,
        head_seed=cfg.head_seed if cfg.member_seeds is None or cfg.family == "linear" else cfg.member_seeds[0],
        device=ranks.device,
    )
    if heads_KD is not None:
        set_head(model.model, heads_KD)
    return model


def load_member(cfg: Reward, head_1D: Float[Tensor, "1 D"], ranks: Ranks) -> RewardModel:
    """A member of an independent ensemble as it starts, with this head; on the CPU."""
    model = load_reward_model(cfg.model, num_heads=1, head="fresh", head_std=0.0, device=ranks.device)
    set_head(model.model, head_1D)
    return model
