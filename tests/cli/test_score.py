"""`rewarden score`: expected scores by transformers alone."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from rewarden.cli import app
from rewarden.data.write import write_jsonl
from rewarden.errors import ConfigError, DataError, RewardenError
from rewarden.models.load import Model, save_model
from rewarden.models.reward import load_reward_model
from rewarden.recipe import score as module
from rewarden.recipe.score import parse_rows
from rewarden.scoring.registry import register
from rewarden.scoring.reward_model import RewardModelScorer


def call(*words):
    """The result of one command; what it raises is raised here."""
    return CliRunner().invoke(app, ["score", *(str(word) for word in words)], catch_exceptions=False)


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@torch.no_grad()
def by_hand(folder: Path, messages: list[dict]) -> float:
    """The score by the model's own forward of one row, which is read at its last token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return float(model(input_ids=torch.tensor([ids])).logits[0].mean())


@pytest.fixture(scope="module")
def ensemble(world_files, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ensemble") / "model"
    spec = Model(model_name_or_path=str(world_files.policy))
    model = load_reward_model(spec, num_heads=3, head="fresh", head_seed=5)
    save_model(model.model, model.tokenizer, folder, extra={"role": "reward", "template": "chat", "num_heads": 3})
    return folder


def test_pairs_get_both_scores_the_winner_and_the_accuracy(world_files):
    result = call(world_files.pairs, "--reward", world_files.reward, "--json")
    scored, given = rows(result.stdout), rows(world_files.pairs.read_text())
    assert [row["id"] for row in scored] == [row["id"] for row in given]
    for row, pair in zip(scored, given, strict=True):
        chosen, rejected = (by_hand(world_files.reward, pair["prompt"] + pair[side]) for side in ("chosen", "rejected"))
        assert row["chosen_score"] == pytest.approx(chosen, abs=1e-5)
        assert row["rejected_score"] == pytest.approx(rejected, abs=1e-5)
        assert row["chosen_wins"] == float(chosen > rejected)
        assert row["status"] == "ok"
    share = statistics.fmean(row["chosen_wins"] for row in scored)
    assert f"{len(scored)} pairs, accuracy {share:.3f}" in result.stderr
    assert f"{len(scored)} rows: {len(scored)} ok" in result.stderr


def test_conversations_get_one_score(world_files):
    result = call(world_files.dialogues, "--reward", world_files.reward, "--json")
    scored, given = rows(result.stdout), rows(world_files.dialogues.read_text())
    assert len(scored) == 12
    for row, dialogue in zip(scored, given, strict=True):
        expected = by_hand(world_files.reward, dialogue["messages"])
        assert row == {"id": dialogue["id"], "score": pytest.approx(expected, abs=1e-5), "status": "ok"}
    values = [row["score"] for row in scored]
    expected = f"scores: mean {statistics.fmean(values):.4f}, standard deviation {statistics.pstdev(values):.4f}"
    assert expected in result.stderr


def test_without_json_the_rows_are_a_table(world_files):
    scored = rows(call(world_files.pairs, "--reward", world_files.reward, "--json").stdout)
    lines = call(world_files.pairs, "--reward", world_files.reward).stdout.splitlines()
    assert lines[0].split() == ["id", "chosen_score", "rejected_score", "chosen_wins", "status"]
    assert len({line.index(word) + len(word) for line, word in zip(lines, ["status", *["ok"] * len(scored)], strict=True)}) == 1
    for line, row in zip(lines[1:], scored, strict=True):
        numbers = [f"{row[key]:.4f}" for key in ("chosen_score", "rejected_score", "chosen_wins")]
        assert line.split() == [row["id"], *numbers, "ok"]


def test_several_heads_are_shown_beside_their_mean(world_files, ensemble):
    result = call(world_files.pairs, "--reward", ensemble, "--json")
    scored = rows(result.stdout)
    for row in scored:
        assert len(row["chosen_members"]) == 3
        assert row["chosen_score"] == pytest.approx(statistics.fmean(row["chosen_members"]), abs=1e-5)
    shares = [
        statistics.fmean(float(row["chosen_members"][head] > row["rejected_members"][head]) for row in scored)
        for head in range(3)
    ]
    assert "accuracy by member: " + ", ".join(f"{share:.3f}" for share in shares) in result.stderr


def test_a_label_that_prefers_the_other_side_or_none_counts_as_such(world_files, here):
    pair = rows(world_files.pairs.read_text())[0]
    wins = rows(call(world_files.pairs, "--reward", world_files.reward, "--json", "--rows", 0).stdout)[0]["chosen_wins"]
    write_jsonl("soft.jsonl", [{**pair, "id": str(p), "preference": p} for p in (0.9, 0.2, 0.5, 0.4)])
    result = call("soft.jsonl", "--reward", world_files.reward, "--json")
    assert [row["preference"] for row in rows(result.stdout)] == [0.9, 0.2, 0.5, 0.4]
    expected = (wins + 2 * (1 - wins)) / 3
    assert f"3 pairs, accuracy {expected:.3f}" in result.stderr
    assert "1 pairs labeled as ties, left out of the accuracy" in result.stderr


def test_labeled_answers_say_how_well_good_and_bad_are_told_apart(world_files, here):
    dialogues = rows(world_files.dialogues.read_text())[:6]
    labels = [True, False, True, False, False, True]
    write_jsonl(
        "labeled.jsonl",
        [
            {"prompt": row["messages"][:-1], "completion": row["messages"][-1:], "label": label}
            for row, label in zip(dialogues, labels, strict=True)
        ],
    )
    result = call("labeled.jsonl", "--reward", world_files.reward, "--json")
    scored = rows(result.stdout)
    assert [row["label"] for row in scored] == labels
    values = [by_hand(world_files.reward, row["messages"]) for row in dialogues]
    assert [row["score"] for row in scored] == pytest.approx(values, abs=1e-5)
    good, bad = ([v for v, label in zip(values, labels, strict=True) if label is wanted] for wanted in (True, False))
    ordered = statistics.fmean((a > b) + 0.5 * (a == b) for a in good for b in bad)
    assert f"3 good with mean {statistics.fmean(good):.4f}, 3 bad with mean {statistics.fmean(bad):.4f}" in result.stderr
    assert f"a good one scores above a bad one in {ordered:.3f} of all pairs" in result.stderr


def test_texts_that_are_too_long_are_counted_and_get_no_score(world_files, here):
    words = "I would like a cheap trip. " * 400
    write_jsonl("pairs.jsonl", [{"prompt": "Hello", "chosen": words, "rejected": "Thank you."}])
    result = call("pairs.jsonl", "--reward", world_files.reward, "--json")
    (row,) = rows(result.stdout)
    assert (row["status"], row["chosen_score"], row["chosen_wins"]) == ("too_long", None, None)
    assert row["rejected_score"] is not None
    assert "1 rows: 1 too_long" in result.stderr
    assert "accuracy" not in result.stderr
    assert "-" in call("pairs.jsonl", "--reward", world_files.reward).stdout.splitlines()[1].split()


def test_max_length_is_a_limit_of_its_own(world_files):
    result = call(world_files.dialogues, "--reward", world_files.reward, "--json", "--max-length", 2)
    assert {row["status"] for row in rows(result.stdout)} == {"too_long"}


def test_hh_transcripts_are_read_with_and_without_their_format(world_files, here):
    pair = {"chosen": "\n\nHuman: Hello\n\nAssistant: Thank you.", "rejected": "\n\nHuman: Hello\n\nAssistant: No."}
    write_jsonl("hh.jsonl", [pair])
    for words in ((), ("--format", "hh")):
        (row,) = rows(call("hh.jsonl", "--reward", world_files.reward, "--json", *words).stdout)
        assert None not in (row["chosen_score"], row["rejected_score"])


def test_malformed_rows_stop_the_command_or_are_dropped_and_counted(world_files, here):
    write_jsonl("a.jsonl", [{"prompt": "Hello", "completion": "Yes."}, {"prompt": "Hello"}])
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        call("a.jsonl", "--reward", world_files.reward)
    result = call("a.jsonl", "--reward", world_files.reward, "--json", "--on-bad-row", "drop")
    assert len(rows(result.stdout)) == 1
    assert "1 of 2 rows; dropped: 1" in result.stderr


def test_rows_choose_what_is_scored(world_files):
    every = rows(call(world_files.dialogues, "--reward", world_files.reward, "--json").stdout)
    some = rows(call(world_files.dialogues, "--reward", world_files.reward, "--json", "--rows", "7, 0,2-3").stdout)
    assert [row["id"] for row in some] == [every[index]["id"] for index in (0, 2, 3, 7)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "numbers from 0 and ranges"),
        ("3-1", "numbers from 0"),
        ("", "numbers from 0"),
        ("-1", "numbers"),
        ("0,9", "row 9"),
    ],
)
def test_rows_that_are_none_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_rows(text, 5)


