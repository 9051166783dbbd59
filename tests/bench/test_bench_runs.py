import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.__main__ import main, measure
from bench.benchmark import Benchmark, Entry, times_as_much, times_faster
from bench.registry import BENCHMARKS
from bench.run import check_same_work, environment, interleaved, last_facts, run_side
from bench.settings import Settings, check_places, chosen, read_settings
from bench.view import Progress, View, clock, result_table
from rewarden.errors import ConfigError, RewardenError


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Both sides on this interpreter; scripts in the test's folder."""
    peers = tmp_path / "peers"
    (peers / "bin").mkdir(parents=True)
    (peers / "bin" / "python").symlink_to(sys.executable)
    (peers / "installed").touch()
    return Settings(
        our_python=Path(sys.executable),
        peers=peers,
        scripts=tmp_path,
        results=tmp_path / "results.json",
        pairs=2,
        threads=2,
        timeout_s=60,
        sizes={},
        small=False,
    )


def script(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def side(who: str, number: float, **facts: object) -> str:
    return f"import json, os\nprint('noise')\nprint(json.dumps({{{who!r}: 'x', 's': {number}, 'n': int(os.environ['N']), **{facts}}}))"


def benchmark(folder: Path, name: str = "one", ours: str = "", peer: str = "") -> Benchmark:
    return Benchmark(
        name=name,
        title=name,
        ours=script(folder, f"{name}_ours.py", ours or side("ours", 2.0)),
        peer=script(folder, f"{name}_peer.py", peer or side("peer", 3.0)),
        entries=(
            Entry(name=f"{name}_speed", unit="s", key="s", ratio=times_faster),
            Entry(name=f"{name}_memory", unit="GB", key="peak_above_imports_gb", ratio=times_as_much),
        ),
        sizes={"N": "4"},
        small={"N": "2"},
        same=("n",),
        seconds=(10.0, 20.0),
    )


def plain() -> Console:
    return Console(file=io.StringIO(), width=160)


def text_of(console: Console) -> str:
    return console.file.getvalue()


def test_ours_and_the_peer_take_turns(tmp_path):
    order = []

    def run(one: Benchmark, who: str) -> dict:
        order.append(("run", who))
        return {}

    runs = list(interleaved(benchmark(tmp_path), 3, run, lambda who, pair: order.append((pair, who))))
    assert [(r.pair, r.side) for r in runs] == [(1, "ours"), (1, "peer"), (2, "ours"), (2, "peer"), (3, "ours"), (3, "peer")]
    assert order[:4] == [(1, "ours"), ("run", "ours"), (1, "peer"), ("run", "peer")]


def test_two_scripts_become_two_entries_and_their_details(settings, tmp_path):
    console, one = plain(), benchmark(tmp_path)
    measure(settings, [one], [one], {"commit": "abc", "versions": {}}, console)
    speed, memory = json.loads(settings.results.read_text())
    assert speed == {
        "name": "one_speed",
        "ours": 2.0,
        "peer": 3.0,
        "unit": "s",
        "ratio_median": 1.5,
        "ratio_min": 1.5,
        "ratio_max": 1.5,
        "runs": 2,
    }
    assert memory["name"] == "one_memory"
    details = json.loads((tmp_path / "details.json").read_text())["one_speed"]
    assert details["pairs"] == [[2.0, 3.0], [2.0, 3.0]]
    assert details["sizes"] == {"N": "4"}
    assert details["commit"] == "abc"
    shown = text_of(console)
    assert "BENCH_PAIRS=2 is too few to quote" in shown
    assert "one: pair 2 of 2, peer: 3 s (4/4 runs, about 0:00 left)" in shown


def test_a_side_that_fails_is_told_with_its_output_and_finished_benchmarks_are_kept(settings, tmp_path):
    good = benchmark(tmp_path)
    bad = benchmark(tmp_path, "two", peer="print('so far so good')\nraise SystemExit('no such trainer')")
    with pytest.raises(RewardenError) as caught:
        measure(settings, [good, bad], [good, bad], {}, plain())
    told = str(caught.value)
    assert told.startswith("the peer: two_peer.py ended with exit code 1")
    assert "sizes: N=4" in told
    assert "command: " in told
    assert "| so far so good" in told
    assert "| no such trainer" in told
    assert [row["name"] for row in json.loads(settings.results.read_text())] == ["one_speed", "one_memory"]


def test_a_side_that_prints_no_result_or_hangs_is_told(settings, tmp_path):
    silent = benchmark(tmp_path, ours="print('{not json')\nprint({'loss': 1})")
    with pytest.raises(RewardenError, match=r"our side: one_ours\.py printed no JSON object with 'ours'"):
        run_side(settings, silent, "ours")
    slow = benchmark(tmp_path, ours="import time\nprint('waiting', flush=True)\ntime.sleep(60)")
    with pytest.raises(RewardenError, match=r"(?s)longer than BENCH_TIMEOUT=2 s.*\| waiting"):
        run_side(replace(settings, timeout_s=2), slow, "ours")


def test_sides_that_did_other_work_are_refused(settings, tmp_path):
    uneven = benchmark(tmp_path, peer=side("peer", 3.0, n=5))
    with pytest.raises(RewardenError, match="one: n is 4 on our side and 5 on the peer's; both must do the same work"):
        measure(settings, [uneven], [uneven], {}, plain())
    assert not settings.results.exists()


def test_work_that_only_one_side_reports_is_refused(tmp_path):
    from bench.benchmark import Pair

    with pytest.raises(RewardenError, match="n is None"):
        check_same_work(benchmark(tmp_path), Pair(ours={}, peer={}))


def test_the_result_is_the_last_json_line_of_its_side():
    printed = '{"ours": 1}\n{"loss": 3}\n{"ours": 2, "s": 1}\n{"train": 1}\n{\'loss\': 1}\nbye\n'
    assert last_facts(printed, "ours") == {"ours": 2, "s": 1}
    assert last_facts(printed, "peer") is None


def test_both_sides_get_the_same_surroundings_whatever_the_caller_has_set(settings, monkeypatch):
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "BENCH_ONLY", "MALLOC_ARENA_MAX", "HF_HUB_ONLINE"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("PROMPTS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = environment(settings, {"PROMPTS": "64"}, (Path("/a"), Path("/b")), "/scratch")
    assert found["PROMPTS"] == "64"
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "2"
    assert found["PYTHONPATH"] == os.pathsep.join(["/a", "/b"])
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert found["HF_HUB_OFFLINE"] == "1"
    assert not {"PYTHONSTARTUP", "BENCH_ONLY", "MALLOC_ARENA_MAX", "HF_HUB_ONLINE"} & found.keys()


def test_without_the_peers_one_line_says_what_to_do(tmp_path):
    console = plain()
    code = main({"REWARDEN_PEERS": str(tmp_path / "none"), "REWARDEN_SHARED": str(tmp_path)}, console, BENCHMARKS)
    assert code == 2
    assert " ".join(text_of(console).split()) == (
        f"bench: no peers in {tmp_path / 'none'}: run `make peers` once (it uses the network), then `make bench` again"
    )


def test_without_the_peer_scripts_the_message_names_the_folder(settings):
    with pytest.raises(ConfigError, match=r"no .*trl_ppo\.py: set REWARDEN_SHARED to the folder that holds bench/peers"):
        check_places(settings, BENCHMARKS[:1], BENCHMARKS)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"BENCH_PAIRS": "0"}, "BENCH_PAIRS is '0'; give a whole number of at least 1, such as BENCH_PAIRS=5"),
        ({"BENCH_PAIRS": "five"}, "BENCH_PAIRS is 'five'"),
        ({"BENCH_SIZES": "PROMPTS"}, "BENCH_SIZES has 'PROMPTS'; write NAME=NUMBER"),
        ({"BENCH_SIZES": "PROMPTS=many"}, "BENCH_SIZES has 'PROMPTS=many'"),
    ],
)
def test_a_knob_that_cannot_be_read_is_named(environ, message):
    with pytest.raises(ConfigError) as caught:
        read_settings(environ, Path(sys.executable))
    assert message in str(caught.value)


