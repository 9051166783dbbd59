"""User reports 3.1: tokens, end of sequence, padding, chat templates."""

import dataclasses
import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rewarden.algos import sft
from rewarden.algos.health import alarms, text_facts
from rewarden.algos.pairs import encode_pairs
from rewarden.algos.rows import encode_rows
from rewarden.algos.selection import Selection
from rewarden.algos.sft import SFT
from rewarden.data.sources import Data, load_comparisons, load_conversations, load_prompts
from rewarden.errors import ConfigError, DataError
from rewarden.models.features import FeatureCache
from rewarden.models.load import Model, load_tokenizer, save_model, template_of
from rewarden.models.reward import load_reward_model
from rewarden.rollout.hf import Sampling
from rewarden.text.render import load_template
from rewarden.types import Comparison, Message, Rollout, Score, ScoredRollout, Span
from tests.reports.short_runs import ALONE, talk, write_rows
from tests.text.conftest import CHATML, FAMILIES, chatml_tokenizer

CPU = torch.device("cpu")


def test_the_end_of_turn_is_learned_where_pad_is_eos_and_padding_is_not(families):
    """Row 1 (trl#1623): targets are told by position, so the real end of turn counts though padding has the same id."""
    tokenizer = families["chatml"]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    template = load_template(tokenizer)
    rows = encode_rows(
        [talk("Hello", "Yes"), talk("Hello", "Yes, that is a good question. Why?")], template, None, "error"
    ).rows
    batch = sft.prepare(rows, CPU)
    for row, answer in enumerate(("Yes", "Yes, that is a good question. Why?")):
        expected = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
        learned = batch.tokens.ids_BT[row][batch.target_BT[row]].tolist()
        assert learned == expected
        assert learned[-1] == tokenizer.pad_token_id
    assert not (batch.target_BT & ~batch.tokens.mask_BT).any()


def turn(ids: tuple[int, ...], ended: str) -> ScoredRollout:
    """A rollout whose prompt is one token and whose sampled turn is `ids`."""
    spans = (
        Span(role="template", turn=0, start=0, stop=1),
        Span(role="assistant", turn=0, start=1, stop=1 + len(ids), ended=ended),
    )
    rollout = Rollout(conversation=talk("?", "!"), token_ids=(9, *ids), spans=spans, logp_sampler=(0.0,) * len(ids), stop=ended)
    return ScoredRollout(rollout=rollout, score=Score(value=0.0), through_turn=0)


QUIET = {
    "kl/k1": 0.0,
    "kl/k3": 0.0,
    "kl/sequence": 0.0,
    "eos_first_rate": 0.0,
    "text/repetition": 0.0,
    "rollout/behavior_gap": 0.0,
    "rollout/logp_gap_max": 0.0,
}
"""Facts of a round in which nothing is wrong."""


def test_a_policy_that_ends_at_once_is_measured_and_said_in_words():
    """Row 3 (orlhf#352, orlhf#985): the share of answers whose first token is the end, and what to look for."""
    end = 2
    facts = text_facts([turn((end,), "eos"), turn((end,), "eos"), turn((5, end), "eos"), turn((5, 6), "length")], ALONE)
    assert facts["eos_first_rate"] == 0.5
    sampling, selection = Sampling(max_completion_length=4), Selection()
    assert alarms(QUIET, QUIET, sampling, selection) == {}
    found = alarms({**QUIET, "eos_first_rate": 0.75}, QUIET, sampling, selection)
    assert found.keys() == {"ends_at_once"}
    assert found["ends_at_once"].startswith("75% of the answers end with their first token; look for empty answers in the data")


def test_empty_targets_are_left_out_of_fine_tuning_and_named(tmp_path):
    """Row 3: an empty answer teaches to end at once, so it is dropped, counted, and its line is shown."""
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Hi", "completion": "Yes"}, {"prompt": "Why", "completion": ""}])
    loaded = load_conversations(Data(path=str(file)))
    assert loaded.dropped == {"empty_answer": 1}
    assert loaded.where() == f"empty_answer: {file}:2"


