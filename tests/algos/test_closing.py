"""The last line of a job: what was measured on held-out rows, and which weights are exported."""

from rewarden.algos.closing import ppo_closing, reward_closing, sft_closing

START = {"eval/score": 0.5, "eval/kl_sequence": 0.0}
BETTER = {"eval/score": 0.75, "eval/kl_sequence": 1.25}
WORSE = {"eval/score": 0.25, "eval/kl_sequence": 9.0}


def test_an_export_of_the_policy_before_training_says_so():
    assert ppo_closing(2, 0, START, START, WORSE) == [
        "exported round 0 of 2: the policy before training, nothing beat it (selection score 0.500 before training, 0.250 at KL "
        "9.00 after the last round)"
    ]
    assert ppo_closing(2, 0, START, START, {}) == [
        "exported round 0 of 2: the policy before training, nothing beat it (selection score 0.500 before training)"
    ]


def test_an_export_of_a_trained_policy_shows_both_scores():
    expected = "exported round 3 of 5: selection score 0.500 before training, 0.750 at KL 1.25 after it"
    assert ppo_closing(5, 3, START, BETTER, WORSE) == [expected]


def test_without_selection_prompts_the_last_round_is_exported():
    assert ppo_closing(4, 4, {}, {}, {}) == ["exported round 4 of 4: the last one, since without eval_data nothing chooses"]


def test_a_reward_model_ends_with_its_accuracy_beside_the_longer_answer_rule():
    report = {
        "eval/accuracy": 0.6875,
        "eval/accuracy_low": 0.65,
        "eval/accuracy_high": 0.725,
        "eval/num_pairs": 64.0,
        "eval/longer_wins_accuracy": 0.5,
    }
    assert reward_closing(report) == [
        "held-out: accuracy 68.8% (65.0% to 72.5%, 95 % interval, 64 pairs); taking the longer answer: 50.0%"
    ]


def test_fine_tuning_ends_with_its_held_out_loss():
    assert sft_closing({"eval/nll": 1.25, "eval/perplexity": 3.4903}) == ["held-out: 1.2500 nats per token, perplexity 3.49"]


def test_without_held_out_rows_nothing_is_said():
    assert sft_closing({"loss/nll": 1.0}) == []
    assert reward_closing({"loss/total": 1.0}) == []
