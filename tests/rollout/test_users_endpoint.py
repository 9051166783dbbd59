"""Dialogues with a user behind a real OpenAI-compatible server on loopback, which generates with a real (tiny) model."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from transformers.utils.import_utils import is_serve_available

from rewarden.errors import EndpointError
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.rollout.play import play, turn_seed
from rewarden.rollout.users import build_user
from rewarden.runtime.endpoint.request import SEED_RANGE
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message
from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_policy
from tests.chat_server import ChatServer, Fault

MODEL, TOKENIZER = build_policy(TripDesk(), 0)
TEMPLATE = load_template(TOKENIZER)
POLICY = HFSampler(MODEL, TEMPLATE, Sampling(max_completion_length=5))
OPENING = "Hello, I want a trip with my dog."
# What a server does with an answer that it begins for the model; an untrained one would not write the labels by itself.
LABELLED = "Justification: it follows.\nQuestion: "


def serving(**options):
    given = {"prefill": LABELLED, "positions": 4096} | options
    return ChatServer(MODEL, TOKENIZER, **given)


def user_of(server, folder=None, simulator=None, **endpoint):
    fields = {"base_url": server.url, "model": "tiny", "backoff_s": 0.01, "max_retries": 1, "timeout_s": 20.0} | endpoint
    spec = {
        "kind": "endpoint",
        "endpoint": fields,
        "max_completion_length": 6,
        "simulator": {"on_truncated": "keep"} | (simulator or {}),
    }
    return build_user(spec, folder=folder)


def played(user, num=3, turns=2, opening=OPENING):
    start = [TEMPLATE.start(Conversation(id=f"row{i}", messages=(Message(role="user", text=opening),))) for i in range(num)]
    return play(start, sampler=POLICY, template=TEMPLATE, user=user, turns=[turns] * num, seeds=range(num))


def test_dialogues_are_played_with_a_user_over_http():
    with serving() as server:
        user = user_of(server, simulator={"personas": ["You have a dog."]})
        out = played(user)
    assert [rollout.stop for rollout in out] == ["turns"] * 3
    assert len(server.bodies) == 6
    prompts = {(body["messages"][0]["content"], body["seed"]) for body in server.bodies}
    for row, rollout in enumerate(out):
        messages = rollout.conversation.messages
        assert [m.role for m in messages] == ["user", "assistant"] * 3
        for turn in range(2):
            seen = messages[: 2 * turn + 2]
            (prompt,) = [text for text, seed in prompts if seed == turn_seed("user", row, turn) % SEED_RANGE]
            assert "".join(f"### {m.role}: {m.text}\n\n" for m in seen) in prompt
            assert "You have a dog." in prompt
        # All of the user's tokens are text that was given: they are in no assistant span, and have no log-probability.
        assert len(rollout.logp_sampler) == sum(s.stop - s.start for s in rollout.spans if s.role == "assistant")
        assert rollout.logp_sampler
        said = [TOKENIZER.decode(rollout.token_ids[s.start : s.stop]) for s in rollout.spans if s.role == "user"]
        assert said == [m.text for m in messages[::2]]
    body = server.bodies[0]
    assert (body["temperature"], body["max_tokens"], [m["role"] for m in body["messages"]]) == (0.8, 6, ["user"])
    assert user.counts["replied"] == 6
    assert user.voice.client.usage.sent == 6


def test_rows_with_one_opening_meet_different_users_and_a_second_run_sends_nothing(tmp_path):
    with serving() as server:
        first = played(user_of(server, tmp_path), num=4)
        sent = len(server.bodies)
        second = played(user_of(server, tmp_path), num=4)
    assert len(server.bodies) == sent == 8
    assert [rollout.token_ids for rollout in first] == [rollout.token_ids for rollout in second]
    assert len({rollout.conversation.messages[2].text for rollout in first}) == 4
    assert (tmp_path / "user_replies.jsonl").exists()


def failing(fault, row):
    """The fault for every request of one row's first user turn."""
    return lambda body: fault if body["seed"] == turn_seed("user", row, 0) % SEED_RANGE else None


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault(code=500), "server_error"),
        (Fault(code=429), "rate_limited"),
        (Fault(body=b"<html>"), "malformed"),
        (Fault(hang=True), "timeout"),
        (Fault(drop=True), "unreachable"),
        (Fault(code=400, body=b'{"error": {"message": "maximum context length is 8"}}'), "too_long"),
    ],
)
def test_a_failing_server_ends_one_dialogue_with_a_counted_status_and_the_rest_goes_on(fault, status):
    with serving() as server:
        server.fault_of = failing(fault, row=1)
        # One that answers first: a server that answers nothing at all is a message, not a status.
        user = user_of(server, timeout_s=1.0 if status == "timeout" else 20.0, concurrency=1)
        out = played(user)
    assert [rollout.stop for rollout in out] == ["turns", "error", "turns"]
    assert out[1].conversation.meta["user_failed"] == status
    assert out[1].conversation.messages[-1].role == "assistant"
    assert user.counts[status] == 1
    assert user.voice.client.usage.statuses[status] == 1