def test_a_size_that_no_benchmark_has_is_refused(settings):
    with pytest.raises(ConfigError, match="BENCH_SIZES sets PROMTS, which no benchmark reads; use one of LENGTH, LORA"):
        check_places(replace(settings, sizes={"PROMTS": "1"}), (), BENCHMARKS)


def test_other_than_standard_sizes_go_to_another_file():
    standard = read_settings({}, Path(sys.executable))
    small = read_settings({"BENCH_SMALL": "1"}, Path(sys.executable))
    other = read_settings({"BENCH_SIZES": "STEPS=1, NEW=32"}, Path(sys.executable))
    assert (standard.results.name, small.results.name, other.results.name) == (
        "results.json",
        "results.small.json",
        "results.small.json",
    )
    ppo = BENCHMARKS[0]
    assert standard.sizes_of(ppo) == {"PROMPTS": "64", "NEW": "64", "STEPS": "3", "LORA": "0"}
    assert other.sizes_of(ppo) == {"PROMPTS": "64", "NEW": "32", "STEPS": "1", "LORA": "0"}
    assert small.sizes_of(ppo)["PROMPTS"] == "8"
    assert (standard.pairs, standard.threads) == (5, 2)


def test_benchmarks_are_chosen_by_their_name_or_that_of_a_result():
    def pick(only: str) -> list[str]:
        return [one.name for one in chosen(BENCHMARKS, only)]

    assert pick("") == [one.name for one in BENCHMARKS]
    assert pick("ppo_peak_memory, decode_speedup") == ["ppo", "decode_128"]
    assert pick("reward") == ["reward"]
    with pytest.raises(ConfigError, match=r"BENCH_ONLY names 'pop'; use one or several of ppo, ppo_step_speedup"):
        pick("pop")


