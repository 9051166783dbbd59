"""Bad words on the command line of `sample`, `score` and `worlds`."""

from bad_desk import Kind

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]


def sample(name: str, words: str, *said: str, **more: object) -> Kind:
    return Kind(name, f"sample {words}", said, **more)


def score(name: str, words: str, *said: str, **more: object) -> Kind:
    return Kind(name, f"score {words}", said, **more)


COMMANDS = [
    sample("no model to sample", "gone Hello", "gone", "is not a folder"),
    sample("a reward model to sample", "$reward Hello", "holds a reward model"),
    sample("no answers", "$policy Hello --n 0", "n is 0; at least 1"),
    sample("an answer of no tokens", "$policy Hello --max-completion-length 0", "max_completion_length is 0"),
    sample("a negative temperature", "$policy Hello --temperature -1", "temperature is -1"),
    sample("a temperature that is NaN", "$policy Hello --temperature nan", "temperature is nan", "finite"),
    sample("a nucleus of nothing", "$policy Hello --top-p 0", "top_p is 0"),
    sample("n that is a word", "$policy Hello --n two", "--n", "valid integer", lines=9),
    sample("an unknown template to sample", "$policy Hello --template chatt", "template is 'chatt'", "was trained with 'chat'"),
    sample("a prompt file that is not there", "$policy prompts.jsonl", "prompts.jsonl: no such file of prompts"),
    sample("an empty prompt file", "$policy p.jsonl", "p.jsonl: no rows in the file", files={"p.jsonl": ""}),
    sample("no prompt", "$policy ''", "the prompt is empty"),
    sample("a prompt of broken bytes", "$policy caf\udce9", "not UTF-8"),
    sample(
        "a prompt longer than the positions",
        "$policy p.jsonl",
        "p.jsonl:1",
        "320 positions",
        files={"p.jsonl": [{"prompt": "Hello. " * 400}]},
    ),
    sample("an output that is a folder", "$policy Hello --output there", "output: there is a folder", files={"there/x": "x"}),
    sample("an output that exists", "$policy Hello --output a.jsonl", "output: a.jsonl exists", files={"a.jsonl": "mine"}),
    sample("an output below a file", "$policy Hello --output a.jsonl/b.jsonl", "a.jsonl", files={"a.jsonl": "mine"}),
    sample("an unknown output format", "$policy Hello --output a.csv", "output: a.csv", ".jsonl"),
    score("no reward model", "$dialogues --reward gone", "gone", "is not a folder", lines=2),
    score("a policy to score with", "$dialogues --reward $policy", "has no scalar head", lines=2),
    score("no file to score", "gone.jsonl --reward $reward", "gone.jsonl: no such file"),
    score("an empty file to score", "a.jsonl --reward $reward", "a.jsonl: no rows in the file", files={"a.jsonl": ""}),
    score(
        "a label that is text",
        "a.jsonl --reward $reward",
        "a.jsonl:1: label is 'good' (str)",
        files={"a.jsonl": [{"prompt": "a", "completion": "b", "label": "good"}]},
    ),
    score(
        "labels that are missing",
        "a.jsonl --reward $reward",
        "a.jsonl:1: label is None",
        files={"a.jsonl": [{"prompt": "a", "completion": "b", "label": None}]},
    ),
    score(
        "rows beyond the file", "$dialogues --reward $reward --rows 99", "rows: '99' asks for row 99; the file has rows 0 to 7"
    ),
    score("prompts to score", "$prompts --reward $reward", "prompts.jsonl:1"),
    score("an unknown format to score", "$dialogues --reward $reward --format hhh", "format is 'hhh'", "'hh'"),
    score("a format without answers to score", "$dialogues --reward $reward --format moss_ppo", "moss_ppo"),
    score(
        "a broken line to score", "a.jsonl --reward $reward", "a.jsonl:1: broken JSON", files={"a.jsonl": '{"messages": [\n{'}
    ),
    score(
        "pairs that are equal",
        "a.jsonl --reward $reward",
        "a.jsonl: no comparisons are left",
        files={"a.jsonl": [{"prompt": "a", "chosen": "b", "rejected": "b"}]},
    ),
    score(
        "an output of scores that exists",
        "$dialogues --reward $reward --output a.jsonl",
        "output: a.jsonl exists",
        files={"a.jsonl": "mine"},
    ),
    Kind("a seed that is a word", "worlds --seed two", ("--seed", "valid integer"), lines=9),
]
"""Every kind of bad command."""
