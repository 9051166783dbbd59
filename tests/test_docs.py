"""What README and docs tell a reader to type, import or open exists and parses."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from rewarden.cli import app
from rewarden.errors import ConfigError
from rewarden.scoring import parse_scorer

ROOT = Path(__file__).parents[1]
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]

FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*([\w+-]*)")
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
DOTTED = re.compile(r"(?<![\w/.-])rewarden(?:\.[A-Za-z_]\w*)+")
SHELL = {"", "bash", "sh", "shell", "console", "text"}
FILE_ENDINGS = {"json", "yaml", "yml", "toml", "py", "md", "jsonl", "parquet", "html"}


class Block(NamedTuple):
    """A fenced code block: where its first line stands, its language, its text."""

    line: int
    language: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    fence, language, start, lines = "", "", 0, []
    for number, line in enumerate(page.splitlines(), 1):
        mark = FENCE.match(line)
        if not fence and mark:
            fence, language, start, lines = mark.group(1), mark.group(2).lower(), number + 1, []
        elif fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            yield Block(start, language, "\n".join(lines))
            fence = ""
        elif fence:
            lines.append(line)


def commands(block: Block) -> Iterator[tuple[int, list[str]]]:
    """Each simple command of a shell block as words: prompts, comments and `VAR=x` in front are taken off."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    for offset, line in enumerate(text.splitlines()):
        line = re.sub(r"^\s*\$ ", "", line)
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a line of output, such as an apostrophe without its partner
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if word in {";", "&&", "||", "|", "&"}:
                while command and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", command[0]):
                    command = command[1:]
                if command:
                    yield block.line + offset, command
                command = []
            else:
                command.append(word)


def rewarden_words(command: list[str]) -> list[str] | None:
    """The words after `rewarden` (`.venv/bin/rewarden`, `accelerate launch ... -m rewarden.cli`), or None for another program."""
    if Path(command[0]).name == "rewarden":
        return command[1:]
    if "-m" in command and command[command.index("-m") + 1 :][:1] == ["rewarden.cli"]:
        return command[command.index("-m") + 2 :]
    return None


def command_problem(words: list[str]) -> str | None:
    """Why the command line would refuse these words, or None."""
    group = typer.main.get_command(app)
    try:
        context = group.make_context("rewarden", list(words))
        name, command, rest = group.resolve_command(context, list(words))
        assert command is not None
        command.make_context(name, rest, parent=context)
    except typer.Exit:
        return None  # --help
    except Exception as error:  # noqa: BLE001 - the message of any refusal is the finding
        return getattr(error, "message", "") or str(error) or type(error).__name__
    return None


def recipe_problem(words: list[str]) -> str | None:
    """Why a recipe named in the words, or its `path=value` overrides, would be refused, or None.

    A recipe of the reader's own making (`my_*.yaml`) need not exist.
    """
    recipes = [word for word in words if word.endswith((".yaml", ".yml"))]
    if words[0] not in {"run", "show"} or not recipes or Path(recipes[0]).name.startswith("my_"):
        return None
    if not (ROOT / recipes[0]).exists():
        return f"no file {recipes[0]}"
    return refusal(ROOT / recipes[0], [word for word in words if re.match(r"^[A-Za-z_][\w.]*=", word)])


