"""A client killed while it works: what it had received is never asked for again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rewarden.runtime.endpoint import ReplyCache
from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_policy
from tests.chat_server import ChatServer
from tests.runtime.ask_endpoint import AT_ONCE, TOTAL, ask_all

ROOT = Path(__file__).parents[2]


def kept_keys(path):
    """Keys of the replies that stand in the file as whole lines."""
    return {json.loads(line)["key"] for line in path.read_bytes().split(b"\n")[:-1] if line.endswith(b"}")}


def test_replies_received_before_kill_9_are_not_asked_for_again(tmp_path):
    model, tokenizer = build_policy(TripDesk(), 0)
    path, whole = tmp_path / "kept.jsonl", tmp_path / "whole.jsonl"
    with ChatServer(model, tokenizer, wait_s=0.02) as server:
        expected, _ = ask_all(server.url, whole)
        assert len(kept_keys(whole)) == TOTAL
        server.bodies.clear()
        asked_at_kill = []
        for enough in (10, 20):
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.ask_endpoint", server.url, str(path)],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            while child.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < enough):
                time.sleep(0.002)
            assert child.poll() is None, "the client ended before it could be killed"
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            time.sleep(0.3)  # what was on the way reaches the server
            asked_at_kill.append((kept_keys(path), len(server.bodies)))
        path.write_bytes(path.read_bytes() + b'{"key": "half')
        replies, usage = ask_all(server.url, path)
        total = len(server.bodies)
    (first_kept, first_asked), (second_kept, second_asked) = asked_at_kill
    assert len(first_kept) >= 10
    assert first_kept < second_kept
    # Every run asks for what is missing and for nothing else; only requests on the way at a kill are asked for twice.
    assert usage.sent == total - second_asked == TOTAL - len(second_kept)
    assert usage.cached == len(second_kept)
    assert first_asked - len(first_kept) <= AT_ONCE
    assert second_asked - first_asked - (len(second_kept) - len(first_kept)) <= AT_ONCE
    assert max(Counter(body["seed"] for body in server.bodies).values()) <= 3
    assert [reply.text for reply in replies] == [reply.text for reply in expected]
    assert len(ReplyCache(path)) == TOTAL