@pytest.mark.parametrize(
    ("text", "reason", "status"),
    [
        ("", "stop", "empty"),
        ("Justification: x", "stop", "no_label"),
        ("Question: Wh", "length", "truncated"),
        ("", "content_filter", "refused"),
    ],
)
def test_a_reply_that_cannot_be_used_is_asked_for_again_and_the_second_is_taken(text, reason, status):
    bad = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": reason}]}).encode()
    with serving() as server:
        server.fault_of = failing(Fault(body=bad), row=0)
        user = user_of(server, simulator={"on_truncated": "keep" if status != "truncated" else "reject", "max_asks": 4})
        server.fault_of = failing(Fault(body=bad), row=0)
        (first, _) = played(user, num=2, turns=1)
    asked = [body["seed"] for body in server.bodies]
    if status == "truncated":  # the model's own replies are cut at six tokens too
        assert (first.stop, first.conversation.meta["user_failed"]) == ("error", "truncated")
        assert len(asked) == len(set(asked)) == 8
    else:
        assert first.stop == "turns"
        assert user.counts["again"] == 1
        assert len(set(asked)) == 3


def test_the_stop_signal_over_http_makes_the_user_leave():
    left = json.dumps(
        {"choices": [{"message": {"content": "Justification: x\nQuestion: [DONE]"}, "finish_reason": "stop"}]}
    ).encode()
    with serving() as server:
        server.fault_of = failing(Fault(body=left), row=1)
        out = played(user_of(server, simulator={"stop_signal": "[DONE]"}))
    assert [rollout.stop for rollout in out] == ["turns", "user", "turns"]


def test_a_dialogue_longer_than_the_servers_context_is_too_long():
    with serving(positions=16) as server:
        user = user_of(server)
        out = played(user, num=2)
    assert [(rollout.stop, rollout.conversation.meta["user_failed"]) for rollout in out] == [("error", "too_long")] * 2


def test_a_user_who_is_down_is_one_message():
    with serving() as server:
        pass
    with pytest.raises(EndpointError, match=r"nothing answers at http://127.0.0.1:\d+/v1 after 2 tries"):
        played(user_of(server))


def serve(folder: Path, port: int, log) -> subprocess.Popen:
    program = shutil.which("transformers") or str(Path(sys.executable).parent / "transformers")
    return subprocess.Popen(
        [program, "serve", str(folder), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)],
        stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_dialogues_are_played_with_transformers_serve(smollm2, tmp_path):
    if not is_serve_available():
        pytest.skip("transformers serve needs fastapi and openai (transformers[serving]), which are not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (tmp_path / "serve.log").open("w") as log:
        server = serve(smollm2, port, log)
        try:
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline and server.poll() is None:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=2).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            fields = {
                "base_url": f"http://127.0.0.1:{port}/v1",
                "model": str(smollm2),
                "concurrency": 1,
                "timeout_s": 300.0,
                "max_retries": 0,
            }
            spec = {
                "kind": "endpoint",
                "endpoint": fields,
                "max_completion_length": 60,
                "simulator": {"on_truncated": "keep", "on_missing_label": "whole", "max_asks": 2},
            }
            user = build_user(spec, folder=tmp_path)
            out = played(user, num=2, turns=1)
            usage = user.voice.client.usage
            again = build_user(spec, folder=tmp_path)
            repeated = played(again, num=2, turns=1)
        finally:
            server.terminate()
            server.wait()
    assert [rollout.stop for rollout in out] == ["turns", "turns"], (tmp_path / "serve.log").read_text()[-2000:]
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0
    assert again.voice.client.usage.sent == 0
    assert [rollout.token_ids for rollout in out] == [rollout.token_ids for rollout in repeated]