def refusal(recipe: Path, overrides: list[str]) -> str | None:
    """What reading and parsing every stage of a recipe complains about, or None; no file of data or weights is opened."""
    from rewarden.recipe.jobs import parse_stage
    from rewarden.recipe.read import read_recipe

    try:
        for stage in read_recipe(recipe, overrides).stages:
            spec, _ = parse_stage(stage, stage.name)
            if isinstance(getattr(spec, "reward", None), dict):
                parse_scorer(spec.reward, f"{stage.name}: reward")
    except ConfigError as error:
        return str(error)
    return None


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9_-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def shell_problems(page: str) -> list[str]:
    found = []
    for block in blocks(page):
        if block.language not in SHELL:
            continue
        for line, command in commands(block):
            words = rewarden_words(command)
            if words:
                problem = command_problem(words) or recipe_problem(words)
            elif command[0] == "make" and len(command) > 1:
                missing = [w for w in command[1:] if "=" not in w and not w.startswith("-") and w not in make_targets()]
                problem = f"no make target {missing}" if missing and block.language != "text" else None
            elif (
                Path(command[0]).name.startswith("python")
                and command[1:2]
                and command[1].startswith(("examples/", "tools/", "bench/"))
            ):
                problem = None if (ROOT / command[1]).exists() else f"no file {command[1]}"
            else:
                continue
            if problem:
                found.append(f"line {line}: {shlex.join(command)}: {problem}")
    return found


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute chain that starts at one."""
    parts = dotted.split(".")
    for stop in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:stop]))
        except ModuleNotFoundError as error:
            if not ".".join(parts[:stop]).startswith(str(error.name)):
                raise
            continue
        for attribute in parts[stop:]:
            fields = getattr(value, "model_fields", {})
            if not hasattr(value, attribute) and attribute not in fields:
                return False
            value = getattr(value, attribute, None)
        return True
    return False


def name_problems(page: str) -> list[str]:
    names = {name for name in DOTTED.findall(page) if name.rsplit(".", 1)[1] not in FILE_ENDINGS}
    found = [f"no {name}" for name in sorted(names) if not exists(name)]
    for block in blocks(page):
        if block.language not in {"python", "py"}:
            continue
        try:
            tree = ast.parse(block.text)
        except SyntaxError as error:
            found.append(f"line {block.line}: python block: {error}")
            continue
        imports = [
            node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rewarden")
        ]
        found += [
            f"line {block.line}: no {node.module}.{alias.name}"
            for node in imports
            for alias in node.names
            if not exists(f"{node.module}.{alias.name}")
        ]
    return found


def anchors(page: str) -> set[str]:
    """The anchors GitHub gives to headings."""
    prose = re.sub(r"^(```|~~~).*?^\1", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{1,6}\s+(.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def link_problems(page: str, path: Path) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", re.sub(r"^(```|~~~).*?^\1", "", page, flags=re.MULTILINE | re.DOTALL))
    found = []
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            found.append(f"no file {target}")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            found.append(f"no heading {target}")
        elif ROOT not in file.parents and file != ROOT:
            found.append(f"outside the repository: {target}")
    return found


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_a_readme():
    assert (ROOT / "README.md").exists()


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_command_parses(path):
    assert shell_problems(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_dotted_name_exists(path):
    assert name_problems(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_every_relative_link_leads_somewhere(path):
    assert link_problems(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=page_id)
def test_every_shipped_recipe_parses(path):
    assert refusal(path, []) is None


BAD_PAGE = """
# A page

See [the plan](no_such_file.md), [here](#a-page), [there](#nowhere) and `rewarden.types.Conversation`, not `rewarden.types.Talk`.

```bash
make demo && make nonsense   # a comment
$ X=1 rewarden run no_such_recipe.yaml a.b=1
rewarden run \\
  my_own.yaml
```

```python
from rewarden.errors import RewardenError, Mistake
```
"""


def test_the_checks_find_what_is_wrong_in_a_bad_page():
    assert name_problems(BAD_PAGE) == ["no rewarden.types.Talk", "line 14: no rewarden.errors.Mistake"]
    assert anchors(BAD_PAGE) == {"a-page"}
    shell = next(blocks(BAD_PAGE))
    assert [command for _, command in commands(shell)] == [
        ["make", "demo"],
        ["make", "nonsense"],
        ["rewarden", "run", "no_such_recipe.yaml", "a.b=1"],
        ["rewarden", "run", "my_own.yaml"],
    ]
    assert recipe_problem(["run", "no_such_recipe.yaml"]) == "no file no_such_recipe.yaml"
    assert recipe_problem(["run", "my_own.yaml"]) is None


def test_a_make_target_that_does_not_exist_is_found():
    assert shell_problems("```bash\nmake nonsense\nmake test\n```") == ["line 2: make nonsense: no make target ['nonsense']"]


def test_a_command_that_does_not_exist_is_found():
    assert command_problem(["nonsense"]) is not None
    assert command_problem(["run", "--nonsense"]) is not None
    assert command_problem(["--help"]) is None


def test_an_override_with_a_misspelt_key_is_found():
    assert "did you mean 'optim'" in (recipe_problem(["run", "recipes/sft_world.yaml", "optm.learning_rate=1e-4"]) or "")
    assert recipe_problem(["run", "recipes/sft_world.yaml", "optim.learning_rate=1e-4"]) is None
