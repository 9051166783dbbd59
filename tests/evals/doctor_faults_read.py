"""Planted faults in files and in the form of rows."""

import gzip
import json
from pathlib import Path

from doctor_desk import CHOSEN, QUESTIONS, Fault, Rows, assistant, at, every, instead, put, said, user


def line(text: str | bytes, *indices: int):
    """Lines that are not what they were."""

    def write(file: Path, lines: list[str]) -> Path:
        raw = [one.encode() for one in lines]
        for index in indices:
            raw[index] = text if isinstance(text, bytes) else text.encode()
        return put(file, b"".join(raw))

    return write


def whole(name: str, content: str | bytes):
    """A file of another name and content."""

    def write(file: Path, lines: list[str]) -> Path:
        return put(file.with_name(name), content)

    return write


def array(file: Path, lines: list[str]) -> Path:
    """A printed JSON array, 12 lines an element from line 2 on; in elements 1 and 3 a quotation mark is missing on the fifth."""
    text = json.dumps([json.loads(one) for one in lines], indent=1)
    return put(
        file.with_name("rows.json"), text.replace('"What is Oslo', "What is Oslo").replace('"What is Riga', "What is Riga")
    )


def cut_gzip(file: Path, lines: list[str]) -> Path:
    """The end is missing, but the lines are all there: gzip writes them whole before its checksum."""
    return put(file.with_name("rows.jsonl.gz"), gzip.compress("".join(lines).encode())[:-8])


def folder(file: Path, lines: list[str]) -> Path:
    put(file.parent / "there" / "train.jsonl", "".join(lines))
    put(file.parent / "there" / "test.jsonl", lines[0])
    return file.parent / "there"


def marked(file: Path, lines: list[str]) -> Path:
    return put(file, b"\xef\xbb\xbf" + "".join(lines).encode())


def gap(file: Path, lines: list[str]) -> Path:
    return put(file, "".join(lines[:2]) + "\n  \n" + "".join(lines[2:]))


def without(column: str, index: int):
    def spoil(rows: Rows) -> None:
        del rows[index][column]

    return spoil


def transcript(*turns: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[i % 2]}: {turn}" for i, turn in enumerate(turns))


MANY = [f"turn {i}" for i in range(19)]
MISSING = "columns are 'prompt', 'chosen'; needed: prompt + chosen + rejected"

FILES = [
    Fault("broken_json", (3,), write=line('{"messages": [}\n', 2), detail="broken JSON at column 15"),
    Fault("broken_json", (3, 5), write=line('{"a": 1,}\n', 2, 4), name="two broken lines"),
    Fault("broken_json", ("rows.json:18", "rows.json:42"), write=array, name="two broken elements of an array"),
    Fault("repeated_key", (4,), write=line('{"id": 1, "id": 2, "messages": []}\n', 3), detail="the key 'id' twice"),
    Fault("not_utf8", (1,), write=line(b'{"text": "caf\xe9"}\n', 0), detail="byte 0xe9 at column 14"),
    Fault("half_character", (6,), write=line('{"text": "\\ud83d"}\n', 5), detail="half of a character"),
    Fault("damaged_file", ("rows.jsonl.gz:7",), write=cut_gzip, detail="damaged or cut off"),
    Fault("no_rows", ("rows.jsonl",), write=whole("rows.jsonl", "")),
    Fault("no_array", ("rows.json:1",), write=whole("rows.json", '{"rows": []}'), detail="an object with keys rows"),
    Fault("byte_order_mark", ("rows.jsonl",), write=marked, severity="note"),
    Fault("blank_line", ("rows.jsonl",), write=gap, severity="note", count=2),
    Fault("file_of_another_split", ("there",), write=folder, severity="note"),
]

