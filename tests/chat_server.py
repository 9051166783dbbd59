"""An OpenAI-compatible chat server on loopback over a real model, with faults on request; for tests of clients.

with ChatServer(model, tokenizer) as server:
    server.url                                # http://127.0.0.1:PORT/v1
    server.faults.extend([Fault(code=500)])   # the next request meets it; then the model answers again
    server.bodies                             # what was asked, in order
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


@dataclass(frozen=True)
class Fault:
    """What one request gets instead of an answer; `body` None is an error in OpenAI's shape."""

    code: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    drop: bool = False
    trickle: bool = False


class ChatServer(ThreadingHTTPServer):
    """`fault_of(body)` may give a fault for certain requests; `faults` are for the next ones, whatever they ask."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, model, tokenizer, *, name="tiny", key=None, wait_s=0.0, prefill="", positions=None, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.tokenizer, self.name, self.key = model.eval(), tokenizer, name, key
        self.wait_s, self.prefill = wait_s, prefill
        self.positions = positions or model.config.max_position_embeddings
        self.faults: deque[Fault] = deque()
        self.fault_of: Callable[[dict], Fault | None] = lambda body: None
        self.bodies: list[dict] = []
        self.times: list[float] = []
        self.most_at_once = self.at_once = 0
        self.lock, self.model_lock, self.closing = threading.Lock(), threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that hung up or was killed is what these tests are about."""

    def answer(self, body: dict) -> tuple[int, dict]:
        """What the model says."""
        messages = [{"role": m["role"], "content": m["content"]} for m in body["messages"]]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        most = body.get("max_tokens") or body["max_completion_tokens"]
        if len(ids) + most > self.positions:
            words = f"This model's maximum context length is {self.positions} tokens, but {len(ids) + most} were requested"
            return 400, {"error": {"message": words, "code": "context_length_exceeded"}}
        temperature = body.get("temperature", 1.0)
        with self.model_lock, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(body.get("seed", 0))
            given = torch.tensor([ids])
            out = self.model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=most, return_dict_in_generate=True, output_logits=True, pad_token_id=0,
                **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}),
            )  # fmt: skip
        new = out.sequences[0, len(ids) :].tolist()
        ended = new[-1] == self.tokenizer.eos_token_id
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.prefill + self.tokenizer.decode(new, skip_special_tokens=True)},
            "finish_reason": "stop" if ended else "length",
        }
        if body.get("logprobs"):
            logps = [step[0].double().log_softmax(-1) for step in out.logits]
            choice["logprobs"] = {
                "content": [self._logp(i, logp, body["top_logprobs"]) for i, logp in zip(new, logps, strict=True)]
            }
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(ids) + len(new)}
        return 200, {"id": "x", "object": "chat.completion", "model": self.name, "choices": [choice], "usage": usage}

    def _logp(self, chosen: int, logp_V: torch.Tensor, most: int) -> dict:
        def entry(i):
            return {"token": self.tokenizer.decode([i]), "logprob": logp_V[i].item(), "bytes": None}

        return {**entry(chosen), "top_logprobs": [entry(i) for i in logp_V.topk(most).indices.tolist()]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def log_message(self, format, *args):
        pass

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.times.append(time.monotonic())
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            fault = server.faults.popleft() if server.faults else server.fault_of(body)
        try:
            server.closing.wait(server.wait_s)
            if fault is not None:
                self._fail(fault)
            elif server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                self._send(401, {"error": {"message": f"Incorrect key provided: {self.headers.get('Authorization')}"}})
            elif self.path != "/v1/chat/completions":
                self._send(404, {"error": {"message": f"no such path: {self.path}"}})
            elif body["model"] != server.name:
                self._send(404, {"error": {"message": f"The model {body['model']} does not exist"}})
            else:
                self._send(*server.answer(body))
        finally:
            with server.lock:
                server.at_once -= 1

    def _fail(self, fault: Fault):
        if fault.hang:
            self.server.closing.wait(30)
        if fault.hang or fault.drop:
            self.close_connection = True
        elif fault.trickle:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            while not self.server.closing.wait(0.05):
                self.wfile.write(b" ")
        else:
            body = (
                json.dumps({"error": {"message": f"made to fail with {fault.code}"}}).encode()
                if fault.body is None
                else fault.body
            )
            self._send_bytes(fault.code, body, fault.headers)

    def _send(self, code: int, answer: dict):
        self._send_bytes(code, json.dumps(answer).encode(), {})

    def _send_bytes(self, code: int, body: bytes, headers: dict[str, str]):
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
