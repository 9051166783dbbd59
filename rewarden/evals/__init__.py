"""Measurements of finished runs. To add one: a new file here and one line in EVALUATORS."""

from rewarden.evals.alpaca_win_rate import AlpacaEval
from rewarden.evals.compare import Compare
from rewarden.spec import Spec

EVALUATORS: dict[str, type[Spec]] = {"alpaca_eval": AlpacaEval, "compare": Compare}
