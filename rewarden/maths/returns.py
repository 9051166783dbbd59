"""From a score and a KL penalty to per-token rewards, advantages and returns."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.maths.kl import k1
from rewarden.maths.precision import Real, at_least_float32


def token_rewards(
    score_B: Float[Tensor, " B"],
    logp_BT: Float[Tensor, "B T"],
    logp_ref_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    beta: Real,
) -> Float[Tensor, "B T"]:
    """Reward of every sampled token: a KL penalty on each, and the score added on the last.

        reward[b, t] = -beta * (logp[b, t] - logp_ref[b, t]) + (score[b] if t is the last masked position of row b)

    `mask_BT` keeps the sampled tokens; other positions are 0 whatever they hold. `logp_BT` is of the policy that sampled.
    The score comes processed (scaled, clipped): beta is relative to it. Zheng et al. 2023 (arXiv:2307.04964), section 3;
    the penalty is k1, not clamped at 0.

    Raises ValueError for a row without a sampled token, whose score would be lost.
    """
    empty_B = ~mask_BT.any(dim=1)
    if bool(empty_B.any()):
        rows = empty_B.nonzero().flatten().tolist()
        raise ValueError(f"rows {rows} have no sampled token to carry their score; leave them out and count them")
    penalty_BT = torch.where(mask_BT, -beta * k1(logp_BT, logp_ref_BT), 0.0)
    last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)  # holds for no rows too, which amax refuses
    return torch.where(last_BT, penalty_BT + score_B.unsqueeze(1).to(penalty_BT.dtype), penalty_BT)


def gae(
    reward_BT: Float[Tensor, "B T"],
    value_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    gamma: Real,
    lam: Real,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalized advantage estimation over the masked positions of each row: (advantage, return).

        delta[t]     = reward[t] + gamma * value[next(t)] - value[t]
        advantage[t] = delta[t] + gamma * lam * advantage[next(t)]
        return[t]    = advantage[t] + value[t]

    next(t) is the next masked position of the row, so the tokens of several assistant turns form one sequence and what a
    user said in between takes no time. Past the last one, value and advantage are 0. Off the mask both results are 0 and
    no input matters. Schulman et al. 2016 (arXiv:1506.02438), eq. 11-16.
    """
    # Slide the masked positions of each row to its front, in order: then next(t) is simply t + 1.
    order_BT = mask_BT.int().argsort(dim=1, descending=True, stable=True)
    kept_BT = mask_BT.gather(1, order_BT)
    reward = torch.where(kept_BT, at_least_float32(reward_BT).gather(1, order_BT), 0.0)
    value = torch.where(kept_BT, at_least_float32(value_BT).gather(1, order_BT), 0.0)
    next_value = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    delta_TB = (reward + gamma * next_value - value).t().contiguous()

    advantages = []
    advantage_B = delta_TB.new_zeros(delta_TB.shape[1])
    for delta_B in reversed(delta_TB.unbind(0)):
        advantage_B = torch.add(delta_B, advantage_B, alpha=gamma * lam)
        advantages.append(advantage_B)
    packed_BT = torch.stack(advantages[::-1], dim=1) if advantages else torch.zeros_like(reward)

    advantage_BT = torch.zeros_like(packed_BT).scatter(1, order_BT, packed_BT)
    return_BT = torch.where(mask_BT, advantage_BT + at_least_float32(value_BT), 0.0)
    return torch.where(mask_BT, advantage_BT, 0.0), return_BT
