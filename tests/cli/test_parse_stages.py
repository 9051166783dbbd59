"""What a stage may say: known keys, own kinds, keys that only drive it."""

from pathlib import Path

import pytest

from rewarden.errors import ConfigError
from rewarden.recipe.jobs import DRIVE_KEYS, JOBS, parse_recipe
from rewarden.recipe.read import read_recipe
from rewarden.recipe.stages import fingerprint, resolved
from rewarden.spec import outside

SFT = """
kind: sft
model: {model_name_or_path: m}
data: {path: d.jsonl}
"""
PPO = """
kind: ppo
policy: {model_name_or_path: m}
reward: {kind: reward_model, path: r}
data: {path: d.jsonl}
"""
COMPARE = """
stages:
  - stage: first
    kind: world_start
  - stage: last
    kind: compare
    before: {model_name_or_path: m}
    after: {model_name_or_path: m}
    data: {path: d.jsonl}
    world: {kind: trip_desk}
    scorers: {proxy: {kind: reward_model, path: r}}
"""


def parsed(path, *overrides):
    return parse_recipe(read_recipe(path, overrides))[-1]


def test_every_kind_of_job_is_an_algorithm_a_collector_or_an_evaluator():
    algorithms = {"sft", "reward", "ppo", "average"}
    collectors = {"world_start", "world_pairs", "join_pairs", "sample_n", "score_samples", "best_of_n_data", "vote"}
    evaluators = {"compare", "alpaca_eval", "best_of_n", "preference", "overoptimization"}
    assert set(JOBS) == algorithms | collectors | evaluators


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (SFT, "optm.learning_rate=1", r"recipe.yaml: unknown key 'optm'; did you mean 'optim'\?"),
        (SFT, "save_step=5", r"unknown key 'save_step'; did you mean 'save_steps'\?"),
        (SFT, "optim.learning_rat=1", r"unknown key 'optim.learning_rat'; did you mean 'learning_rate'\?"),
        (SFT, "eval_data.pth=x", r"unknown key 'eval_data.pth'; did you mean 'path'\?"),
        (SFT, "kind=stf", r"kind is 'stf'; did you mean 'sft'\?"),
        (SFT, "kind=null", "kind is None"),
        (SFT, "max_steps=0", "max_steps is 0"),
        (SFT, "data=null", "data is None"),
        (SFT, "save_steps=-1", "save_steps is -1"),
        (SFT, "view=lively", "view is 'lively'"),
        (SFT, "report_to=tensorbord", "tensorbord"),
        (PPO, "reward.pth=x", r"reward: unknown key 'pth'; did you mean 'path'\?"),
        (PPO, "reward.kind=rewardmodel", r"reward: kind is 'rewardmodel'; did you mean 'reward_model'\?"),
        (PPO, "reward={kind: sum, scorers: [{scorer: {kind: gold}, wieght: 2}]}", r"wieght'; did you mean 'weight'\?"),
        (COMPARE, "last.scorer=1", r"stage last: unknown key 'scorer'; did you mean 'scorers'\?"),
        (COMPARE, "last.scorers.proxy.pth=x", r"stage last: scorers.proxy: unknown key 'pth'; did you mean 'path'\?"),
        (COMPARE, "last.world.tarp=true", r"stage last: world: unknown key 'tarp'; did you mean 'trap'\?"),
        (COMPARE, "first.save_steps=3", r"stage first: unknown key 'save_steps'"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path_and_the_nearest_name(write, text, override, message):
    with pytest.raises(ConfigError, match=message):
        parsed(write(text), override)


def test_a_missing_kind_and_a_missing_key_are_named(write):
    with pytest.raises(ConfigError, match="no `kind:`; one of alpaca_eval, average, best_of_n, best_of_n_data, compare, "):
        parsed(write("seed: 1\n"))
    with pytest.raises(ConfigError, match="model is missing; it has no default"):
        parsed(write("kind: sft\ndata: {path: x}\n"))


def test_all_unknown_keys_are_named_at_once(write):
    with pytest.raises(ConfigError, match=r"(?s)'optm'.*'dta'"):
        parsed(write(SFT), "optm.x=1", "dta.y=2")


def test_drive_keys_go_to_the_driver(write):
    spec, how = parsed(write(SFT), "save_steps=7", "view=off", "report_to=tensorboard", "seed=4")
    assert (how.save_steps, how.view, how.report_to, how.seed) == (7, "off", ("tensorboard",), 4)
    assert spec.seed == 4
    assert parsed(write(SFT), "report_to=none")[1].report_to == ()


@pytest.mark.parametrize(
    "override",
    [
        "save_steps=7",
        "save_total_limit=None",
        "report_to=[tensorboard]",
        "project=p",
        "run_name=r",
        "view=off",
        "max_skipped_steps=9",
    ],
)
def test_how_a_run_is_driven_is_no_part_of_what_it_is(write, override):
    assert override.split("=")[0] in DRIVE_KEYS
    before, after = parsed(write(SFT))[0], parsed(write(SFT), override)[0]
    assert fingerprint("sft", before, {}) == fingerprint("sft", after, {})
    assert resolved("sft", before) == resolved("sft", after)


def test_a_default_written_out_changes_nothing_and_another_value_does(write):
    path = write(SFT)
    plain, same, other = parsed(path)[0], parsed(path, "seed=0")[0], parsed(path, "seed=1")[0]
    assert fingerprint("sft", plain, {}) == fingerprint("sft", same, {})
    assert fingerprint("sft", plain, {}) != fingerprint("sft", other, {})


def test_the_content_of_inputs_is_part_of_a_stage(write):
    path = write(PPO.replace("kind: reward_model, path: r", "kind: function, path: 'mine.py:f'"))
    Path("mine.py").write_text("def f(): ...")
    spec = parsed(path)[0]

    def now():
        return fingerprint("ppo", spec, {})

    start = now()
    Path("d.jsonl").write_text("one")
    with_data = now()
    Path("m").mkdir()
    Path("m/weights").write_text("x")
    with_model = now()
    Path("mine.py").write_text("def f(): return 1")
    with_code = now()
    assert len({start, with_data, with_model, with_code}) == 4
    Path("train").mkdir()  # the name of a split, not of an input
    assert now() == with_code
    Path("d.jsonl").touch()
    assert now() == with_code


def test_texts_that_only_look_like_paths_are_no_inputs(write):
    path = write(PPO.replace("kind: reward_model, path: r", "kind: regex, pattern: '.'"))
    spec = parsed(path)[0]
    before = fingerprint("ppo", spec, {})
    Path("anything").write_text("x")
    assert fingerprint("ppo", spec, {}) == before
    long = parsed(path, f"reward.pattern={'a/' * 40}{'b' * 400}")[0]
    assert fingerprint("ppo", long, {}) != before


def test_a_cache_that_a_stage_fills_itself_is_no_input(write):
    path = write("kind: reward\nmodel: {model_name_or_path: m}\ndata: {path: d.jsonl}\nfeature_cache_dir: some/cache\n")
    spec = parsed(path)[0]
    before = fingerprint("reward", spec, {})
    Path("some/cache").mkdir(parents=True)
    Path("some/cache/x").write_text("x")
    assert fingerprint("reward", spec, {}) == before


def test_a_path_in_a_stage_counts_through_the_fingerprint_of_that_stage(write):
    spec = parsed(write(SFT))[0]
    Path("d.jsonl").write_text("one")
    folder = Path.cwd()
    first = fingerprint("sft", spec, {folder: "a"})
    Path("d.jsonl").write_text("two")
    assert fingerprint("sft", spec, {folder: "a"}) == first
    assert fingerprint("sft", spec, {folder: "b"}) != first


def test_a_kind_of_your_own_is_a_file_and_a_class(write):
    spec, _ = parsed(write("kind: 'jobs.py:Write'\ntext: hello\n"))
    assert spec.text == "hello"
    with pytest.raises(ConfigError, match=r"unknown key 'txt'; did you mean 'text'\?"):
        parsed(write("kind: 'jobs.py:Write'\ntxt: hello\n"))
    with pytest.raises(ConfigError, match=r"'jobs.py' has no 'Wirte'; did you mean 'Write'\?"):
        parsed(write("kind: 'jobs.py:Wirte'\ntext: hello\n"))
    with pytest.raises(ConfigError, match=r"no file 'nowhere\.py'"):
        parsed(write("kind: 'nowhere.py:Write'\n"))
    with pytest.raises(ConfigError, match="no module 'no_such_module'"):
        parsed(write("kind: 'no_such_module:Write'\n"))
    with pytest.raises(ConfigError, match=r"kind 'jobs.py:Path' is no Spec with build\(ranks\) or run\(folder\)"):
        parsed(write("kind: 'jobs.py:Path'\n"))


def test_two_files_of_one_name_are_two_modules(here):
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "random.py").write_text(f"name = {folder!r}\n")
    assert (outside("a/random.py:name"), outside("b/random:name")) == ("a", "b")
    assert outside("random:Random").__module__ == "random"
    assert outside("a/random.py:name") == "a"


