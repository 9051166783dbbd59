"""Measurements of finished runs. To add one: a new file here and one line in EVALUATORS."""

from rewarden.evals.alpaca_win_rate import AlpacaEval
from rewarden.evals.best_of_n import BestOfN
from rewarden.evals.compare import Compare
from rewarden.evals.overoptimization import Overoptimization
from rewarden.evals.preference import Preference
from rewarden.spec import Spec

EVALUATORS: dict[str, type[Spec]] = {
    "alpaca_eval": AlpacaEval,
    "best_of_n": BestOfN,
    "compare": Compare,
    "overoptimization": Overoptimization,
    "preference": Preference,
}
