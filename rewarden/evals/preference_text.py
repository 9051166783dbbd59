"""A reward report as a page people can read: one row per scorer and rule."""

from collections.abc import Iterable, Mapping, Sequence

from rewarden.evals.preference_measure import LONGER, Estimate, Rate, Row
from rewarden.evals.preference_members import Members
from rewarden.evals.preference_rules import Comparison, DataReport, own_rows

NOTHING = "-"


def page(
    reports: Mapping[str, DataReport],
    about: Mapping[str, Sequence[str]],
    *,
    inside: str,
    confidence: float,
    figure: str,
    notes: Sequence[str],
) -> str:
    """The whole report. about: lines on what became of each data set's pairs; inside: the one that scorers were trained on."""
    lines = [
        "# Reward report",
        "",
        f"Accuracy in percent with {confidence:.0%} intervals; equal scores count half, pairs labeled as ties are left out of "
        "it. All scorers and rules are measured on the same pairs. A star marks what a scorer itself makes of its members.",
        "",
        *(f"- {note}" for note in notes),
    ]
    for name, report in reports.items():
        lines += ["", f"## {name}", "", *about[name], "", *main_table(report, drop_from=None if name == inside else inside)]
        lines += ["", *_groups_tables(report)]
        lines += _members_tables(report.members)
        lines += _comparison_table(report.comparisons)
    return "\n".join([*lines, "", f"![reliability, and score by length]({figure})", "", *MEANING]) + "\n"


def main_table(report: DataReport, *, drop_from: str | None) -> list[str]:
    """One row per scorer and rule; single members are in the table of members."""
    header = ["scorer", "rule", "accuracy", "interval", "minus longer", "minus member"]
    header += ["log loss", "Brier", "calibration error", "score ~ length", "gap ~ length"]
    header += [] if drop_from is None else [f"drop from {drop_from}"]
    rows = []
    for row in report.rows:
        if row.rule.startswith("member "):
            continue
        cells = [row.scorer, f"{row.rule} *" if row.own and row.scorer != LONGER else row.rule, *rate_cells(row.accuracy)]
        cells += [points(row.over_longer), points(row.over_member)]
        numbers = (row.log_loss, row.brier, row.calibration_error, row.score_length_correlation, row.margin_length_correlation)
        cells += [number(value, sign=place > 2) for place, value in enumerate(numbers)]
        rows.append(cells + ([] if drop_from is None else [points(row.drop)]))
    return table(header, rows)


def rate_cells(rate: Rate) -> list[str]:
    """A share and its interval, in percent."""
    if rate.value is None or rate.low is None or rate.high is None:
        return [NOTHING, NOTHING]
    return [f"{100 * rate.value:.1f}", f"{100 * rate.low:.1f} .. {100 * rate.high:.1f}"]


def points(estimate: Estimate | None) -> str:
    """A difference of shares in percentage points, with its interval."""
    if estimate is None:
        return NOTHING
    return f"{100 * estimate.value:+.1f} ({100 * estimate.low:+.1f} .. {100 * estimate.high:+.1f})"


def number(value: float | None, *, sign: bool = False) -> str:
    """Three decimals, or a dash for nothing."""
    if value is None:
        return NOTHING
    return f"{value:+.3f}" if sign else f"{value:.3f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a markdown table; a bar inside a cell is kept from ending it."""
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]


def _groups_tables(report: DataReport) -> list[str]:
    """A table for each split of the pairs: the scorers by their own rule, a column for each group."""
    shown = [row for row in (report.rows[0], *own_rows(report)) if row.accuracy_by]
    lines: list[str] = []
    for name in dict.fromkeys(split for row in shown for split in row.accuracy_by or {}):
        rows = [row for row in shown if row.accuracy_by and name in row.accuracy_by]
        groups = [list((row.accuracy_by or {})[name]) for row in rows]
        # Every scorer has its own groups by score: a column is then a rank, and the ends are in the JSON file.
        same = all(names == groups[0] for names in groups)
        width = max(len(names) for names in groups)
        header = groups[0] if same else [f"{place + 1} of {width}" for place in range(width)]
        counts = [(row.accuracy_by or {})[name] for row in rows]
        lines += [f"Accuracy by {name} (pairs):", ""]
        lines += table(
            ["scorer", *header], [[row.scorer, *_group_cells(c, width)] for row, c in zip(rows, counts, strict=True)]
        )
        lines += [""]
    return lines + _reliability_table(own_rows(report))


