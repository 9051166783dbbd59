"""The table and the picture of best-of-n curves."""

from collections.abc import Iterator

from rewarden.evals.best_of_n_types import Curve, Measure, PointAt, Report
from rewarden.evals.chart import Band, Line, Panel, svg


def page(report: Report) -> str:
    """A table for each way of choosing."""
    lines = [
        f"Best of n of {report.num_generations} answers to each of {report.num_prompts} prompts by {report.policy}. Means over "
        f"all subsets of n answers, with {report.confidence:.0%} bootstrap intervals over prompts; `first n` looks at "
        "the first n answers only. Gain: paired difference to n = 1. KL in nats: the bound log n - (n - 1) / n, and as "
        "measured, ties included.",
        "",
    ]
    for curve in report.curves:
        lines += [*_table(curve, report.judges), ""]
    if report.warnings:
        lines += ["Read with care:", "", *(f"* {text}" for text in report.warnings), ""]
    return "\n".join(lines)


def _table(curve: Curve, judges: tuple[str, ...]) -> Iterator[str]:
    yield f"## {curve.name}"
    yield ""
    yield f"Rule: {curve.chooses}."
    yield ""
    columns = ["n", "KL bound", "KL measured", "score", "score gain"]
    for judge in judges:
        columns += [judge, f"{judge} gain", f"{judge}, first n"]
    columns += ["tokens", "cut", "empty"]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for point in curve.points:
        yield f"| {' | '.join(_cells(point, judges))} |"


def _cells(point: PointAt, judges: tuple[str, ...]) -> Iterator[str]:
    score = point.measures["score"]
    yield str(point.n)
    yield f"{point.kl_bound:.3f}"
    yield f"{point.kl:.3f} ({point.kl_low:.3f} .. {point.kl_high:.3f})"
    yield f"{score.value:.3f}"
    yield _signed(score.gain)
    for judge in judges:
        found = point.measures[judge]
        yield f"{found.value:.3f} ({found.low:.3f} .. {found.high:.3f})"
        yield f"{_signed(found.gain)} ({_signed(found.gain_low)} .. {_signed(found.gain_high)})"
        yield f"{found.first:.3f}"
    yield f"{point.measures['tokens'].value:.1f}"
    yield f"{point.measures['cut'].value:.3f}"
    yield f"{point.measures['empty'].value:.3f}"


def _signed(value: float) -> str:
    """Without a minus before what rounds to nothing."""
    return f"{round(value, 3) + 0.0:+.3f}"


def figure(report: Report) -> str:
    """Against the measured KL: each chooser's own score, each judge, and the length, one color for each way of choosing."""
    panels = [_panel(report, "score", "own score", "gain over one answer, in std")]
    panels += [_panel(report, judge, judge, f"mean {judge}") for judge in report.judges]
    panels.append(_panel(report, "tokens", "length", "mean tokens"))
    return svg(panels, columns=2)


def _panel(report: Report, measure: str, title: str, y_label: str) -> Panel:
    lines = []
    for curve in report.curves:
        scale = curve.score_std or 1.0
        bands = [(point.kl, *_drawn(point.measures[measure], measure, scale)) for point in curve.points]
        points = [(kl, middle) for kl, _, middle, _ in bands]
        band: list[Band] = [(kl, low, high) for kl, low, _, high in bands]
        lines.append(Line(name=curve.name, points=points, band=band))
    return Panel(title=title, x_label="measured KL from one answer, nats", y_label=y_label, lines=lines)


def _drawn(found: Measure, measure: str, scale: float) -> tuple[float, float, float]:
    """(low, middle, high): scores of different models have no common zero and unit, so their gain in std is drawn."""
    if measure == "score":
        return found.gain_low / scale, found.gain / scale, found.gain_high / scale
    return found.low, found.value, found.high
