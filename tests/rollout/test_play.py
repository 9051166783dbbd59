import itertools

import pytest
import torch

from rewarden.errors import DataError
from rewarden.protocols import Player
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.rollout.play import DialoguePlayer, next_turn, play, turn_seed
from rewarden.rollout.users import RecordedUser, WorldUser
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message
from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_policy

WORLD = TripDesk()
MODEL, TOKENIZER = build_policy(WORLD, 0)
TEMPLATE = load_template(TOKENIZER)
END = TOKENIZER.eos_token_id
LINES = ["Hello, I want a trip with my dog.", "I see.", "In winter.", "Something cheap."]


def sampler_of(length=6, model=MODEL, **sampling):
    return HFSampler(model, TEMPLATE, Sampling(max_completion_length=length, **sampling))


def world_start(seed):
    return TEMPLATE.start(Conversation(id=f"user{seed}", messages=(WORLD.opening(seed),), meta={"user_seed": seed}))


def recorded_start(turns):
    return TEMPLATE.start(
        Conversation(id="recorded", messages=(Message(role="user", text=turns[0]),), meta={"user_turns": turns})
    )


def assistants(rollout):
    return [span for span in rollout.spans if span.role == "assistant"]


def test_each_dialogue_runs_to_its_own_turn_and_comes_back_in_order():
    turns = [2, 0, 4, 1, 0]
    player = DialoguePlayer(sampler_of(), TEMPLATE, WorldUser(WORLD))
    out = player.play([world_start(i) for i in range(5)], turns=turns, seeds=range(5), policy_version=3)
    assert isinstance(player, Player)
    for seed, turn, rollout in zip(range(5), turns, out, strict=True):
        assert rollout.conversation.id == f"user{seed}"
        assert rollout.stop == "turns"
        assert rollout.policy_version == 3
        assert [message.role for message in rollout.conversation.messages] == ["user", "assistant"] * (turn + 1)
        assert [span.turn for span in assistants(rollout)] == list(range(turn + 1))
        assert all(span.ended in ("eos", "length") for span in assistants(rollout))
        assert len(rollout.seeds) == turn + 1
        assert len(rollout.logp_sampler) == sum(span.stop - span.start for span in assistants(rollout))
        assert rollout.spans[-1].stop == len(rollout.token_ids)


def test_the_users_words_are_the_worlds_replies_to_the_same_transcript():
    (rollout,) = play([world_start(8)], sampler=sampler_of(), template=TEMPLATE, user=WorldUser(WORLD), turns=[3], seeds=[1])
    for place in range(2, len(rollout.conversation.messages), 2):
        prefix = Conversation(
            id="x",
            messages=rollout.conversation.messages[:place],
            meta={"truncated": rollout.conversation.meta.get("truncated", ())},
        )
        assert rollout.conversation.messages[place] == WORLD.reply(prefix, 8)


def test_a_turn_cut_by_the_limit_is_answered_as_malformed_and_the_dialogue_goes_on():
    (rollout,) = play(
        [world_start(8)], sampler=sampler_of(length=1), template=TEMPLATE, user=WorldUser(WORLD), turns=[2], seeds=[2]
    )
    cut = [span.turn for span in assistants(rollout) if span.ended == "length"]
    assert cut
    assert rollout.conversation.meta["truncated"] == tuple(cut)
    for turn in cut[:-1] if cut[-1] == 2 else cut:
        assert rollout.conversation.messages[2 * turn + 2].text == "I do not follow you."


def test_ids_only_grow_and_what_was_sampled_stays():
    seen = []

    class Watched(HFSampler):
        def sample(self, rollouts, *, seeds, policy_version=0):
            seen.append([rollout.token_ids for rollout in rollouts])
            out = super().sample(rollouts, seeds=seeds, policy_version=policy_version)
            seen.append([rollout.token_ids for rollout in out])
            return out

    sampler = Watched(MODEL, TEMPLATE, Sampling(max_completion_length=6))
    (rollout,) = play([world_start(4)], sampler=sampler, template=TEMPLATE, user=WorldUser(WORLD), turns=[3], seeds=[0])
    stages = [ids for (ids,) in seen]
    assert len(stages) == 8
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(stages))
    assert rollout.token_ids == stages[-1]