def test_the_time_left_is_estimated_from_what_ran(tmp_path):
    progress = Progress([benchmark(tmp_path, "a"), benchmark(tmp_path, "b")], 2)
    assert progress.total == 8
    assert progress.left_s() == 2 * (10 + 20) * 2
    progress.add("a", "ours", 30.0)
    # this machine takes 3 times as long as expected: 30 left of ours, 2 * 60 of the peer, 2 * (30 + 60) of b
    assert progress.left_s() == 30 + 120 + 180
    progress.add("a", "peer", 20.0)
    # 50 s instead of 30 until now: 30 + 20 of a at their own pace, 2 * 30 of b at 5 / 3
    assert progress.left_s() == pytest.approx(50 + 100)
    assert [clock(seconds) for seconds in (-3.0, 59.2, 61.0, 3661.0)] == ["0:00", "1:00", "1:01", "1:01:01"]


def test_on_a_terminal_the_table_bar_and_current_run_are_drawn(tmp_path):
    one = benchmark(tmp_path)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    view = View(console, Progress([one], 2), 2)
    view.starting(one, "peer", 2)
    view.progress.add("one", "ours", 10.0)
    console.print(view.__rich__())
    shown = text_of(console)
    assert "one: pair 2 of 2, peer" in shown
    assert "1/4 runs, about 0:50 left" in shown


def test_names_are_never_cut_in_the_table():
    row = {"name": "reward_train_speedup_of_a_long_name", "ours": 1, "peer": 2, "unit": "real tokens/s", "runs": 5}
    row |= {"ratio_median": 2, "ratio_min": 1, "ratio_max": 3}
    console = Console(file=io.StringIO(), width=90)
    console.print(result_table([row]))
    assert row["name"] in text_of(console)
