"""docs/decisions/user_reports.md holds every row once, and the tests it names exist and speak of that row."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "decisions" / "user_reports.md"
STATES = ("shown", "part", "not yet", "not applicable")


def rows() -> list[tuple[int, str, str, str]]:
    """(number, what was reported, state, the rest) of every row of the page."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if re.fullmatch(r"\d+", cells[0]):
            assert len(cells) == 4, line
            found.append((int(cells[0]), *cells[1:]))
    return found


def named(cell: str) -> list[tuple[Path, str]]:
    """The tests of a cell; a bare file name is one of this folder."""
    return [
        (ROOT / file if "/" in file else Path(__file__).parent / file, name)
        for file, name in re.findall(r"`([\w/]+\.py)::(test_\w+)`", cell)
    ]


@cache
def docstrings(file: Path) -> dict[str, str]:
    """Test -> docstring of a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_stands_on_the_page_once_and_in_order():
    numbers = [number for number, *_ in rows()]
    assert numbers == sorted(set(numbers))
    assert {state for _, _, state, _ in rows()} <= set(STATES)


def test_the_page_answers_every_row_of_the_list(shared):
    text = (shared / "specs" / "user_reports.md").read_text(encoding="utf-8")
    section = text.split("\n## 3. ")[1].split("\n## 4. ")[0]
    listed = [int(number) for number in re.findall(r"^\| (\d+) \|", section, flags=re.MULTILINE)]
    assert [number for number, *_ in rows()] == listed
    assert f"{len(listed)}\nfamilies" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"row-{row[0]}")
def test_what_a_row_names_exists_and_says_its_number(row):
    number, _, state, cell = row
    tests = named(cell)
    assert bool(tests) == (state in ("shown", "part"))
    if state != "shown":
        assert re.sub(r"`[^`]*`", "", cell).strip(" ,;:"), "say what is missing, or why it does not apply"
    for file, name in tests:
        assert name in docstrings(file), f"{file}::{name}"
        if file.parent == Path(__file__).parent:
            head = docstrings(file)[name].split(":")[0]
            assert str(number) in re.findall(r"\d+", head.split("(")[0]), f"{name}: its docstring begins with {head!r}"


def test_every_reproduction_is_named_on_the_page():
    listed = {(file.name, name) for _, _, _, cell in rows() for file, name in named(cell)}
    here = {
        (file.name, name)
        for file in Path(__file__).parent.glob("test_*.py")
        if file != Path(__file__)
        for name in docstrings(file)
        if name.startswith("test_")
    }
    assert here <= listed