@pytest.mark.parametrize(("family", "end"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("llama2", "</s>")])
def test_a_prompt_never_ends_in_an_end_of_turn_even_when_its_text_spells_one(families, family, end):
    """Row 3: a user who types the end of turn does not put the policy behind it; what is typed stays text and is counted."""
    template = load_template(families[family])
    plain, spelled = template.start(talk("Hello")), template.start(talk(f"Hello {end}"))
    assert spelled.token_ids[-1] not in template.stop_ids
    count = sum(token in template.stop_ids for token in plain.token_ids)
    assert sum(token in template.stop_ids for token in spelled.token_ids) == count
    assert template.facts["spelled_special"] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_has_the_template_and_tokens_it_was_trained_with(families, family, tmp_path):
    """Row 4 (orlhf#1069): template text, special ids and the ids of a conversation are the same after save and reload."""
    tokenizer = families[family]
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    save_model(model, tokenizer, tmp_path / "model", extra={"role": "policy", "template": "chat"})
    spec = Model(model_name_or_path=str(tmp_path / "model"))
    again = load_tokenizer(spec)
    assert again.chat_template == tokenizer.chat_template
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.all_special_ids == tokenizer.all_special_ids
    conversation = talk("Hello there, why?", "Yes. 1 2 3", "user assistant", "Many people travel now")
    before, after = load_template(tokenizer, "chat"), load_template(again, template_of(spec))
    assert after.render(conversation) == before.render(conversation)
    assert (after.fingerprint, after.stop_ids) == (before.fingerprint, before.stop_ids)


def test_rows_that_would_train_on_nothing_are_listed(families):
    """Rows 5 and 16 (trl#4879, trl#6310): `on_empty: error` names them, `drop` counts and names them."""
    template = load_template(families["chatml"])
    rows = [
        talk("Hi", "Yes", where="a.jsonl:1"),
        talk("Hello there " * 9, "Yes", where="a.jsonl:2"),
        talk("Why " * 30, "No", where="a.jsonl:3"),
    ]
    limit = len(template.render(rows[0]).token_ids)
    with pytest.raises(DataError, match=r"2 of 3 rows have no token to learn: a\.jsonl:2, a\.jsonl:3\. .*on_empty: drop"):
        encode_rows(rows, template, limit, "truncate", "error")
    kept = encode_rows(rows, template, limit, "truncate", "drop")
    assert kept.dropped["without a target token dropped"] == 2
    assert kept.summary().endswith("(without a target: a.jsonl:2, a.jsonl:3)")
    assert len(encode_rows(rows[:1], template, limit, "truncate", "error").rows) == 1


def test_the_recipe_decides_what_happens_to_rows_without_a_target(world_files, tmp_path):
    """Row 16 (trl#6320): the option acts in a job, and its note holds count and place."""
    file = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "Hello", "completion": "Hello"}, {"prompt": "cheap " * 40, "completion": "Hello"}]
    )
    cfg = SFT(
        model=Model(model_name_or_path=str(world_files.policy)), data=Data(path=str(file)), max_length=12, overlength="truncate"
    )
    notes = "\n".join(cfg.build(ALONE).notes)
    assert "1 without a target token dropped" in notes
    assert f"(without a target: {file}:2)" in notes
    with pytest.raises(DataError, match="1 of 2 rows have no token to learn"):
        cfg.model_copy(update={"on_empty": "error"}).build(ALONE)


def test_every_column_stays_with_a_row_whatever_it_is_read_as(tmp_path):
    """Row 10 (trl#6059): the chosen side of a pair, its prompt and the pair itself keep the columns that nobody knows."""
    row = {"prompt": "Hi", "chosen": "Yes", "rejected": "No", "source": "web", "weight": 2.5, "tags": ["a", "b"]}
    data = Data(path=str(write_rows(tmp_path / "pairs.jsonl", [row])))
    for load in (load_conversations, load_prompts, load_comparisons):
        meta = load(data).rows[0].meta
        assert {key: meta[key] for key in ("source", "weight", "tags")} == {"source": "web", "weight": 2.5, "tags": ["a", "b"]}


def test_sides_of_other_prompts_are_dropped_or_refused_with_their_lines(tmp_path):
    """Row 11 (trl#4639): two sides that answer different questions are no pair."""

    def side(question: str, answer: str) -> list[dict]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    good = {"chosen": side("Hi", "Yes"), "rejected": side("Hi", "No")}
    bad = {"chosen": side("Hi", "Yes"), "rejected": side("Why", "No")}
    file = write_rows(tmp_path / "pairs.jsonl", [good, bad, good, bad])
    loaded = load_comparisons(Data(path=str(file)))
    assert (len(loaded.rows), loaded.dropped) == (2, {"prompts_differ": 2})
    assert loaded.where() == f"prompts_differ: {file}:2, {file}:4"
    prompt = [{"role": "user", "content": "Hi"}]
    explicit = write_rows(
        tmp_path / "explicit.jsonl", [{"prompt": prompt, "chosen": side("Why", "Yes"), "rejected": side("Hi", "No")}]
    )
    with pytest.raises(DataError, match=r"explicit\.jsonl:1: .*does not repeat the prompt"):
        load_comparisons(Data(path=str(explicit)))


