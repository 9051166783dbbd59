"""What best-of-n sampling is worth and how far it moves the policy."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def expected_best_of_n(proxy_N: Float[Tensor, "*P N"], gold_N: Float[Tensor, "*P N"], *, n: int) -> Float[Tensor, "*P"]:
    """Expected gold score of the sample that the proxy ranks first among n of the N drawn: the mean over all subsets.

        sum_i C(i - 1, n - 1) / C(N, n) * gold_(i),    gold_(i) the gold score of the i-th lowest proxy, i = 1..N

    Unbiased for one prompt's best-of-n score, and without the noise of looking at one subset. Samples with equal proxy
    share their weight: a tie is broken at random, so the order of the samples does not matter. One prompt per row of any
    leading dimensions; n = 1 is the mean of gold, n = N the gold score of the best proxy. float64. The estimator of
    Nakano et al. 2021 (arXiv:2112.09332).

    Raises ValueError unless 1 <= n <= N, and for a NaN proxy, which has no rank.
    """
    num_samples = proxy_N.shape[-1]
    if not 1 <= n <= num_samples:
        raise ValueError(f"n is {n} with {num_samples} samples per prompt; use 1 to {num_samples}, or draw more samples")
    num_bad = int(proxy_N.isnan().sum())
    if num_bad:
        raise ValueError(
            f"{num_bad} of {proxy_N.numel()} proxy scores are NaN and cannot be ranked; leave them out and count them"
        )
    # below[i] = C(i, n) / C(N, n): the share of subsets that lie among the i lowest; a ratio of neighbors is (i - n) / i.
    rank = torch.arange(num_samples, 0, -1, dtype=torch.float64, device=proxy_N.device)
    shrink = ((rank - n) / rank).cumprod(0)
    below = torch.cat([shrink.new_ones(1), shrink]).flip(0)
    ranked_N = proxy_N.sort(dim=-1).values.contiguous()
    low_N = torch.searchsorted(ranked_N, proxy_N.contiguous(), right=False)
    high_N = torch.searchsorted(ranked_N, proxy_N.contiguous(), right=True)
    weight_N = (below[high_N] - below[low_N]) / (high_N - low_N)
    return (weight_N * gold_N.double()).sum(dim=-1)


def best_of_n_kl(n: int) -> float:
    """KL in nats from the best of n samples to one sample: log n - (n - 1) / n.

    Exact when no two samples can tie, an upper bound otherwise. Stiennon et al. 2020 (arXiv:2009.01325), appendix; the
    bound: Beirami et al. 2024 (arXiv:2401.01879).

    Raises ValueError for n below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; best-of-n takes 1 sample or more")
    return math.log(n) - (n - 1) / n
