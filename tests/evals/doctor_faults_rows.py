"""Planted faults in what the rows say: texts, labels, repeats, columns, splits."""

from doctor_desk import LONG, QUESTIONS, SHORT, Fault, Rows, assistant, at, every, said, user


def add(index: int):
    """A copy of a row at the end."""

    def spoil(rows: Rows) -> None:
        rows.append(dict(rows[index]))

    return spoil


def swapped(rows: Rows) -> None:
    rows.append({"prompt": rows[1]["prompt"], "chosen": rows[1]["rejected"], "rejected": rows[1]["chosen"]})


def other_thumb(rows: Rows) -> None:
    rows.append({**rows[1], "label": not rows[1]["label"]})


def longer_chosen(rows: Rows) -> None:
    for row, long, short in zip(rows, LONG, SHORT, strict=True):
        row.update(chosen=[assistant(long)], rejected=[assistant(short)])


def column(name: str, value: object):
    return every(**{name: lambda i: value})


def text(code: str, word: str, detail: str = "", **more: object) -> Fault:
    return Fault(code, (2,), spoil=said(1, f"It is {word} there."), severity="warning", detail=detail, **more)  # type: ignore[arg-type]


TEXTS = [
    text("nul_character", "a\0b"),
    text("control_character", "\x1b[1mbold"),
    text("replacement_char", "caf\ufffd", "answer: 'It is caf\ufffd there.'"),
    text("byte_order_mark_in_text", "\ufeffhere"),
    text("mojibake", "cafÃ©"),
    text("mojibake", "donâ€™t", name="mojibake of a quotation mark"),
    text("template_text", "[INST] so [/INST]"),
    Fault(
        "replacement_char", (2,), "hh", at(1, chosen=f"\n\nHuman: {QUESTIONS[1]}\n\nAssistant: caf\ufffd"), severity="warning"
    ),
    Fault("answer_repeats_prompt", (6,), "completions", at(5, completion=QUESTIONS[5]), severity="warning"),
    Fault("very_long_row", (3,), spoil=said(2, "Rome. " * 4000), severity="warning", detail="24,018 characters"),
]

LABELS = [
    Fault("tie", (2,), "pairs", at(1, preference=0.5), severity="note"),
    Fault("tie", (2,), "alpaca", at(1, preference=1.5), severity="note"),
    Fault(
        "preference_below_half",
        (2,),
        "pairs",
        at(1, preference=0.25, chosen=[assistant(LONG[1])], rejected=[assistant(SHORT[1])]),
        severity="note",
    ),
    Fault("negative_margin", (2,), "pairs", every(margin=lambda i: -1.0 if i == 1 else 1.0), severity="warning"),
    Fault("margin_on_some_rows", (1, 2), "pairs", every(margin=lambda i: 1.0 if i > 1 else None), severity="note"),
    Fault("opposite_labels", (7,), "pairs", swapped, severity="warning", detail="the other way round at "),
    Fault("opposite_labels", (7,), "labels", other_thumb, severity="warning"),
    Fault("one_label_only", (1,), "labels", column("label", True), severity="warning"),
    Fault(
        "length_bias",
        ("rows.jsonl",),
        "pairs",
        longer_chosen,
        severity="warning",
        count=6,
        # Wilson's interval of 6 of 6 begins at 6 / (6 + 1.96^2).
        detail="in 100.0% of 6 pairs (61.0% to 100.0%)",
    ),
]

REPEATS = [
    Fault("duplicate_row", (7,), "pairs", add(2), severity="warning", detail="the same as "),
    Fault("duplicate_row", (7,), "messages", add(2), severity="warning"),
    Fault("duplicate_row", (7,), "prompts", add(2), severity="warning"),
    Fault("repeated_id", (5,), "pairs", every(id=lambda i: f"row-{min(i, 3)}" if i < 5 else "last"), severity="warning"),
    Fault(
        "prompt_in_both_splits",
        ("held.jsonl:2",),
        "pairs",
        severity="warning",
        detail="rows.jsonl:4",
        eval_rows=[
            {"prompt": [user(q)], "chosen": [assistant("Yes, it is.")], "rejected": [assistant("No.")]}
            for q in ("Is it far?", "what is  RIGA like", "Is it warm?")
        ],
    ),
]

COLUMNS = [
    Fault("ignored_column", (1,), "pairs", column("source", "web"), severity="note", detail="'source', 6 rows"),
    Fault("ignored_column", (1,), "pairs", column("raw_completion", "x"), severity="note", name="no misspelling"),
    Fault("misspelt_column", (1,), "pairs", column("margn", 1.0), severity="warning", count=6, detail="did you mean 'margin'?"),
    Fault("tools_not_read", (3,), spoil=at(2, tools=[{"name": "x"}]), severity="warning"),
]
