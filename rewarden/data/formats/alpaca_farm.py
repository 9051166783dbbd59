"""AlpacaFarm: instruction, input and one output, a list of outputs, or two outputs with a preference.

The user message is the instruction, and the input after a blank line when there is one (AlpacaEval's rule); both columns stay
in meta for templates with a section for each. `preference` is 1 or 2, the better output, or a number between: 1 + the
probability that output_2 is better, 1.5 a tie. Null and 0 mean that nobody said.
"""

from collections.abc import Iterator

from rewarden.data.formats.messages import blank, comparison, conversation, prompt
from rewarden.data.formats.row import BadRow, Drop, Item, Notice, missing, row_id, show, text
from rewarden.data.read import Row
from rewarden.types import Comparison, Message

_ELSEWHERE = {"messages", "conversations", "prompt", "chosen", "trajectory", "instances"}
"""Columns of other formats. `instances` (Self-Instruct) holds the input, without which the instruction is half a question."""


def matches(row: Row) -> bool:
    """An instruction, and no column that another format is built on."""
    return "instruction" in row.fields and not _ELSEWHERE & row.fields.keys()


def conversations(row: Row) -> Iterator[Item]:
    """The instruction and its output; each output of a list; or the better output of a pair."""
    question = _question(row)
    if "output" not in row.fields and {"output_1", "output_2", "preference"} <= row.fields.keys():
        for item in comparisons(row):
            if isinstance(item, Comparison):
                yield from conversation(row, (*item.prompt, *item.chosen), ("output_1", "output_2", "preference"))
            else:
                yield item
        return
    if "output" not in row.fields:
        raise missing(row, [("instruction", "output"), ("instruction", "output_1", "output_2", "preference")])
    outputs = row.fields["output"]
    if not isinstance(outputs, list):
        yield from conversation(row, (question, _said(row, "output", outputs)), ("output",))
        return
    if not outputs:
        yield Drop("no_outputs")
    for index, output in enumerate(outputs):
        yield from conversation(
            row, (question, _said(row, f"output[{index}]", output)), ("output",), id=f"{row_id(row)}#{index}"
        )


def prompts(row: Row) -> Iterator[Item]:
    """The instruction with its input; outputs go to meta."""
    yield from prompt(row, (_question(row),), ())


def comparisons(row: Row) -> Iterator[Item]:
    """Two outputs; the better one is chosen, and of a tie the first, with preference 0.5."""
    wanted = ("instruction", "output_1", "output_2", "preference")
    if not set(wanted) <= row.fields.keys():
        raise missing(row, [wanted])
    first, second = (_said(row, column, row.fields[column]) for column in wanted[1:3])
    value = row.fields["preference"]
    if value is None or (not isinstance(value, bool) and value == 0):
        yield Drop("no_preference")
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 2:
        raise BadRow(
            row.where, "bad_preference", f"preference is {show(value)}; it is 1 or 2 (the better output), or between: 1.5 a tie"
        )
    second_better = float(value) - 1
    chosen, rejected = (second, first) if second_better > 0.5 else (first, second)
    if value == 1.5:
        yield Notice("tie")
    if blank(chosen):
        yield Notice("chosen_empty")
    yield from comparison(
        row, (_question(row),), (chosen,), (rejected,), wanted[1:], preference=max(second_better, 1 - second_better)
    )


def _question(row: Row) -> Message:
    instruction = text(row, "instruction")
    context = text(row, "input") if row.fields.get("input") is not None else ""
    return Message(role="user", text=f"{instruction}\n\n{context}" if context else instruction)


def _said(row: Row, column: str, value: object) -> Message:
    if not isinstance(value, str):
        raise BadRow(row.where, "not_text", f"column {column!r} is {show(value)}; it must be text (quote it in the file)")
    return Message(role="assistant", text=value)