def test_an_unknown_format_a_missing_file_a_policy_and_an_unknown_template_are_refused(world_files):
    with pytest.raises(ConfigError, match=r"data.format is 'hhh'"):
        call(world_files.pairs, "--reward", world_files.reward, "--format", "hhh")
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        call("nowhere.jsonl", "--reward", world_files.reward)
    with pytest.raises(ConfigError, match="no scalar head"):
        call(world_files.pairs, "--reward", world_files.policy)
    with pytest.raises(ConfigError, match="chatt"):
        call(world_files.pairs, "--reward", world_files.reward, "--template", "chatt")


@pytest.fixture
def windows(monkeypatch) -> list[list[str]]:
    """Windows of three rows; the ids of those that were really scored."""
    monkeypatch.setattr(module, "WINDOW", 3)
    seen: list[list[str]] = []
    original = RewardModelScorer.score

    def score(self, conversations):
        seen.append([row.id for row in conversations])
        return original(self, conversations)

    monkeypatch.setattr(RewardModelScorer, "score", score)
    return seen


def stop_after(monkeypatch, number: int) -> None:
    """Let the scorer be interrupted when it is asked for window `number`."""
    scored = RewardModelScorer.score
    calls = []

    def score(self, conversations):
        calls.append(1)
        if len(calls) > number:
            raise KeyboardInterrupt
        return scored(self, conversations)

    monkeypatch.setattr(RewardModelScorer, "score", score)


