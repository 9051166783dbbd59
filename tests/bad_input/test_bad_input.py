"""Every kind of bad input ends in one clear message and exit code 2, and nothing already written is lost."""

import pytest
from bad_desk import Desk, Kind, contents, lost, split
from bad_kinds_tolerated import TOLERATED
from bad_limits import largest_file, permissions_count
from bad_page import PAGE, REFUSED, page

KINDS: list[Kind] = [kind for kinds in REFUSED.values() for kind in kinds]
LONGEST_LINE = 700


def made(kind: Kind, desk: Desk) -> None:
    """Put the kind's files on the desk."""
    for name, content in kind.files.items():
        desk.write(name, content)
    if kind.make:
        kind.make(desk)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_bad_input_is_one_message_and_nothing_is_lost(kind, desk, rewarden):
    made(kind, desk)
    before = contents(desk.path)
    with largest_file(kind.largest), permissions_count(kind.powerless):
        got = rewarden(*split(desk.filled(kind.command)))
    assert "Traceback" not in got.err
    assert got.code == 2
    missing = [word for word in kind.words if word not in got.err]
    assert not missing, got.err
    lines = got.err.splitlines()
    assert sum(line.lower().startswith("error:") for line in lines) == 1, got.err
    assert len(lines) <= kind.lines, got.err
    assert max(map(len, lines)) <= LONGEST_LINE, got.err
    assert lost(before, contents(desk.path)) == []


@pytest.mark.parametrize("kind", TOLERATED, ids=[kind.name for kind in TOLERATED])
def test_irregular_input_is_used_and_what_was_done_about_it_is_said(kind, desk, rewarden, caplog):
    made(kind, desk)
    got = rewarden(*split(desk.filled(kind.command)))
    pages = [page.read_text(encoding="utf-8") for page in desk.path.glob("runs/*/comparison.md")]
    said = "\n".join([got.out, got.err, caplog.text, *pages])
    assert got.code == 0, said
    missing = [word for word in kind.words if word not in said]
    assert not missing, said


def test_there_are_many_kinds_and_each_has_a_name_of_its_own():
    names = [kind.name for kind in [*KINDS, *TOLERATED]]
    assert len(KINDS) >= 90
    assert len(set(names)) == len(names)


def test_the_page_lists_every_kind():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew with `python tests/bad_input/bad_page.py`"