def test_what_a_file_of_your_own_cannot_import_is_named_with_its_line(here):
    Path("broken.py").write_text("import no_such_package_at_all\n")
    message = (
        r"broken.py cannot be imported: ModuleNotFoundError: No module named 'no_such_package_at_all' \(broken.py, line 1\)"
    )
    with pytest.raises(ConfigError, match=message):
        outside("broken.py:f")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (SFT, ["optim.learning_rate=.inf"], "optim.learning_rate is inf: Input should be a finite number"),
        (PPO, ["beta=.nan"], "beta is nan: Input should be a finite number"),
        (PPO, ["mini_batch_size=64", "rollout_batch_size=8"], "recipe.yaml: mini_batch_size is 64; give at most"),
        (COMPARE, ["last.scorers={proxy: {pth: r}}"], r"stage last: scorers.proxy: kind is None"),
        (COMPARE, ["last.scorers={kl: {kind: reward_model, path: r}}"], "'kl' is a measure that is always taken"),
        (COMPARE, ["last.world={knd: trip_desk}"], r"stage last: world: kind is None"),
        ("kind: world_start\nworld: {knd: trip_desk}\n", [], "recipe.yaml: world: kind is None"),
        (SFT, ['data.path=""'], "data.path is ''"),
        (
            "kind: sft\nmodel: &m {model_name_or_path: *m}\n",
            [],
            "recipe.yaml: not a valid recipe: an alias .* stands inside what it names",
        ),
        ("stages:\n  - {stage: , kind: sft}\n", [], "stage name None is no plain word"),
    ],
)
def test_what_would_stop_a_run_later_is_refused_when_the_recipe_is_read(text, overrides, message, write):
    with pytest.raises(ConfigError, match=message):
        parsed(write(text), *overrides)


def test_a_complaint_of_several_lines_names_the_recipe_in_each(write):
    with pytest.raises(ConfigError) as caught:
        parsed(write(COMPARE), "last.scorers={brief: {kind: length, targt: 3}}")
    assert all(line.startswith("recipe.yaml: stage last: scorers.brief: ") for line in str(caught.value).splitlines())
