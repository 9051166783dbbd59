"""The markdown table of docs/benchmarks.md from what `make bench` wrote: `python bench/table.py [bench/results.json]`."""

import json
import sys
from pathlib import Path
from typing import Any


def markdown(results: list[dict[str, Any]], details: dict[str, Any]) -> str:
    """One row per result, the largest differences, and where it was measured."""
    lines = [
        "| name | ours | peer | unit | ratio, median | range | pairs | peer's version | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        facts = details.get(row["name"], {})
        spread = f"{row['ratio_min']:.2f} .. {row['ratio_max']:.2f}"
        lines.append(
            f"| `{row['name']}` | {row['ours']:.4g} | {row['peer']:.4g} | {row['unit']} | {row['ratio_median']:.2f} | {spread} "
            f"| {row['runs']} | {facts.get('peer', '?')} | {short(facts.get('commit'))} |"
        )
    if same := details.get("same_outputs"):
        lines += ["", f"| same inputs | max difference (at most {same['limit']:g}) |", "|---|---|"]
        lines += [f"| {name} | {value:.1e} |" for name, value in same["max_difference"].items()]
    shown = [details[row["name"]] for row in results if row["name"] in details]
    for machine in dict.fromkeys(facts["machine"] for facts in shown):
        lines += ["", f"Machine: {machine}."]
    if shown:
        busiest = max(facts["cores_busy_with_others"] for facts in shown)
        threads = ", ".join(map(str, sorted({facts["threads"] for facts in shown})))
        lines += [f"Threads per side: {threads}. Cores busy with other processes: at most {busiest:.2f}."]
    few = [row["name"] for row in results if row["runs"] < 5]
    if few:
        lines += ["", f"Fewer than five pairs, not to be quoted: {', '.join(few)}."]
    return "\n".join(lines)


def short(commit: str | None) -> str:
    """Seven digits of a commit, and whether the tree had changes on top."""
    digits, plus, changes = (commit or "?").partition("+")
    return digits[:7] + plus + changes


def main(arguments: list[str]) -> int:
    path = Path(arguments[0]) if arguments else Path(__file__).with_name("results.json")
    if not path.exists():
        print(f"no {path}: run `make bench` first", file=sys.stderr)
        return 2
    beside = path.with_name(path.name.replace("results", "details"))
    details = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    print(markdown(json.loads(path.read_text(encoding="utf-8")), details))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
