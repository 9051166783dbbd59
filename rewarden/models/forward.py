"""What every algorithm asks of a model: log-probs, entropies, values and scores of a batch of token rows.

Rows are sorted by length and joined, up to `max_tokens` tokens, into single rows in which each attends to itself alone
(`models.attention`); for models that cannot do that, rows of like length are padded into sub-batches. Either way there is
neither attention mask nor cache, only the positions that are asked for are projected, and results come back in the order of
the rows, with their graph. The split depends on lengths alone, so a batch always gives the same bits.

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
from rewarden.maths import chunked_token_logp, token_entropy, token_logp
from rewarden.models.attention import CannotPack, run_trunk
from rewarden.models.cut import above, below
from rewarden.models.layout import MAX_TOKENS, Layout, length_buckets, token_chunks
from rewarden.models.packable import packs
from rewarden.models.trunk import apply_score, output_projection, position_limit, score_head, trunk_of
from rewarden.types import TokenBatch

if TYPE_CHECKING:
    from rewarden.models.features import FeatureCache

LOGITS_AT_ONCE = 2**24
"""Logits held at a time by the vocabulary projection (64 MB in float32)."""

Run = Callable[[Layout], Tensor]
"""Final hidden states [R, T, D] of rows of a batch, in a layout."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Final hidden states of one forward pass, flattened, and where the rows stand in it."""

    layout: Layout
    hidden_MD: Tensor


def _from_ids(model: nn.Module, tokens: TokenBatch) -> Run:
    ids_BT, trunk = tokens.ids_BT.masked_fill(~tokens.mask_BT, 0), trunk_of(model)
    return lambda layout: run_trunk(trunk, layout, layout.arrange(ids_BT))


def _parts(model: nn.Module, length_B: Tensor, max_tokens: int | None, run: Run) -> Iterator[_Part]:
    """Hidden states of the first `length_B` tokens of each row, pass by pass."""
    lengths, device = length_B.tolist(), length_B.device
    check_lengths(model, lengths)
    bound = max_tokens or MAX_TOKENS.get(device.type, 4096)
    if not packs(trunk_of(model)):
        yield from _padded(range(len(lengths)), lengths, device, bound, run)
        return
    for rows in token_chunks(lengths, max_tokens=bound):
        layout = Layout.of(rows, lengths, device, packed=True)
        try:
            hidden_MD = run(layout).flatten(0, 1)
        except CannotPack:  # a rule that shows only in rows of this length, such as attention in chunks
            yield from _padded(rows, lengths, device, bound, run)
        else:
            yield _Part(layout, hidden_MD)


