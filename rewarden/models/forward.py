"""What every algorithm asks of a model: log-probs, entropies, values and scores of a batch of token rows.

Rows are sorted by length into sub-batches of at most `max_tokens` padded tokens, run with neither attention mask nor cache
(exact under right padding, since the models are causal), and only the positions that are asked for are projected. Results
come back in the order of the rows, with their graph. The split depends on lengths alone, so a batch always gives the same
bits. Rows of 30 to 256 tokens train 1.6 to 1.8 times as fast as in one padded batch with its mask (CPU time, 4.7M parameters).

Models are used in the mode they are in; algorithms keep them in evaluation mode, without dropout.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from rewarden.errors import DataError
from rewarden.maths import align, chunked_token_logp, token_entropy, token_logp
from rewarden.models.trunk import apply_score, final_hidden, output_projection, position_limit, score_head, trunk_of
from rewarden.types import TokenBatch

if TYPE_CHECKING:
    from rewarden.models.features import FeatureCache

MAX_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Default bound on padded tokens in one forward pass, by device; 512 to 2048 measured alike on a CPU."""

FULL_ENOUGH = 512
"""A sub-batch of this many tokens keeps the processor busy; beyond it a row much shorter than the longest starts a new one."""

LOGITS_AT_ONCE = 2**24
"""Logits held at a time by the vocabulary projection (64 MB in float32)."""


