"""Every formula of the library, once: pure functions of tensors; no configs, logging, randomness or process groups."""

from rewarden.maths.bestofn import (
    best_of_n_kl,
    expected_best_of_n,
    first_best,
    measured_best_of_n_kl,
    selection_weights,
)
from rewarden.maths.calibration import ConfidenceBin, brier_score, expected_calibration_error, reliability
from rewarden.maths.diversity import adapter_diversity
from rewarden.maths.ensemble import (
    disagreement,
    lower_bound,
    mean,
    median,
    mixture_logit,
    soft_worst_case,
    variance_penalty,
    worst_case,
)
from rewarden.maths.kl import k1, k2, k3
from rewarden.maths.length_control import length_controlled_interval, length_controlled_win_rate
from rewarden.maths.logistic import l1_logistic
from rewarden.maths.logprobs import align, chunked_token_logp, token_entropy, token_logp
from rewarden.maths.masking import masked_mean, masked_var, whiten
from rewarden.maths.moments import Moments
from rewarden.maths.policy import clipped_surrogate, is_clipped
from rewarden.maths.preference import bradley_terry, dpo_loss, ipo_loss, reward_centering
from rewarden.maths.relative import log_ratio_gap, relative_loss
from rewarden.maths.returns import gae, token_rewards
from rewarden.maths.stats import (
    WinCounts,
    accuracy_with_ties,
    alpaca_eval_preference,
    auroc,
    auroc_interval,
    bootstrap_interval,
    correlation,
    discrete_win_rate,
    newcombe_interval,
    quantile_bins,
    relative_gap,
    sign_disagreement,
    standard_error,
    wilson_interval,
    win_counts,
    win_rate,
    wins_with_ties,
)
from rewarden.maths.strength import preference_strength, strata, to_flip
from rewarden.maths.student import student_interval, student_within
from rewarden.maths.value import clipped_value_loss, explained_variance, is_value_clipped

__all__ = [
    "ConfidenceBin",
    "Moments",
    "WinCounts",
    "accuracy_with_ties",
    "adapter_diversity",
    "align",
    "alpaca_eval_preference",
    "auroc",
    "auroc_interval",
    "best_of_n_kl",
    "bootstrap_interval",
    "bradley_terry",
    "brier_score",
    "chunked_token_logp",
    "clipped_surrogate",
    "clipped_value_loss",
    "correlation",
    "disagreement",
    "discrete_win_rate",
    "dpo_loss",
    "expected_best_of_n",
    "expected_calibration_error",
    "explained_variance",
    "first_best",
    "gae",
    "ipo_loss",
    "is_clipped",
    "is_value_clipped",
    "k1",
    "k2",
    "k3",
    "l1_logistic",
    "length_controlled_interval",
    "length_controlled_win_rate",
    "log_ratio_gap",
    "lower_bound",
    "masked_mean",
    "masked_var",
    "mean",
    "measured_best_of_n_kl",
    "median",
    "mixture_logit",
    "newcombe_interval",
    "preference_strength",
    "quantile_bins",
    "relative_gap",
    "relative_loss",
    "reliability",
    "reward_centering",
    "selection_weights",
    "sign_disagreement",
    "soft_worst_case",
    "standard_error",
    "strata",
    "student_interval",
    "student_within",
    "to_flip",
    "token_entropy",
    "token_logp",
    "token_rewards",
    "variance_penalty",
    "whiten",
    "wilson_interval",
    "win_counts",
    "win_rate",
    "wins_with_ties",
    "worst_case",
]
