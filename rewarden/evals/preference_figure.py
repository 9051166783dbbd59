"""The picture of a reward report: reliability, and score against length, of every scorer by its own rule."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from rewarden.evals.chart import Line, Panel, svg
from rewarden.evals.preference_pairs import Labels
from rewarden.evals.preference_rules import DataReport, own_rows
from rewarden.evals.preference_scores import PairScores
from rewarden.maths import quantile_bins

LENGTH_BINS = 8
"""Groups of texts by length, of equal size."""


def figure(
    reports: Mapping[str, DataReport], labels: Mapping[str, Labels], scores: Mapping[str, Mapping[str, PairScores]]
) -> str:
    """Two panels for each data set, one color for each scorer."""
    panels = []
    for name, report in reports.items():
        panels.append(reliability_panel(name, report))
        lines = [
            Line(name=scorer, points=score_by_length(found.value_B2, labels[name].length_B2))
            for scorer, found in scores[name].items()
        ]
        panels.append(
            Panel(
                title=f"{name}: score by length", x_label="characters of the answer", y_label="mean score, in std", lines=lines
            )
        )
    return svg(panels, columns=2)


def reliability_panel(name: str, report: DataReport) -> Panel:
    """Share right against stated confidence; on the diagonal a scorer is as right as it says."""
    lines = [Line(name="", points=((0.5, 0.5), (1.0, 1.0)), guide=True)]
    for row in own_rows(report):
        points = [(bin_.confidence, bin_.accuracy) for bin_ in row.reliability]
        lines.append(Line(name=row.scorer, points=[(x, y) for x, y in points if x is not None and y is not None]))
    return Panel(
        title=f"{name}: reliability",
        x_label="stated confidence",
        y_label="share right",
        lines=lines,
        x_range=(0.5, 1.0),
        y_range=(0.0, 1.0),
    )


def score_by_length(value_B2: Float[Tensor, "B 2"], length_B2: Float[Tensor, "B 2"]) -> list[tuple[float, float]]:
    """(mean length, mean score) of equal groups of texts by length; scores less their mean, in units of their spread."""
    value_N, length_N = value_B2.flatten(), length_B2.flatten()
    scale = float(value_N.std(correction=0))
    standard_N = (value_N - value_N.mean()) / (scale if scale > 0 else 1.0)
    group_N, ends = quantile_bins(length_N, bins=LENGTH_BINS)
    groups = [group_N == place for place in range(len(ends))]
    return [(float(length_N[group].mean()), float(standard_N[group].mean())) for group in groups]
