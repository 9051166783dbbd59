"""How different the members of a LoRA ensemble are, as something to train."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def adapter_diversity(layers: Sequence[Sequence[Float[Tensor, "_ _"]]], *, scale_free: bool) -> Float[Tensor, ""]:
    """Mean over layers of the nuclear norm of the members' down-projections, stacked: to be made large.

        W = [A_1; ...; A_K]  (K R x D)        diversity = mean over layers of ||W||_*
        scale_free:                           mean over layers of ||W||_* / ||W||_F * sqrt(max(K R, D))

    The nuclear norm is the sum of singular values: at equal size it is largest when the rows are orthogonal, which members
    that look at different directions have, and lowest when all members look at one. Plain, it also grows with A itself; the
    scale-free form takes that out of the value by the Frobenius norm, which is detached. float32. Zhai et al. 2023,
    "Uncertainty-Penalized RLHF with Diverse Reward LoRA Ensembles" (arXiv:2401.00243).

    Raises ValueError without a layer.
    """
    if not layers:
        raise ValueError("no layer to compare members in; give the down-projections of at least one")
    norms = []
    for members in layers:
        stacked_MD = torch.cat([member.float() for member in members])
        norm = torch.linalg.svdvals(stacked_MD).sum()
        if scale_free:
            size = torch.linalg.vector_norm(stacked_MD.detach()).clamp(min=torch.finfo(torch.float32).tiny)
            norm = norm / size * math.sqrt(max(stacked_MD.shape))
        norms.append(norm)
    return torch.stack(norms).mean()
