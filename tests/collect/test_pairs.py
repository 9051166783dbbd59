import json
from dataclasses import replace

import pytest

from rewarden.collect.pairs import as_prompt, sample_pairs, through
from rewarden.collect.world import WorldPairs, WorldStart, label_pairs, world_prefixes
from rewarden.errors import DataError
from rewarden.models.load import Model, load_policy, load_tokenizer
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message
from rewarden.worlds import TripDesk, seed_range

WORLD = TripDesk()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    WorldStart(num_dialogues=4, num_heldout=2).run(folder)
    return folder


@pytest.fixture(scope="module")
def speaker(start):
    spec = Model(model_name_or_path=str(start / "model"))
    template = load_template(load_tokenizer(spec), "chat")
    return HFSampler(load_policy(spec), template, Sampling(max_completion_length=5)), template


@pytest.fixture(scope="module")
def prefixes(speaker):
    return world_prefixes(WORLD, *speaker, seed_range("pairs")[:20], seed=0)


def test_a_prefix_waits_for_its_turn_and_its_user_is_the_worlds(prefixes):
    lengths = set()
    for prefix in prefixes:
        dialogue = prefix.conversation
        assert prefix.stop == "open"
        assert dialogue.messages[-1].role == "user"
        lengths.add(len(dialogue.messages))
        for place in range(2, len(dialogue.messages), 2):
            said = replace(dialogue, messages=dialogue.messages[:place])
            assert WORLD.reply(said, dialogue.meta["user_seed"]).text == dialogue.messages[place].text
    assert lengths <= {1, 3, 5, 7, 9}
    assert len(lengths) >= 4


def test_pairs_share_their_prefix_and_only_the_last_turn_counts_as_sampled(prefixes, speaker):
    sampler, _ = speaker
    pairs, same = sample_pairs(prefixes, sampler=sampler, seeds=[(2 * i, 2 * i + 1) for i in range(len(prefixes))])
    assert len(pairs) + same == len(prefixes)
    for pair in pairs:
        sides = (pair.first, pair.second)
        assert pair.first.conversation.messages[:-1] == pair.second.conversation.messages[:-1]
        assert pair.first.conversation.messages[-1].text != pair.second.conversation.messages[-1].text
        for side in sides:
            sampled = [span for span in side.spans if span.ended is not None]
            assert [span.turn for span in sampled] == [pair.turn]
            assert len(side.logp_sampler) == sampled[0].stop - sampled[0].start


def test_equal_seeds_give_equal_texts_which_are_dropped_and_counted(prefixes, speaker):
    sampler, _ = speaker
    pairs, same = sample_pairs(prefixes, sampler=sampler, seeds=[(7, 7)] * len(prefixes))
    assert (pairs, same) == ([], len(prefixes))


def test_noiseless_labels_are_the_gold_order_and_ties_are_left_out(prefixes, speaker):
    sampler, _ = speaker
    pairs, _ = sample_pairs(prefixes, sampler=sampler, seeds=[(2 * i, 2 * i + 1) for i in range(len(prefixes))])
    rows, facts = label_pairs(WORLD, pairs, slope=4.0, flip=0.25, seed=0, noisy=False)
    assert len(rows) + facts["tied_gold"] == len(pairs)
    assert all(row["gold_chosen"] > row["gold_rejected"] for row in rows)
    noisy, facts = label_pairs(WORLD, pairs, slope=4.0, flip=0.25, seed=0, noisy=True)
    assert len(noisy) == len(pairs)


def test_as_prompt_forgets_what_was_sampled_but_keeps_every_id(prefixes):
    played = next(prefix for prefix in prefixes if prefix.logp_sampler)
    prompt = as_prompt(played)
    assert prompt.token_ids == played.token_ids
    assert prompt.logp_sampler == ()
    assert all(span.ended is None for span in prompt.spans)


def test_through_cuts_after_the_asked_assistant_turn():
    roles = ("system", "user", "assistant", "user", "assistant")
    dialogue = Conversation(id="d", messages=tuple(Message(role=role, text=str(i)) for i, role in enumerate(roles)))
    assert len(through(dialogue, 0).messages) == 3
    assert through(dialogue, 1) == dialogue
    assert through(dialogue, 9) == dialogue


def test_the_files_of_the_data_job_have_the_rows_asked_for(start, tmp_path):
    policy = Model(model_name_or_path=str(start / "model"))
    asked = {"num_pairs": 6, "num_test_pairs": 0, "num_prompts": 5, "num_selection": 3, "num_heldout": 2}
    facts = WorldPairs(policy=policy, sampling=Sampling(max_completion_length=4), **asked).run(tmp_path)
    users: list[int] = []
    for name, count in (("pairs", 6), ("prompts", 5), ("selection", 3), ("heldout", 2)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert len(rows) == facts[f"{name}/rows"]
        assert len(rows) <= count
        assert name.startswith("pairs") or len(rows) == count
        users += {row["user_seed"] for row in rows}
        assert all(row["prompt"][-1]["role"] == "user" for row in rows)
    assert len(users) == len(set(users))
    assert not (tmp_path / "pairs_test.jsonl").exists()  # none asked for; an empty file would stop whoever reads it


def test_pairs_that_are_all_ties_are_refused_where_they_are_made(start, tmp_path):
    policy = Model(model_name_or_path=str(start / "model"))
    asked = {"num_pairs": 0, "num_test_pairs": 4, "num_prompts": 0, "num_selection": 0, "num_heldout": 0}
    with pytest.raises(DataError, match=r"pairs_test: none of 4 pairs is left .*raise num_test_pairs"):
        WorldPairs(policy=policy, sampling=Sampling(max_completion_length=4), **asked).run(tmp_path)
