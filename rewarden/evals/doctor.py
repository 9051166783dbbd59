"""The data doctor: what is wrong with training data, found before a run learns it.

It reads every row, past broken ones; tells what each is; looks for what would stop, silence or bias training; and, given a
model, renders the rows as training would and checks tokens, masks and lengths. Weights are never loaded.

A finding has a code, a severity, a count and the first places. `exit_code`: 0 when nothing is worse than a note, 1 for
warnings, 3 for errors; 2 is left for a command that could not look at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import Field, model_validator

from rewarden.data.formats import Target
from rewarden.data.sources import Data
from rewarden.errors import ConfigError
from rewarden.evals.doctor_findings import Finding, Findings
from rewarden.evals.doctor_model import Opened, open_model
from rewarden.evals.doctor_preview import Preview, previews
from rewarden.evals.doctor_read import Source, read_source
from rewarden.evals.doctor_rows import PairFacts, check_labels, check_repeats, check_splits, check_texts
from rewarden.evals.doctor_tokens import Limits, TokenFacts, check_tokens
from rewarden.models.load import Model
from rewarden.spec import Spec

EXIT_CODES = {None: 0, "note": 0, "warning": 1, "error": 3}
"""By the worst severity found."""


class Doctor(Spec):
    """What is examined, and by which limits."""

    data: Data
    """The training data."""
    eval_data: Data | None = None
    """Held-out data: examined as well, and compared with the training data."""
    model: Model | None = None
    """The model that will be trained; without it, tokens, template and lengths are not looked at."""
    target: Target | None = None
    """What all rows are for. Not given: told row by row from the columns."""
    max_length: int | None = Field(default=None, ge=1)
    """Most tokens of a row in training."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt."""
    rows: int = Field(default=2, ge=0)
    """Rows whose loss mask is shown."""

    @model_validator(mode="after")
    def _needs(self) -> "Doctor":
        limits = [name for name in ("max_length", "max_prompt_length") if getattr(self, name) is not None]
        if limits and self.model is None:
            raise ConfigError(f"{limits[0]} is in tokens, which needs a model; give one, or leave the limit out")
        if self.eval_data is not None and _place(self.eval_data) == _place(self.data):
            raise ConfigError(f"eval_data is the training data itself ({self.data.path}); give another file or split")
        return self


def _place(data: Data) -> tuple[str, str, str | None]:
    return data.path, data.split, data.subset


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One source, and the counts of its labels and tokens."""

    source: Source
    pairs: PairFacts | None
    tokens: TokenFacts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that was found; `rewarden.evals.doctor_report` says it in words and in JSON."""

    cfg: Doctor
    examined: tuple[Examined, ...]
    opened: Opened | None
    limits: Limits
    findings: tuple[Finding, ...]
    exit_code: int
    previews: tuple[Preview, ...] = field(default=())


def diagnose(cfg: Doctor, told: Callable[[str, int, int], None] = lambda name, done, rows: None) -> Diagnosis:
    """Examine data and model. `told(source, done, rows)` is called as rows are tokenised.

    Errors: DataError when there is nothing to read; ConfigError when the model's config or tokenizer cannot be opened.
    """
    findings = Findings()
    opened = None if cfg.model is None else open_model(cfg.model, findings)
    limits = Limits(
        max_length=cfg.max_length,
        max_prompt_length=cfg.max_prompt_length,
        positions=opened.positions if opened else None,
    )
    sources = [read_source("data", cfg.data, cfg.target, findings)]
    if cfg.eval_data is not None:
        sources.append(read_source("eval_data", cfg.eval_data, cfg.target, findings))
        check_splits(sources[0], sources[1], findings)
    examined = tuple(_examine(source, opened, limits, findings, told) for source in sources)
    return Diagnosis(
        cfg=cfg,
        examined=examined,
        opened=opened,
        limits=limits,
        findings=tuple(findings),
        exit_code=EXIT_CODES[findings.worst()],
        previews=tuple(previews(sources[0], opened, limits, cfg.rows)) if opened else (),
    )


def _examine(
    source: Source, opened: Opened | None, limits: Limits, findings: Findings, told: Callable[[str, int, int], None]
) -> Examined:
    check_texts(source, opened.special_tokens() if opened else frozenset(), findings)
    check_repeats(source, findings)
    pairs = check_labels(source, findings)
    tokens = None
    if opened is not None:
        tokens = check_tokens(source, opened, limits, findings, lambda done, rows: told(source.name, done, rows))
    return Examined(source=source, pairs=pairs, tokens=tokens)
