"""Imports point one way, and what a shell prompt waits for does not load torch."""

import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent
HEAVY = ("torch", "transformers", "datasets", "numpy", "pandas", "pyarrow")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def loaded_by(statement: str) -> set[str]:
    """Which heavy packages are imported once `statement` has run in a new interpreter."""
    probe = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    result = run(sys.executable, "-c", probe)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split()) if result.stdout.strip() else set()


def test_imports_keep_the_contracts():
    result = run(SCRIPTS / "lint-imports", "--no-logo")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_probe_sees_torch_when_it_is_there():
    assert "torch" in loaded_by("import rewarden.types")


def test_import_rewarden_loads_no_torch():
    assert loaded_by("import rewarden") == set()


def test_errors_and_spec_load_no_torch():
    assert loaded_by("import rewarden.errors, rewarden.spec") == set()


def test_the_command_line_module_loads_no_torch():
    assert loaded_by("import rewarden.cli") == set()


def test_help_names_every_command_and_loads_no_torch():
    probe = "import rewarden.cli\nsys.argv = ['rewarden', '--help']\ntry:\n    rewarden.cli.main()\nexcept SystemExit as stop:\n    assert not stop.code"
    assert loaded_by(probe) == set()
    text = run(SCRIPTS / "rewarden", "--help").stdout
    assert [name for name in ("demo", "run", "show", "sample", "score", "worlds") if name not in text] == []


def test_help_takes_less_than_a_third_of_a_second():
    """Processor time, best of five: on a busy machine the clock also counts the work of others."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = run(SCRIPTS / "rewarden", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert result.returncode == 0, result.stderr
    assert min(seconds) < 0.3, seconds


def test_maths_knows_no_process_groups():
    """import-linter sees packages outside only as a whole, and all of maths needs torch."""
    files = sorted((ROOT / "rewarden" / "maths").glob("*.py"))
    assert files
    assert [path.name for path in files if "distributed" in path.read_text(encoding="utf-8")] == []


def test_no_file_names_a_folder_of_this_machine():
    folders = [ROOT / name for name in ("rewarden", "docs", "recipes", "examples", "tools")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".md", ".yaml", ".toml"}]
    here = (str(ROOT), f"{Path.home()}/")
    assert [str(path) for path in files if any(word in path.read_text(encoding="utf-8") for word in here)] == []
