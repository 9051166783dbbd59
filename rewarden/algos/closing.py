"""What a job says when it is done: one line of what was measured on held-out rows or prompts."""

from collections.abc import Mapping

Report = Mapping[str, float]


def sft_closing(report: Report) -> list[str]:
    """Held-out loss, of the last evaluation; nothing without held-out rows."""
    if "eval/nll" not in report:
        return []
    return [f"held-out: {report['eval/nll']:.4f} nats per token, perplexity {report['eval/perplexity']:.2f}"]


def reward_closing(report: Report) -> list[str]:
    """Held-out accuracy beside what the rule "the longer answer wins" reaches; nothing without held-out pairs."""
    if "eval/accuracy" not in report:
        return []
    low, high = report["eval/accuracy_low"], report["eval/accuracy_high"]
    return [
        f"held-out: accuracy {report['eval/accuracy']:.1%} ({low:.1%} to {high:.1%}, 95 % interval, "
        f"{report['eval/num_pairs']:.0f} pairs); taking the longer answer: {report['eval/longer_wins_accuracy']:.1%}"
    ]


def ppo_closing(step: int, exported: int, start: Report, best: Report, last: Report) -> list[str]:
    """Which round is exported, and its score on the selection prompts beside that before training.

    step: rounds done; exported: the round whose weights are exported, 0 for the policy before training; start, best, last:
    measures on the selection prompts before training, of that round and of the newest one ({} where there are none).
    """
    if not start:
        return [f"exported round {exported} of {step}: the last one, since without eval_data nothing chooses"]
    before = f"selection score {start['eval/score']:.3f} before training"
    if exported:
        return [f"exported round {exported} of {step}: {before}, {_score_and_kl(best)} after it"]
    newest = f", {_score_and_kl(last)} after the last round" if "eval/score" in last else ""
    return [f"exported round 0 of {step}: the policy before training, nothing beat it ({before}{newest})"]


def _score_and_kl(report: Report) -> str:
    return f"{report['eval/score']:.3f} at KL {report['eval/kl_sequence']:.2f}"
