"""Run a recipe and print what it took beyond its imports: `python memory_child.py RECIPE [path=value]...` on Linux.

The last line is {"footprint": ..., "peak": ...} in bytes: resident memory after the imports, and the peak above it.
"""

import json
import sys
from pathlib import Path

import rewarden.recipe.run


def status(key: str) -> int:
    """A field of /proc/self/status in bytes; what it calls kB is 1024 bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def main() -> None:
    footprint = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again from here
    rewarden.recipe.run.run_recipe(Path(sys.argv[1]), sys.argv[2:], resume="never")
    print(json.dumps({"footprint": footprint, "peak": status("VmHWM") - footprint}))


if __name__ == "__main__":
    main()
