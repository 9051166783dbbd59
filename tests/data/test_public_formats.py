"""AlpacaFarm, MOSS, OpenAssistant, UltraInteract and the neighbours of these formats, on real rows where they exist."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rewarden.data.sources import Data, load_comparisons, load_conversations, load_prompts
from rewarden.errors import DataError
from rewarden.types import Comparison, Conversation


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def make(*rows: Any) -> str:
        path = tmp_path / "rows.json"
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        return str(path)

    return make


@pytest.fixture
def real(shared: Path) -> Any:
    return lambda name: str(shared / "data" / name)


def raw(path: str) -> list[Any]:
    text = Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line] if path.endswith(".jsonl") else json.loads(text)


def texts(pair: Comparison) -> tuple[str, str, str]:
    return pair.prompt[-1].text, pair.chosen[-1].text, pair.rejected[-1].text


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in conversation.messages]


# AlpacaFarm


@pytest.mark.parametrize(
    ("preference", "chosen", "probability"),
    [(1, "one", 1.0), (2, "two", 1.0), (1.0, "one", 1.0), (1.25, "one", 0.75), (1.75, "two", 0.75), (1.5, "one", 0.5)],
)
def test_an_alpaca_preference_names_the_better_output(write: Any, preference: float, chosen: str, probability: float) -> None:
    row = {"instruction": "Do.", "input": "", "output_1": "one", "output_2": "two", "preference": preference, "extra": 1}
    (pair,) = load_comparisons(Data(path=write(row))).rows
    assert texts(pair) == ("Do.", chosen, "two" if chosen == "one" else "one")
    assert pair.preference == probability
    assert {key: pair.meta[key] for key in ("instruction", "input", "extra")} == {"instruction": "Do.", "input": "", "extra": 1}


def test_alpaca_rows_nobody_judged_are_dropped_and_counted(write: Any) -> None:
    base = {"instruction": "Do.", "input": None, "output_1": "one", "output_2": "two"}
    values = [None, 0, 0.0, 1.5, 2]
    loaded = load_comparisons(Data(path=write(*({**base, "preference": value} for value in values))))
    assert loaded.dropped == {"no_preference": 3}
    assert loaded.noticed == {"tie": 1}
    assert [pair.preference for pair in loaded.rows] == [0.5, 1.0]


@pytest.mark.parametrize("value", [3, 0.5, -1, "2", True, float("nan")])
def test_other_alpaca_preferences_are_refused(write: Any, value: Any) -> None:
    row = {"instruction": "Do.", "output_1": "one", "output_2": "two", "preference": value}
    with pytest.raises(DataError, match=r"rows\.json:1\[0\]: preference is .*(1 or 2 \(the better output\))"):
        load_comparisons(Data(path=write(row)))


def test_alpaca_instruction_and_input_are_joined_by_a_blank_line(real: Any) -> None:
    path = real("alpaca_farm/outputs_rlhf.json")
    rows = raw(path)
    loaded = load_conversations(Data(path=path))
    assert len(loaded.rows) == 252
    for conversation, row in zip(loaded.rows, rows, strict=True):
        question = row["instruction"] + ("\n\n" + row["input"] if row["input"] else "")
        assert turns(conversation) == [("user", question), ("assistant", row["output"])]
        assert (conversation.meta["instruction"], conversation.meta["input"]) == (row["instruction"], row["input"])
    assert sum(not row["input"] for row in rows) == 44  # both forms occur
    assert [prompt.messages for prompt in load_prompts(Data(path=path)).rows] == [row.messages[:1] for row in loaded.rows]


def test_each_output_of_a_list_is_a_conversation(real: Any) -> None:
    path = real("alpaca_farm/multisamples_sft.json")
    rows = raw(path)
    loaded = load_conversations(Data(path=path))
    assert [row.messages[-1].text for row in loaded.rows] == [output for row in rows for output in row["output"]]
    assert [row.id.rsplit("#", 1)[1] for row in loaded.rows] == ["0", "1", "2", "3"] * 8
    prompts = load_prompts(Data(path=path)).rows
    assert [prompt.meta["output"] for prompt in prompts] == [row["output"] for row in rows]


def test_an_empty_list_of_outputs_is_dropped(write: Any) -> None:
    rows = ({"instruction": "a", "output": []}, {"instruction": "b", "output": ["x"]})
    assert load_conversations(Data(path=write(*rows))).dropped == {"no_outputs": 1}


def test_alpaca_pairs_without_a_preference_are_prompts_but_no_pairs(real: Any) -> None:
    path = real("alpaca_farm/outputs_pairs.json")
    assert len(load_prompts(Data(path=path)).rows) == 6
    with pytest.raises(
        DataError, match=r"outputs_pairs\.json:2\[0\]: columns are .*needed: instruction \+ output_1 \+ output_2 \+ preference"
    ):
        load_comparisons(Data(path=path))


def test_alpaca_eval_annotations_keep_their_probabilities(shared: Path) -> None:
    import gzip

    for model, rows, equal in (("alpaca-7b", 805, 3), ("claude-2", 805, 1), ("text_davinci_001", 803, 3)):
        path = shared / "data" / "alpaca_eval" / "full" / model / "annotations.json.gz"
        annotations = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8"))
        loaded = load_comparisons(Data(path=str(path)))
        assert (loaded.total, loaded.dropped) == (rows, {"chosen_equals_rejected": equal})  # equal outputs are the only ties
        assert loaded.noticed == {"tie": equal}
        judged = [row for row in annotations if row["output_1"] != row["output_2"]]
        for pair, row in zip(loaded.rows, judged, strict=True):
            second_is_chosen = pair.chosen[0].text == row["output_2"]
            assert (pair.preference if second_is_chosen else 1 - pair.preference) == pytest.approx(
                row["preference"] - 1, abs=1e-12
            )
            assert pair.preference >= 0.5


def test_pandalm_outputs_that_are_no_text_are_refused_and_empty_ones_kept(real: Any) -> None:
    path = real("pandalm/alpacafarm_format.json")
    with pytest.raises(
        DataError, match=r"alpacafarm_format\.json:975\[139\]: column 'output_1' is True \(bool\); it must be text"
    ):
        load_comparisons(Data(path=path))
    loaded = load_comparisons(Data(path=path, on_bad_row="drop"))
    rows = raw(path)
    untexted = [row for row in rows if not isinstance(row["output_1"], str) or not isinstance(row["output_2"], str)]
    empty = [row for row in rows if "" in (row["output_1"], row["output_2"])]
    assert loaded.dropped == {"not_text": len(untexted)} == {"not_text": 6}
    assert loaded.noticed["empty_answer"] == len(empty) == 52
    assert loaded.noticed["chosen_empty"] == 1
    assert len(loaded.rows) == 888
    learned = load_conversations(Data(path=path, on_bad_row="drop"))
    assert learned.dropped == {"not_text": 6, "empty_answer": 1}


def test_pandalm_votes_are_not_taken_for_a_preference(real: Any) -> None:
    path = real("pandalm/testset-v1.json")
    assert len(load_prompts(Data(path=path)).rows) == 999
    with pytest.raises(DataError, match=r"testset-v1\.json:2\[0\]: columns are .*needed: instruction \+ output_1"):
        load_comparisons(Data(path=path))


def test_llmbar_sets_read_under_other_names_are_its_derived_pairs(real: Any) -> None:
    derived = raw(real("llmbar/chosen_rejected.jsonl"))
    names = {"instruction": "input", "preference": "label"}
    found: Counter[tuple[str, str, str]] = Counter()
    dropped: Counter[str] = Counter()
    noticed: Counter[str] = Counter()
    for subset in (
        "natural",
        "adv_neighbor",
        "adv_gptinst",
        "adv_gptout",
        "adv_manual",
        "processed_mt_bench",
        "processed_fair_eval",
        "processed_llmeval2",
    ):
        loaded = load_comparisons(Data(path=real(f"llmbar/{subset}.json"), columns=names))
        found.update(texts(pair) for pair in loaded.rows)
        dropped.update(loaded.dropped)
        noticed.update(loaded.noticed)
    assert (dropped, noticed) == ({"chosen_equals_rejected": 1}, {"empty_answer": 1})
    assert found == Counter(
        (row["prompt"], row["chosen"], row["rejected"]) for row in derived if row["chosen"] != row["rejected"]
    )
    again = load_comparisons(Data(path=real("llmbar/chosen_rejected.jsonl")))
    assert Counter(map(texts, again.rows)) == found
    assert again.rows[0].meta["subset"] == "natural"


# MOSS


def test_moss_prompts_of_even_length_are_refused_dropped_or_cut_as_told(real: Any) -> None:
    folder = real("moss_rlhf/ppo_data")
    dialogues = raw(folder + "/train.json")
    even = [dialogue for dialogue in dialogues if len(dialogue) % 2 == 0]
    assert (len(dialogues), len(even)) == (31, 20)
    with pytest.raises(
        DataError, match=r"train\.json:2\[0\]: a prompt of 2 turns ends with the assistant.*drop_last_assistant"
    ):
        load_prompts(Data(path=folder))
    dropped = load_prompts(Data(path=folder, on_bad_row="drop"))
    assert (len(dropped.rows), dropped.dropped) == (11, {"ends_with_assistant": 20})
    cut = load_prompts(Data(path=folder, drop_last_assistant=True))
    assert cut.noticed == {"last_assistant_turn_dropped": 20, "file_of_another_split": 1}
    assert [[text for _, text in turns(row)] for row in cut.rows] == [one[: len(one) - 1 + len(one) % 2] for one in dialogues]


def test_moss_roles_are_counted_from_the_first_turn(write: Any) -> None:
    path = write(["Q", "A"], ["Q", "A", "R"])
    assert turns(load_conversations(Data(path=path)).rows[0]) == [("user", "Q"), ("assistant", "A")]
    cut = load_prompts(Data(path=path, drop_last_assistant=True))
    assert [turns(row) for row in cut.rows] == [[("user", "Q")], [("user", "Q"), ("assistant", "A"), ("user", "R")]]


def test_moss_dialogues_of_even_length_are_learned_and_the_others_dropped(real: Any) -> None:
    loaded = load_conversations(Data(path=real("moss_rlhf/ppo_data"), split="valid"))
    assert (len(loaded.rows), loaded.dropped) == (20, {"ends_with_user": 11})


def test_moss_lists_with_empty_turns_or_none_are_dropped(write: Any) -> None:
    loaded = load_prompts(Data(path=write(["Q"], [], ["Q", "", "R"], [" "])))
    assert (len(loaded.rows), loaded.dropped) == (1, {"no_turns": 1, "empty_turn": 2})
    with pytest.raises(DataError, match=r"rows\.json:1\[1\]: the row is \['Q', 3\] \(list\); it must be a list of strings"):
        load_prompts(Data(path=write(["Q"], ["Q", 3])))
    with pytest.raises(DataError, match=r"rows\.json:1\[1\]: the row has columns prompt; it must be a list of strings"):
        load_prompts(Data(path=write(["Q"], {"prompt": "Q"})))


def test_moss_pairs_are_checked_beyond_their_lengths(write: Any) -> None:
    rows = (
        {"chosen": ["u", "a", "v", "good"], "rejected": ["u", "a", "v", "bad"], "mean preference difference": 1.25},
        {"chosen": ["u", "good"], "rejected": ["u", "a", "v", "bad"]},
        {"chosen": ["u", "good"], "rejected": ["other", "bad"]},
        {"chosen": ["u", "same"], "rejected": ["u", "same"]},
        {"chosen": ["u", "good"], "rejected": ["u", " "]},
        {"chosen": ["u", "a", "v"], "rejected": ["u", "a", "w"]},
        {"chosen": ["u", "a", "v"], "rejected": ["u", "a", "v"]},
        {"chosen": [], "rejected": []},
    )
    path = write(*rows)
    loaded = load_comparisons(Data(path=path))
    assert [texts(pair) for pair in loaded.rows] == [("v", "good", "bad")]
    assert loaded.rows[0].meta["mean preference difference"] == 1.25
    assert loaded.dropped == {
        "lengths_differ": 1,
        "prompts_differ": 1,
        "chosen_equals_rejected": 1,
        "empty_turn": 1,
        "ends_with_user": 2,
        "no_turns": 1,
    }
    assert load_prompts(Data(path=path)).dropped == {"ends_with_user": 2, "no_turns": 1}
    assert len(load_conversations(Data(path=path)).rows) == 5


# OpenAssistant


def test_oasst_paths_are_the_derived_conversations(real: Any) -> None:
    loaded = load_conversations(Data(path=real("oasst_100/en_100_tree.jsonl")))
    derived = raw(real("oasst_100/conversations.jsonl"))
    expected = Counter(tuple((m["role"], m["content"]) for m in row["messages"]) for row in derived)
    assert Counter(tuple(turns(row)) for row in loaded.rows) == expected
    assert len(loaded.rows) == 400
    assert loaded.dropped == {"ends_with_user": 180 + 46}  # leaves of depth 3 and 5
    assert loaded.noticed == {"synthetic_message": 22, "assistant_without_rank": 46}
    assert loaded.rows[0].meta["message_tree_id"] == derived[0]["message_tree_id"]


def test_oasst_siblings_are_the_derived_ranked_pairs(real: Any) -> None:
    loaded = load_comparisons(Data(path=real("oasst_100/en_100_tree.jsonl")))
    derived = raw(real("oasst_100/ranked_pairs.jsonl"))

    def derived_key(row: Any) -> tuple[Any, ...]:
        return tuple((m["role"], m["content"]) for m in row["prompt"]), row["chosen"], row["rejected"]

    found = Counter((tuple((m.role, m.text) for m in pair.prompt), *texts(pair)[1:]) for pair in loaded.rows)
    assert found == Counter(map(derived_key, derived))
    assert len(loaded.rows) == 754
    assert loaded.dropped == {"rank_missing": 1 + 3 + 3}  # two and three unranked siblings; one unranked beside three ranked
    assert len({pair.id for pair in loaded.rows}) == 754


def test_oasst_prompts_are_all_messages_of_prompters(real: Any) -> None:
    loaded = load_prompts(Data(path=real("oasst_100/en_100_tree.jsonl")))
    assert len(loaded.rows) == 480
    assert Counter(len(row.messages) for row in loaded.rows)[1] == 100
    lottery = load_prompts(Data(path=real("oasst_100/prompt_lottery_en_250_text.jsonl")))
    assert len(lottery.rows) == 250
    assert lottery.rows[0].messages[0].text == "Can you tell me about GLaDOS?"


def message(id: str, role: str, *replies: Any, **more: Any) -> dict[str, Any]:
    return {"message_id": id, "role": role, "text": f"text {id}", "replies": list(replies), **more}


def test_deleted_and_failed_messages_take_what_is_below_them_along(write: Any) -> None:
    tree = message(
        "q",
        "prompter",
        message("a", "assistant", message("f", "prompter", message("g", "assistant"), deleted=True), rank=1),
        message("b", "assistant", message("h", "prompter"), rank=0, review_result=False),
        message("c", "assistant", rank=None),
        message("d", "assistant", rank=1),
        message("e", "assistant", rank=2, synthetic=True),
    )
    path = write({"message_tree_id": "t", "prompt": tree})
    pairs = load_comparisons(Data(path=path))
    assert [pair.id for pair in pairs.rows] == ["a>e", "d>e"]
    assert pairs.dropped == {"rank_missing": 3, "ranks_equal": 1, "review_failed": 1, "deleted": 1}
    assert pairs.noticed == {"synthetic_message": 1, "assistant_without_rank": 2}  # c, and g below the deleted f
    paths = load_conversations(Data(path=path))
    assert [row.id for row in paths.rows] == ["a", "c", "d", "e"]  # a became a leaf
    assert paths.dropped == {"review_failed": 1, "deleted": 1}
    assert [row.id for row in load_prompts(Data(path=path)).rows] == ["q"]


def test_broken_trees_are_refused_with_the_message_named(write: Any) -> None:
    good = message("q", "prompter", message("a", "assistant", rank=0), message("b", "assistant", rank="1"))
    with pytest.raises(DataError, match=r"rows\.json:1\[0\]: message 'b' has rank '1' \(str\); want an integer or null"):
        load_comparisons(Data(path=write({"prompt": good})))
    with pytest.raises(DataError, match="message 'q' has role 'promter'; did you mean 'prompter'"):
        load_conversations(Data(path=write({"prompt": message("q", "promter")})))
    with pytest.raises(DataError, match="message 1 is user, expected assistant"):
        load_conversations(Data(path=write({"prompt": message("q", "prompter", message("r", "prompter"))})))


# UltraInteract


def test_the_documented_ultrainteract_pair(real: Any) -> None:
    (row,) = raw(real("ultrainteract/documented_pair.jsonl"))
    path = real("ultrainteract/documented_pair.jsonl")
    (pair,) = load_comparisons(Data(path=path)).rows
    assert [(message.role, message.text) for message in pair.prompt] == [
        (turn["from"], turn["value"]) for turn in row["trajectory"]
    ]
    assert (pair.chosen[0].text, pair.rejected[0].text, pair.id) == (row["chosen"], row["rejected"], row["id"])
    assert {key: pair.meta[key] for key in ("task", "dataset", "parent_id")} == {
        key: row[key] for key in ("task", "dataset", "parent_id")
    }
    (learned,) = load_conversations(Data(path=path)).rows
    assert learned.messages == (*pair.prompt, *pair.chosen)
    assert learned.meta["prompt_messages"] == len(row["trajectory"])
    assert load_prompts(Data(path=path)).rows[0].messages == pair.prompt


def test_the_documented_ultrainteract_instructions(real: Any) -> None:
    path = real("ultrainteract/documented_sft.jsonl")
    assert [turns(row) for row in load_conversations(Data(path=path)).rows] == [
        [("user", row["instruction"]), ("assistant", row["response"])] for row in raw(path)
    ]


def test_rows_in_the_ultrainteract_form_have_the_stated_turns(real: Any) -> None:
    path = real("ultrainteract/ultrainteract_format_from_gsm8k.jsonl")
    loaded = load_comparisons(Data(path=path))
    users = Counter(sum(message.role == "user" for message in pair.prompt) for pair in loaded.rows)
    assert users == {1: 400, 2: 200, 3: 100}
    assert (loaded.dropped, loaded.noticed) == ({}, {})


def test_irregular_ultrainteract_rows_are_dropped_and_counted(write: Any) -> None:
    def row(*turns: tuple[str, str], id: str = "x", chosen: str = "good") -> dict[str, Any]:
        return {
            "id": id,
            "trajectory": [{"from": who, "value": what} for who, what in turns],
            "chosen": chosen,
            "rejected": "bad",
        }

    path = write(
        row(("user", "q"), ("assistant", "w"), ("user", "r"), id="1"),
        row(("user", "q"), ("assistant", "other"), ("user", "r"), id="2"),  # the same user turns again
        row(("user", "q"), ("assistant", "w"), id="3"),  # trajectory + chosen has an odd number of turns
        row(("user", "q"), ("user", "r"), ("user", "s"), id="4"),
        row(("assistant", "w"), ("user", "r"), id="5"),
        row(("user", "q"), id="6", chosen="bad"),
        row(("user", "q"), id="7"),
    )
    pairs = load_comparisons(Data(path=path))
    assert [pair.id for pair in pairs.rows] == ["1", "2", "7"]
    assert pairs.dropped == {"roles_do_not_alternate": 3, "chosen_equals_rejected": 1}
    learned = load_conversations(Data(path=path))
    assert [one.id for one in learned.rows] == ["1", "6"]
    assert learned.dropped == {"roles_do_not_alternate": 3, "repeated_user_turns": 2}
    assert [one.id for one in load_prompts(Data(path=path)).rows] == ["1", "6"]


# Neighbours: files of other shapes


def test_taskmaster_dialogues_that_end_with_the_user_are_not_learned(real: Any) -> None:
    loaded = load_conversations(Data(path=real("taskmaster/tm4_dialogs.messages.jsonl.gz")))
    assert (loaded.total, len(loaded.rows), loaded.dropped) == (3710, 3635, {"ends_with_user": 75})


def test_sharegpt_dialogues_are_read(real: Any) -> None:
    loaded = load_conversations(Data(path=real("mt_bench/dummy_conversation.json")))
    assert (len(loaded.rows), loaded.dropped, loaded.rows[0].id) == (500, {}, "identity_0")


def test_gsm8k_is_read_once_its_columns_are_named(real: Any) -> None:
    path = real("gsm8k/test.jsonl.gz")
    loaded = load_conversations(Data(path=path, columns={"prompt": "question", "completion": "answer"}))
    assert len(loaded.rows) == 1319
    assert loaded.rows[0].messages[0].text.startswith("Janet\u2019s ducks")  # the apostrophe as it is written
    assert "<<16-3-4=9>>" in loaded.rows[0].messages[1].text


@pytest.mark.parametrize(
    "name",
    [
        "taskmaster/reward_pairs.jsonl",
        "taskmaster/tm-3-2020.reward.jsonl.gz",
        "gsm8k/test.jsonl.gz",
        "gsm8k/example_model_solutions.jsonl.gz",
        "self_instruct/seed_tasks.jsonl",
        "self_instruct/user_oriented_instructions.jsonl",
        "mt_bench/question.jsonl",
        "mt_bench/reference_answer_gpt-4.jsonl",
        "mt_bench/judge_prompts.jsonl",
        "llmbar/natural.json",
    ],
)
def test_files_of_another_shape_are_refused_at_their_first_row(real: Any, name: str) -> None:
    for load in (load_conversations, load_prompts, load_comparisons):
        with pytest.raises(DataError, match=Path(name).name.replace(".", r"\.") + r":(1|2\[0\]): "):
            load(Data(path=real(name)))


def test_every_reason_is_explained_in_the_decisions() -> None:
    root = Path(__file__).parents[2]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (root / "rewarden" / "data").rglob("*.py"))
    patterns = (
        r'(?:Drop|Notice)\("(\w+)"',
        r'BadRow\(\s*row\.where,\s*"(\w+)"',
        r'(?:return|_id else|\) or \() ?"(\w+_\w+)"',
        r'(?:noticed|dropped)\["(\w+)"\]',
    )
    reasons = {reason for pattern in patterns for reason in re.findall(pattern, code)}
    page = (root / "docs" / "decisions" / "irregular_rows.md").read_text(encoding="utf-8")
    assert len(reasons) > 45
    assert {reason for reason in reasons if f"`{reason}`" not in page} == set()
