import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MB = 1_000_000

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")


def measured(folder: Path, text: str) -> tuple[dict, str]:
    (folder / "work.py").write_text(text, encoding="utf-8")
    command = [sys.executable, str(ROOT / "bench" / "measure.py"), str(folder / "out.json"), str(folder / "work.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads((folder / "out.json").read_text()), done.stdout


@needs_proc
def test_the_peak_of_the_work_is_counted_even_when_it_is_given_back(tmp_path):
    facts, _ = measured(tmp_path, f"import os\nx = bytearray(os.urandom(1)) * {80 * MB}\ndel x\n")
    assert 0.080 <= facts["peak_above_imports_gb"] < 0.095
    assert facts["peak_reset"] is True


@needs_proc
def test_what_imports_take_is_in_the_footprint_not_in_the_work(tmp_path):
    (tmp_path / "heavy.py").write_text(f"kept = bytearray(b'x') * {90 * MB}\nspike = len(bytearray(b'x') * {150 * MB})\n")
    facts, _ = measured(tmp_path, f"from heavy import kept\nx = bytearray(b'y') * {30 * MB}\n")
    assert facts["footprint_gb"] > 0.090
    assert 0.030 <= facts["peak_above_imports_gb"] < 0.045


def test_the_script_runs_as_if_started_by_hand_and_once(tmp_path):
    (tmp_path / "neighbor.py").write_text("print('imported')\nname = 'n'\n")
    text = (
        "import sys\nfrom neighbor import name\nif __name__ == '__main__':\n    print(name, sys.argv[1:], sys.argv[0][-7:])\n"
    )
    _, printed = measured(tmp_path, text)
    assert printed.splitlines() == ["imported", "n [] work.py"]
