"""`rewarden score --explain`: what a reward model is given, token by token, and what the end-of-turn token is worth."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rewarden.data.write import write_jsonl
from rewarden.errors import ConfigError
from rewarden.recipe.score import Scoring, check_output, load_items, read_scoring
from rewarden.runtime.disk import writing
from rewarden.scoring import build_scorer
from rewarden.scoring.explain import AS_SCORED, WITHOUT_END_OF_TURN, Explanation, explain
from rewarden.scoring.reward_model import RewardModelScorer
from rewarden.text.printable import printable

STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "template": "dim"}


def explain_once(raw: Mapping[str, Any], *, output: Path | None, as_json: bool) -> None:
    """Explain the chosen rows (the first one when none is chosen), both sides of a pair, for people or as JSON lines."""
    check_output(output)
    spec = read_scoring({"rows": "0", **raw})
    items, summary = load_items(spec)
    path, scorer = only_reward_model(spec)
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    notes.print(f"data: {summary}")
    notes.print(facts(path, scorer))
    for note in scorer.notes:
        notes.print(note)
    for note in scorer.template.notes:
        notes.print(f"template: {note}")
    found = ((item.id, side, explain(scorer, row)) for item in items for side, row in item.sides.items())
    rows = (row_of(id, side, explanation) for id, side, explanation in found)
    if output is not None:
        with writing(output):
            notes.print(f"{write_jsonl(output, list(rows))} explanations written to {output}")
    elif as_json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False), flush=True)
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        for id, side, explanation in found:
            for line in lines_of(id, side, explanation):
                console.print(line)


def only_reward_model(spec: Scoring) -> tuple[str, RewardModelScorer]:
    """(path, scorer) of the one reward model that is named.

    Errors: ConfigError for several, or for a scorer that reads no tokens.
    """
    if len(spec.rewards) > 1:
        raise ConfigError(f"--explain reads one reward model; name one as models.yaml:NAME, of {', '.join(spec.rewards)}")
    ((_, reward),) = spec.rewards.items()
    if reward["kind"] != "reward_model":
        raise ConfigError(f"--explain reads the tokens of a reward model; a reward of kind {reward['kind']} has none")
    scorer = build_scorer(reward, "reward")
    assert isinstance(scorer, RewardModelScorer)
    return reward["path"], scorer


def facts(path: str, scorer: RewardModelScorer) -> str:
    """One line about the reward model."""
    members = scorer.members
    what = "1 head"
    if members.num_members > 1:
        what = f"{members.family} ensemble of {members.num_members} members, {scorer.aggregate}"
    limit = "any length" if scorer.max_length is None else f"at most {scorer.max_length} tokens"
    end = scorer.template.end_of_turn_id
    name = members.tokenizer.convert_ids_to_tokens(end)
    return f"reward model: {path}, {what}, template {members.template_kind}, {limit}, end-of-turn token {end} {name!r}"


def row_of(id: str, side: str, found: Explanation) -> dict[str, Any]:
    """The explanation as plain JSON values; a score that is not finite is null."""
    return {
        "id": id,
        **({"side": side} if side else {}),
        "status": found.status,
        "text": found.text,
        "tokens": [
            {
                "position": position,
                "id": piece.id,
                "token": piece.name,
                "text": piece.text,
                "start": piece.start,
                "stop": piece.stop,
                "role": found.span_at(position).role,
                "turn": found.span_at(position).turn,
                "special": piece.special,
            }
            for position, piece in enumerate(found.pieces)
        ],
        "scored_position": found.scored_position,
        "end_of_turn_position": found.end_of_turn_position,
        "spelled_special_tokens": found.spelled,
        "scores": {
            name: {
                "position": reading.position,
                "score": _finite(reading.value),
                "members": [_finite(score) for score in reading.scores],
                "std": _finite(reading.std),
            }
            for name, reading in found.readings.items()
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def lines_of(id: str, side: str, found: Explanation) -> Iterator[Text]:
    """The explanation for people; roles have colours where the terminal has."""
    yield Text(f"row {id}" + (f", {side}" if side else ""), style="bold")
    yield Text(f"text, {len(found.text)} characters:")
    yield _coloured(found)
    yield Text(f"tokens, {len(found.pieces)}:")
    shown = [printable(piece.name, kept="") for piece in found.pieces]
    ids, names = max(len(str(p.id)) for p in found.pieces), max(2, *map(len, shown))
    texts = max(len(repr(p.text)) for p in found.pieces)
    for position, piece in enumerate(found.pieces):
        span = found.span_at(position)
        words = [span.role, f"turn {span.turn}"]
        words += ["special"] * piece.special
        words += ["end of turn"] * (position == found.end_of_turn_position)
        words += ["<- scored here"] * (position == found.scored_position)
        columns = f"{position:>6}  {piece.id:>{ids}}  {shown[position]:<{names}}  {piece.text!r:<{texts}}  "
        yield Text(columns + ", ".join(words), style="bold reverse" if words[-1].startswith("<-") else STYLES[span.role])
    if found.spelled:
        yield Text(f"{found.spelled} special tokens spelled in the messages are read as plain text", style="yellow")
    yield from _scores(found)
    yield Text("")


def _scores(found: Explanation) -> Iterator[Text]:
    if found.status != "ok":
        yield Text(f"no score: {found.status}, {len(found.pieces)} tokens", style="bold red")
        return
    yield Text("scores:")
    width = max(len(name) for name in found.readings)
    for name, reading in found.readings.items():
        members = "".join(f" {score:>10.4f}" for score in reading.scores)
        line = f"  {name.replace('_', ' '):<{width}}  token {reading.position:>5}  {reading.value:>10.4f}"
        several = len(reading.scores) > 1
        yield Text(line + (f"  members{members}, std {reading.std:.4f}" if several else ""))
    if WITHOUT_END_OF_TURN in found.readings:
        difference = found.readings[AS_SCORED].value - found.readings[WITHOUT_END_OF_TURN].value
        yield Text(f"  what follows the answer changes the score by {difference:+.4f}")


def _coloured(found: Explanation) -> Text:
    """The exact text, special tokens bold, each character in the colour of the span its token belongs to."""
    styles = [""] * len(found.text)
    for position, piece in enumerate(found.pieces):
        style = STYLES[found.span_at(position).role] + (" bold" if piece.special else "")
        styles[piece.start : piece.stop] = [style] * (piece.stop - piece.start)
    out = Text()
    for character, style in zip(found.text, styles, strict=True):
        out.append(printable(character), style=style)
    return out
