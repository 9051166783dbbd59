"""The client against a real server on loopback that generates with a real (tiny) model."""

import asyncio
import json
import logging
import socket
import time

import pytest
import torch

from rewarden.errors import ConfigError, EndpointError
from rewarden.runtime.endpoint import ChatRequest, Endpoint
from rewarden.spec import check
from rewarden.types import Message
from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_policy
from tests.chat_server import ChatServer, Fault

MODEL, TOKENIZER = build_policy(TripDesk(), 0)
SAID = "I want a cheap trip."


def serving(**options):
    return ChatServer(MODEL, TOKENIZER, **options)


def client_of(server, *, cache=None, **fields):
    given = {"base_url": server.url, "model": "tiny", "backoff_s": 0.01, "timeout_s": 20.0, "max_retries": 3}
    return Endpoint(**(given | fields)).build(cache=cache)


def requests(num, **fields):
    options = {"max_tokens": 5, "temperature": 1.0} | fields
    return [ChatRequest(messages=(Message(role="user", text=SAID),), seed=seed, **options) for seed in range(num)]


def content(text, **choice):
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"} | choice]}).encode()


def test_the_reply_is_what_the_model_writes_and_its_tokens_are_counted():
    with serving() as server:
        client = client_of(server, prompt_price=10.0, completion_price=1000.0)
        (reply,) = client.complete(requests(1, max_tokens=4, temperature=0.0))
    ids = TOKENIZER.apply_chat_template([{"role": "user", "content": SAID}], add_generation_prompt=True, return_dict=False)
    sequence = list(ids)
    for _ in range(4):
        sequence.append(int(MODEL(input_ids=torch.tensor([sequence])).logits[0, -1].argmax()))
    assert TOKENIZER.eos_token_id not in sequence[len(ids) :]
    assert reply.text == TOKENIZER.decode(sequence[len(ids) :], skip_special_tokens=True)
    assert (reply.status, reply.finish_reason, reply.model, reply.cached) == ("truncated", "length", "tiny", False)
    assert (reply.prompt_tokens, reply.completion_tokens) == (len(ids), 4)
    usage = client.usage
    assert (usage.asked, usage.sent, usage.prompt_tokens, usage.completion_tokens) == (1, 1, len(ids), 4)
    assert usage.cost == pytest.approx((10 * len(ids) + 1000 * 4) / 1e6)
    assert usage.statuses == {"truncated": 1}


def test_replies_come_in_order_and_the_seed_decides():
    with serving() as server:
        first = client_of(server).complete(requests(6))
        second = client_of(server).complete(requests(6)[::-1])
    assert [reply.text for reply in first] == [reply.text for reply in second][::-1]
    assert len({reply.text for reply in first}) == 6
    assert sorted(body["seed"] for body in server.bodies) == sorted([*range(6), *range(6)])


def test_a_seed_of_63_bits_is_sent_in_31():
    with serving() as server:
        wide = [ChatRequest(messages=(Message(role="user", text=SAID),), max_tokens=2, seed=2**62 + 5)]
        client_of(server).complete(wide)
    assert server.bodies[0]["seed"] == 5


def test_equal_requests_are_sent_once_and_a_second_call_sends_nothing():
    with serving() as server:
        client = client_of(server)
        twice = client.complete([*requests(2), *requests(2)])
        again = client.complete(requests(2))
    assert len(server.bodies) == 2
    assert twice[:2] == twice[2:]
    assert [reply.cached for reply in again] == [True, True]
    assert [reply.text for reply in again] == [reply.text for reply in twice[:2]]
    assert (client.usage.asked, client.usage.repeated, client.usage.cached, client.usage.sent) == (6, 2, 2, 2)


def test_without_sending_seeds_two_draws_are_still_two_requests():
    with serving() as server:
        client_of(server, send_seed=False).complete(requests(3))
    assert len(server.bodies) == 3
    assert all("seed" not in body for body in server.bodies)


