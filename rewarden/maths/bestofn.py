"""What best-of-n sampling is worth and how far it moves the policy.

Of n answers drawn for a prompt, the one with the highest proxy score is kept. Everything here follows from the N >= n answers
that were drawn once: which subsets of n would have chosen which answer.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def expected_best_of_n(proxy_N: Float[Tensor, "*P N"], gold_N: Float[Tensor, "*P N"], *, n: int) -> Float[Tensor, "*P"]:
    """Expected gold score of the sample that the proxy ranks first among n of the N drawn: the mean over all subsets.

        sum_i C(i - 1, n - 1) / C(N, n) * gold_(i),    gold_(i) the gold score of the i-th lowest proxy, i = 1..N

    Unbiased for one prompt's best-of-n score, and without the noise of looking at one subset. Samples with equal proxy
    share their weight: a tie is broken at random, so the order of the samples does not matter. One prompt per row of any
    leading dimensions; n = 1 is the mean of gold, n = N the gold score of the best proxy. float64. The estimator of
    Nakano et al. 2021 (arXiv:2112.09332). Samples without a score: `selection_weights`.

    Raises ValueError unless 1 <= n <= N, and for a NaN proxy, which has no rank.
    """
    num_bad = int(proxy_N.isnan().sum())
    if num_bad:
        raise ValueError(
            f"{num_bad} of {proxy_N.numel()} proxy scores are NaN and cannot be ranked; leave them out and count them"
        )
    weight_N = selection_weights(proxy_N, torch.ones_like(proxy_N, dtype=torch.bool), n=n)
    return (weight_N * gold_N.double()).sum(dim=-1)


def selection_weights(proxy_N: Float[Tensor, "*P N"], scored_N: Bool[Tensor, "*P N"], *, n: int) -> Float[Tensor, "*P N"]:
    """Probability that each sample is the one chosen from n of the N drawn, over all subsets; rows add up to 1.

        W_l = (below(a + c) - below(a)) / (1 - below(f)),    below(i) = C(i, n) / C(N, n)

    for a level l of c equal proxy scores above a others, f of the N having no score; each of the c gets W_l / c. Samples that
    are not `scored_N` rank below all others and are never chosen: a subset of nothing but such samples is left out. A row
    without any score is all 0. float64.

    Raises ValueError unless 1 <= n <= N, and for a NaN proxy that is marked as scored.
    """
    _check_n(n, proxy_N.shape[-1])
    if bool((proxy_N.isnan() & scored_N).any()):
        raise ValueError("a proxy score marked as scored is NaN and cannot be ranked; leave it out of scored_N and count it")
    below = _below(proxy_N.shape[-1], n, proxy_N.device)
    low_N, high_N = _level(proxy_N, scored_N)
    share_N = (below[high_N] - below[low_N]) / (high_N - low_N).clamp(min=1)
    some = 1 - below[(~scored_N).sum(dim=-1, keepdim=True)]
    return torch.where(scored_N, share_N / torch.where(some > 0, some, 1.0), 0.0)


def first_best(proxy_N: Float[Tensor, "*P N"], scored_N: Bool[Tensor, "*P N"], *, n: int) -> Int[Tensor, "*P"]:
    """Place of the highest proxy score among the first n samples, the first of equal ones; -1 where none has a score.

    One draw of best-of-n, as it would run: curves over n from prefixes share their samples and are noisier than
    `selection_weights`, which averages over all subsets.

    Raises ValueError unless 1 <= n <= N.
    """
    _check_n(n, proxy_N.shape[-1])
    scored_n = scored_N[..., :n]
    proxy_n = torch.where(scored_n, proxy_N[..., :n].double(), -math.inf)
    best = proxy_n.max(dim=-1, keepdim=True).values
    # A proxy may be -inf itself, so the place is looked up among the scored.
    place = ((proxy_n == best) & scored_n).to(torch.int8).argmax(dim=-1)
    return torch.where(scored_n.any(dim=-1), place, -1)


def best_of_n_kl(n: int) -> float:
    """KL in nats from the best of n samples to one sample: log n - (n - 1) / n.

    Exact when no two samples can tie, an upper bound otherwise. Stiennon et al. 2020 (arXiv:2009.01325), appendix; the
    bound: Beirami et al. 2024 (arXiv:2401.01879).

    Raises ValueError for n below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; best-of-n takes 1 sample or more")
    return math.log(n) - (n - 1) / n


