"""Asking users: what counts as an answer, what ends a dialogue, what is asked for again."""

import pytest

from rewarden.errors import ConfigError, DataError, UserError
from rewarden.protocols import User
from rewarden.rollout.ask import Answer, ManyUsers, ask
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.rollout.play import play, turn_seed
from rewarden.rollout.simulated import SimulatedUser, Spoken
from rewarden.rollout.user_prompt import Simulator
from rewarden.rollout.users import USERS, RecordedUser, WorldUser, build_user, parse_user
from rewarden.spec import Spec
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message
from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_policy

WORLD = TripDesk()
MODEL, TOKENIZER = build_policy(WORLD, 0)
TEMPLATE = load_template(TOKENIZER)


def dialogue(*texts, name="d", **meta):
    roles = ("user", "assistant")
    return Conversation(
        id=name, messages=tuple(Message(role=roles[i % 2], text=text) for i, text in enumerate(texts)), meta=meta
    )


def played(user, names, turns, *, length=6, **meta):
    sampler = HFSampler(MODEL, TEMPLATE, Sampling(max_completion_length=length))
    start = [TEMPLATE.start(dialogue("Hello, I want a trip with my dog.", name=name, **meta)) for name in names]
    return play(start, sampler=sampler, template=TEMPLATE, user=user, turns=[turns] * len(start), seeds=range(len(start)))


class Lines:
    """A voice that says lines from a list, by dialogue; remembers what it was asked."""

    def __init__(self, **lines):
        self.lines = {name: list(said) for name, said in lines.items()}
        self.asked = []

    def speak(self, prompts, seeds, ids):
        self.asked += list(zip(ids, seeds, strict=True))
        said = [self.lines[name].pop(0) if self.lines.get(name) else "Justification: -\nQuestion: I see." for name in ids]
        return [line if isinstance(line, Spoken) else Spoken(status="ok", text=line) for line in said]


def test_a_user_that_fails_ends_its_dialogue_with_a_status_and_the_rest_goes_on():
    class Fragile:
        def reply(self, dialogue, seed):
            if dialogue.id == "b" and len(dialogue.messages) == 4:
                raise UserError("no", "timeout")
            return Message(role="user", text="I see.")

    a, b, c = played(Fragile(), "abc", 2)
    assert [rollout.stop for rollout in (a, b, c)] == ["turns", "error", "turns"]
    assert b.conversation.meta["user_failed"] == "timeout"
    assert "user_failed" not in a.conversation.meta
    assert [m.role for m in b.conversation.messages] == ["user", "assistant"] * 2
    assert b.spans[-1].role == "assistant"
    assert len(c.conversation.messages) == 6


def test_an_error_that_no_user_raises_on_purpose_is_not_swallowed():
    class Broken:
        def reply(self, dialogue, seed):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        played(Broken(), "a", 1)


def test_an_empty_reply_of_any_user_ends_the_dialogue_as_empty():
    out = played(RecordedUser(), "a", 3, user_turns=["Hello, I want a trip with my dog.", " ", "In winter."])
    assert [(rollout.stop, rollout.conversation.meta["user_failed"]) for rollout in out] == [("error", "empty")]
    assert ask(RecordedUser(), [dialogue("a", "b", user_turns=["a", ""])], [0]) == [Answer(failed="empty")]


def test_answers_that_are_no_users_are_refused():
    class Wrong:
        def reply(self, dialogue, seed):
            return Message(role="assistant", text="I see.")

    class Few(Wrong):
        def replies(self, dialogues, seeds):
            return []

    with pytest.raises(DataError, match="Wrong answered with role 'assistant'"):
        played(Wrong(), "a", 1)
    with pytest.raises(DataError, match="Few gave 0 answers to 1 dialogues"):
        played(Few(), "a", 1)


def test_a_user_who_never_stops_is_played_through_the_turns_asked_for_and_not_further():
    voice = Lines()
    (rollout,) = played(SimulatedUser(voice, Simulator(stop_signal="[DONE]")), "a", 4)
    assert rollout.stop == "turns"
    assert len(voice.asked) == 4


def test_the_turn_limit_and_the_stop_signal_make_the_user_leave():
    voice = Lines(a=["Question: I see.", "Justification: -\nQuestion: [DONE]"])
    user = SimulatedUser(voice, Simulator(stop_signal="[DONE]", max_turns=4))
    a, b = played(user, "ab", 9)
    assert (a.stop, b.stop) == ("user", "user")
    assert sum(m.role == "user" for m in a.conversation.messages) == 2
    assert sum(m.role == "user" for m in b.conversation.messages) == 4
    assert user.counts == {"asked": 5, "replied": 4, "left": 1, "turn_limit": 1, "again": 0}
    assert user.report() == {
        "user/again": 0.0,
        "user/asked": 5.0,
        "user/left": 1.0,
        "user/replied": 4.0,
        "user/turn_limit": 1.0,
    }