def _padded(rows: Sequence[int], lengths: Sequence[int], device: torch.device, bound: int, run: Run) -> Iterator[_Part]:
    for bucket in length_buckets([lengths[row] for row in rows], max_tokens=bound):
        layout = Layout.of([rows[index] for index in bucket], lengths, device, packed=False)
        yield _Part(layout, run(layout).flatten(0, 1))


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
    for part in _parts(model, length_B, max_tokens, _from_ids(model, tokens)):
        at = part.layout
        wanted_N = mask_BT[at.row_N, at.position_N + 1]
        row_N, position_N = at.row_N[wanted_N], at.position_N[wanted_N] + 1
        yield _Targets(row_N, position_N, tokens.ids_BT[row_N, position_N], part.hidden_MD[at.flat_N[wanted_N]])


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
    # Few logits are kept for backward; many are computed again, a chunk at a time.
    chunk = None if int(mask_BT.sum()) * len(weight_VD) <= LOGITS_AT_ONCE else _chunk(len(weight_VD))
    row, position, value = [], [], []
    for part in _targets(model, tokens, mask_BT, max_tokens):
        row.append(part.row_N)
        position.append(part.position_N)
        value.append(
            chunked_token_logp(part.hidden_ND, weight_VD, part.id_N, temperature=temperature, chunk=chunk, bias_V=bias_V)
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
    row, position, value = [], [], []
    # The state after a row's last token speaks of no token.
    for part in _parts(model, (tokens.length_B - 1).clamp(min=0), max_tokens, _from_ids(model, tokens)):
        at = part.layout
        row.append(at.row_N)
        position.append(at.position_N + 1)
        value.append(apply_score(model, part.hidden_MD[at.flat_N])[:, 0])
    return _scatter(tokens.ids_BT.shape, row, position, value, tokens.ids_BT)


def sequence_scores(
    model: nn.Module, tokens: TokenBatch, *, features: "FeatureCache | None" = None, max_tokens: int | None = None
) -> Float[Tensor, "B K"]:
    """The scalar heads at each row's last real token, found by the mask; float32.

    `features` supplies the activations of the frozen lower layers, computed once and kept on disk.

    Errors: DataError for a row without a token.
    """
    _check_rows(tokens)
    if not len(tokens.length_B):
        return torch.zeros(0, score_head(model).out_features, device=tokens.ids_BT.device)
    if features is not None and features.last_only:
        return apply_score(model, features.last_hidden(model, tokens))
    run = _from_ids(model, tokens) if features is None else features.through(model, tokens)
    rows, scores = [], []
    for part in _parts(model, tokens.length_B, max_tokens, run):
        rows.append(part.layout.row_b)
        scores.append(apply_score(model, part.hidden_MD[part.layout.last_b]))
    return torch.cat(scores)[torch.cat(rows).argsort()]


def scores_and_logp(
    model: nn.Module,
    tokens: TokenBatch,
    mask_BT: Bool[Tensor, "B T"],
    projection: tuple[Tensor, Tensor | None],
    *,
    features: "FeatureCache | None" = None,
    max_tokens: int | None = None,
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B T"]]:
    """(`sequence_scores`, log p of the masked tokens by another projection of the same hidden states), in one pass.

    projection: weight [V, D] and bias of an LM head. Where the mask is False the log-prob is 0; position 0 must be.

    Errors: DataError for a row without a token.
    """
    _check_rows(tokens)
    weight_VD, bias_V = projection
    chunk = None if int(mask_BT.sum()) * len(weight_VD) <= LOGITS_AT_ONCE else _chunk(len(weight_VD))
    next_BT = F.pad(mask_BT[:, 1:], (0, 1))
    run = _from_ids(model, tokens) if features is None else features.through(model, tokens)
    rows, scores = [], []
    row, position, value = [], [], []
    for part in _parts(model, tokens.length_B, max_tokens, run):
        at = part.layout
        rows.append(at.row_b)
        scores.append(apply_score(model, part.hidden_MD[at.last_b]))
        wanted_N = next_BT[at.row_N, at.position_N]
        row_N, position_N = at.row_N[wanted_N], at.position_N[wanted_N] + 1
        hidden_ND, id_N = part.hidden_MD[at.flat_N[wanted_N]], tokens.ids_BT[row_N, position_N]
        row.append(row_N)
        position.append(position_N)
        value.append(chunked_token_logp(hidden_ND, weight_VD, id_N, temperature=1.0, chunk=chunk, bias_V=bias_V))
    return torch.cat(scores)[torch.cat(rows).argsort()], _scatter(mask_BT.shape, row, position, value, weight_VD)


def scores_by_adapter(
    model: nn.Module,
    tokens: TokenBatch,
    adapters: Sequence[str],
    use: Callable[[str], None],
    *,
    level: int,
    max_tokens: int | None = None,
) -> Float[Tensor, "B K"]:
    """`sequence_scores` of a model of one head, by each of its adapters: column k after `use(adapters[k])`.

    The layers below `level`, which no adapter touches, run once for all; at level 0 every adapter runs the whole model.
    """
    _check_rows(tokens)
    if level == 0 or not len(tokens.length_B):
        columns = []
        for name in adapters:
            use(name)
            columns.append(sequence_scores(model, tokens, max_tokens=max_tokens))
        return torch.cat(columns, dim=1)
    ids_BT, trunk = tokens.ids_BT.masked_fill(~tokens.mask_BT, 0), trunk_of(model)

    def lower(layout: Layout) -> Tensor:
        return below(model, level, lambda: run_trunk(trunk, layout, layout.arrange(ids_BT)))

    rows, scores = [], []
    for part in _parts(model, tokens.length_B, max_tokens, lower):
        ids_RT = part.layout.arrange(ids_BT)
        hidden_RTD = part.hidden_MD.view(*ids_RT.shape, -1)
        columns = []
        for name in adapters:
            use(name)
            final_MD = above(model, level, part.layout, ids_RT, hidden_RTD).flatten(0, 1)
            columns.append(apply_score(model, final_MD[part.layout.last_b]))
        rows.append(part.layout.row_b)
        scores.append(torch.cat(columns, dim=1))
    return torch.cat(scores)[torch.cat(rows).argsort()]


def _check_rows(tokens: TokenBatch) -> None:
    if bool((tokens.length_B < 1).any()):
        raise DataError(f"row {int(tokens.length_B.argmin())} has no token; a score needs at least one")
