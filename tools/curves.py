"""Curves of finished runs as one SVG picture, from their metrics.jsonl: python tools/curves.py RUN:KEY[,KEY] ... -o curves.svg

Each argument is one panel: a run folder, a colon, and the metrics drawn in it, such as runs/ppo_hh:score/mean,eval/score.
"""

import argparse
import json
import math
from pathlib import Path

WIDTH, HEIGHT, COLUMNS = 300, 190, 3
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 30, 28
COLORS = ("#1f5fa8", "#c2571a", "#3b7d3a", "#7b4aa0")


def series(run: Path, key: str) -> list[tuple[float, float]]:
    """(step, value) of every line that has a finite value."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    if not points:
        raise SystemExit(f"{run}/metrics.jsonl has no {key}; it has {', '.join(sorted(rows[-1]))}")
    return points


def panel(run: Path, keys: list[str]) -> str:
    """One chart with its title, axes and legend, drawn at the origin."""
    lines = {key: series(run, key) for key in keys}
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line]
    low_x, high_x = min(xs), max(max(xs), min(xs) + 1)
    low_y, high_y = min(ys), max(max(ys), min(ys) + 1e-9)

    def place(x: float, y: float) -> str:
        across = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    out = [f'<text x="{LEFT}" y="12" font-weight="bold">{run.name}</text>']
    out.append(f'<path d="M{LEFT},{TOP} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}" fill="none" stroke="#888"/>')
    out.append(f'<text x="{LEFT - 4}" y="{TOP + 4}" text-anchor="end">{high_y:.3g}</text>')
    out.append(f'<text x="{LEFT - 4}" y="{HEIGHT - BOTTOM}" text-anchor="end">{low_y:.3g}</text>')
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 12}">step {low_x:.0f}</text>')
    out.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">{high_x:.0f}</text>')
    for number, (key, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(place(x, y) for x, y in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        out += [
            f'<circle cx="{place(x, y).split(",")[0]}" cy="{place(x, y).split(",")[1]}" r="2" fill="{color}"/>' for x, y in line
        ]
        out.append(f'<text x="{LEFT + 110 * number}" y="25" fill="{color}">{key}</text>')
    return "\n".join(out)


def main() -> None:
    """Read the arguments and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("panels", nargs="+", metavar="RUN:KEY[,KEY]")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    drawn = []
    for number, text in enumerate(arguments.panels):
        run, _, keys = text.partition(":")
        x, y = WIDTH * (number % COLUMNS), HEIGHT * (number // COLUMNS)
        drawn.append(f'<g transform="translate({x},{y})">\n{panel(Path(run), keys.split(","))}\n</g>')
    wide, high = WIDTH * min(len(drawn), COLUMNS), HEIGHT * math.ceil(len(drawn) / COLUMNS)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    style = 'font-family="sans-serif" font-size="10" fill="#222">\n<rect width="100%" height="100%" fill="#fff"/>'
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(f"{head} {style}\n" + "\n".join(drawn) + "\n</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    main()
