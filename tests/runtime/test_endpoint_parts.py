"""What needs no server: shapes of replies, waits, the cache file."""

import json
from datetime import UTC, datetime

import pytest

from rewarden.errors import ConfigError
from rewarden.runtime.endpoint import ChatRequest, Reply, ReplyCache, TokenLogp
from rewarden.runtime.endpoint.reply import as_record, from_record, read_refusal, read_reply
from rewarden.runtime.endpoint.request import body_of, key_of
from rewarden.runtime.endpoint.wait import back_off, retry_after
from rewarden.types import Message


def completion(**fields):
    choice = {"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice | fields.pop("choice", {})], **fields})


@pytest.mark.parametrize(
    "body",
    [
        "", "null", "[]", "3", "{", "[" * 100_000, '{"choices": {}}', '{"choices": [3]}', '{"choices": [{"message": "x"}]}',
        '{"choices": [{"message": {"content": 3}}]}', '{"choices": [{"message": {"content": [{"type": "image"}]}}]}', '{"error": {"message": "busy"}}',
        '{"choices": null, "error": "busy"}',
    ],
)  # fmt: skip
def test_every_body_that_is_no_completion_is_malformed(body):
    reply = read_reply(body)
    assert (reply.status, reply.text) == ("malformed", "")
    assert reply.error


def test_parts_are_joined_and_absent_counts_stay_unknown():
    reply = read_reply(
        completion(choice={"message": {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}})
    )
    assert (reply.status, reply.text, reply.prompt_tokens, reply.completion_tokens) == ("ok", "ab", None, None)
    reply = read_reply(completion(usage={"prompt_tokens": -1, "completion_tokens": 2.5}))
    assert (reply.prompt_tokens, reply.completion_tokens) == (None, None)


def test_half_an_emoji_becomes_the_replacement_character():
    assert read_reply(completion(choice={"message": {"content": "a\ud83d"}})).text == "a\ufffd"
    assert read_reply(r'{"choices": [{"message": {"content": "\ud83d\ude00"}}]}').text == "\U0001f600"


def test_a_refusal_field_is_a_refusal():
    reply = read_reply(completion(choice={"message": {"content": None, "refusal": "I cannot."}}))
    assert (reply.status, reply.error) == ("refused", "I cannot.")


def test_log_probabilities_that_are_not_numbers_are_none():
    good = {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}
    reply = read_reply(completion(choice={"logprobs": {"content": [good]}}))
    assert reply.logprobs == (TokenLogp(token="a", logp=-0.5, top=(("a", -0.5), ("b", -1.5))),)
    for bad in ({"token": "a"}, {"token": "a", "logprob": "x"}, {"token": 3, "logprob": 1.0}, 7, {**good, "top_logprobs": [3]}):
        assert read_reply(completion(choice={"logprobs": {"content": [bad]}})).logprobs is None
    assert read_reply(completion(choice={"logprobs": None})).logprobs is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "no"}}', "no"),
        ('{"error": "no"}', "no"),
        ('{"detail": [{"msg": "no"}]}', "no"),
        ('{"message": "no"}', "no"),
        ('[{"error": {"message": "no"}}]', "no"),
        ("plain\n words", "plain words"),
        ("", "no words"),
    ],
)
def test_the_servers_words_are_found_in_every_shape(body, words):
    assert read_refusal(400, body) == Reply(status="rejected", error=f"HTTP 400: {words}")


