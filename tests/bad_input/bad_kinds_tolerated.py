"""Irregular input that is used all the same: what was left out, renamed or taken over is counted and said."""

import json
from collections.abc import Callable
from pathlib import Path

from bad_desk import Desk, Kind
from bad_kinds_data import ANSWER, GOOD, PAIR, USER
from bad_kinds_models import tensors
from bad_kinds_runtime import RUN, holding

LONG = {"messages": [USER, {"role": "assistant", "content": "Trips are fun. " * 200}]}


def sft(name: str, content: object, *words: str, extra: str = "") -> Kind:
    """Dialogues of which some are irregular."""
    return Kind(name, f"run sft.yaml view=plain data.path=rows.jsonl {extra}", words, files={"rows.jsonl": content})


def stopped(name: str, change: Callable[[Desk], object], *words: str) -> Kind:
    """A stopped run with something left behind by a kill."""

    def make(desk: Desk) -> None:
        desk.copy("stopped", RUN)
        change(desk)

    return Kind(name, "run sft.yaml view=plain", words, make=make)


def model(name: str, change: Callable[[Desk], object], *words: str) -> Kind:
    """A model with something unusual."""

    def make(desk: Desk) -> None:
        desk.copy("policy", "m")
        change(desk)

    return Kind(name, "run sft.yaml view=plain model.model_name_or_path=m", words, make=make)


def with_tensor(name: str) -> Callable[[Desk], object]:
    return tensors(lambda kept: kept.update({name: kept["model.norm.weight"].clone()}))


def half_written(desk: Desk) -> None:
    desk.write(f"{RUN}/checkpoints/.tmp-step-00000002/rng.pt", "half")


def torn_metrics(desk: Desk) -> None:
    file = desk.path / RUN / "metrics.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0] + '{"step": 2, "lo')


def prompts_one_too_long(desk: Desk) -> None:
    rows = [json.loads(line) for line in Path(desk.world.names["prompts"]).read_text().splitlines()]
    desk.write("rows.jsonl", [*rows, {"prompt": "Hello. " * 400}])


TOLERATED = [
    sft("a byte order mark", "\ufeff" + json.dumps(GOOD) + "\n", "1 of 1 rows", "1 byte_order_mark"),
    sft("blank lines", json.dumps(GOOD) + "\n\n\n", "1 of 1 rows", "2 blank_line"),
    sft("ids that are no text", [{**GOOD, "id": 7}, {**GOOD, "id": [1]}], "2 of 2 rows"),
    sft("an id twice", [{**GOOD, "id": "a"}] * 2, "2 of 2 rows", "1 repeated_id"),
    sft("an empty answer", [GOOD, {"messages": [USER, {**ANSWER, "content": ""}]}], "1 of 2 rows", "1 empty_answer"),
    sft("a bad row to be dropped", [GOOD, {"messages": 3}], "1 of 2 rows", "1 no_messages", extra="data.on_bad_row=drop"),
    sft("a row longer than the positions", [GOOD, LONG], "encoding: 1 of 2 rows", "1 longer than 320 tokens dropped"),
    sft("a row that is cut", [GOOD, LONG], "encoding: 2 of 2 rows", "1 cut at 320 tokens", extra="overlength=truncate"),
    sft(
        "a warm-up longer than the training",
        [GOOD],
        "policy: warmup_steps is 9, beyond the 1 optimizer steps",
        extra="optim.warmup_steps=9",
    ),
    Kind(
        "a negative margin and an equal pair",
        "run reward.yaml view=plain data.path=rows.jsonl",
        ("1 of 2 rows", "1 chosen_equals_rejected", "1 negative_margin"),
        files={"rows.jsonl": [{**PAIR, "margin": -1}, {**PAIR, "rejected": [ANSWER]}]},
    ),
    Kind(
        "a training prompt longer than the positions",
        "run ppo.yaml view=plain data.path=rows.jsonl",
        ("prompts: 4 prompts", "1 longer than 319 tokens dropped"),
        make=prompts_one_too_long,
    ),
    Kind(
        "a prompt to compare on longer than the positions",
        "run compare.yaml data.path=rows.jsonl",
        ("4 of 5 rows; dropped: 1 longer_than_319_tokens",),
        make=prompts_one_too_long,
    ),
    Kind(
        "no pairs asked for",
        "run r.yaml policy.model_name_or_path=$policy",
        ("pairs: none asked for, no file written", "prompts: 2 rows"),
        files={
            "r.yaml": "kind: world_pairs\nnum_pairs: 0\nnum_test_pairs: 0\nnum_prompts: 2\nnum_selection: 0\nnum_heldout: 0\n"
        },
    ),
    model(
        "a tensor that nobody uses", with_tensor("v_head.weight"), "m: 1 tensors have no place in the model", "'v_head.weight'"
    ),
    model("rotary tables in the weights", with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq"), "SFT: done"),
    stopped(
        "a lock of a run that was killed", holding(f"{RUN}/lock", "pid 4194304 on here"), "took over the lock of pid 4194304"
    ),
    stopped(
        "a checkpoint of a killed writer",
        half_written,
        "removed runs/sft/checkpoints/.tmp-step-00000002",
        "resuming after step 1",
    ),
    stopped("a torn line of metrics", torn_metrics, "dropped 1 lines of metrics.jsonl after step 1"),
]
"""Input that is used and spoken of."""