def test_the_log_probabilities_of_a_dialogue_are_those_of_one_forward_over_it():
    (rollout,) = play([world_start(4)], sampler=sampler_of(), template=TEMPLATE, user=WorldUser(WORLD), turns=[3], seeds=[0])
    ids = torch.tensor([rollout.token_ids])
    with torch.no_grad():
        logp = MODEL(input_ids=ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    expected = [logp[t - 1].item() for span in assistants(rollout) for t in range(span.start, span.stop)]
    assert rollout.logp_sampler == pytest.approx(expected, abs=1e-4)


def test_the_recorded_user_speaks_its_lines_and_leaves():
    out = play(
        [recorded_start(LINES), recorded_start(LINES[:2]), recorded_start(LINES[:1])],
        sampler=sampler_of(), template=TEMPLATE, user=RecordedUser(), turns=[2, 9, 9], seeds=[1, 2, 3],
    )  # fmt: skip
    assert [rollout.stop for rollout in out] == ["turns", "user", "user"]
    said = [[m.text for m in rollout.conversation.messages if m.role == "user"] for rollout in out]
    assert said == [LINES[:3], LINES[:2], LINES[:1]]
    assert all(rollout.conversation.messages[-1].role == "assistant" for rollout in out)


def test_a_full_context_ends_a_dialogue_at_its_last_answer():
    sampler = sampler_of(length=40)
    assert sampler.num_positions == 320
    out = play(
        [world_start(i) for i in range(4)],
        sampler=sampler,
        template=TEMPLATE,
        user=WorldUser(WORLD),
        turns=[99] * 4,
        seeds=range(4),
    )
    for rollout in out:
        assert rollout.stop == "length"
        assert len(rollout.token_ids) <= 320
        assert rollout.conversation.messages[-1].role == "assistant"
        assert rollout.spans[-1].role == "assistant"
        # The longest sentence of the user, with its header, would not have fitted.
        assert len(rollout.token_ids) > 320 - 30


def test_play_depends_on_the_dialogues_own_seed_only():
    parts = {"template": TEMPLATE, "user": WorldUser(WORLD)}
    together = play([world_start(i) for i in range(6)], sampler=sampler_of(), turns=[2] * 6, seeds=range(6), **parts)
    alone = [play([world_start(i)], sampler=sampler_of(), turns=[2], seeds=[i], **parts)[0] for i in range(6)]
    assert [rollout.token_ids for rollout in together] == [rollout.token_ids for rollout in alone]
    other = play([world_start(i) for i in range(6)], sampler=sampler_of(), turns=[2] * 6, seeds=range(6, 12), **parts)
    assert all(a.token_ids != b.token_ids for a, b in zip(together, other, strict=True))


def test_a_branch_resumes_at_the_turn_it_left_off_and_repeats_with_the_same_seed():
    parts = {"sampler": sampler_of(), "template": TEMPLATE, "user": WorldUser(WORLD)}
    (prefix,) = play([world_start(3)], turns=[1], seeds=[10], **parts)
    opened = TEMPLATE.extend(prefix, WorldUser(WORLD).reply(prefix.conversation, 0))
    a, b, c = play([opened] * 3, turns=[3] * 3, seeds=[10, 11, 10], **parts)
    (whole,) = play([world_start(3)], turns=[3], seeds=[10], **parts)
    assert a.token_ids == c.token_ids == whole.token_ids
    assert a.token_ids != b.token_ids
    assert b.token_ids[: len(opened.token_ids)] == opened.token_ids
    assert b.seeds[:2] == prefix.seeds


def test_seeds_of_turns_can_be_injected():
    (rollout,) = play(
        [world_start(3)], sampler=sampler_of(), template=TEMPLATE, user=WorldUser(WORLD), turns=[2], seeds=[7],
        seed_of_turn=lambda role, seed, turn: 1000 * seed + turn,
    )  # fmt: skip
    assert rollout.seeds == (7000, 7001, 7002)
    assert len({turn_seed(role, seed, turn) for role in ("assistant", "user") for seed in range(5) for turn in range(5)}) == 50


def test_impossible_requests_are_refused():
    parts = {"sampler": sampler_of(), "template": TEMPLATE, "user": WorldUser(WORLD)}
    (done,) = play([world_start(3)], turns=[1], seeds=[10], **parts)
    with pytest.raises(DataError, match=r"'user3': asked to play through assistant turn 1, but its next is turn 2"):
        play([done], turns=[1], seeds=[1], **parts)
    with pytest.raises(DataError, match="1 rollouts, 2 turns and 1 seeds"):
        play([world_start(1)], turns=[1, 2], seeds=[1], **parts)
    assert next_turn(done) == 2
    assert play([], turns=[], seeds=[], **parts) == []