def test_a_reply_that_cannot_be_used_is_asked_for_again_with_another_seed_and_then_ends_the_dialogue():
    voice = Lines(
        a=["no label", "Question: ", Spoken(status="truncated", text="Question: Wh"), "too late"],
        b=["no label", "Question: In winter."],
        c=[Spoken(status="refused"), Spoken(status="server_error")],
    )
    user = SimulatedUser(voice, Simulator(max_asks=3))
    answers = user.replies([dialogue("x", "y", name=name) for name in "abcd"], [1, 2, 3, 4])
    assert answers == [
        Answer(failed="truncated"),
        Answer(message=Message(role="user", text="In winter.")),
        Answer(failed="server_error"),
        Answer(message=Message(role="user", text="I see.")),
    ]
    assert [name for name, _ in voice.asked] == ["a", "b", "c", "d", "a", "b", "c", "a"]
    seeds = [seed for _, seed in voice.asked]
    assert seeds[:4] == [1, 2, 3, 4]
    assert len(set(seeds)) == 8
    assert user.counts == {"asked": 8, "again": 4, "turn_limit": 0, "truncated": 1, "server_error": 1, "replied": 2}


def test_one_dialogue_alone_gives_the_message_none_or_a_user_error():
    user = SimulatedUser(Lines(a=["x", "x", "x"], b=["Question: [DONE]"]), Simulator(stop_signal="[DONE]"))
    assert isinstance(user, User)
    assert isinstance(user, ManyUsers)
    assert user.reply(dialogue("x", "y", name="c"), 1) == Message(role="user", text="I see.")
    assert user.reply(dialogue("x", "y", name="b"), 1) is None
    with pytest.raises(UserError, match=r"'a': the simulated user gave no reply \(no_label\)") as error:
        user.reply(dialogue("x", "y", name="a"), 1)
    assert error.value.status == "no_label"


def test_seeds_of_the_user_come_from_row_turn_and_role():
    voice = Lines()
    played(SimulatedUser(voice, Simulator()), "ab", 2)
    expected = [(name, turn_seed("user", row, turn)) for turn in range(2) for row, name in enumerate("ab")]
    assert voice.asked == expected
    assert (
        len({seed for _, seed in voice.asked} | {turn_seed("assistant", row, turn) for row in range(2) for turn in range(2)})
        == 8
    )


def test_a_simulated_users_words_are_never_in_the_loss():
    (rollout,) = played(SimulatedUser(Lines(a=["Question: Thank you. In winter."]), Simulator()), "a", 1)
    spans = [span for span in rollout.spans if span.role == "user"]
    said = [TOKENIZER.decode(rollout.token_ids[span.start : span.stop]) for span in spans]
    assert said[1] == "Thank you. In winter."
    assert all(span.ended is None for span in spans)
    assert [span.ended is not None for span in rollout.spans if span.role == "assistant"] == [True, True]
    assert len(rollout.logp_sampler) == sum(s.stop - s.start for s in rollout.spans if s.role == "assistant")


def test_a_reply_that_fills_the_context_ends_the_dialogue_at_the_last_answer():
    long = "Question: " + "Thank you. " * 120
    (rollout,) = played(SimulatedUser(Lines(a=[long]), Simulator()), "a", 3)
    assert rollout.stop == "length"
    assert rollout.spans[-1].role == "assistant"


def test_users_are_built_from_configs_by_kind():
    assert set(USERS) == {"scripted", "recorded", "model", "endpoint"}
    assert isinstance(build_user({"kind": "scripted", "world": {"kind": "trip_desk", "trap": True}}), WorldUser)
    assert isinstance(build_user({"kind": "recorded"}), RecordedUser)
    with pytest.raises(ConfigError, match="user: kind is 'scriptd'; did you mean 'scripted'"):
        build_user({"kind": "scriptd"})
    with pytest.raises(ConfigError, match="user: world: kind is 'trip_desc'; did you mean 'trip_desk'"):
        parse_user({"kind": "scripted", "world": "trip_desc"})
    with pytest.raises(ConfigError, match="no policy is at hand to play the user"):
        build_user({"kind": "model"})
    with pytest.raises(ConfigError, match="key_env is no name"):
        parse_user({"kind": "endpoint", "endpoint": {"base_url": "http://h/v1", "model": "m", "key_env": "sk-1"}})


def test_a_user_of_your_own_is_named_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from rewarden.spec import Spec\nfrom rewarden.types import Message\n"
        "class Echo(Spec):\n    word: str\n    def build(self, *, policy=None, folder=None):\n        return EchoUser(self.word)\n"
        "class EchoUser:\n    def __init__(self, word):\n        self.word = word\n"
        "    def reply(self, dialogue, seed):\n        return Message(role='user', text=self.word)\n"
        "class Nothing(Spec):\n    def build(self, *, policy=None, folder=None):\n        return 3\n"
    )
    user = build_user({"kind": "mine.py:Echo", "word": "Hm."})
    assert user.reply(dialogue("a", "b"), 1).text == "Hm."
    with pytest.raises(ConfigError, match="build\\(\\) returned int"):
        build_user({"kind": "mine.py:Nothing"})

    class Builds(Spec):
        pass

    with pytest.raises(ConfigError, match="Builds builds no user"):
        parse_user(Builds())
