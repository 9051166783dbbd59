"""The view reads reports and the clock charges each second once."""

import io
import time

import pytest

from rewarden.runtime import view as view_module
from rewarden.runtime.clock import Clock, phase, timed_by
from rewarden.runtime.view import COLUMNS, View, columns_for, shares

PPO = {
    "score/mean": 0.5, "kl/k3": 0.01234, "length/mean": 31.25, "eos_rate": 0.98, "loss/total": 1.5,
    "time/step": 4.0, "time/rollout": 2.4, "time/update": 1.2, "time/tokens_per_s": 12345.6,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_line_holds_all_that_was_asked_for():
    out = io.StringIO()
    with View("ppo", 100, file=out) as view:
        assert view.mode == "plain"
        view.note("data: [12 rows]")
        view.update(1, PPO)
    first, second = out.getvalue().splitlines()
    assert first == "data: [12 rows]"
    assert second == (
        "ppo 1/100  score 0.5  kl 0.01234  length 31.2  eos 98%  loss 1.5  tok/s 12,346  "
        "rollout 60% update 30% other 10%  eta 0:06:36"
    )


def test_sft_and_reward_jobs_show_loss_and_accuracy():
    out = io.StringIO()
    with View("reward", 2, file=out) as view:
        view.update(2, {"loss/total": 0.6931, "reward/accuracy": 0.625, "time/step": 1.0})
    assert out.getvalue() == "reward 2/2  loss 0.6931  accuracy 62.5%  eta 0:00:00\n"


def test_columns_are_any_report_keys():
    assert columns_for(()) == COLUMNS
    out = io.StringIO()
    with View("x", 1, columns=columns_for(["gold/mean", "absent"]), file=out) as view:
        view.update(1, {"gold/mean": 0.25, "score/mean": 9.0})
    assert out.getvalue() == "x 1/1  gold/mean 0.25  eta 0:00:00\n"


def test_plain_lines_are_rare_but_the_last_step_always_shows(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(view_module.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with View("x", 1000, file=out) as view:
        for step in range(1, 1001):
            now[0] += 0.1
            view.update(step, {})
    steps = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert steps[0] == 1
    assert steps[-1] == 1000
    assert 55 <= sum(step <= 600 for step in steps) <= 61  # once a second in the first minute
    assert 4 <= sum(step > 600 for step in steps) <= 6  # then every ten seconds


def test_a_terminal_gets_a_live_table_that_ends_complete():
    out = Terminal()
    with View("ppo", 3, file=out) as view:
        assert view.mode == "live"
        for step in (1, 2, 3):
            view.update(step, {**PPO, "score/mean": step / 10})
        view.note("a line above the table")
    text = out.getvalue()
    assert "\x1b[" in text
    assert "a line above the table" in text
    last = text[text.rindex("step") - 900 :]
    for word in ("score", "kl", "length", "eos", "tok/s", "0.3", "step 3/3", "eta 0:00:00", "rollout 60%"):
        assert word in last


def test_off_prints_nothing():
    out = io.StringIO()
    with View("x", 1, mode="off", file=out) as view:
        view.note("line")
        view.update(1, PPO)
    assert out.getvalue() == ""


def test_eta_is_the_pace_of_the_last_20_steps():
    view = View("x", 100, mode="off", file=io.StringIO())
    assert view.eta() == "-"
    for step in range(1, 11):
        view.update(step, {"time/step": 1000.0})
    for step in range(11, 31):
        view.update(step, {"time/step": 60.0})
    assert view.eta() == "1:10:00"


def test_shares_add_up_to_the_whole_step():
    got = shares(PPO)
    assert list(got) == ["rollout", "update", "other"]
    assert got["rollout"] == pytest.approx(0.6)
    assert sum(got.values()) == pytest.approx(1.0)
    assert shares({}) == {}


def test_nested_phases_charge_each_second_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    with timed_by(Clock()) as clock:
        spend(1)
        with phase("update"):
            spend(2)
            with phase("score"):
                spend(4)
            spend(8)
            assert clock.report() == {"time/update": 10.0, "time/score": 4.0}
            spend(16)
        with phase("score"):
            spend(32)
        assert clock.report() == {"time/update": 16.0, "time/score": 32.0}
        with pytest.raises(ZeroDivisionError), phase("broken"):
            spend(64 / (now[0] - now[0]))
        spend(64)
        assert clock.report() == {"time/broken": 0.0}
    with phase("nobody listens"):
        spend(1)
    assert clock.report() == {}


def test_phases_and_the_view_cost_next_to_nothing():
    began = time.process_time()
    with timed_by(Clock()) as clock:
        for _ in range(10_000):
            with phase("a"):
                pass
    phases = time.process_time() - began
    view = View("x", 100_000, file=Terminal())
    with view:
        began = time.process_time()
        for step in range(10_000):
            view.update(step, PPO)
        shown = time.process_time() - began
    assert clock.report().keys() == {"time/a"}
    assert phases < 0.5, f"{phases / 1e4 * 1e6:.0f} us a phase"
    assert shown < 2.0, f"{shown / 1e4 * 1e6:.0f} us an update"
