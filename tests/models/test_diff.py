"""Our own diffs: exact, restartable, and every kind of damage named."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from diff_models import config_of, flip, same_bits, same_tensor, save_model, save_pickles, save_state, state
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from rewarden.errors import ConfigError
from rewarden.models.diff import check_diff, make_diff, read_manifest, recover
from rewarden.models.load import Model, load_policy

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A base with 61 tokens, a tuned model with 64, both sharded, and their diff; copied before they are hurt."""
    root = tmp_path_factory.mktemp("made")
    save_model(root / "raw", 0)
    save_model(root / "tuned", 1, vocab_size=64, shard="40KB")
    make_diff(root / "raw", root / "tuned", root / "diff")
    return root


@pytest.fixture
def hurt(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


def rewrite(file: Path, change) -> None:
    """Change the tensors of a safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def flipped(file: Path) -> list[str]:
    """Change a byte near the end of a file; the tensors that it belongs to."""
    before = {key: value.clone() for key, value in load_file(file).items()}
    flip(file, -5)
    return [key for key, value in load_file(file).items() if not torch.equal(value, before[key])]


def first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_make_then_recover_gives_every_bit_back_with_another_vocabulary(tmp_path, dtype):
    raw = save_model(tmp_path / "raw", 0, dtype=dtype)
    tuned = save_model(tmp_path / "tuned", 1, dtype=dtype, vocab_size=64, shard="20KB")
    assert len(list(tuned.glob("*.safetensors"))) > 2
    make_diff(raw, tuned, tmp_path / "diff")
    recover(raw, tmp_path / "diff", tmp_path / "out")
    assert same_bits(state(tmp_path / "out"), state(tuned))
    assert (tmp_path / "out" / "config.json").read_bytes() == (tuned / "config.json").read_bytes()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    assert same_bits(loaded.state_dict(), state(tuned))
    text = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert text.get_vocab() == AutoTokenizer.from_pretrained(tuned).get_vocab()


def test_a_real_model_recovered_from_a_diff_writes_its_known_text(shared, tmp_path):
    real = shared / "data" / "weights_stories260k"
    golden = json.loads((real / "golden.json").read_text())
    generator = torch.Generator().manual_seed(0)
    moved = {key: value + 0.01 * torch.randn(value.shape, generator=generator) for key, value in state(real).items()}
    raw = save_state(tmp_path / "raw", moved, config_of(real), shards=3)
    make_diff(raw, real, tmp_path / "diff")
    recover(raw, tmp_path / "diff", tmp_path / "out")
    ids = torch.tensor([golden["prompt_ids"]])
    told = LlamaForCausalLM.from_pretrained(tmp_path / "out").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0
    )
    assert told[0, ids.shape[1] :].tolist() == golden["greedy_ids"][:40]


def test_the_diff_is_the_exclusive_or_of_the_bits_and_whole_where_rows_differ(made):
    raw, tuned, diff = (state(made / name) for name in ("raw", "tuned", "diff"))
    for key, value in diff.items():
        if tuned[key].shape == raw[key].shape:
            assert torch.equal(value, tuned[key].view(torch.int32) ^ raw[key].view(torch.int32))
        else:
            assert same_tensor(value, tuned[key])
    whole = [key for key in diff if tuned[key].shape != raw[key].shape]
    assert sorted(whole) == ["lm_head.weight", "model.embed_tokens.weight"]


@pytest.mark.parametrize("dtype", list(BITS), ids=str)
def test_any_bit_pattern_comes_back_nan_and_denormals_included(tmp_path, dtype):
    generator = torch.Generator().manual_seed(3)
    low, high = (-(2**15), 2**15) if dtype.itemsize == 2 else (-(2**31), 2**31)
    sides = [torch.randint(low, high, (50, 7), generator=generator).to(BITS[dtype]).view(dtype) for _ in range(2)]
    raw, tuned = (save_state(tmp_path / name, {"w": side}) for name, side in zip(("raw", "tuned"), sides, strict=True))
    make_diff(raw, tuned, tmp_path / "diff")
    recover(raw, tmp_path / "diff", tmp_path / "out")
    assert same_tensor(state(tmp_path / "out")["w"], sides[1])


def test_where_subtraction_loses_bits_the_exact_rule_loses_none_and_the_published_rule_counts_them(tmp_path):
    base, own = torch.tensor([1000.0, 1.0, 0.0]), torch.tensor([1e-6, 2.0, 5.0])
    lost = ((own - base) + base != own).sum()
    assert lost == 1
    raw = save_state(tmp_path / "raw", {"layers.0.w": base})
    tuned = save_state(tmp_path / "tuned", {"layers.0.w": own})
    said: list[str] = []
    published = make_diff(raw, tuned, tmp_path / "moss", rule="moss", report=said.append)
    assert published.tensors["layers.0.w"].inexact == 1
    assert any("1 entries will not come back" in line for line in said)
    recovered = recover(raw, tmp_path / "moss", tmp_path / "rounded")
    assert torch.equal(state(tmp_path / "rounded")["layers.0.w"], (own - base) + base)
    assert "rule moss: 1 entries are not bit for bit those of the tuned model (float32 subtraction)" in recovered.notes
    make_diff(raw, tuned, tmp_path / "exact")
    recover(raw, tmp_path / "exact", tmp_path / "out")
    assert torch.equal(state(tmp_path / "out")["layers.0.w"], own)


def test_a_base_of_another_floating_type_is_rounded_first_and_the_result_is_still_exact(tmp_path):
    raw = save_model(tmp_path / "raw", 0, dtype=torch.float16)
    tuned = save_model(tmp_path / "tuned", 1, dtype=torch.bfloat16)
    said: list[str] = []
    make_diff(raw, tuned, tmp_path / "diff", report=said.append)
    assert any("are of another type" in line for line in said)
    recover(raw, tmp_path / "diff", tmp_path / "out")
    assert same_bits(state(tmp_path / "out"), state(tuned))


@pytest.mark.parametrize("legacy", [False, True], ids=["mapped", "legacy"])
def test_pickled_shards_are_read_and_safetensors_are_written(tmp_path, legacy, monkeypatch):
    raw, tuned = save_model(tmp_path / "raw", 0), save_model(tmp_path / "tuned", 1, vocab_size=64)
    save, old = torch.save, not legacy
    monkeypatch.setattr(torch, "save", lambda value, file: save(value, file, _use_new_zipfile_serialization=old))
    pickled = [save_pickles(tmp_path / f"{path.name}_bin", state(path), config_of(path), 3) for path in (raw, tuned)]
    made = make_diff(*pickled, tmp_path / "diff")
    assert {record.mode for record in made.tensors.values()} == {"full", "xor"}
    # A base in another file format is the same base.
    recover(raw, tmp_path / "diff", tmp_path / "out")
    assert same_bits(state(tmp_path / "out"), state(tuned))
    assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_number_of_entries_in_memory_changes_nothing(made, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("rewarden.models.diff.read.CHUNK", chunk)
    make_diff(made / "raw", made / "tuned", tmp_path / "diff")
    assert {path.name: path.read_bytes() for path in (tmp_path / "diff").glob("*.safetensors")} == {
        path.name: path.read_bytes() for path in (made / "diff").glob("*.safetensors")
    }
    assert read_manifest(tmp_path / "diff").tensors.keys() == read_manifest(made / "diff").tensors.keys()
    recover(made / "raw", tmp_path / "diff", tmp_path / "out")
    assert same_bits(state(tmp_path / "out"), state(made / "tuned"))


def test_scalars_empty_tensors_and_other_types_come_back(tmp_path):
    sides = [
        {
            "scalar": torch.tensor(1.5 + step),
            "empty": torch.zeros(0, 3),
            "flags": torch.tensor([True, step > 0, False]),
            "ids": torch.tensor([1, 2 - step, 2**40]),
            "bytes": torch.tensor([0, 255 - step], dtype=torch.uint8),
            "double": torch.tensor([0.1 + step], dtype=torch.float64),
            "small": torch.tensor([0.5 + step]).to(torch.float8_e4m3fn),
        }
        for step in range(2)
    ]
    raw, tuned = (save_state(tmp_path / name, side) for name, side in zip(("raw", "tuned"), sides, strict=True))
    make_diff(raw, tuned, tmp_path / "diff")
    recover(raw, tmp_path / "diff", tmp_path / "out")
    assert same_bits(state(tmp_path / "out"), sides[1])


def test_the_manifest_holds_the_hashes_of_base_diff_and_tuned(made):
    manifest = json.loads((made / "diff" / "diff.json").read_text())
    raw, tuned, diff = (state(made / name) for name in ("raw", "tuned", "diff"))

    def sha(tensor) -> str:
        return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()

    assert set(manifest["tensors"]) == set(tuned)
    for key, record in manifest["tensors"].items():
        assert record["shape"] == list(tuned[key].shape)
        assert (record["sha256"], record["diff_sha256"]) == (sha(tuned[key]), sha(diff[key]))
        assert record.get("base_sha256") == (sha(raw[key]) if record["mode"] == "xor" else None)
    lines = sorted(f"{key} F32 {list(value.shape)} {sha(value)}\n" for key, value in tuned.items())
    assert manifest["tuned_sha256"] == hashlib.sha256("".join(lines).encode()).hexdigest()
    for name, record in manifest["files"].items():
        data = (made / "diff" / name).read_bytes()
        assert (record["size"], record["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert manifest["total"] == pytest.approx(sum(value.double().sum().item() for value in tuned.values()))
    assert "xor" in manifest["rule_text"]


def test_a_cast_rounds_once_and_the_config_says_so(made, tmp_path):
    recover(made / "raw", made / "diff", tmp_path / "out", dtype="bfloat16")
    tuned = state(made / "tuned")
    assert same_bits(state(tmp_path / "out"), {key: value.bfloat16() for key, value in tuned.items()})
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"


def test_a_type_too_small_for_the_weights_is_refused(tmp_path):
    raw, tuned = (save_state(tmp_path / name, {"w": torch.tensor([1e6, 1.0])}) for name in ("raw", "tuned"))
    make_diff(raw, tuned, tmp_path / "diff")
    with pytest.raises(ConfigError, match="dtype is float16: 1 entries are too large"):
        recover(raw, tmp_path / "diff", tmp_path / "out", dtype="float16")


def test_check_says_what_a_whole_diff_is(made):
    alone = "\n".join(check_diff(made / "diff").lines)
    assert "30 tensors (2 full, 28 xor)" in alone
    assert "the base was not checked" in alone
    assert "base + diff is the tuned model by every hash" in check_diff(made / "diff", made / "raw").lines[-1]


def every_command(folder: Path, tmp_path: Path) -> list:
    """The three ways to notice damage of a diff."""
    return [
        lambda: check_diff(folder / "diff"),
        lambda: check_diff(folder / "diff", folder / "raw"),
        lambda: recover(folder / "raw", folder / "diff", tmp_path / "out"),
    ]


def refuses(folder: Path, tmp_path: Path, *words: str) -> None:
    for command in every_command(folder, tmp_path):
        with pytest.raises(ConfigError) as error:
            command()
        assert [word for word in words if word not in str(error.value)] == [], str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_truncated_shard_is_named(hurt, tmp_path):
    file = first_file(hurt / "diff")
    file.write_bytes(file.read_bytes()[:-100])
    refuses(hurt, tmp_path, file.name, "truncated or damaged", "again")


def test_a_missing_shard_is_named(hurt, tmp_path):
    file = first_file(hurt / "diff")
    file.unlink()
    refuses(hurt, tmp_path, f"{file.name} is missing")


def test_a_changed_byte_is_named_by_its_tensor(hurt, tmp_path):
    file = first_file(hurt / "diff")
    changed = flipped(file)
    refuses(hurt, tmp_path, changed[0], "was changed")


def test_a_changed_byte_of_the_base_makes_it_another_base(hurt, tmp_path):
    file = first_file(hurt / "raw")
    changed = flipped(file)
    for command in every_command(hurt, tmp_path)[1:]:
        with pytest.raises(ConfigError, match="is not the base of this diff") as error:
            command()
        assert changed[0] in str(error.value)


def test_a_wrong_base_is_named(made, tmp_path):
    other = save_model(tmp_path / "other", 5)
    with pytest.raises(ConfigError, match=r"other is not the base of this diff \(raw\): the sha256 of"):
        recover(other, made / "diff", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"is not the base .* more tensors"):
        check_diff(made / "diff", other)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "dtype", "words"),
    [
        ({"num_hidden_layers": 2}, torch.float32, "it lacks model.layers.2."),
        ({"intermediate_size": 52}, torch.float32, "has shape"),
        ({}, torch.float16, "is of type F16, the manifest says F32"),
    ],
)
def test_a_base_of_other_shape_or_type_is_named_before_anything_is_read(made, tmp_path, changes, dtype, words):
    other = save_model(tmp_path / "other", 0, dtype=dtype, **changes)
    with pytest.raises(ConfigError, match=words) as error:
        recover(other, made / "diff", tmp_path / "out")
    assert "is not the base of this diff" in str(error.value)


def test_a_missing_key_is_named(hurt, tmp_path):
    file = first_file(hurt / "diff")
    gone = sorted(load_file(file))[0]
    rewrite(file, lambda tensors: tensors.pop(gone))
    refuses(hurt, tmp_path, "missing", gone, file.name)


def test_an_extra_key_is_named(hurt, tmp_path):
    rewrite(first_file(hurt / "diff"), lambda tensors: tensors.update({"model.surprise": torch.ones(2)}))
    refuses(hurt, tmp_path, "model.surprise")


def test_keys_are_held_against_the_manifest_where_there_is_no_index(tmp_path):
    raw, tuned = (save_state(tmp_path / name, {"a": torch.ones(2), "b": torch.ones(2)}) for name in ("raw", "tuned"))
    make_diff(raw, tuned, tmp_path / "diff")
    file = tmp_path / "diff" / "diff.safetensors"
    rewrite(file, lambda tensors: tensors.pop("a"))
    refuses(tmp_path, tmp_path, "lacks 1 tensors of its manifest: 'a'")
    rewrite(file, lambda tensors: tensors.update({"a": torch.zeros(2, dtype=torch.int32), "c": torch.ones(1)}))
    refuses(tmp_path, tmp_path, "holds 1 tensors that its manifest does not name: 'c'")


def test_a_shape_or_type_that_is_not_the_manifests_is_named(hurt, tmp_path):
    file = first_file(hurt / "diff")
    key = next(key for key, value in load_file(file).items() if value.dtype == torch.int32 and value.ndim == 2)
    rewrite(file, lambda tensors: tensors.update({key: tensors[key].T.contiguous()}))
    refuses(hurt, tmp_path, key, "has shape", "the manifest says")
    rewrite(file, lambda tensors: tensors.update({key: tensors[key].T.contiguous().float()}))
    refuses(hurt, tmp_path, key, "is of type F32, the manifest says I32")


def test_a_changed_config_and_a_missing_manifest_are_named(hurt, tmp_path):
    config = hurt / "diff" / "config.json"
    config.write_text(config.read_text().replace("32", "33", 1))
    refuses(hurt, tmp_path, "config.json was changed")
    config.unlink()
    refuses(hurt, tmp_path, "config.json is missing")
    (hurt / "diff" / "diff.json").unlink()
    with pytest.raises(ConfigError, match=r"no diff\.json; copy that file too"):
        check_diff(hurt / "diff")


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"format": "other"}'])
def test_a_damaged_manifest_is_named(hurt, tmp_path, text):
    (hurt / "diff" / "diff.json").write_text(text)
    refuses(hurt, tmp_path, "diff.json", "again")


def test_models_that_do_not_fit_are_refused_when_the_diff_is_made(made, tmp_path):
    raw = made / "raw"
    for changes, words in (
        ({"num_hidden_layers": 2}, "lacks 9 tensors of the base"),
        ({"num_hidden_layers": 4}, "holds 9 tensors that the base"),
        ({"intermediate_size": 52}, r"is \[.*\] in .* and \[.*\] in the base .*: this is another base"),
    ):
        tuned = save_model(tmp_path / str(changes), 1, **changes)
        with pytest.raises(ConfigError, match=words):
            make_diff(raw, tuned, tmp_path / "diff")
    whole = save_state(tmp_path / "ints", {key: value.int() for key, value in state(raw).items()})
    with pytest.raises(ConfigError, match="only floating types may differ"):
        make_diff(raw, whole, tmp_path / "diff")
    assert not (tmp_path / "diff").exists()


def test_nothing_is_overwritten(made, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for command in (
        lambda: recover(made / "raw", made / "diff", tmp_path / "out"),
        lambda: make_diff(made / "raw", made / "tuned", tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match="out exists already"):
            command()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


class Stop:
    """Takes lines, and stops the work as Ctrl-C does, after some of them."""

    def __init__(self, after: int) -> None:
        self.after, self.lines = after, []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if len(self.lines) == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["make", "recover"])
def test_stopped_after_any_file_a_second_call_goes_on_and_gives_the_same_bytes(made, tmp_path, kind):
    def work(out: Path, report) -> None:
        if kind == "make":
            make_diff(made / "raw", made / "tuned", out, report=report)
        else:
            recover(made / "raw", made / "diff", out, report=report)

    said: list[str] = []
    work(tmp_path / "straight", said.append)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "straight").iterdir()}
    for after in range(1, len(said) + 1):
        out = tmp_path / f"out{after}"
        with pytest.raises(KeyboardInterrupt):
            work(out, Stop(after))
        assert not out.exists()
        lines: list[str] = []
        work(out, lines.append)
        assert sum("kept from an earlier try" in line for line in lines) == after
        assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
        assert not (tmp_path / f".out{after}.writing").exists()


def test_a_half_done_folder_of_other_inputs_or_with_damage_is_not_continued(hurt, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        recover(hurt / "raw", hurt / "diff", out, report=Stop(1))
    flip(first_file(tmp_path / ".out.writing"), -3)
    lines: list[str] = []
    recover(hurt / "raw", hurt / "diff", out, report=lines.append)
    assert not any("kept" in line for line in lines)
    assert same_bits(state(out), state(hurt / "tuned"))
    shutil.rmtree(out)
    with pytest.raises(KeyboardInterrupt):
        recover(hurt / "raw", hurt / "diff", out, report=Stop(1))
    lines.clear()
    recover(hurt / "raw", hurt / "diff", out, dtype="bfloat16", report=lines.append)
    assert not any("kept" in line for line in lines)


def test_a_pickle_that_would_run_code_is_not_opened(tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    raw = save_state(tmp_path / "raw", {"w": torch.ones(2)})
    (tmp_path / "tuned").mkdir()
    torch.save({"w": Attack()}, tmp_path / "tuned" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin .*could run code, so it is not opened"):
        make_diff(raw, tmp_path / "tuned", tmp_path / "diff")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 10, 300])
def test_a_truncated_pickle_is_named(tmp_path, keep):
    raw = save_state(tmp_path / "raw", {"w": torch.ones(200)})
    bad = tmp_path / "tuned" / "pytorch_model.bin"
    bad.parent.mkdir()
    torch.save({"w": torch.ones(200)}, bad)
    bad.write_bytes(bad.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin .*(truncated or damaged|is damaged)"):
        make_diff(raw, bad.parent, tmp_path / "diff")


def test_what_is_no_checkpoint_is_named(tmp_path):
    raw = save_state(tmp_path / "raw", {"w": torch.ones(2)})
    empty, optimizer, adapter = (tmp_path / name for name in ("empty", "optimizer", "adapter"))
    for folder in (empty, optimizer, adapter):
        folder.mkdir()
    torch.save({"state": {"step": 1}}, optimizer / "pytorch_model.bin")
    (adapter / "adapter_config.json").write_text("{}")
    for folder, words in (
        (empty, "holds no weights"),
        (optimizer, "no table of tensors|not a table"),
        (adapter, "PEFT adapter"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_diff(raw, folder, tmp_path / "diff")
    with pytest.raises(ConfigError, match="rule is 'mosss'; use one of exact, moss, alpaca_farm"):
        make_diff(raw, raw, tmp_path / "diff", rule="mosss")


def test_a_diff_is_never_loaded_as_a_model(made, tmp_path):
    for rule in ("exact", "moss"):
        make_diff(made / "raw", made / "tuned", tmp_path / rule, rule=rule)
        with pytest.raises(ConfigError, match="is a weight diff, not a model; recover it first"):
            load_policy(Model(model_name_or_path=str(tmp_path / rule)))


def test_rule_and_check_are_held_against_the_manifest(made, tmp_path):
    with pytest.raises(ConfigError, match=r"rule is 'moss', but .* was made with 'exact'"):
        recover(made / "raw", made / "diff", tmp_path / "out", rule="moss")
    with pytest.raises(ConfigError, match="check is 'maybe'; use auto, manifest, sum or off"):
        recover(made / "raw", made / "diff", tmp_path / "out", check="maybe")
    with pytest.raises(ConfigError, match="dtype is 'int8'; use auto, float32"):
        recover(made / "raw", made / "diff", tmp_path / "out", dtype="int8")
    assert recover(made / "raw", made / "diff", tmp_path / "out", check="off").checked == "not checked"
    assert read_manifest(made / "diff").rule == "exact"
