"""One client for every OpenAI-compatible chat endpoint: a hosted model, vLLM, SGLang, llama.cpp, `transformers serve`.

    client = Endpoint(base_url="http://localhost:8000/v1", model="NAME", key_env="MY_KEY").build()
    replies = client.complete([ChatRequest(messages=(Message(role="user", text="Hello"),), max_tokens=64, seed=1)])

A reply is never an exception: what went wrong is its `status`, counted in `client.usage`. Only what no second try can mend
(a wrong key, path or model) and a server that is down raise, with one message.
"""

from rewarden.runtime.endpoint.cache import ReplyCache
from rewarden.runtime.endpoint.client import EndpointClient
from rewarden.runtime.endpoint.config import Endpoint
from rewarden.runtime.endpoint.reply import Reply, TokenLogp
from rewarden.runtime.endpoint.request import ChatRequest
from rewarden.runtime.endpoint.usage import Usage

__all__ = ["ChatRequest", "Endpoint", "EndpointClient", "Reply", "ReplyCache", "TokenLogp", "Usage"]
