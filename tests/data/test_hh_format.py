"""Anthropic HH-RLHF on the real rows; what is expected is stated by the SOURCE.md and the flags that lie beside them."""

import ast
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from rewarden.data.formats import FORMATS
from rewarden.data.formats.row import Drop, Notice
from rewarden.data.read import Row, read_rows
from rewarden.data.records import Loaded
from rewarden.data.sources import Data, load_comparisons, load_conversations, load_prompts
from rewarden.data.split import first_prompt
from rewarden.errors import DataError
from rewarden.types import Comparison, Message


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return shared / "data" / "hh_rlhf_helpful"


@pytest.fixture(scope="module")
def stated(folder: Path) -> dict[str, int]:
    """The irregular rows that SOURCE.md counts."""
    (found,) = re.findall(r"Irregular rows \(of 6240\): (\{.*?\})", (folder / "SOURCE.md").read_text(encoding="utf-8"))
    return ast.literal_eval(found)


@pytest.fixture(scope="module")
def resplit(folder: Path) -> list[Loaded[Comparison]]:
    """The two sides of the resplit; together they are the rows of the original files."""
    return [load_comparisons(Data(path=str(folder / "resplit"), split=split)) for split in ("train", "test")]


def row(chosen: str, rejected: str = "\n\nHuman: q\n\nAssistant: b") -> Row:
    return Row(where="f:1", name="f:1", fields={"chosen": chosen, "rejected": rejected})


def test_pairs_show_the_irregularities_that_the_source_counts(
    resplit: list[Loaded[Comparison]], stated: dict[str, int]
) -> None:
    seen = Counter(resplit[0].noticed) + Counter(resplit[1].noticed)
    assert seen.pop("file_of_another_split") == 4  # the other side and index.json, twice
    assert seen == stated
    assert sum(stated.values()) == 178  # guards the reading of SOURCE.md
    # 10 chosen and 15 rejected sides have consecutive turns of one role, 7 rows on both sides: 18 rows. All 14 rows whose
    # prompts differ are among those and the 2 whose rejected side ends with the human.
    dropped = Counter(resplit[0].dropped) + Counter(resplit[1].dropped)
    assert dropped == {"chosen_equals_rejected": 36, "consecutive_same_role": 18, "ends_with_human": 2}
    assert [one.total for one in resplit] == [5240, 1000]
    assert sum(len(one.rows) for one in resplit) == 6240 - 56


def test_each_flagged_row_shows_exactly_its_flags(folder: Path) -> None:
    flagged = list(read_rows(folder / "edge_cases.jsonl"))
    for case in flagged:
        seen = {item.what for item in FORMATS["hh"].comparisons(case) if isinstance(item, Notice)}  # type: ignore[misc]
        assert seen == set(case.fields["flags"]), case.where
    assert len(flagged) == 36


@pytest.mark.parametrize(
    ("flags", "fate"),
    [
        ({"chosen_equals_rejected"}, "chosen_equals_rejected"),
        ({"chosen_consecutive_same_role"}, "consecutive_same_role"),
        ({"rejected_consecutive_same_role"}, "consecutive_same_role"),
        ({"rejected_ends_with_human"}, "ends_with_human"),
        ({"prompts_differ"}, "consecutive_same_role or ends_with_human"),
        ({"inline_role_marker"}, None),
        ({"20_or_more_turns"}, None),
        ({"rejected_empty_final_assistant"}, None),
        ({"chosen_empty_turn_inside"}, None),
    ],
)
def test_what_becomes_of_each_kind_of_flagged_row(folder: Path, flags: set[str], fate: str | None) -> None:
    cases = [case for case in read_rows(folder / "edge_cases.jsonl") if flags <= set(case.fields["flags"])]
    assert cases
    spoils = ("same_role", "ends_with_human", "prompts_differ", "chosen_equals")
    kept = 0
    for case in cases:
        (result,) = [item for item in FORMATS["hh"].comparisons(case) if not isinstance(item, Notice)]  # type: ignore[misc]
        if fate:
            assert isinstance(result, Drop), case.where
            assert result.reason in fate
        elif not any(word in flag for word in spoils for flag in case.fields["flags"]):
            assert isinstance(result, Comparison), case.where
            kept += 1
    assert fate or kept


