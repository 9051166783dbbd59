"""Bad data: files that cannot be read, and rows that are not what they should be."""

import gzip
import json
import os

import pyarrow
import pyarrow.parquet
from bad_desk import Content, Desk, Kind

USER = {"role": "user", "content": "Hello, I want a cheap trip."}
ANSWER = {"role": "assistant", "content": "Where do you want to go?"}
OTHER = {"role": "assistant", "content": "Trips are fun."}
SYSTEM = {"role": "system", "content": "Be brief."}
GOOD = {"messages": [USER, ANSWER]}
PAIR = {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}
LONG = "x" * 200_000


def sft(name: str, file: str, content: Content, *words: str, **more: object) -> Kind:
    """A file of dialogues given to supervised fine-tuning."""
    return Kind(name, f"run sft.yaml data.path={file}", words, files={file: content}, **more)


def reward(name: str, content: Content, *words: str, extra: str = "") -> Kind:
    """A file of pairs given to reward training."""
    return Kind(name, f"run reward.yaml data.path=pairs.jsonl {extra}", words, files={"pairs.jsonl": content})


def ppo(name: str, content: Content, *words: str, extra: str = "") -> Kind:
    """A file of prompts given to PPO."""
    return Kind(name, f"run ppo.yaml data.path=prompts.jsonl {extra}", words, files={"prompts.jsonl": content})


def table(name: str, columns: dict[str, list]) -> object:
    """Makes a Parquet file."""

    def make(desk: Desk) -> None:
        pyarrow.parquet.write_table(pyarrow.table(columns), desk.path / name)

    return make


def saved_to_disk(desk: Desk) -> None:
    """A folder of `save_to_disk` whose data file is gone."""
    import datasets

    datasets.Dataset.from_list([GOOD]).save_to_disk(str(desk.path / "rows"))
    for file in (desk.path / "rows").glob("*.arrow"):
        file.unlink()


def link_to_nothing(desk: Desk) -> None:
    (desk.path / "rows.jsonl").symlink_to("gone.jsonl")


def pipe(desk: Desk) -> None:
    os.mkfifo(desk.path / "rows.jsonl")


