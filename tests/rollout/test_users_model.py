"""A user played by a model in this process."""

import pytest
import torch

from rewarden.models.load import save_model
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.rollout.model_user import SamplerVoice
from rewarden.rollout.play import play
from rewarden.rollout.simulated import SimulatedUser
from rewarden.rollout.user_prompt import Simulator
from rewarden.rollout.users import build_user
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message
from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_policy

from .conftest import chat_tokenizer, llama

MODEL, TOKENIZER = build_policy(TripDesk(), 0)
TEMPLATE = load_template(TOKENIZER)
POLICY = HFSampler(MODEL, TEMPLATE, Sampling(max_completion_length=5))
OPENING = "Hello, I want a trip with my dog."


def dialogues(num, **meta):
    return [Conversation(id=f"row{i}", messages=(Message(role="user", text=OPENING),), meta=meta) for i in range(num)]


def played(user, num=4, turns=2):
    start = [TEMPLATE.start(row) for row in dialogues(num)]
    return play(start, sampler=POLICY, template=TEMPLATE, user=user, turns=[turns] * num, seeds=range(num))


def other_voice(positions=512, length=8, **fields):
    """A model with another vocabulary and another template than the policy's."""
    template = load_template(chat_tokenizer())
    sampler = HFSampler(llama(max_position_embeddings=positions), template, Sampling(max_completion_length=length, **fields))
    return SamplerVoice(sampler, template)


def test_a_user_with_its_own_tokenizer_talks_in_text_and_its_words_become_the_policys_tokens():
    user = SimulatedUser(other_voice(), Simulator(on_missing_label="whole", on_truncated="keep"))
    out = played(user)
    assert {rollout.stop for rollout in out} <= {"turns", "error"}
    full = [rollout for rollout in out if rollout.stop == "turns"]
    assert len(full) >= 2
    for rollout in full:
        said = [m.text for m in rollout.conversation.messages if m.role == "user"][1:]
        assert all(word.startswith("w") for text in said for word in text.split())
        spans = [span for span in rollout.spans if span.role == "user"][1:]
        for text, span in zip(said, spans, strict=True):
            assert list(rollout.token_ids[span.start : span.stop]) == TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_what_the_user_says_is_what_its_model_writes_to_the_prompt():
    simulator = Simulator(on_missing_label="whole", on_truncated="keep")
    voice = other_voice(temperature=0.0)
    talk = Conversation(id="a", messages=(Message(role="user", text=OPENING), Message(role="assistant", text="w9 w8")))
    message = SimulatedUser(voice, simulator).reply(talk, 7)
    tokenizer, model = chat_tokenizer(), llama(max_position_embeddings=512).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": simulator.prompt(talk)}], add_generation_prompt=True, return_dict=False
    )
    new = []
    with torch.no_grad():
        while len(new) < 8 and (not new or new[-1] != tokenizer.eos_token_id):
            new.append(int(model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax()))
    assert message.text == tokenizer.decode(new, skip_special_tokens=True).strip()


def test_the_policy_can_be_its_own_user_with_its_own_sampling():
    spec = {
        "kind": "model",
        "sampling": {"max_completion_length": 3},
        "simulator": {"on_missing_label": "whole", "on_truncated": "keep", "max_asks": 1},
    }
    user = build_user(spec, policy=POLICY)
    first, second = played(user), played(build_user(spec, policy=POLICY))
    assert [rollout.token_ids for rollout in first] == [rollout.token_ids for rollout in second]
    assert POLICY.sampling.max_completion_length == 5
    spoken = [m.text for rollout in first for m in rollout.conversation.messages[2::2]]
    assert spoken
    assert all(len(TOKENIZER(text, add_special_tokens=False)["input_ids"]) <= 3 for text in spoken)


def test_a_prompt_longer_than_the_users_context_is_counted_as_too_long():
    user = SimulatedUser(other_voice(positions=64), Simulator())
    out = played(user, num=2)
    assert [(rollout.stop, rollout.conversation.meta["user_failed"]) for rollout in out] == [("error", "too_long")] * 2
    # Another draw does not make a prompt shorter.
    assert user.counts["asked"] == 2


def test_a_model_that_never_writes_the_label_ends_its_dialogues_as_no_label():
    user = SimulatedUser(other_voice(length=40), Simulator(on_truncated="keep", max_asks=2))
    out = played(user, num=2)
    assert [rollout.conversation.meta["user_failed"] for rollout in out] == ["no_label"] * 2
    assert (user.counts["asked"], user.counts["again"]) == (4, 2)


def test_a_user_is_loaded_from_a_folder_with_its_own_tokenizer(tmp_path):
    save_model(llama(max_position_embeddings=512), chat_tokenizer(), tmp_path / "user", extra={"template": "chat"})
    user = build_user(
        {
            "kind": "model",
            "model": {"model_name_or_path": str(tmp_path / "user")},
            "sampling": {"max_completion_length": 6},
            "simulator": {"on_missing_label": "whole", "on_truncated": "keep"},
        }
    )
    talk = Conversation(id="a", messages=(Message(role="user", text=OPENING), Message(role="assistant", text="I see.")))
    message = user.reply(talk, 3)
    assert message.role == "user"
    assert all(word.startswith("w") for word in message.text.split())


@pytest.mark.slow
def test_a_real_model_writes_the_label_when_it_is_asked_often_enough(smollm2):
    user = build_user(
        {
            "kind": "model",
            "model": {"model_name_or_path": str(smollm2)},
            "sampling": {"max_completion_length": 80, "temperature": 0.8},
            "simulator": {"max_asks": 5, "on_truncated": "keep"},
        }
    )
    talks = [
        Conversation(
            id=f"row{i}",
            messages=(
                Message(role="user", text=f"Tell me something about {topic}."),
                Message(role="assistant", text=f"{topic.capitalize()} can be found in many places."),
            ),
        )
        for i, topic in enumerate(["apples", "horses", "rivers", "snow"])
    ]
    answers = user.replies(talks, list(range(4)))
    said = [answer.message.text for answer in answers if answer.message]
    assert said, user.counts
    assert all(text and "Question:" not in text for text in said)