def length_buckets(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Row numbers in groups of at most `max_tokens` padded tokens (a longer row goes alone), longest first.

    Empty rows are left out. A group that keeps the processor busy takes no row shorter than 3/4 of its longest.
    """
    order = sorted((row for row, length in enumerate(lengths) if length > 0), key=lambda row: (-lengths[row], row))
    groups: list[list[int]] = []
    longest = 0
    for row in order:
        size = len(groups[-1]) * longest if groups else 0
        if not groups or size + longest > max_tokens or (size >= FULL_ENOUGH and 4 * lengths[row] < 3 * longest):
            groups.append([])
            longest = lengths[row]
        groups[-1].append(row)
    return groups


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Final hidden states of one sub-batch: rows `row_b` of the batch, first `length_b` positions wanted of each."""

    row_b: Tensor
    length_b: Tensor
    hidden_bTD: Tensor


def _hidden_states(model: nn.Module, tokens: TokenBatch, length_B: Tensor, max_tokens: int | None) -> Iterator[_Hidden]:
    """Final hidden states of the first `length_B` tokens of each row, sub-batch by sub-batch."""
    trunk = trunk_of(model)
    ids_BT = tokens.ids_BT.masked_fill(~tokens.mask_BT, 0)
    for row_b, length_b, longest in _sub_batches(model, length_B, max_tokens):
        yield _Hidden(row_b, length_b, final_hidden(trunk, ids_BT[row_b, :longest]))


def _sub_batches(model: nn.Module, length_B: Tensor, max_tokens: int | None) -> Iterator[tuple[Tensor, Tensor, int]]:
    lengths = length_B.tolist()
    check_lengths(model, lengths)
    bound = max_tokens or MAX_TOKENS.get(length_B.device.type, 4096)
    for rows in length_buckets(lengths, max_tokens=bound):
        row_b = torch.tensor(rows, device=length_B.device)
        yield row_b, length_B[row_b], lengths[rows[0]]


def check_lengths(model: nn.Module, lengths: Sequence[int]) -> None:
    """Refuse rows beyond the positions the model has; some models crash there, others go on and compute nonsense.

    Errors: DataError.
    """
    limit = position_limit(model)
    longest = max(lengths, default=0)
    if limit is not None and longest > limit:
        raise DataError(f"a row of {longest} tokens; the model has positions for {limit}: lower max_length to at most {limit}")


@dataclass(frozen=True, slots=True)
class _Targets:
    """Masked tokens of one sub-batch: where they stand, what they are, and the hidden state that predicts each."""

    row_N: Tensor
    position_N: Tensor
    id_N: Tensor
    hidden_ND: Tensor


def _targets(model: nn.Module, tokens: TokenBatch, mask_BT: Tensor, max_tokens: int | None) -> Iterator[_Targets]:
    """The hidden states before masked tokens. A row runs only as far as its last masked token needs."""
    if mask_BT.shape != tokens.ids_BT.shape or bool((mask_BT & ~tokens.mask_BT).any()):
        raise DataError(
            f"the mask is {tuple(mask_BT.shape)}, the ids {tuple(tokens.ids_BT.shape)}; it must have their shape and mark real "
            "tokens only"
        )
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    length_B = (position_T * mask_BT).amax(1) if mask_BT.numel() else tokens.length_B
    for part in _hidden_states(model, tokens, length_B, max_tokens):
        longest = part.hidden_bTD.shape[1]
        wanted_bT = mask_BT[part.row_b, 1 : longest + 1]
        index_N, before_N = wanted_bT.nonzero(as_tuple=True)
        row_N, position_N = part.row_b[index_N], before_N + 1
        yield _Targets(row_N, position_N, tokens.ids_BT[row_N, position_N], part.hidden_bTD[index_N, before_N])


def _chunk(num_words: int) -> int:
    return max(64, LOGITS_AT_ONCE // num_words)


def _scatter(shape: torch.Size, row: list[Tensor], position: list[Tensor], value: list[Tensor], like: Tensor) -> Tensor:
    """A tensor of zeros with the values in their places; with no value at all, zeros that still take part in a backward."""
    if not value:
        return torch.zeros(shape, device=like.device, requires_grad=torch.is_grad_enabled())
    found = torch.cat(value)
    zeros = torch.zeros(shape, device=found.device, dtype=found.dtype)
    return zeros.index_put((torch.cat(row), torch.cat(position)), found)


def sequence_logp(
    model: nn.Module, tokens: TokenBatch, mask_BT: Bool[Tensor, "B T"], *, temperature: float, max_tokens: int | None = None
) -> Float[Tensor, "B T"]:
    """log p(token t | tokens before t) where the mask is True, 0 elsewhere; float32, in nats.

    Logits are divided by `temperature` first, so that it is the log-prob of the policy that samples at that temperature.
    Position 0 has nothing before it and stays 0. What stands after a row's last masked token is not even computed.

    Errors: DataError for a mask that marks padding, and for rows longer than the model has positions.
    """
    weight_VD, bias_V = output_projection(model)
    row, position, value = [], [], []
    for part in _targets(model, tokens, mask_BT, max_tokens):
        row.append(part.row_N)
        position.append(part.position_N)
        value.append(
            chunked_token_logp(
                part.hidden_ND, weight_VD, part.id_N, temperature=temperature, chunk=_chunk(len(weight_VD)), bias_V=bias_V
            )
        )
    return _scatter(mask_BT.shape, row, position, value, weight_VD)


def sequence_logp_entropy(
    model: nn.Module, tokens: TokenBatch, mask_BT: Bool[Tensor, "B T"], *, temperature: float, max_tokens: int | None = None
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """(`sequence_logp`, entropy in nats of the distribution each masked token was drawn from), both at `temperature`.

    Meant for statistics under no_grad: the entropy keeps its logits when gradients are on.
    """
    weight_VD, bias_V = output_projection(model)
    chunk = _chunk(len(weight_VD))
    row, position, logp, entropy = [], [], [], []
    for part in _targets(model, tokens, mask_BT, max_tokens):
        row.append(part.row_N)
        position.append(part.position_N)
        for hidden_nD, id_n in zip(part.hidden_ND.split(chunk), part.id_N.split(chunk), strict=True):
            # One more position than needed, since token_logp reads what position t - 1 says of token t.
            logits_mV = F.linear(torch.cat([hidden_nD, hidden_nD[:1]]), weight_VD, bias_V)
            shifted_1m = F.pad(id_n, (1, 0)).unsqueeze(0)
            logp.append(token_logp(logits_mV.unsqueeze(0), shifted_1m, temperature=temperature)[0, 1:])
            entropy.append(token_entropy(logits_mV[:-1].float() / temperature))
    shape = mask_BT.shape
    return _scatter(shape, row, position, logp, weight_VD), _scatter(shape, row, position, entropy, weight_VD)


def sequence_values(model: nn.Module, tokens: TokenBatch, *, max_tokens: int | None = None) -> Float[Tensor, "B T"]:
    """value_BT[b, t] is the critic's value of the state before token t; position 0 and padding hold 0; float32.

    Errors: DataError for a model with more than one head.
    """
    if score_head(model).out_features != 1:
        raise DataError(f"the critic has {score_head(model).out_features} heads; values need one")
    rows, values = [], []
    width = tokens.ids_BT.shape[1]
    for part in _hidden_states(model, tokens, tokens.length_B, max_tokens):
        values_bT = apply_score(model, part.hidden_bTD.flatten(0, 1)).view(part.hidden_bTD.shape[:2])
        values.append(F.pad(align(values_bT), (0, width - values_bT.shape[1])))
        rows.append(part.row_b)
    if not values:
        return torch.zeros(tokens.ids_BT.shape, device=tokens.ids_BT.device, requires_grad=torch.is_grad_enabled())
    found_BT = torch.cat(values)
    value_BT = found_BT.new_zeros(tokens.ids_BT.shape).index_put((torch.cat(rows),), found_BT)
    return value_BT.masked_fill(~tokens.mask_BT, 0.0)


def sequence_scores(
    model: nn.Module, tokens: TokenBatch, *, features: "FeatureCache | None" = None, max_tokens: int | None = None
) -> Float[Tensor, "B K"]:
    """The scalar heads at each row's last real token, found by the mask; float32.

    `features` supplies the activations of the frozen lower layers, computed once and kept on disk.

    Errors: DataError for a row without a token.
    """
    if bool((tokens.length_B < 1).any()):
        raise DataError(f"row {int(tokens.length_B.argmin())} has no token; a score needs at least one")
    source = _last_hidden(model, tokens) if features is None else features.last_hidden(model, tokens)
    rows, scores = [], []
    for row_b, length_b, longest in _sub_batches(model, tokens.length_B, max_tokens):
        rows.append(row_b)
        scores.append(apply_score(model, source(row_b, length_b, longest)))
    if not scores:
        return torch.zeros(0, score_head(model).out_features, device=tokens.ids_BT.device)
    return torch.cat(scores)[torch.cat(rows).argsort()]


def _last_hidden(model: nn.Module, tokens: TokenBatch) -> Callable[[Tensor, Tensor, int], Tensor]:
    """(rows, lengths, longest) -> the final hidden state at each row's last token."""
    ids_BT, trunk = tokens.ids_BT.masked_fill(~tokens.mask_BT, 0), trunk_of(model)

    def source(row_b: Tensor, length_b: Tensor, longest: int) -> Tensor:
        return final_hidden(trunk, ids_BT[row_b, :longest])[torch.arange(len(row_b), device=row_b.device), length_b - 1]

    return source
