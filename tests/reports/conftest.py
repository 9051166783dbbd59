"""Shared by the reproductions of user reports: the miniature world and the template families of other folders."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.algos.conftest import world_files  # noqa: F401 - a fixture
from tests.scoring.conftest import reward_folder  # noqa: F401 - a fixture
from tests.text.conftest import families  # noqa: F401 - a fixture

Make = Callable[..., str]


@pytest.fixture
def reward_file(tmp_path: Path) -> Make:
    """Write a Python file with reward functions; give the path of one: reward_file("def f(completions, **_): ...")."""

    def make(code: str, name: str = "f") -> str:
        path = tmp_path / "rewards.py"
        path.write_text(code, encoding="utf-8")
        return f"{path}:{name}"

    return make
