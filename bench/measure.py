"""Run a script unchanged and note how much memory it took beyond its imports: `python measure.py OUT.json SCRIPT`.

First the script's own top-level imports are executed, in order. Then the resident memory is read (the footprint after
imports) and the peak counter of the process is reset, and then the script runs as if started by hand; its imports cost nothing
now. The peak at the end minus the footprint is what the work took. Both sides of every benchmark are measured by this file.

Where the system has no /proc the peak includes the imports, and the footprint is the peak at that moment.
"""

import ast
import gc
import json
import resource
import runpy
import sys
from pathlib import Path

GB = 1e9
KIB = 1024


def memory() -> tuple[float, float]:
    """(resident now, peak so far) of this process in GB of 10^9 bytes."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KIB) / GB
        return peak, peak
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    resident, peak = (int(fields[key].split()[0]) * KIB / GB for key in ("VmRSS", "VmHWM"))  # what it calls kB is 1024 bytes
    return resident, peak


def reset_peak() -> bool:
    """Let the peak start again from what is resident now; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def run_imports(script: Path) -> None:
    """Execute the script's top-level import statements."""
    tree = ast.parse(script.read_text(encoding="utf-8"), str(script))
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(body=imports, type_ignores=[]), str(script), "exec"), {"__name__": "imports"})


def main() -> None:
    out, script = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    # What `python SCRIPT` would set, so that the script finds its neighbors and sees no arguments.
    sys.argv = [str(script)]
    sys.path[0] = str(script.parent)
    run_imports(script)
    gc.collect()
    footprint, _ = memory()
    reset = reset_peak()
    runpy.run_path(str(script), run_name="__main__")
    _, peak = memory()
    facts = {"footprint_gb": footprint, "total_peak_gb": peak, "peak_above_imports_gb": peak - footprint, "peak_reset": reset}
    out.write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
