"""Rejection sampling: the best of n answers to each prompt as data to imitate (expert iteration, when it is repeated)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console

from rewarden.collect.choice import Choice, check_n, check_some_scored, proxy_of
from rewarden.collect.sample_store import Samples, read_samples, read_scores
from rewarden.data.write import prompt_row, write_jsonl
from rewarden.errors import DataError
from rewarden.maths import first_best
from rewarden.spec import Spec


class BestOfNData(Spec):
    """The best of the first n answers to each prompt, as prompt-completion rows for `kind: sft`."""

    samples: str
    """Folder of a finished run of kind sample_n."""
    scores: str
    """Folder of a finished run of kind score_samples, of these samples."""
    choose: Choice
    """Who chooses."""
    n: int | None = Field(None, ge=1)
    """Choose among the first n answers; null: among all."""
    keep_cut: bool = False
    """Keep winners that the token limit cut. They have no end, and would be learned with one."""
    keep_tied: bool = True
    """Keep the winner of a prompt whose n answers all have one score; it is the first of them."""

    def run(self, folder: Path) -> dict[str, float]:
        """Write sft.jsonl; return how many rows it has and how many prompts were skipped, by reason.

        Errors: ConfigError for n above the number of answers; DataError for scores of other samples, or when nothing is left.
        """
        samples = read_samples(self.samples)
        n = samples.num_generations if self.n is None else self.n
        check_n(n, samples)
        counts: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        rows = list(self._rows(samples, n, counts))
        words = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count) or "none"
        if not rows:
            raise DataError(
                f"{self.samples}: no winner is left to learn from ({words}); sample more answers, allow longer ones, or "
                "choose by another scorer"
            )
        write_jsonl(folder / "sft.jsonl", rows)
        Console(highlight=False, markup=False).print(
            f"{len(rows)} winners of {len(samples.prompts)} prompts, best of {n}; skipped: {words}"
        )
        return {"winners/rows": float(len(rows))} | {f"winners/{reason}": float(count) for reason, count in counts.items()}

    def _rows(self, samples: Samples, n: int, counts: Counter[str]) -> Iterator[dict[str, Any]]:
        scores = read_scores(self.scores, self.choose.scorer, samples)
        proxy = proxy_of(scores, self.choose.aggregate)
        check_some_scored(proxy, scores)
        winner_P = first_best(proxy.score_PN, proxy.scored_PN, n=n).tolist()
        tied_P = proxy.first(n).tied_P.tolist()
        cut_PN, empty_PN = samples.cut_PN(), samples.empty_PN()
        for p, (index, tied) in enumerate(zip(winner_P, tied_P, strict=True)):
            reason = _skipped(
                index,
                empty=bool(empty_PN[p, index]),
                cut=bool(cut_PN[p, index]) and not self.keep_cut,
                tied=tied and not self.keep_tied,
            )
            if reason:
                counts[reason] += 1
                continue
            yield {
                **prompt_row(samples.prompts[p]),
                "completion": [{"role": "assistant", "content": samples.text(p, index)}],
                "best_of_n_sample": index,
                "best_of_n_score": float(proxy.score_PN[p, index]),
            }


REASONS = ("without_score", "empty", "cut", "tied")
"""Why a prompt has no row: no answer with a score, a winner that says nothing, one without an end, nothing to choose."""


def _skipped(index: int, *, empty: bool, cut: bool, tied: bool) -> str | None:
    if index < 0:
        return "without_score"
    return "empty" if empty else "cut" if cut else "tied" if tied else None
