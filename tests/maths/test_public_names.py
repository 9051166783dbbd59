import rewarden.maths as maths


def test_the_names_of_the_design_are_importable_from_the_package():
    promised = [
        "masked_mean",
        "masked_var",
        "whiten",
        "align",
        "token_logp",
        "chunked_token_logp",
        "token_entropy",
        "k1",
        "k2",
        "k3",
        "token_rewards",
        "gae",
        "clipped_surrogate",
        "is_clipped",
        "clipped_value_loss",
        "explained_variance",
        "bradley_terry",
        "reward_centering",
        "dpo_loss",
        "ipo_loss",
        "relative_loss",
        "mean",
        "worst_case",
        "median",
        "lower_bound",
        "variance_penalty",
        "soft_worst_case",
        "disagreement",
        "Moments",
        "expected_best_of_n",
        "best_of_n_kl",
        "win_rate",
        "length_controlled_win_rate",
        "standard_error",
        "bootstrap_interval",
        "wilson_interval",
        "accuracy_with_ties",
        "wins_with_ties",
        "correlation",
        "expected_calibration_error",
        "reliability",
        "brier_score",
        "auroc",
        "sign_disagreement",
        "newcombe_interval",
        "mixture_logit",
    ]
    assert set(promised) <= set(maths.__all__)


def test_every_exported_name_exists_once_and_is_documented():
    assert sorted(maths.__all__) == sorted(set(maths.__all__))
    for name in maths.__all__:
        assert getattr(maths, name).__doc__, name