def test_log_probabilities_are_those_of_the_model():
    with serving() as server:
        (reply,) = client_of(server).complete(requests(1, top_logprobs=3))
        (plain,) = client_of(server).complete(requests(1))
    ids = TOKENIZER.apply_chat_template([{"role": "user", "content": SAID}], add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logp_V = MODEL(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
    first = reply.logprobs[0]
    assert len(reply.logprobs) == 5
    best = logp_V.topk(3)
    assert [logp for _, logp in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert [token for token, _ in first.top] == [TOKENIZER.decode([i]) for i in best.indices.tolist()]
    (chosen,) = TOKENIZER.convert_tokens_to_ids(["▁" + first.token]) if first.token.isalpha() else [None]
    if chosen is not None and chosen != TOKENIZER.unk_token_id:
        assert first.logp == pytest.approx(logp_V[chosen].item(), abs=1e-5)
    assert plain.logprobs is None


def test_no_more_requests_are_on_the_way_than_allowed():
    with serving(wait_s=0.05) as server:
        client_of(server, concurrency=3).complete(requests(9, max_tokens=1))
    assert server.most_at_once == 3


def test_progress_is_told_and_counts_what_the_cache_had():
    with serving() as server:
        client = client_of(server, concurrency=1)
        client.complete(requests(1))
        told = []
        client.complete(requests(3), on_reply=lambda done, total: told.append((done, total)))
    assert told == [(2, 3), (3, 3)]


@pytest.mark.parametrize(
    "fault",
    [Fault(code=500), Fault(code=503), Fault(code=429), Fault(code=408), Fault(drop=True), Fault(body=b"<html>busy</html>"), Fault(body=b'{"choices": []}')],
    ids=["500", "503", "429", "408", "dropped", "html", "no choices"],
)  # fmt: skip
def test_a_fault_that_passes_is_tried_again(fault):
    with serving() as server:
        server.faults.extend([fault, fault])
        client = client_of(server)
        (reply,) = client.complete(requests(1))
    assert reply.status == "truncated"
    assert (client.usage.sent, client.usage.retries, client.usage.failed) == (3, 2, 0)


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (Fault(code=500), "server_error", "made to fail with 500"),
        (Fault(code=429), "rate_limited", "429"),
        (Fault(body=b"not json"), "malformed", "not json"),
        (Fault(body=b'{"choices": [{}]}'), "malformed", "no choices"),
        (Fault(drop=True), "unreachable", "RemoteProtocolError"),
        (Fault(hang=True), "timeout", "no reply within 0.3 s"),
        (Fault(trickle=True), "timeout", "no reply within 0.3 s"),
    ],
    ids=["500", "429", "malformed", "no message", "dropped", "hanging", "trickling"],
)
def test_a_fault_that_stays_is_a_counted_status_and_the_others_go_on(fault, status, words):
    with serving() as server:
        server.fault_of = lambda body: fault if body["seed"] == 1 else None
        client = client_of(server, max_retries=1, timeout_s=0.3 if status == "timeout" else 20.0, concurrency=1)
        started = time.monotonic()
        replies = client.complete(requests(3, max_tokens=1))
    assert time.monotonic() - started < 10
    assert [reply.status for reply in replies] == ["truncated", status, "truncated"]
    assert words in replies[1].error
    assert client.usage.statuses == {"truncated": 2, status: 1}
    assert (client.usage.sent, client.usage.failed) == (4, 1)
    assert client.usage.report("user")[f"user/{status}"] == 1.0


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault(body=content("")), "empty"),
        (Fault(body=content(" \n")), "empty"),
        (Fault(body=content(None)), "empty"),
        (Fault(body=content("cut he", finish_reason="length")), "truncated"),
        (Fault(body=content("", finish_reason="content_filter")), "refused"),
        (Fault(code=400, body=b'{"error": {"message": "m", "code": "content_filter"}}'), "refused"),
        (Fault(code=400, body=b'{"error": {"message": "maximum context length is 8 tokens"}}'), "too_long"),
        (Fault(code=400, body=b'{"error": {"message": "bad field"}}'), "rejected"),
        (Fault(code=422, body=b'{"detail": [{"msg": "bad field", "loc": ["body"]}]}'), "rejected"),
    ],
)
def test_what_another_try_would_not_change_is_not_tried_again(fault, status):
    with serving() as server:
        server.faults.append(fault)
        client = client_of(server)
        (reply,) = client.complete(requests(1))
        assert (reply.status, client.usage.sent) == (status, 1)
        client.complete(requests(1))
        # What the server decided is kept; a request that it could not read may be mended.
        assert client.usage.sent == (2 if status == "rejected" else 1)


