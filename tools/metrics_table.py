"""Metrics of a finished run as a markdown table, a column for each step: python tools/metrics_table.py RUN KEY [KEY ...]

--every N shows every Nth step and the last one.
"""

import argparse
import json
from pathlib import Path


def table(run: Path, keys: list[str], every: int) -> str:
    """A row for each metric, a column for each step; a step that lacks the metric has a dash."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shown = [row for row in rows if row["step"] % every == 0 or row in (rows[0], rows[-1])]
    known = {key for row in rows for key in row}
    if missing := [key for key in keys if key not in known]:
        raise SystemExit(f"{run}/metrics.jsonl has no {missing[0]}; it has {', '.join(sorted(known))}")
    lines = [f"| | {' | '.join(str(row['step']) for row in shown)} |", f"|---|{'---|' * len(shown)}"]
    lines += [f"| `{key}` | {' | '.join(number(row.get(key)) for row in shown)} |" for key in keys]
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three digits after the point, four where the number is small."""
    if value is None:
        return "-"
    return f"{value:.4f}" if 0 < abs(value) < 0.1 else f"{value:.3f}"


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("keys", nargs="+", metavar="KEY")
    parser.add_argument("--every", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    print(table(arguments.run, arguments.keys, arguments.every))


if __name__ == "__main__":
    main()
