import json
import math
import shutil

import pytest
import torch

from rewarden.collect.world import WorldPairs, WorldStart
from rewarden.data.sources import Data
from rewarden.errors import DataError
from rewarden.evals.compare import Compare, measure_both, paired_table, sequence_kl
from rewarden.models.load import Model, load_policy, load_tokenizer, save_model
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.text.render import load_template
from rewarden.worlds import TripDesk

SAMPLING = Sampling(max_completion_length=6)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    (root / "start").mkdir()
    WorldStart(num_dialogues=4, num_heldout=2).run(root / "start")
    policy = Model(model_name_or_path=str(root / "start" / "model"))
    counts = {"num_pairs": 0, "num_test_pairs": 0, "num_prompts": 0, "num_selection": 0}
    WorldPairs(policy=policy, num_heldout=12, sampling=SAMPLING, **counts).run(root)
    model = load_policy(policy)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    save_model(model, load_tokenizer(policy), root / "after", extra={"template": "chat"})
    return root


def config(files, after="after", **changes):
    return Compare(
        before=Model(model_name_or_path=str(files / "start" / "model")),
        after=Model(model_name_or_path=str(files / after)),
        data=Data(path=str(files / "heldout.jsonl")),
        world={"kind": "trip_desk"},
        sampling=SAMPLING,
        **changes,
    )


def test_a_policy_against_itself_differs_in_nothing(files):
    before, after, rows_before, rows_after, _ = measure_both(config(files, after="start/model"))
    assert [r.token_ids for r in before] == [r.token_ids for r in after]
    assert rows_before == rows_after
    for row in paired_table(rows_before, rows_after, confidence=0.95, seed=0):
        assert row.difference == row.low == row.high == 0.0


def test_the_measures_are_those_of_the_trained_turn_and_of_the_end(files):
    world = TripDesk()
    before, _, rows, _, _ = measure_both(config(files))
    for rollout, row in zip(before, rows, strict=True):
        first = next(span for span in rollout.spans if span.ended is not None)
        facts = world.turn_facts(rollout.conversation.messages, frozenset(rollout.conversation.meta.get("truncated", ())))
        assert len(facts) == 5
        assert row["gold_turn"] == facts[first.turn].gold
        assert row["gold_end"] == facts[-1].gold
        assert row["length"] == first.stop - first.start
        assert row["malformed"] == float(facts[first.turn].malformed)


def test_sequence_kl_is_the_summed_log_ratio_of_plain_forwards(files):
    cfg = config(files)
    template = load_template(load_tokenizer(cfg.after), "chat")
    policy, reference = load_policy(cfg.after), load_policy(cfg.before)
    prompts = [template.start(TripDesk().start(user)) for user in range(5)]
    rollouts = HFSampler(policy, template, SAMPLING).sample(prompts, seeds=range(5))
    expected = []
    for rollout in rollouts:
        ids = torch.tensor([rollout.token_ids])
        first = len(rollout.token_ids) - len(rollout.logp_sampler)
        with torch.no_grad():
            sides = [model(ids).logits[0].double().log_softmax(-1) for model in (policy, reference)]
        expected.append(sum(float(sides[0][t - 1, ids[0, t]] - sides[1][t - 1, ids[0, t]]) for t in range(first, ids.shape[1])))
    assert sequence_kl(policy, reference, rollouts, 1.0) == pytest.approx(expected, abs=1e-4)
    assert sum(expected) != 0


def test_the_paired_table_by_hand():
    """Differences 1, 3 and a missing value: mean 2, standard error 1, two prompts."""
    before = [{"score": 0.0}, {"score": 1.0}, {"score": float("nan")}]
    after = [{"score": 1.0}, {"score": 4.0}, {"score": 2.0}]
    (row,) = paired_table(before, after, confidence=0.95, seed=0)
    assert (row.before, row.after, row.difference, row.num_prompts) == (0.5, 2.5, 2.0, 2)
    assert row.standard_error == pytest.approx(math.sqrt(2.0) / math.sqrt(2.0))
    assert (row.low, row.high) == (1.0, 3.0)


def test_the_files_hold_the_table_and_the_dialogues(files, tmp_path):
    facts = config(files, num_examples=2).run(tmp_path)
    table = {row["name"]: row for row in json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))}
    assert facts["gold_turn/difference"] == table["gold_turn"]["difference"]
    text = (tmp_path / "examples.md").read_text(encoding="utf-8")
    assert text.count("from here on before training") == 2
    assert text.count("from here on after training") == 2
    assert "gold_end" in (tmp_path / "comparison.md").read_text(encoding="utf-8")


def test_one_prompt_is_too_few(files, tmp_path):
    (tmp_path / "one.jsonl").write_text(
        (files / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8"
    )
    with pytest.raises(DataError, match="1 prompts"):
        measure_both(config(files).model_copy(update={"data": Data(path=str(tmp_path / "one.jsonl"))}))


def test_the_report_says_when_before_and_after_are_the_same_policy(files, tmp_path):
    folders = {name: tmp_path / name for name in ("same", "untrained", "other")}
    shutil.copytree(files / "start" / "model", tmp_path / "round0")
    card = tmp_path / "round0" / "rewarden.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "exported_step": 0}))
    for folder, after in zip(folders.values(), (files / "start" / "model", tmp_path / "round0", files / "after"), strict=True):
        folder.mkdir()
        config(files, after=after, num_examples=0).run(folder)
    first = {name: (folder / "comparison.md").read_text().splitlines()[0] for name, folder in folders.items()}
    assert first["same"].startswith("**Before and after are the same policy**:")
    assert "(training exported round 0, the policy before training: nothing beat it)" in first["untrained"]
    assert first["other"].startswith("Paired over")