def test_fine_tuning_leaves_out_transcripts_in_which_the_assistant_writes_a_role(folder: Path) -> None:
    loaded = load_conversations(Data(path=str(folder / "original"), split="test"))
    # 47 chosen sides hold a role marker inside a turn, 4 of them among the 10 with consecutive turns.
    assert loaded.dropped == {"inline_role_marker": 43, "consecutive_same_role": 10, "empty_answer": 2}
    assert loaded.noticed["inline_role_marker"] == 47
    for conversation in loaded.rows:
        assert all(turn.text for turn in conversation.messages if turn.role == "assistant")
        assert "Human:" not in " ".join(turn.text for turn in conversation.messages if turn.role == "assistant")


def test_prompts_are_the_chosen_transcripts_without_the_last_answer(folder: Path) -> None:
    loaded = load_prompts(Data(path=str(folder / "original"), split="test"))
    assert loaded.dropped == {"consecutive_same_role": 10}
    assert all(prompt.messages[-1].role == "user" for prompt in loaded.rows)


def test_no_text_of_a_kept_pair_is_lost_but_space(folder: Path) -> None:
    path = folder / "original" / "helpful-online.test.jsonl.gz"
    raw = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")[:-1]]
    role = {"user": "Human", "assistant": "Assistant"}
    for pair in load_comparisons(Data(path=str(path))).rows:
        original = raw[int(pair.id.rsplit(":", 1)[1]) - 1]
        for side in ("chosen", "rejected"):
            turns = (*pair.prompt, *getattr(pair, side))
            again = "".join(f"{role[turn.role]}:{turn.text}" for turn in turns)
            assert re.sub(r"\s", "", again) == re.sub(r"\s", "", original[side]), pair.id


def test_the_resplit_shares_no_first_prompt(resplit: list[Loaded[Comparison]]) -> None:
    keys = [{first_prompt(pair.prompt) for pair in one.rows} for one in resplit]
    assert min(len(side) for side in keys) > 500
    assert keys[0] & keys[1] == set()


def test_a_transcript_becomes_messages_without_the_space_around_them() -> None:
    case = row(
        "\n\nHuman: Hi\n\nthere \n\nAssistant:  Yes.\n\n\n\nHuman: q\n\nAssistant: a",
        "\n\nHuman: Hi\n\nthere\n\nAssistant: Yes.\n\nHuman: q\n\nAssistant:",
    )
    (notice, pair) = FORMATS["hh"].comparisons(case)  # type: ignore[misc]
    assert notice == Notice("rejected_empty_final_assistant")
    assert isinstance(pair, Comparison)
    assert [turn.text for turn in pair.prompt] == ["Hi\n\nthere", "Yes.", "q"]
    assert (pair.chosen, pair.rejected) == ((Message(role="assistant", text="a"),), (Message(role="assistant", text=""),))


def test_prompts_that_only_differ_in_words_are_dropped() -> None:
    items = list(FORMATS["hh"].comparisons(row("\n\nHuman: q1\n\nAssistant: a", "\n\nHuman: q2\n\nAssistant: b")))  # type: ignore[misc]
    assert items == [Notice("prompts_differ"), Drop("prompts_differ")]


def test_a_transcript_that_starts_with_the_assistant_is_dropped() -> None:
    items = list(FORMATS["hh"].conversations(row("\n\nAssistant: hello\n\nHuman: q\n\nAssistant: a")))  # type: ignore[misc]
    assert items == [Drop("starts_with_assistant")]


def test_text_that_is_no_transcript_is_refused_with_line(tmp_path: Path) -> None:
    path = tmp_path / "hh.jsonl"
    good = {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, "chosen": "Once upon"}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"hh\.jsonl:2: chosen starts with 'Once upon'; a transcript starts with 'Human:'"):
        load_comparisons(Data(path=str(path)))


def test_transcripts_are_told_from_trl_pairs_by_their_form(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"chosen": "The sky is blue.", "rejected": "The sky is green."}), encoding="utf-8")
    assert load_comparisons(Data(path=str(path))).rows[0].prompt[0].text == "The sky is"
    with pytest.raises(DataError, match="a transcript starts with 'Human:'"):
        load_comparisons(Data(path=str(path), format="hh"))