def test_the_key_depends_on_all_that_decides_the_reply():
    def key(salt="", model="m", send_seed=True, extra=None, **fields):
        given = {"messages": (Message(role="user", text="a"),), "max_tokens": 3, "seed": 1} | fields
        request = ChatRequest(**given)
        body = body_of(request, model=model, length_field="max_tokens", send_seed=send_seed, extra=extra or {})
        return key_of(body, seed=request.seed, salt=salt)

    keys = [
        key(), key(salt="s"), key(model="n"), key(extra={"x": 1}), key(seed=2), key(seed=2, send_seed=False), key(send_seed=False), key(max_tokens=4),
        key(temperature=0.5), key(top_p=0.5), key(stop=("x",)), key(top_logprobs=0), key(messages=(Message(role="system", text="a"),)),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    # Seeds that are equal in 31 bits are still two draws.
    assert key(seed=1 + 2**31) != key(seed=1)


def test_waits_double_with_jitter_up_to_the_limit_and_repeat_with_the_seed():
    def waits(seed=0, key="k"):
        return [back_off(attempt, first_s=0.5, most_s=60.0, seed=seed, key=key) for attempt in range(12)]

    for attempt, wait in enumerate(waits()):
        full = min(0.5 * 2**attempt, 60.0)
        assert full / 2 <= wait <= full
    assert waits() == waits()
    assert waits() != waits(seed=1) != waits(key="l")
    assert back_off(10**6, first_s=1.0, most_s=7.0, seed=0, key="k") <= 7.0


def test_retry_after_is_seconds_or_a_date():
    now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
    assert retry_after("7") == 7.0
    assert retry_after("Thu, 01 Jan 2026 12:00:30 GMT", now) == 30.0
    assert retry_after("Thu, 01 Jan 2026 11:00:00 GMT", now) == 0.0
    assert retry_after("-3") == 0.0
    assert [retry_after(text) for text in (None, "soon", "nan", "inf", "")] == [None] * 5


FULL = Reply(
    status="ok", text="a\n\u2028ü", finish_reason="stop", model="m", prompt_tokens=3, completion_tokens=0,
    logprobs=(TokenLogp(token="a", logp=-0.25, top=(("a", -0.25), ("b", -float("inf")))),),
)  # fmt: skip


def test_a_reply_comes_back_from_the_file_as_it_was(tmp_path):
    path = tmp_path / "new" / "kept.jsonl"
    cache = ReplyCache(path)
    cache.keep("k1", FULL, "http://h/v1")
    cache.keep("k2", Reply(status="empty"), "http://h/v1")
    for read in (cache, ReplyCache(path)):
        reply, source = read.find("k1")
        assert (source, reply.cached) == ("http://h/v1", True)
        assert as_record(reply) == as_record(FULL)
        assert from_record(as_record(FULL)).logprobs == FULL.logprobs
        assert read.find("k2")[0] == Reply(status="empty", cached=True)
        assert read.find("k3") is None
        assert len(read) == 2


@pytest.mark.parametrize("kept_bytes", [1, 9, 30, -1])
def test_a_half_written_last_line_is_ignored_and_the_next_reply_begins_a_new_one(tmp_path, kept_bytes):
    path = tmp_path / "kept.jsonl"
    cache = ReplyCache(path)
    cache.keep("k1", FULL, "u")
    whole = path.stat().st_size
    cache.keep("k2", FULL, "u")
    half = path.read_bytes()
    path.write_bytes(half[: whole + kept_bytes] if kept_bytes > 0 else half[:-1])
    cut = ReplyCache(path)
    assert (len(cut), cut.ignored, cut.find("k2")) == (1, 1, None)
    cut.keep("k3", FULL, "u")
    again = ReplyCache(path)
    assert again.find("k1") is not None
    assert again.find("k3") is not None


def test_only_a_half_line_is_a_cache_that_was_just_begun(tmp_path):
    path = tmp_path / "kept.jsonl"
    path.write_bytes(b'{"ke')
    ReplyCache(path).keep("k", FULL, "u")
    assert ReplyCache(path).find("k") is not None


def test_two_writers_share_a_file(tmp_path):
    path = tmp_path / "kept.jsonl"
    first, second = ReplyCache(path), ReplyCache(path)
    for number in range(20):
        (first, second)[number % 2].keep(f"k{number}", FULL, "u")
    assert len(ReplyCache(path)) == 20


def test_another_file_is_not_written_into(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nmore\n")
    with pytest.raises(ConfigError, match="none is a kept reply; choose another file"):
        ReplyCache(path)
    assert path.read_text() == "my notes\nmore\n"