def test_retry_after_is_waited_for_by_everybody():
    with serving() as server:
        server.faults.append(Fault(code=429, headers={"Retry-After": "1"}))
        replies = client_of(server, concurrency=2, backoff_s=0.0).complete(requests(8, max_tokens=1))
    assert all(reply.status == "truncated" for reply in replies)
    told, later = server.times[0], [moment for moment in server.times if moment > server.times[0] + 0.2]
    assert len(later) >= 6
    assert min(later) - told >= 0.95


def test_a_server_that_asks_to_wait_too_long_is_not_asked_again():
    with serving() as server:
        server.faults.append(Fault(code=429, headers={"Retry-After": "3600"}))
        client = client_of(server, max_wait_s=5.0)
        (reply,) = client.complete(requests(1))
    assert (reply.status, client.usage.sent) == ("rate_limited", 1)


def test_a_slow_server_is_waited_for():
    with serving(wait_s=0.4) as server:
        (reply,) = client_of(server, timeout_s=20.0).complete(requests(1))
    assert reply.status == "truncated"


def test_a_prompt_beyond_the_context_is_too_long():
    with serving() as server:
        (reply,) = client_of(server).complete(requests(1, max_tokens=400))
    assert reply.status == "too_long"
    assert "maximum context length is 320 tokens" in reply.error


def test_a_wrong_key_is_one_message_that_does_not_show_it(monkeypatch, tmp_path, caplog):
    secret = "sk-abcdefghijklmnopqrstuvwx"
    caplog.set_level(logging.DEBUG)
    with serving(key="another") as server:
        monkeypatch.setenv("MY_KEY", secret)
        client = client_of(server, key_env="MY_KEY", cache=tmp_path / "kept.jsonl")
        with pytest.raises(
            ConfigError, match=r"answers 401 \(Incorrect key provided: Bearer \*\*\*\); check the key in MY_KEY"
        ) as error:
            client.complete(requests(20))
        with pytest.raises(ConfigError, match="name the variable that holds the key in key_env"):
            client_of(server).complete(requests(1))
    assert len(server.bodies) <= 9
    assert secret not in str(error.value) + caplog.text + repr(client) + repr(client.usage) + client.endpoint.model_dump_json()


def test_the_right_key_works_and_is_written_nowhere(monkeypatch, tmp_path, caplog):
    secret = "sk-abcdefghijklmnopqrstuvwx"
    caplog.set_level(logging.DEBUG)
    with serving(key=secret) as server:
        monkeypatch.setenv("MY_KEY", f" {secret}\n")
        server.faults.append(Fault(code=500, body=f"you sent {secret}".encode()))
        server.faults.append(Fault(body=content(f"your key is {secret}")))
        replies = client_of(server, key_env="MY_KEY", cache=tmp_path / "kept.jsonl").complete(requests(2))
    assert all(reply.status in ("ok", "truncated") for reply in replies)
    assert secret not in caplog.text + (tmp_path / "kept.jsonl").read_text() + repr(replies)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "other"}, r"404 \(The model other does not exist\); check base_url .* and the model's name, 'other'"),
        ({"path": "/v2"}, r"404 \(no such path: /v2/chat/completions\); check base_url"),
    ],
)
def test_a_wrong_model_or_path_is_one_message(fields, words):
    with serving() as server:
        url = server.url.replace("/v1", fields.pop("path", "/v1"))
        with pytest.raises(ConfigError, match=words):
            client_of(server, base_url=url, **fields).complete(requests(3))