def interrupted(*words) -> None:
    assert CliRunner().invoke(app, ["score", *(str(word) for word in words)]).exit_code == 130


def test_a_stopped_file_goes_on_where_it_stopped_with_the_same_bits(world_files, here, windows, monkeypatch):
    words = (world_files.dialogues, "--reward", world_files.reward, "--output")
    call(*words, "once.jsonl")
    assert [len(window) for window in windows] == [3, 3, 3, 3]
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        interrupted(*words, "twice.jsonl")
    assert not Path("twice.jsonl").exists()
    assert len(Path("twice.jsonl.part").read_text().splitlines()) == 1 + 2
    del windows[:]
    result = call(*words, "twice.jsonl")
    assert "resuming after 6 of 12 rows" in result.stderr
    assert len(windows) == 2
    assert "12 rows written to twice.jsonl" in result.stderr
    assert "12 rows: 12 ok" in result.stderr
    assert Path("twice.jsonl").read_bytes() == Path("once.jsonl").read_bytes()
    assert not Path("twice.jsonl.part").exists()


def test_a_torn_last_line_of_a_stopped_file_is_scored_again(world_files, here, windows, monkeypatch):
    words = (world_files.dialogues, "--reward", world_files.reward, "--output")
    call(*words, "once.jsonl")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        interrupted(*words, "twice.jsonl")
    part = Path("twice.jsonl.part")
    part.write_bytes(part.read_bytes()[:-20])
    assert "resuming after 3 of 12 rows" in call(*words, "twice.jsonl").stderr
    assert Path("twice.jsonl").read_bytes() == Path("once.jsonl").read_bytes()


