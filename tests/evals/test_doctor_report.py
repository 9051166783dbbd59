"""What the doctor counts, shows and prints, against numbers and masks written by hand."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from doctor_desk import as_lines, assistant, clean, letters_tokenizer, put, save_model, user

from rewarden.errors import ConfigError
from rewarden.evals.doctor import Doctor, diagnose
from rewarden.evals.doctor_kinds import KINDS
from rewarden.evals.doctor_report import as_json, report
from rewarden.evals.doctor_rows import spread
from rewarden.spec import check

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("letters") / "model", letters_tokenizer())


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """The path of a file with these rows, in the working folder."""
    monkeypatch.chdir(tmp_path)
    return lambda rows, name="rows.jsonl": str(put(Path(name), "".join(as_lines(rows))))


def words(diagnosis, color: bool = False) -> str:
    console = Console(
        force_terminal=color,
        color_system="standard" if color else None,
        soft_wrap=True,
        highlight=False,
        markup=False,
        width=400,
    )
    with console.capture() as said:
        for line in report(diagnosis, color=color):
            console.print(line)
    return said.get()


TALK = [{"messages": [user("Hi"), assistant("Ho."), user("A"), assistant("Bye.")]}]
TURNS = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>{b}\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n{c}<|im_end|>{d}\n"


def test_the_preview_marks_each_answer_with_its_end_of_turn(rows_of, letters):
    diagnosis = diagnose(Doctor(data={"path": rows_of(TALK)}, model={"model_name_or_path": str(letters)}))
    expected = TURNS.replace("{a}", "{+Ho.").replace("{b}", "+}").replace("{c}", "{+Bye.").replace("{d}", "+}")
    assert f"rows.jsonl:1: 9 of 52 tokens are learned\n{expected}" in words(diagnosis)
    # Turns of 10 and 9 tokens by the user, of 16 and 17 by the assistant, whose letters and end of turn are learned: 4 + 5.
    facts = diagnosis.examined[0].tokens
    assert (facts.num_tokens, facts.num_learned, facts.num_answers, facts.num_complete, facts.num_bos) == (52, 9, 2, 2, 0)


def test_the_preview_has_colors_on_a_terminal(rows_of, letters):
    diagnosis = diagnose(Doctor(data={"path": rows_of(TALK)}, model={"model_name_or_path": str(letters)}, max_length=45))
    said = words(diagnosis, color=True)
    assert "\x1b[32mHo.\x1b[0m\x1b[1;32m<|im_end|>\x1b[0m" in said
    assert "{+" not in said
    assert "\x1b[9;31m" in said  # struck out in red behind token 45


def test_the_preview_marks_what_the_limit_cuts_off(rows_of, letters):
    # The last answer begins at token 46: 10 + 16 + 9 and its header of 11.
    diagnosis = diagnose(Doctor(data={"path": rows_of(TALK)}, model={"model_name_or_path": str(letters)}, max_length=48))
    assert "assistant\n{+By+}{-e.<|im_end|>\n-}\n" in words(diagnosis)
    facts = diagnosis.examined[0].tokens
    assert (facts.num_answers, facts.num_complete) == (2, 1)
    assert [(f.code, f.examples[0].detail) for f in diagnosis.findings] == [("longer_than_max_length", "52 tokens, at most 48")]


def test_only_the_completion_of_a_prompt_is_learned(rows_of, letters):
    prompt = [user("Hi"), assistant("Ho."), user("A")]
    diagnosis = diagnose(
        Doctor(
            data={"path": rows_of([{"prompt": prompt, "completion": [assistant("Bye.")]}])},
            model={"model_name_or_path": str(letters)},
        )
    )
    assert TURNS.replace("{a}", "Ho.").replace("{b}", "").replace("{c}", "{+Bye.").replace("{d}", "+}") in words(diagnosis)
    assert diagnosis.examined[0].tokens.num_learned == 5


def test_both_sides_of_a_pair_are_shown_with_their_answers_learned(rows_of, letters):
    diagnosis = diagnose(Doctor(data={"path": rows_of(clean("pairs"))}, model={"model_name_or_path": str(letters)}, rows=1))
    assert [(one.where, one.side) for one in diagnosis.previews] == [("rows.jsonl:1", "chosen"), ("rows.jsonl:1", "rejected")]
    said = words(diagnosis)
    assert "{+Rome is a city that I can tell you a lot about.<|im_end|>+}\n" in said
    assert "{+Rome is nice.<|im_end|>+}\n" in said


def test_nothing_of_a_prompt_is_learned_and_the_policy_writes_at_its_end(rows_of, letters):
    diagnosis = diagnose(Doctor(data={"path": rows_of(clean("prompts"))}, model={"model_name_or_path": str(letters)}, rows=1))
    assert "What is Rome like?<|im_end|>\n<|im_start|>assistant\n <- the policy writes here" in words(diagnosis)
    assert "{+" not in words(diagnosis).split("loss mask")[1].split("\n", 1)[1]
    assert diagnosis.examined[0].tokens.prompt_lengths == [37] * 6  # 8 + 18 letters + 11


def test_long_texts_are_shortened_where_nothing_is_learned(rows_of, letters):
    row = {"messages": [user("a" * 5000), assistant("b" * 900)]}
    said = words(diagnose(Doctor(data={"path": rows_of([row])}, model={"model_name_or_path": str(letters)})))
    assert "more characters ...]" in said
    assert "{+" + "b" * 900 + "<|im_end|>+}" in said
    assert "a" * 601 not in said


def test_a_plain_format_shows_its_bos(rows_of, letters):
    data = {"path": rows_of(clean("pairs"))}
    diagnosis = diagnose(Doctor(data=data, model={"model_name_or_path": str(letters), "template": "hh"}, rows=1))
    assert "<|endoftext|>\n\nHuman: What is Rome like?\n\nAssistant:{+ Rome is a city" in words(diagnosis)
    assert diagnosis.examined[0].tokens.num_bos == diagnosis.examined[0].tokens.num_texts == 12


def test_rows_shown_are_as_many_as_asked_for(rows_of, letters):
    path = rows_of(clean("messages"))
    for rows in (0, 3, 99):
        diagnosis = diagnose(Doctor(data={"path": path}, model={"model_name_or_path": str(letters)}, rows=rows))
        assert len(diagnosis.previews) == min(rows, 6)


def test_the_json_holds_plain_values_and_its_keys_stay(rows_of, letters):
    held = [{"prompt": [user("Is it far?")], "chosen": [assistant("Yes.")], "rejected": [assistant("No, no.")]}]
    cfg = Doctor(
        data={"path": rows_of(clean("pairs"))},
        eval_data={"path": rows_of(held, "held.jsonl")},
        model={"model_name_or_path": str(letters)},
    )
    said = as_json(diagnose(cfg))
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert list(said) == ["schema", "exit_code", "counts", "findings", "sources", "model", "limits", "preview"]
    assert (said["schema"], said["exit_code"], said["counts"]) == (1, 0, {"error": 0, "warning": 0, "note": 0})
    assert list(said["sources"]) == ["data", "eval_data"]
    assert list(said["sources"]["data"]) == [
        "path", "split", "num_rows", "num_unreadable", "target", "types", "columns", "num_usable", "left_out", "refused", "pairs", "tokens",
    ]  # fmt: skip
    # The longer answer is chosen in 3 of 6; Wilson: 1/2 -+ 1.96 sqrt(1/24 + 1.96^2/144) / (1 + 1.96^2/6) = 1/2 -+ 0.312.
    pairs = said["sources"]["data"]["pairs"]
    assert pairs["longer_chosen_share"] == 0.5
    assert pairs["longer_chosen_interval"] == pytest.approx([0.188, 0.812], abs=5e-4)
    model = said["model"]
    assert (model["end_of_turn"], model["pad"]) == ({"id": 2, "token": "<|im_end|>"}, {"id": 0, "token": "<|endoftext|>"})
    assert (model["vocab_size"], model["embeddings"], model["positions"]) == (260, {"model.embed_tokens.weight": 260}, 100_000)
    assert "".join(segment["text"] for segment in said["preview"][0]["segments"]).startswith(
        "<|im_start|>user\nWhat is Rome like?"
    )


def test_a_finding_in_json_says_where_what_and_what_to_do(rows_of):
    rows = clean("pairs")
    rows[2]["chosen"] = 3
    (found,) = as_json(diagnose(Doctor(data={"path": rows_of(rows)})))["findings"]
    assert found == {
        "code": "bad_answer",
        "severity": "error",
        "source": "data",
        "count": 1,
        "examples": [{"where": "rows.jsonl:3", "detail": "chosen is 3 (int); it must be text or a list of messages"}],
        "means": KINDS["bad_answer"].means,
        "do": KINDS["bad_answer"].do,
    }


def test_the_worst_and_most_frequent_findings_come_first(rows_of):
    rows = clean("pairs")
    for index, answer in ((0, 3), (1, 3), (2, "x")):
        rows[index]["rejected"] = answer
    rows[3]["prompt"], rows[4]["preference"] = 3, 0.5
    rows += [rows[5], rows[5]]
    diagnosis = diagnose(Doctor(data={"path": rows_of(rows)}))
    assert [(one.severity, one.code, one.count) for one in diagnosis.findings] == [
        ("error", "bad_answer", 2),
        ("error", "bad_prompt", 1),
        ("warning", "duplicate_row", 2),
        ("note", "tie", 1),
    ]
    said = words(diagnosis)
    assert "findings: 2 errors, 1 warning, 1 note\n" in said
    assert "error   bad_answer: 2\n" in said
    assert "at rows.jsonl:1: rejected is 3 (int)" in said


def test_findings_of_both_sources_are_told_apart(rows_of):
    rows = clean("pairs")
    rows[0]["chosen"] = 3
    data, held = rows_of(rows), rows_of([{**rows[0], "prompt": "Is it far?"}], "held.jsonl")
    said = words(diagnose(Doctor(data={"path": data}, eval_data={"path": held})))
    assert "bad_answer: 1 in data\n" in said
    assert "bad_answer: 1 in eval_data\n" in said


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_length": 5}, "max_length is in tokens, which needs a model"),
        ({"max_prompt_length": 5}, "max_prompt_length is in tokens"),
        ({"eval_data": {"path": "rows.jsonl"}}, "eval_data is the training data itself"),
        ({"rows": -1}, "rows is -1"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(Doctor, {"data": {"path": "rows.jsonl"}, **fields})


def test_spread_is_by_nearest_rank():
    assert spread(range(1, 101)) == {"min": 1, "median": 50.5, "p95": 95, "max": 100}
    assert spread([7]) == {"min": 7, "median": 7, "p95": 7, "max": 7}
    assert spread([]) == {}


def test_a_real_model_and_real_rows(shared, smollm2):
    file = shared / "data" / "hh_rlhf_helpful" / "edge_cases.jsonl"
    diagnosis = diagnose(Doctor(data={"path": str(file)}, model={"model_name_or_path": str(smollm2)}, max_length=512, rows=1))
    facts = as_json(diagnosis)
    assert not [found for found in diagnosis.findings if found.source == "model" or found.severity == "error"]
    assert facts["sources"]["data"]["tokens"]["num_answers"] == 2 * len(diagnosis.examined[0].source.entries) == 36
    assert (facts["model"]["end_of_turn"]["token"], facts["model"]["vocab_size"]) == ("<|im_end|>", 49152)
    lengths = {found.code: found.count for found in diagnosis.findings if "length" in found.code}
    assert lengths["nothing_within_max_length"] == sum(  # counted anew from the tokenizer itself
        any(prompt >= 512 for prompt in prompts) for prompts in _prompt_lengths(diagnosis, smollm2)
    )


def _prompt_lengths(diagnosis, folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for entry in diagnosis.examined[0].source.entries:
        rows = [{"role": message.role, "content": message.text} for message in entry.record.prompt]
        yield [len(tokenizer.apply_chat_template(rows, add_generation_prompt=True, return_dict=False))]


def test_the_page_lists_every_finding_as_it_is():
    page = PAGE.read_text(encoding="utf-8")
    missing = [
        code for code, kind in KINDS.items() if f"| `{code}` | {kind.severity} | {kind.means} | {kind.do} |\n" not in page
    ]
    assert missing == []
