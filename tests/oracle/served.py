"""A server over loopback in a thread, and small models with text for it."""

import asyncio
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import mambaslots as ms
import torch
import uvicorn
from mambaslots.loaded_model import LoadedText
from mambaslots.serve import ServerSettings, make_app
from mambaslots.serve.app import make_app_over
from mambaslots.serve.connections import Connection
from mambaslots.text import ByteTokenizer, ChatTemplate, GenerationDefaults, TextCodec
from oracle.fleet import Replicas

T = TypeVar("T")
TINY_CODE = Path(__file__).parents[2] / "models/tiny-code"
SPECIALS = {"<|begin|>": 256, "<|end|>": 257, "<|tools|>": 258}
TEMPLATE = """\
{{- "<|begin|>" -}}
{%- if tools %}{{ "<|tools|>" ~ (tools | tojson) ~ "<|end|>" }}{% endif -%}
{%- if tool_choice %}{{ "choice " ~ (tool_choice | tojson) }}{% endif -%}
{%- if style %}{{ "style " ~ style }}{% endif -%}
{%- for message in messages -%}
  {%- if message.role == "developer" %}{{ raise_exception("no role developer here") }}{% endif -%}
  {{- message.role ~ ":" ~ message.content -}}
  {%- for call in message.tool_calls or [] -%}
    {{- call.function.name ~ (call.function.arguments | tojson) -}}
  {%- endfor -%}
  {%- if message.tool_call_id %}{{ "#" ~ message.tool_call_id }}{% endif -%}
  {{- "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "assistant:" }}{% endif -%}
"""


def tiny_loaded(
    template: str | None = TEMPLATE, has_text: bool = True, defaults: GenerationDefaults | None = None
) -> ms.LoadedModel:
    """A random model of bytes in float64, whose answers end at no token."""
    config = ms.models.HybridConfig.tiny(vocab_size=259, pattern="M*M", dtype=torch.float64)
    chat = ChatTemplate(template) if template is not None else None
    text = TextCodec(ByteTokenizer(SPECIALS), chat) if has_text else None
    return ms.LoadedModel(text, defaults or GenerationDefaults(), Path("tiny"), ms.models.HybridLM(config))


def small_config(**overrides: Any) -> ms.InferenceConfig:
    """Room for eight requests of 2,048 tokens, in blocks of 32."""
    sizes: dict[str, Any] = {
        "block_size_tokens": 32,
        "max_requests": 8,
        "max_tokens_per_step": 256,
        "max_sequence_length": 2048,
        "num_kv_blocks": 512,
        "num_mamba_slots": 64,
    }
    return ms.InferenceConfig(**(sizes | overrides))


@dataclass(frozen=True)
class Reply:
    """A response: its status, headers by lower-case names, and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, whose form is checked."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines), lines
        return [each if each == "[DONE]" else json.loads(each) for each in (line[6:] for line in lines)]


@dataclass
class Served:
    """A server that runs.

    Attributes:
        loaded, config: what it serves.
        port: where it listens.
        app, loop, server: its parts.
    """

    loaded: ms.LoadedModel
    config: ms.InferenceConfig
    port: int
    app: Any
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def call(self, function: Callable[[ms.DynamicInferenceEngine], T]) -> T:
        """What `function` returns for the engine, in its thread."""
        return self.do(lambda: self.app.state.engine.call(function))

    def do(self, make: Callable[[], Any]) -> Any:
        """The result of a coroutine in the server's loop."""

        async def made() -> Any:
            return await make()

        return asyncio.run_coroutine_threadsafe(made(), self.loop).result(60)

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass at once by the clock of the server's loop, between two of its calls."""
        earlier = self.loop.time

        def move() -> None:
            self.loop.time = lambda: earlier() + seconds  # type: ignore[method-assign]

        self.loop.call_soon_threadsafe(move)

    def stats(self) -> ms.EngineStats:
        return self.call(lambda engine: engine.stats())

    @cached_property
    def reference(self) -> ms.DynamicInferenceEngine:
        """Another engine of the same model, to compare with."""
        return ms.DynamicInferenceEngine(self.loaded.model, self.config)

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """Send `body` as JSON, or as it is where it is bytes."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send("POST", path, sent, {"content-type": "application/json"} | named)

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, None, headers)


@contextmanager
def serving(
    loaded: ms.LoadedModel, config: ms.InferenceConfig | None = None, **settings: Any
) -> Iterator[Served]:
    """A server in a thread. At the end its engine is checked: nothing runs or waits, integrity holds."""
    config = config or small_config()
    engine = ms.DynamicInferenceEngine(loaded.model, config)
    app = make_app(engine, loaded, ServerSettings(**({"model_name": "tiny"} | settings)))
    with serving_app(app, loaded, config) as served:
        yield served
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.cache.num_held_kv_blocks) == (0, 0, 0)
    engine.check_integrity()


@contextmanager
def serving_replicas(
    replicas: Replicas, loaded: ms.LoadedModel, config: ms.InferenceConfig, **settings: Any
) -> Iterator[Served]:
    """As `serving`, over replicas. The server has the model's text alone."""
    text = LoadedText(loaded.text, loaded.generation, loaded.folder)
    fleet = replicas.fleet()
    app = make_app_over(fleet, text, ServerSettings(**({"model_name": "tiny"} | settings)))
    with serving_app(app, loaded, config) as served:
        served.do(_calling(replicas.start))
        try:
            yield served
        finally:
            served.do(fleet.close)
            served.do(replicas.close)


def _calling(function: Callable[[], None]) -> Callable[[], Any]:
    async def called() -> None:
        function()

    return called


@contextmanager
def serving_app(app: Any, loaded: ms.LoadedModel, config: ms.InferenceConfig) -> Iterator[Served]:
    """A server of `app` in a thread, which has started: its loop may be called, too."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", http=Connection, ws="none")
    )
    logging.getLogger("uvicorn.access").disabled = True
    served = Served(loaded, config, listener.getsockname()[1], app, server)
    thread = threading.Thread(target=_run, args=(served, listener), daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.002)
        yield served
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        listener.close()


def _run(served: Served, listener: socket.socket) -> None:
    asyncio.set_event_loop(served.loop)
    served.loop.run_until_complete(served.server.serve(sockets=[listener]))
    served.loop.close()
