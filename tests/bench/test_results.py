import json
import runpy
from pathlib import Path

import pytest

from bench import results
from bench.benchmark import Entry, Pair, times_as_much, times_faster
from bench.registry import BENCHMARKS
from rewarden.errors import RewardenError

ROOT = Path(__file__).parents[2]
KEYS = {"name", "ours", "peer", "unit", "ratio_median", "ratio_min", "ratio_max", "runs"}


def pairs(key: str, *numbers: tuple[float, float]) -> list[Pair]:
    return [Pair(ours={key: ours, "ours": "us"}, peer={key: peer, "peer": "them"}) for ours, peer in numbers]


def test_a_speed_up_from_times_is_peer_over_ours_pair_by_pair():
    entry = Entry(name="step", unit="s", key="s", ratio=times_faster)
    found = results.result(entry, pairs("s", (2.0, 3.0), (4.0, 4.0), (10.0, 30.0)))
    # ratios 1.5, 1, 3: their median is 1.5, while that of the medians would be 4 / 4 = 1
    assert found == {
        "name": "step",
        "ours": 4.0,
        "peer": 4.0,
        "unit": "s",
        "ratio_median": 1.5,
        "ratio_min": 1.0,
        "ratio_max": 3.0,
        "runs": 3,
    }


def test_a_speed_up_from_rates_and_a_share_of_memory_are_ours_over_the_peers():
    entry = Entry(name="rate", unit="tokens/s", key="x", ratio=times_as_much)
    found = results.result(entry, pairs("x", (200.0, 100.0), (90.0, 100.0), (50.0, 200.0), (300.0, 100.0)))
    # ratios 2, 0.9, 0.25, 3: with an even number the median lies between the middle two
    assert (found["ratio_min"], found["ratio_median"], found["ratio_max"]) == (0.25, 1.45, 3.0)


def test_every_promised_name_is_in_the_registry_with_the_right_direction():
    entries = {entry.name: entry for benchmark in BENCHMARKS for entry in benchmark.entries}
    assert {"ppo_step_speedup", "ppo_peak_memory", "reward_train_speedup", "decode_speedup"} <= entries.keys()
    assert {"decode_speedup_32", "decode_speedup_128", "best_of_n_speedup"} <= entries.keys()
    assert entries["ppo_step_speedup"].ratio(10.0, 20.0) == 2.0
    assert entries["ppo_peak_memory"].ratio(1.0, 4.0) == 0.25
    assert entries["reward_train_speedup"].ratio(20.0, 10.0) == 2.0
    assert entries["decode_speedup"].ratio(15.0, 10.0) == 1.5
    assert "128" in entries["decode_speedup"].unit
    assert entries["best_of_n_speedup"].ratio(40.0, 5.0) == 8.0


def test_the_plain_decode_entry_is_the_one_of_batch_128():
    sizes = {entry.name: benchmark.sizes for benchmark in BENCHMARKS for entry in benchmark.entries}
    assert sizes["decode_speedup"]["ROWS"] == sizes["decode_speedup_128"]["ROWS"] == "128"
    assert sizes["decode_speedup_32"]["ROWS"] == "32"


def entry_of(name: str, ratio: float = 1.0) -> dict:
    return {
        "name": name,
        "ours": 1.0,
        "peer": 2.0,
        "unit": "s",
        "ratio_median": ratio,
        "ratio_min": ratio,
        "ratio_max": ratio,
        "runs": 5,
    }


def test_a_run_of_some_benchmarks_keeps_the_entries_of_others_and_the_order_of_the_registry(tmp_path):
    path = tmp_path / "results.json"
    results.write(path, [entry_of("c"), entry_of("a", 1.0)], {"a": {"commit": "1"}}, ["a", "b", "c"])
    results.write(path, [entry_of("a", 9.0), entry_of("b")], {"a": {"commit": "2"}}, ["a", "b", "c"])
    written = json.loads(path.read_text())
    assert [row["name"] for row in written] == ["a", "b", "c"]
    assert written[0]["ratio_median"] == 9.0
    assert all(row.keys() == KEYS for row in written)
    assert json.loads((tmp_path / "details.json").read_text()) == {"a": {"commit": "2"}}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["details.json", "results.json"]


def test_a_damaged_results_file_is_named(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("[{", encoding="utf-8")
    with pytest.raises(RewardenError, match=r"results\.json is no JSON .*; remove it"):
        results.write(path, [], {})
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(RewardenError, match="holds a dict, not a list"):
        results.write(path, [], {})


def test_the_markdown_table_shows_what_was_written_and_warns_of_few_pairs(tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps([entry_of("ppo_step_speedup", 1.25), {**entry_of("decode_speedup"), "runs": 1}]))
    facts = {
        "peer": "trl 1.12.0",
        "commit": "0123456789+changes",
        "machine": "a box",
        "cores_busy_with_others": 0.04,
        "threads": 2,
    }
    same = {"limit": 1e-4, "max_difference": {"token log-probs": 2e-6}}
    (tmp_path / "details.json").write_text(json.dumps({"ppo_step_speedup": facts, "same_outputs": same}))
    main = runpy.run_path(str(ROOT / "bench" / "table.py"))["main"]
    assert main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "| `ppo_step_speedup` | 1 | 2 | s | 1.25 | 1.25 .. 1.25 | 5 | trl 1.12.0 | 0123456+changes |" in shown
    assert "| token log-probs | 2.0e-06 |" in shown
    assert "Machine: a box." in shown
    assert "Fewer than five pairs, not to be quoted: decode_speedup." in shown
    assert main([str(tmp_path / "none.json")]) == 2
    assert "run `make bench` first" in capsys.readouterr().err