FORM = [
    Fault("missing_column", (2,), "pairs", without("rejected", 1), detail=MISSING),
    Fault("missing_column", (6,), "labels", without("label", 5), name="a label is missing"),
    Fault("missing_column", (1,), "alpaca", without("preference", 0), name="a preference is missing"),
    Fault("column_named_where", (5,), "pairs", at(4, where="here")),
    Fault("not_an_object", (3,), spoil=instead(2, [1, 2]), detail="the row is [1, 2]"),
    Fault("not_text", (4,), spoil=said(3, None), detail="content None"),
    Fault("no_messages", (2,), spoil=at(1, messages="Hello")),
    Fault("not_a_message", (2,), spoil=at(1, messages=["Hello"])),
    Fault("unknown_role", (6,), spoil=at(5, messages=[{"role": "bot", "content": "Hi"}]), detail="role 'bot'"),
    Fault("roles_do_not_alternate", (1,), spoil=at(0, messages=[user("Hi"), user("Ho"), assistant("Yes")])),
    Fault("bad_prompt", (3,), "pairs", at(2, prompt=3)),
    Fault("bad_answer", (3,), "pairs", at(2, chosen=3)),
    Fault("prompt_not_from_user", (1,), "pairs", at(0, prompt=[user("Hi"), assistant("Yes")])),
    Fault("answer_not_from_assistant", (1,), "pairs", at(0, chosen=[assistant("Yes"), user("And?")])),
    Fault("bad_margin", (4,), "pairs", every(margin=lambda i: float("nan") if i == 3 else 1.0), detail="margin is nan"),
    Fault("bad_preference", (4,), "pairs", at(3, preference=1.5)),
    Fault("bad_preference", (4,), "alpaca", at(3, preference=3)),
    Fault("bad_label", (4,), "labels", at(3, label="good")),
    Fault("not_a_transcript", (2,), "hh", at(1, chosen="Once upon a time")),
    Fault("not_turns", (2,), "moss", at(1, chosen=["Hi", 3])),
    Fault("ends_with_assistant", (5,), "prompts", at(4, prompt=[user("Hi"), assistant("Yes")])),
    Fault("ends_with_system", (5,), "prompts", at(4, prompt=[{"role": "system", "content": "Be kind"}])),
    Fault("prompts_differ", (2,), "pairs", at(1, chosen=[user("What else?"), assistant("Yes.")])),
    Fault(
        "mixed_types",
        (6,),
        "pairs",
        instead(5, {"messages": [user("Hi"), assistant("Yes")]}),
        detail="messages among preference",
    ),
    Fault("mixed_types", (6,), "pairs", instead(5, {"prompt": "Hi"}), name="a prompt among pairs"),
    Fault(
        "mixed_types",
        (6,),
        "pairs",
        instead(5, {"chosen": [user("Hi"), assistant("Yes")], "rejected": [user("Hi"), assistant("Nay")]}),
        severity="warning",
        name="an implicit prompt among explicit ones",
    ),
]

LEFT_OUT = [
    Fault("prompts_differ", (2,), "implicit", at(1, chosen=[user("What else?"), assistant("Yes.")]), severity="warning"),
    Fault("chosen_equals_rejected", (3,), "pairs", at(2, rejected=[assistant(CHOSEN[2])]), severity="warning"),
    Fault(
        "chosen_equals_rejected",
        (3,),
        "hh",
        at(2, **dict.fromkeys(("chosen", "rejected"), transcript("a", "b"))),
        severity="warning",
    ),
    Fault("ends_with_user", (3,), spoil=at(2, messages=[user("Hi")]), severity="warning"),
    Fault("empty_answer", (3,), spoil=said(2, "  "), severity="warning"),
    Fault("empty_answer", (3,), "pairs", said(2, "", "rejected"), severity="warning"),
    Fault("empty_prompt", (1,), "prompts", said(0, "", "prompt"), severity="warning"),
    Fault("no_preference", (1,), "alpaca", at(0, preference=None), severity="warning"),
    Fault("empty_turn", (1,), "moss", at(0, chosen=["Hi", ""]), severity="warning"),
    Fault("lengths_differ", (1,), "moss", at(0, chosen=["a", "b", "c", "d"]), severity="warning"),
    Fault(
        "starts_with_assistant",
        (1,),
        "hh",
        at(0, **{s: f"\n\nAssistant: a\n\nHuman: b\n\nAssistant: {s}" for s in ("chosen", "rejected")}),
        severity="warning",
    ),
    Fault("rejected_empty_final_assistant", (4,), "hh", at(3, rejected=transcript(QUESTIONS[3], "")), severity="warning"),
    Fault("inline_role_marker", (4,), "hh", at(3, rejected=transcript(QUESTIONS[3], "No. Human: why?")), severity="warning"),
    Fault(
        "20_or_more_turns",
        (4,),
        "hh",
        at(3, chosen=transcript(*MANY, "Yes"), rejected=transcript(*MANY, "Nay")),
        severity="note",
    ),
]