def _group_cells(rates: Mapping[str, Rate], width: int) -> list[str]:
    cells = [f"{rate_cells(rate)[0]} ({rate.num})" if rate.num else NOTHING for rate in rates.values()]
    return cells + [NOTHING] * (width - len(cells))


def _reliability_table(rows: Sequence[Row]) -> list[str]:
    rows = [row for row in rows if row.reliability]
    if not rows:
        return []
    header = ["scorer", *(f"{bin_.low:.2g} to {bin_.high:.2g}" for bin_ in rows[0].reliability)]
    cells = [
        [
            row.scorer,
            *(
                f"{100 * bin_.confidence:.0f} -> {100 * bin_.accuracy:.0f} ({bin_.num})"
                if bin_.confidence is not None and bin_.accuracy is not None
                else NOTHING
                for bin_ in row.reliability
            ),
        ]
        for row in rows
    ]
    return [
        "Reliability, by stated confidence: mean confidence -> share right, in percent (pairs):",
        "",
        *table(header, cells),
        "",
    ]


def _members_tables(members: Sequence[Members]) -> list[str]:
    if not members:
        return []
    header = [
        "ensemble",
        "members",
        "correlation",
        "sign disagreement",
        "error correlation",
        "disagreement",
        "of the mean's spread",
    ]
    header += ["AUROC, disagreement", "AUROC, small gap"]
    rows = [
        [
            found.scorer,
            str(found.num_members),
            number(found.mean_correlation),
            number(found.mean_sign_disagreement),
            number(found.error_correlation),
            number(found.mean_disagreement),
            number(found.relative_disagreement),
            area(found.error_by_disagreement),
            area(found.error_by_small_gap),
        ]
        for found in members
    ]
    lines = ["### Members", "", *table(header, rows), ""]
    width = max(len(found.accuracy_by_disagreement) for found in members)
    header = ["ensemble", *(f"{place + 1} of {width}" for place in range(width))]
    cells = [[found.scorer, *_group_cells(found.accuracy_by_disagreement, width)] for found in members]
    return [*lines, "Accuracy of the mean by disagreement, the most agreed first (pairs):", "", *table(header, cells), ""]


def area(estimate: Estimate | None) -> str:
    """An area under a curve with its interval."""
    return NOTHING if estimate is None else f"{estimate.value:.3f} ({estimate.low:.3f} .. {estimate.high:.3f})"


def _comparison_table(comparisons: Sequence[Comparison]) -> list[str]:
    if not comparisons:
        return []
    rows = [[item.first, item.second, points(item.accuracy)] for item in comparisons]
    head = [
        "### Scorers against one another",
        "",
        "Accuracy of the first minus the second, each by its own rule, over the same pairs.",
    ]
    head += [f"{len(comparisons)} comparisons; no interval is widened for their number."] if len(comparisons) > 1 else []
    return [*head, "", *table(["first", "second", "difference"], rows), ""]


MEANING = (
    "What the columns mean:",
    "",
    "- **longer answer**: prefer the answer with more characters. **minus longer**: accuracy minus that rule's, paired.",
    "- **one member**: the members' average, what one taken at random is expected to show. **minus member**: accuracy minus "
    "it, paired.",
    "- **mean probability**: prefer by the mean of the members' probabilities; the rule mean takes the probability of the mean "
    "score.",
    "- **log loss, Brier, calibration error**: of sigmoid(score difference) against the labels; a coin has .693, .250 and 0.",
    "- **score ~ length**: Pearson correlation of score and characters over all texts; **gap ~ length**: of their differences "
    "in pairs.",
    "- **sign disagreement**: share of pairs in which two members prefer different sides. **error correlation**: of their "
    "being right; at 1 they err on the same pairs, and no aggregate can mend it.",
    "- **disagreement**: std of the members' score differences. **AUROC**: probability that a wrong pair has more of it than a "
    "right one; .5 says nothing. A small gap of the mean is the sign to beat.",
)