def test_a_redirect_is_named_and_not_followed():
    with serving() as server:
        server.faults.append(Fault(code=307, headers={"Location": "https://elsewhere.example/v1/chat/completions?token=x"}))
        with pytest.raises(ConfigError, match=r"redirects \(307\) to 'https://elsewhere.example/v1/chat/completions'; write"):
            client_of(server).complete(requests(1))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_endpoint_that_is_down_is_one_message():
    client = Endpoint(base_url=f"http://127.0.0.1:{free_port()}/v1", model="m", max_retries=2, backoff_s=0.01).build()
    with pytest.raises(
        EndpointError, match=r"nothing answers at http://127.0.0.1:\d+/v1 after 3 tries \(ConnectError.*\); start the server"
    ):
        client.complete(requests(50))


def test_an_endpoint_that_dies_leaves_counted_statuses_or_stops_the_run_and_a_second_run_asks_for_the_rest(tmp_path):
    path = tmp_path / "kept.jsonl"
    patient = {"concurrency": 1, "max_retries": 0}
    with serving() as server:
        port = server.server_address[1]
        client = client_of(server, cache=path, max_failures=0, **patient)
        client.complete(requests(3))
    lost = client.complete(requests(6))
    assert [reply.status for reply in lost] == ["truncated"] * 3 + ["unreachable"] * 3
    assert client.usage.failed == 3
    with serving(port=port) as server:
        client = client_of(server, cache=path, max_failures=2, **patient)
        client.complete(requests(4))
        assert len(server.bodies) == 1
    with pytest.raises(
        EndpointError, match=r"2 requests failed one after another, the last with unreachable .*max_failures: 2"
    ):
        client.complete(requests(9))
    with serving(port=port) as server:
        assert all(reply.status == "truncated" for reply in client_of(server, cache=path, **patient).complete(requests(9)))
        assert sorted(body["seed"] for body in server.bodies) == [4, 5, 6, 7, 8]


def test_a_proxy_of_the_environment_does_not_stand_before_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with serving() as server:
        (reply,) = client_of(server, max_retries=0).complete(requests(1))
    assert reply.status == "truncated"


def test_it_works_inside_a_running_event_loop():
    async def notebook():
        return client_of(server).complete(requests(2))

    with serving() as server:
        assert [reply.status for reply in asyncio.run(notebook())] == ["truncated"] * 2


def test_what_is_wrong_in_the_config_is_said_without_showing_secrets():
    good = {"base_url": "http://h/v1/", "model": "m"}
    assert Endpoint(**good).base_url == "http://h/v1"
    for fields, words, hidden in [
        ({"key_env": "sk-123-abc"}, "key_env is no name of an environment variable", "sk-123"),
        ({"base_url": "http://me:pw1@h/v1"}, "base_url holds a user name", "pw1"),
        ({"base_url": "http://h/v1?key=pw2"}, "base_url holds a user name", "pw2"),
        ({"base_url": "h:8000"}, "write http://HOST:PORT/v1", None),
        ({"base_url": "http://h:x/v1"}, "base_url is no URL", None),
        ({"base_url": "http://h/v1/chat/completions"}, "leave out what follows the version: http://h/v1", None),
        ({"model": ""}, "model is ''", None),
    ]:
        with pytest.raises(ConfigError, match=words) as error:
            check(Endpoint, good | fields)
        assert hidden is None or hidden not in str(error.value)


def test_a_key_that_is_not_set_or_is_none_is_said_before_anything_is_sent(monkeypatch):
    config = Endpoint(base_url="http://h/v1", model="m", key_env="MY_KEY")
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        config.build()
    monkeypatch.setenv("MY_KEY", "two words")
    with pytest.raises(ConfigError, match="MY_KEY holds blanks"):
        config.build()


def test_extra_fields_and_the_other_length_field_reach_the_server():
    with serving() as server:
        client_of(server, extra_body={"min_p": 0.1}, length_field="max_completion_tokens").complete(
            requests(1, stop=("x",), top_p=0.5)
        )
    (body,) = server.bodies
    assert (body["min_p"], body["max_completion_tokens"], body["stop"], body["top_p"], body["stream"]) == (
        0.1,
        5,
        ["x"],
        0.5,
        False,
    )
    assert "max_tokens" not in body