def test_scores_of_another_reward_are_kept_aside_and_not_mixed_in(world_files, ensemble, here, windows, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        interrupted(world_files.dialogues, "--reward", ensemble, "--output", "a.jsonl")
    before = Path("a.jsonl.part").read_bytes()
    result = call(world_files.dialogues, "--reward", world_files.reward, "--output", "a.jsonl")
    assert "a.jsonl.part holds scores of other rows or another reward; it is now a.jsonl.part.1" in result.stderr
    assert Path("a.jsonl.part.1").read_bytes() == before
    assert all("members" not in row for row in rows(Path("a.jsonl").read_text()))


def test_an_output_that_exists_is_not_written_over(world_files, here):
    Path("mine.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine\.jsonl exists"):
        call(world_files.dialogues, "--reward", world_files.reward, "--output", "mine.jsonl")
    assert Path("mine.jsonl").read_text() == "mine"


def test_a_disk_that_fills_up_loses_no_finished_window(world_files, here, windows, monkeypatch):
    words = (world_files.dialogues, "--reward", world_files.reward, "--output", "a.jsonl")
    with monkeypatch.context() as patch:

        def full(path, data, written=[]):  # noqa: B006 - counts calls
            written.append(1)
            if len(written) == 3:
                raise RewardenError(f"cannot write {path}: No space left on device")
            append(path, data)

        from rewarden.recipe import part as part_module

        append = part_module.append
        patch.setattr(part_module, "append", full)
        with pytest.raises(RewardenError, match="No space left"):
            call(*words)
    result = call(*words)
    assert "resuming after 3 of 12 rows" in result.stderr
    assert len(rows(Path("a.jsonl").read_text())) == 12
    assert all(math.isfinite(row["score"]) for row in rows(Path("a.jsonl").read_text()))


@pytest.fixture
def registry(world_files, ensemble, here) -> Path:
    """A single model, the ensemble by its worst head, and a rule."""
    register("models.yaml", "single", {"kind": "reward_model", "path": str(world_files.reward)})
    worst = {"rule": "worst_case"}
    register("models.yaml", "worst", {"kind": "reward_model", "path": str(ensemble), "aggregate": worst})
    register("models.yaml", "short", {"kind": "length", "target": 10, "penalty": 0.1})
    return here / "models.yaml"


def test_an_entry_of_a_registry_scores_like_its_folder(world_files, registry):
    alone = call(world_files.pairs, "--reward", world_files.reward, "--json")
    entry = call(world_files.pairs, "--reward", "models.yaml:single", "--json")
    assert (entry.stdout, entry.stderr) == (alone.stdout, alone.stderr)


def test_a_whole_registry_gives_one_set_of_columns_per_entry(world_files, registry):
    result = call(world_files.pairs, "--reward", registry, "--json")
    together = rows(result.stdout)
    for name in ("single", "worst", "short"):
        alone = call(world_files.pairs, "--reward", f"models.yaml:{name}", "--json")
        expected = [{"id": row["id"]} | {f"{name}/{key}": row[key] for key in row if key != "id"} for row in rows(alone.stdout)]
        found = [{key: row[key] for key in row if key == "id" or key.startswith(f"{name}/")} for row in together]
        assert found == expected
        for line in alone.stderr.splitlines()[1:]:  # the first one is about the data
            assert f"{name}: {line}" in result.stderr.splitlines()
    assert {key.split("/")[0] for row in together for key in row} == {"id", "single", "worst", "short"}
    worst = together[0]["worst/chosen_members"]
    assert together[0]["worst/chosen_score"] == min(worst)
    assert together[0]["worst/chosen_std"] == pytest.approx(statistics.pstdev(worst), abs=1e-5)
    table = call(world_files.pairs, "--reward", registry).stdout.splitlines()
    assert table[0].split() == list(together[0])
    assert len(table) == 1 + len(together)


def test_what_the_data_say_stands_once_beside_the_columns_of_all_entries(world_files, registry):
    pair = rows(world_files.pairs.read_text())[0]
    write_jsonl("soft.jsonl", [{**pair, "preference": 0.9}])
    (row,) = rows(call("soft.jsonl", "--reward", registry, "--json").stdout)
    assert row["preference"] == 0.9
    assert [key for key in row if "preference" in key] == ["preference"]


def test_a_stopped_run_over_a_registry_goes_on_with_the_entry_it_was_at(world_files, registry, windows, monkeypatch):
    words = (world_files.dialogues, "--reward", registry, "--output")
    call(*words, "once.jsonl")
    assert len(windows) == 8  # two reward models, twelve rows in windows of three; the rule is not counted
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        interrupted(*words, "twice.jsonl")
    del windows[:]
    result = call(*words, "twice.jsonl")
    assert "resuming after 18 of 36 scores" in result.stderr
    assert len(windows) == 2
    assert Path("twice.jsonl").read_bytes() == Path("once.jsonl").read_bytes()


def test_options_of_a_reward_model_reach_the_entries_and_are_refused_where_they_mean_nothing(world_files, registry):
    result = call(world_files.dialogues, "--reward", "models.yaml:single", "--json", "--max-length", 2)
    assert {row["status"] for row in rows(result.stdout)} == {"too_long"}
    with pytest.raises(ConfigError, match=r"models\.yaml: entry 'short' is a length, which has no max_length"):
        call(world_files.dialogues, "--reward", registry, "--max-length", 2)


def test_registries_that_cannot_be_used_are_refused(world_files, registry):
    with pytest.raises(ConfigError, match=r"models\.yaml: no entry 'singel'; did you mean 'single'"):
        call(world_files.pairs, "--reward", "models.yaml:singel")
    with pytest.raises(ConfigError, match=r"gone\.yaml: no such registry"):
        call(world_files.pairs, "--reward", "gone.yaml:single")
    Path("empty.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"empty\.yaml: no entries"):
        call(world_files.pairs, "--reward", "empty.yaml")
    Path("nowhere.yaml").write_text("one: {kind: gold}\ntwo: {kind: reward_model, path: gone/model}\n")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml:2: entry 'two': 'gone/model' is not there"):
        call(world_files.pairs, "--reward", "nowhere.yaml")


def test_an_entry_is_explained_with_its_members_and_its_aggregate(world_files, registry):
    words = (world_files.dialogues, "--reward", "models.yaml:worst", "--explain")
    result = call(*words, "--json")
    (row,) = rows(result.stdout)
    for reading in row["scores"].values():
        assert reading["score"] == min(reading["members"])
        assert reading["std"] == pytest.approx(statistics.pstdev(reading["members"]), abs=1e-5)
    assert "linear ensemble of 3 members, worst_case" in result.stderr
    assert "its 3 members are not centered before worst_case" in result.stderr
    scores = row["scores"]["as_scored"]
    members = " ".join(f"{member:>10.4f}" for member in scores["members"])
    assert f"{scores['score']:.4f}  members {members}, std {scores['std']:.4f}" in call(*words).stdout


def test_explain_asks_for_one_reward_model(world_files, registry):
    with pytest.raises(
        ConfigError, match=r"--explain reads one reward model; name one as models.yaml:NAME, of single, worst, short"
    ):
        call(world_files.dialogues, "--reward", registry, "--explain")
    with pytest.raises(ConfigError, match="a reward of kind length has none"):
        call(world_files.dialogues, "--reward", "models.yaml:short", "--explain")
