"""The page that lists every kind of bad input. Write it anew with `python tests/bad_input/bad_page.py`."""

from pathlib import Path

from bad_desk import Kind
from bad_kinds_commands import COMMANDS
from bad_kinds_data import DATA
from bad_kinds_models import MODELS
from bad_kinds_recipes import RECIPES
from bad_kinds_runtime import RUNTIME
from bad_kinds_scoring import SCORING
from bad_kinds_tolerated import TOLERATED

PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "bad_input.md"

REFUSED = {
    "Data": DATA,
    "Models": MODELS,
    "Recipes": RECIPES,
    "Run folders": RUNTIME,
    "Rewards and measurements": SCORING,
    "Commands": COMMANDS,
}
"""Kinds that end in one message and exit code 2, by what is bad."""

INTRODUCTION = """# Bad input

What a user gives is wrong in many ways. Each way below ends in **one message** on standard error that names the file, line or key,
says what was got and what to do; the exit code is **2**; there is **no traceback**; and **nothing already written is lost**: every
file that was there before is as it was, or was moved aside, or is a whole newer version.

Errors that are raised on purpose are `RewardenError`s, made where the input is first looked at. Three boundaries turn what others
raise into one: code of your own (a reward function, a file that a recipe names) is quoted with its file and line; what
transformers, tokenizers, gguf, Arrow and torch raise for a file they cannot read names that file; what the system refuses while
writing (a full or read-only disk, also when safetensors or torch report it in their own way) says how to go on. Anything else is
a bug and keeps its traceback.

Input that is irregular and still of use is used, and what was done about it is counted and said; see the last table.

The tables are the test: `tests/bad_input` makes each input, runs the command as a user would, and looks for these words.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, kinds in REFUSED.items():
        parts += [f"## {title}", *table(kinds, "the message says")]
    parts += ["## Used, counted and said", *table(TOLERATED, "the run says")]
    return "\n".join(parts)


def table(kinds: list[Kind], says: str) -> list[str]:
    """One line per kind."""
    rows = [f"| {kind.name} | {' ... '.join(map(quoted, kind.words))} |" for kind in kinds]
    return ["", f"| input | {says} |", "|---|---|", *rows, ""]


def quoted(words: str) -> str:
    """Words as code that a Markdown table takes."""
    fence = "``" if "`" in words else "`"
    pad = " " if fence == "``" else ""
    return f"{fence}{pad}{words.strip()}{pad}{fence}".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
