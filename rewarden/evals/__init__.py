"""Measurements of finished runs. To add one: a new file here and one line in EVALUATORS."""

from rewarden.evals.compare import Compare
from rewarden.spec import Spec

EVALUATORS: dict[str, type[Spec]] = {"compare": Compare}