def measured_best_of_n_kl(proxy_N: Float[Tensor, "*P N"], scored_N: Bool[Tensor, "*P N"], *, n: int) -> Float[Tensor, "*P"]:
    """KL in nats from the best of n answers to one answer, E[log p_best(y) / p(y)], estimated from the ranks of N samples.

    An answer of a level (all answers of equal proxy) that holds the share q of the policy's answers, with a share F at or
    below it, is `((F^n - (F - q)^n) / q)` times likelier after the choice, whatever its own probability. Spreading every level
    over its ranks makes all ranks distinct, and the KL `best_of_n_kl(n)`; what the spreading added is known level by level:

        KL = log n - (n - 1) / n - E_chosen[d(tau)],     tau = q / F = P(an answer ties with the chosen one | not above it)
        d(tau) = log(n tau / (1 - rho^n)) - (n - 1) / n - (n - 1) rho^n log(rho) / (1 - rho^n),    rho = 1 - tau

    d(0) = 0 and d(1) = log n - (n - 1) / n, so without ties the result is the bound, without noise, and 0 when all answers tie.
    tau is estimated by (c - 1) / (a + c - 1) for a level of c samples above a others, E_chosen by `selection_weights`.
    Plugging the level shares into KL itself overshoots by about n / 2N. Samples without a score are never chosen:

        KL = (KL_all - phi^n (n - 1) log phi) / (1 - phi^n) - log(1 - phi^n),    phi their share, KL_all with them as a level

    NaN for a row without any score. float64. Own derivation, checked against enumeration.

    Raises ValueError unless 1 <= n <= N, and for a NaN proxy that is marked as scored.
    """
    weight_N = selection_weights(proxy_N, scored_N, n=n)
    low_N, high_N = _level(proxy_N, scored_N)
    tau_N = ((high_N - low_N - 1).clamp(min=0) / (high_N - 1).clamp(min=1)).double()
    excess = (weight_N * _spread_excess(tau_N, n)).sum(dim=-1)
    phi = (~scored_N).double().mean(dim=-1)
    none = phi**n
    log_phi = torch.where(phi > 0, phi, 1.0).log()
    # The failed level is one tie at the bottom, whose d is the whole bound.
    all_levels = best_of_n_kl(n) - (1 - none) * excess - none * best_of_n_kl(n)
    some = torch.where(none < 1, 1 - none, math.nan)
    return (all_levels - none * (n - 1) * log_phi) / some - some.log()


def _spread_excess(tau: Float[Tensor, "*S"], n: int) -> Float[Tensor, "*S"]:
    """KL that spreading a level over its ranks adds inside it: d(tau) of `measured_best_of_n_kl`."""
    if n == 1:
        return torch.zeros_like(tau)
    inside = tau.clamp(1e-12, 1 - 1e-12)
    log_rho = torch.log1p(-inside)
    gone = -torch.expm1(n * log_rho)  # 1 - rho^n
    excess = (n * inside / gone).log() - (n - 1) / n - (n - 1) * (1 - gone) * log_rho / gone
    return torch.where(tau <= 1e-12, 0.0, torch.where(tau >= 1, best_of_n_kl(n), excess)).clamp(min=0)


def _check_n(n: int, num_samples: int) -> None:
    if not 1 <= n <= num_samples:
        raise ValueError(f"n is {n} with {num_samples} samples per prompt; use 1 to {num_samples}, or draw more samples")


def _below(num_samples: int, n: int, device: torch.device) -> Float[Tensor, " M"]:
    """C(i, n) / C(N, n) for i = 0..N: the share of subsets that lie among the i lowest; a ratio of neighbors is (i - n) / i."""
    rank = torch.arange(num_samples, 0, -1, dtype=torch.float64, device=device)
    shrink = ((rank - n) / rank).clamp(min=0).cumprod(0)
    return torch.cat([shrink.new_ones(1), shrink]).flip(0)


def _level(proxy_N: Float[Tensor, "*P N"], scored_N: Bool[Tensor, "*P N"]) -> tuple[Int[Tensor, "*P N"], Int[Tensor, "*P N"]]:
    """Per sample: how many samples lie below its score, and how many at or below it; those without a score lie below all."""
    num_failed = (~scored_N).sum(dim=-1, keepdim=True)
    # NaN sorts last, so the scored ones of a row come first, and the failed ones are added to both counts.
    kept_N = torch.where(scored_N, proxy_N, math.nan)
    ranked_N = kept_N.sort(dim=-1).values
    ranked_N = torch.where(ranked_N.isnan(), math.inf, ranked_N).contiguous()
    wanted_N = torch.where(scored_N, proxy_N, -math.inf).contiguous()
    low_N = torch.searchsorted(ranked_N, wanted_N, right=False)
    high_N = torch.searchsorted(ranked_N, wanted_N, right=True)
    return low_N + num_failed, (high_N + num_failed).clamp(max=proxy_N.shape[-1])