DATA = [
    Kind("a missing file", "run sft.yaml data.path=nowhere.jsonl", ("nowhere.jsonl: no such file or folder",)),
    Kind("a missing folder", "run sft.yaml data.path=no/where.jsonl", ("no/where.jsonl", "folder no does not exist either")),
    Kind(
        "a misspelt file",
        "run sft.yaml data.path=dialogs.jsonl",
        ("dialogs.jsonl: no such file", "did you mean 'dialogues.jsonl'?"),
        files={"dialogues.jsonl": [GOOD]},
    ),
    Kind(
        "a link to nothing",
        "run sft.yaml data.path=rows.jsonl",
        ("rows.jsonl", "a link", "gone.jsonl"),
        make=link_to_nothing,
    ),
    Kind("a pipe", "run sft.yaml data.path=rows.jsonl", ("rows.jsonl", "neither a file nor a folder"), make=pipe),
    sft("an empty file", "rows.jsonl", "", "rows.jsonl: no rows in the file"),
    sft("only blank lines", "rows.jsonl", "\n\n \n", "rows.jsonl: no rows in the file"),
    sft("a file without a known ending", "rows.txt", [GOOD], "rows.txt: cannot tell the kind of file", ".jsonl"),
    sft(
        "broken JSON at a line",
        "rows.jsonl",
        json.dumps(GOOD) + '\n{"messages": [}\n',
        "rows.jsonl:2: broken JSON at column 15",
    ),
    sft("JSON cut off", "rows.json", '[{"messages": [', "rows.json:1: broken JSON at column 16"),
    sft(
        "a key twice in a row",
        "rows.jsonl",
        '{"id": 1, "id": 2, "messages": []}',
        "rows.jsonl:1",
        "the key 'id' twice",
        "mend or remove the line",
    ),
    sft("an object where rows should be", "rows.json", '{"rows": []}', "rows.json:1: an object with keys rows", "'data'"),
    sft("a number where rows should be", "rows.json", "17", "rows.json:1: starts with '17'", "JSON array"),
    sft("a bare list as a row", "rows.jsonl", [[1, 2]], "rows.jsonl:1: the row is [1, 2]", "must be an object with messages"),
    sft("a bare text as a row", "rows.json", '["hello"]', "rows.json:1[0]: the row is 'hello'", "must be an object"),
    sft("brackets without end", "rows.jsonl", "[" * 100_000, "rows.jsonl:1", "JSON that cannot be read"),
    sft("a number of 5,000 digits", "rows.jsonl", '{"id": ' + "9" * 5000 + "}", "rows.jsonl:1: JSON that cannot be read"),
    sft("UTF-16", "rows.jsonl", json.dumps(GOOD).encode("utf-16"), "rows.jsonl:1: byte 0xff at column 1 is not UTF-8"),
    sft("Latin-1", "rows.jsonl", b'{"text": "caf\xe9"}\n', "rows.jsonl:1: byte 0xe9 at column 14 is not UTF-8"),
    sft(
        "a broken line of a megabyte",
        "rows.jsonl",
        '{"text": "' + "x" * 2**20,
        "rows.jsonl:1: broken JSON at column 10: Unterminated string",
    ),
    sft("half a character", "rows.jsonl", '{"text": "\\ud83d"}\n', "rows.jsonl:1: \\ud83d is half of a character"),
    sft("not gzip", "rows.jsonl.gz", b"plain", "rows.jsonl.gz:1: the gzip data are damaged", "copy the file again"),
    sft(
        "gzip cut off",
        "rows.jsonl.gz",
        gzip.compress(json.dumps(GOOD).encode() * 50)[:-20],
        "rows.jsonl.gz",
        "the gzip data are damaged or cut off",
    ),
    sft("not Parquet", "rows.parquet", b"PAR1 no PAR1", "rows.parquet", "not readable as Parquet"),
    Kind(
        "a Parquet file without rows",
        "run sft.yaml data.path=rows.parquet",
        ("rows.parquet: no rows in the file",),
        make=table("rows.parquet", {"text": []}),
    ),
    Kind(
        "a Parquet column of numbers",
        "run sft.yaml data.path=rows.parquet",
        ("rows.parquet:1: column 'text' is 3 (int)", "must be text"),
        make=table("rows.parquet", {"text": [3]}),
    ),
    Kind(
        "a null inside Parquet",
        "run sft.yaml data.path=rows.parquet",
        ("rows.parquet:2: messages[1] has content None (NoneType)", "must be text"),
        make=table(
            "rows.parquet",
            {"messages": [[USER, ANSWER], [USER, {"role": "assistant", "content": None}]]},
        ),
    ),
    Kind(
        "a saved data set without its data",
        "run sft.yaml data.path=rows",
        ("rows: a saved data set that cannot be read", "save it again"),
        make=saved_to_disk,
    ),
    Kind(
        "a folder without data",
        "run sft.yaml data.path=there",
        ("there: no file ends in .jsonl",),
        files={"there/notes.txt": "none"},
    ),
    Kind(
        "a split that is not there",
        "run sft.yaml data.path=there data.split=test",
        ("there: no file of split 'test'",),
        files={"there/train.jsonl": [GOOD]},
    ),
    Kind(
        "a split of one file",
        "run sft.yaml data.path=rows.jsonl data.split=test",
        ("rows.jsonl: split='test', but this is one file",),
        files={"rows.jsonl": [GOOD]},
    ),
    Kind(
        "a subset that is not there",
        "run sft.yaml data.path=there data.subset=helpfull",
        ("there: subset='helpfull' is no subfolder", "did you mean 'helpful'?"),
        files={"there/helpful/train.jsonl": [GOOD]},
    ),
    Kind(
        "a hub data set without a network",
        "run sft.yaml data.path=nobody/nothing",
        ("nobody/nothing, split 'train'", "Nothing of that name is on disk"),
    ),
    sft("an unknown role", "rows.jsonl", [{"messages": [{**USER, "role": "bot"}]}], "rows.jsonl:1: messages[0] has role 'bot'"),
    sft(
        "a role of 200,000 letters",
        "rows.jsonl",
        [{"messages": [{**USER, "role": LONG}]}],
        "rows.jsonl:1: messages[0] has role 'xxx",
        "allowed: assistant",
    ),
    sft(
        "two user messages in a row",
        "rows.jsonl",
        [{"messages": [USER, USER, ANSWER]}],
        "rows.jsonl:1: message 1 is user, expected assistant",
        "in turn",
    ),
    sft(
        "a system message in the middle",
        "rows.jsonl",
        [{"messages": [USER, SYSTEM, ANSWER]}],
        "rows.jsonl:1: message 1 is system, expected assistant",
    ),
    sft("a dialogue that begins with the assistant", "rows.jsonl", [{"messages": [ANSWER]}], "message 0 is assistant"),
    sft(
        "no messages", "rows.jsonl", [{"messages": []}], "rows.jsonl:1: column 'messages' is [] (list)", "at least one message"
    ),
    sft("messages null", "rows.jsonl", [{"messages": None}], "rows.jsonl:1: column 'messages' is None", "list of at least one"),
    sft("a message that is text", "rows.jsonl", [{"messages": ["Hello"]}], "rows.jsonl:1: messages[0] is 'Hello' (str)"),
    sft(
        "a content that is null",
        "rows.jsonl",
        [{"messages": [USER, {"role": "assistant", "content": None}]}],
        "rows.jsonl:1: messages[1] has content None",
        "must be text",
    ),
    sft(
        "a column of mixed types",
        "rows.jsonl",
        [GOOD, {"messages": "Hello"}],
        "rows.jsonl:2: column 'messages' is 'Hello' (str)",
        "on_bad_row: drop",
    ),
    sft(
        "every answer empty",
        "rows.jsonl",
        [{"messages": [USER, {**ANSWER, "content": "  "}]}] * 3,
        "rows.jsonl: no conversations are left",
        "3 empty_answer",
    ),
    sft("every dialogue ends with the user", "rows.jsonl", [{"messages": [USER]}], "rows.jsonl: no conversations are left"),
    sft(
        "missing columns",
        "rows.jsonl",
        [{"question": "a", "answer": "b"}],
        "rows.jsonl:1: columns are 'question', 'answer'; needed: messages",
    ),
    sft("a misspelt column", "rows.jsonl", [{"mesages": []}], "rows.jsonl:1", "'mesages': did you mean 'messages'?"),
    sft("a column named where", "rows.jsonl", [{**GOOD, "where": "x"}], "rows.jsonl:1: a column is named 'where'", "columns:"),
    Kind(
        "columns that name what is not there",
        "run sft.yaml data.path=rows.jsonl data.columns={messages: talk}",
        ("rows.jsonl:1: columns names 'talk'", "it has messages"),
        files={"rows.jsonl": [GOOD]},
    ),
    Kind(
        "a format that does not fit",
        "run sft.yaml data.path=rows.jsonl data.format=hh",
        ("rows.jsonl:1", "format 'hh'", "chosen"),
        files={"rows.jsonl": [GOOD]},
    ),
    Kind(
        "a format without dialogues",
        "run sft.yaml data.path=rows.jsonl data.format=moss_ppo",
        ("format is 'moss_ppo', which holds no conversations", "trl"),
        files={"rows.jsonl": [GOOD]},
    ),
    Kind(
        "a transcript without roles",
        "run reward.yaml data.path=rows.jsonl data.format=hh",
        ("rows.jsonl:1", "Human"),
        files={"rows.jsonl": [{"chosen": "no roles here", "rejected": "none here either"}]},
    ),
    Kind(
        "a trajectory that is text",
        "run reward.yaml data.path=rows.jsonl",
        ("rows.jsonl:1: column 'trajectory' is 'x' (str)", "format 'ultrainteract'"),
        files={"rows.jsonl": [{"trajectory": "x", "chosen": "a", "rejected": "b"}]},
    ),
    Kind(
        "a tree whose replies are text",
        "run reward.yaml data.path=rows.jsonl",
        ("rows.jsonl:1", "replies", "format 'oasst'"),
        files={"rows.jsonl": [{"message_tree_id": "t", "prompt": {"role": "prompter", "text": "a", "replies": "none"}}]},
    ),
    Kind(
        "a preference of 3 between two outputs",
        "run reward.yaml data.path=rows.jsonl",
        ("rows.jsonl:1: preference is 3 (int); it is 1 or 2", "format 'alpaca_farm'"),
        files={"rows.jsonl": [{"instruction": "a", "input": "", "output_1": "b", "output_2": "c", "preference": 3}]},
    ),
    reward(
        "a margin of 400 digits",
        '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1' + "0" * 400 + "}",
        "pairs.jsonl:1: margin is 1000",
        "finite number",
    ),
    reward(
        "chosen equals rejected everywhere",
        [{**PAIR, "rejected": [ANSWER]}] * 4,
        "no comparisons are left",
        "4 chosen_equals_rejected",
    ),
    reward(
        "a pair without rejected",
        [{"prompt": [USER], "chosen": [ANSWER]}],
        "pairs.jsonl:1",
        "needed: prompt + chosen + rejected",
    ),
    reward(
        "a margin that is NaN", '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}', "pairs.jsonl:1: margin is nan"
    ),
    reward("a margin that is text", [{**PAIR, "margin": "big"}], "pairs.jsonl:1: margin is 'big' (str)", "finite number"),
    reward("a preference above 1", [{**PAIR, "preference": 1.5}], "pairs.jsonl:1: preference is 1.5", "from 0 to 1"),
    reward("a preference that is true", [{**PAIR, "preference": True}], "pairs.jsonl:1: preference is True (bool)"),
    reward(
        "a side that repeats another prompt",
        [{**PAIR, "chosen": [{**USER, "content": "Other."}, ANSWER]}],
        "pairs.jsonl:1: chosen starts with a user message and does not repeat the prompt",
    ),
    reward(
        "a side that ends with the user",
        [{**PAIR, "chosen": [ANSWER, USER]}],
        "pairs.jsonl:1: chosen does not end with an assistant",
    ),
    reward(
        "every pair longer than the limit", [PAIR], "no pair is left", "1 longer than 2 tokens dropped", extra="max_length=2"
    ),
    reward(
        "one pair longer than the limit is an error",
        [PAIR],
        "pairs.jsonl:1: ",
        "at most max_length=2",
        extra="max_length=2 overlength=error",
    ),
    reward("held-out pairs missing", [PAIR], "held.jsonl: no such file", extra="eval_data.path=held.jsonl"),
    ppo(
        "every prompt longer than the limit",
        [{"prompt": [USER]}],
        "no prompt is left",
        "longer than 1 tokens",
        extra="max_prompt_length=1",
    ),
    ppo(
        "every prompt longer than the model's positions",
        [{"prompt": "Hello. " * 400}],
        "prompts.jsonl: no prompt is left",
        "longer than 319 tokens dropped",
        "a model with more positions",
        extra="max_prompt_length=null",
    ),
    ppo("a prompt that ends with the assistant", [{"prompt": [USER, ANSWER]}], "prompts.jsonl:1", "drop_last_assistant: true"),
    ppo(
        "a prompt that is only a system message",
        [{"prompt": [SYSTEM]}],
        "prompts.jsonl:1: the prompt is a system message alone",
    ),
    ppo("a prompt that is a number", [{"prompt": 3}], "prompts.jsonl:1: prompt is 3 (int)", "text or a list of messages"),
    Kind(
        "more prompts held out than there are",
        "run sft.yaml data.path=rows.jsonl data.holdout_prompts=9 data.part=train",
        ("rows.jsonl: holdout_prompts", "9"),
        files={"rows.jsonl": [GOOD]},
    ),
    Kind(
        "a part without a hold-out",
        "run sft.yaml data.part=train",
        ("data: part is 'train' but holdout_prompts is 0", "part: all"),
    ),
    Kind(
        "a fold beyond the last",
        "run sft.yaml data.folds=2 data.fold=2 data.part=train",
        ("data: fold is 2 and folds is 2; folds count from 0",),
    ),
    Kind(
        "folds and held-out prompts at once",
        "run sft.yaml data.folds=2 data.fold=0 data.part=train data.holdout_prompts=3",
        ("data: folds is 2 and holdout_prompts is 3", "set one of them"),
    ),
    Kind(
        "preference strength that nobody voted on",
        "run reward.yaml strength={soft_labels: true}",
        (":1: column 'mean preference difference' is None", "kind: vote"),
    ),
    Kind(
        "preference strength of a pair with a margin of its own",
        "run reward.yaml strength={flip_share: 0.1} data.path=rows.jsonl",
        ("rows.jsonl:1: margin is 1, of the side that strength may turn round", "leave strength out"),
        files={"rows.jsonl": [{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1, "mean preference difference": 2}]},
    ),
    Kind(
        "every row longer than the limit",
        "run sft.yaml data.path=rows.jsonl max_length=2",
        ("rows.jsonl: no row is left to train on", "1 longer than 2 tokens dropped", "raise max_length"),
        files={"rows.jsonl": [GOOD]},
    ),
    Kind(
        "one row longer than the limit is an error",
        "run sft.yaml data.path=rows.jsonl max_length=2 overlength=error",
        ("rows.jsonl:1: ", "at most max_length=2", "overlength: drop"),
        files={"rows.jsonl": [GOOD]},
    ),
]
"""Every kind of bad data."""
