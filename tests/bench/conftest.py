"""`bench` lies beside the package, not in it: the repository root goes on the path."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


@pytest.fixture
def toy(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of peer scripts, importable as the benchmarks' own processes see it."""
    folder = shared / "bench" / "peers"
    if not (folder / "toy.py").exists():
        pytest.skip(f"peer scripts absent: {folder} (set REWARDEN_SHARED)")
    monkeypatch.syspath_prepend(str(folder))
    return folder