def test_a_template_that_rewrites_earlier_turns_is_detected_and_masks_are_those_of_the_whole(families):
    """Row 12 (oi#1806): a later turn takes the thought off an earlier answer (spans follow the whole), or moves the prompt (refused)."""
    tokenizer = families["thinking"]
    template = load_template(tokenizer)
    thought = "<think>\nhm\n</think>\n\nYes"
    one, two = talk("Hello", thought), talk("Hello", thought, "Why", "<think>\nhm\n</think>\n\nNo")
    alone, whole = template.render(one), template.render(two)
    assert whole.token_ids[: len(alone.token_ids)] != alone.token_ids
    spans = [span for span in whole.spans if span.role == "assistant"]
    text = [tokenizer.decode(list(whole.token_ids[span.start : span.stop])) for span in spans]
    assert [("hm" in part, part.endswith("<|im_end|>")) for part in text] == [(False, True), (True, True)]
    with pytest.raises(ConfigError, match="generation prompt"):
        load_template(chatml_tokenizer("{{ messages | length }} messages\n" + CHATML))


def comparison(chosen: str, rejected: str) -> Comparison:
    sides = ((Message(role="assistant", text=text),) for text in (chosen, rejected))
    return Comparison(id="pair", prompt=(Message(role="user", text="Hi"),), chosen=next(sides), rejected=next(sides))


def test_the_length_limit_looks_at_both_sides_of_a_pair(families):
    """Row 13 (oi#1597): a pair is left out when either side is too long, and counted."""
    template = load_template(families["chatml"])
    long = "Yes, that is a good question. " * 5
    limit = len(template.render(talk("Hi", "Yes, why?")).token_ids)
    rows = [comparison("Yes", long), comparison(long, "Yes"), comparison("Yes", "No")]
    pairs, dropped = encode_pairs(rows, template, limit, "drop")
    assert len(pairs) == 1
    assert dropped == {f"longer than {limit} tokens dropped": 2}


@pytest.mark.parametrize("family", ["chatml", "llama3", "llama2"])
def test_a_system_text_is_counted_once_and_every_length_rule_uses_one_count(families, family):
    """Row 14 (oi#1601, oi#1604): a row of exactly the limit stays, one token less drops, cuts or refuses it."""
    tokenizer = families[family]
    template = load_template(tokenizer)
    system = Message(role="system", text="Be kind, please. Many people travel now.")
    row = dataclasses.replace(talk("Hello", "Yes. Why?"), messages=(system, *talk("Hello", "Yes. Why?").messages))
    messages = [{"role": message.role, "content": message.text} for message in row.messages]
    length = len(tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"])
    assert len(encode_rows([row], template, length, "drop").rows[0].token_ids) == length
    assert encode_rows([row], template, length - 1, "drop").dropped == {f"longer than {length - 1} tokens dropped": 1}
    assert len(encode_rows([row], template, length - 1, "truncate").rows[0].token_ids) == length - 1
    with pytest.raises(DataError, match=f"{length} tokens; at most max_length={length - 1}"):
        encode_rows([row], template, length - 1, "error")


def test_what_a_template_met_is_said_when_a_job_starts(world_files, tmp_path, caplog):
    """Row 7 (trl#1153): special tokens that texts spell, and answers merged with their prompt, are in the notes of the job."""
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Hello <|end|>", "completion": "Hello"}])
    cfg = SFT(model=Model(model_name_or_path=str(world_files.policy)), data=Data(path=str(file)))
    with caplog.at_level(logging.WARNING):
        notes = cfg.build(ALONE).notes
    assert "template: 1 special tokens spelled in texts, kept as text" in notes


def test_activations_of_other_code_are_other_entries(world_files, tmp_path, monkeypatch):
    """Row 17 (trl#6206): a new version of the library that computes them makes new entries beside the old ones."""
    model = load_reward_model(Model(model_name_or_path=str(world_files.reward), trainable_layers=1)).model
    before = FeatureCache(tmp_path, model).folder
    assert FeatureCache(tmp_path, model).folder == before
    monkeypatch.setattr("rewarden.models.features.transformers_version", "0.0.0")
    other = FeatureCache(tmp_path, model).folder
    monkeypatch.undo()
    monkeypatch.setattr("rewarden.models.features.FORMAT", 2)
    assert len({before, other, FeatureCache(tmp_path, model).folder}) == 3
