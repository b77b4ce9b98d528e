"""Clients of a soak: they ask, read, leave in the middle, and send what no server should take."""

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fuzzing.malformed_bodies import COMPLETIONS, JSON, Malformed
from server_fuzz import fault_of
from soaking.model import random_text
from soaking.requests import LONGEST, Choice, Query, Record, Talk, wrong_form
from soaking.rounds import RoundTally

PATIENCE_S = 60.0
REFUSALS = {"queue_full": 429, "timeout": 504, "capacity": 503, "cancelled": 503, "draining": 503,
            "no_replica": 503}  # fmt: skip
"""Codes of the errors that a server under load may answer with, and their statuses."""


class RefusedError(Exception):
    """The server did not answer a good request."""

    def __init__(self, status: int, code: str | None, message: str = "") -> None:
        super().__init__(f"status {status}, {code}: {message}")
        self.status, self.code = status, code


class Weights:
    """Which weights are served.

    Attributes:
        version: of the weights.
        num_changes: odd while they change.
    """

    def __init__(self) -> None:
        self.version = 0
        self.num_changes = 0

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Answers that are under way within it are of no version."""
        self.num_changes += 1
        yield
        self.version = version
        self.num_changes += 1

    def are_those_of(self, num_changes: int) -> bool:
        """Whether weights were whole when so many changes were counted, and are the same since."""
        return num_changes == self.num_changes and num_changes % 2 == 0


@dataclass
class World:
    """What clients know of the server.

    Attributes:
        port: where it listens.
        keys: of tenants; empty where everybody is served.
        admin_key: None where there is none.
        talk: what is asked.
        weights: which ones answer.
        may_refuse: codes in `REFUSALS` that may come.
        paths: what operators read.
        until_s: `time.monotonic` after which no client asks any more.
        is_closing: whether the server may be gone.
        name: what repeats the round.
    """

    port: int
    keys: dict[str, str]
    admin_key: str | None
    talk: Talk
    until_s: float
    name: str
    weights: Weights = field(default_factory=Weights)
    may_refuse: set[str] = field(default_factory=lambda: {"queue_full"})
    paths: tuple[str, ...] = ("/metrics", "/status.json", "/health", "/v1/models", "/", "/page/page.js")
    is_closing: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_closing or time.monotonic() >= self.until_s

    def headers(self, query: Query) -> dict[str, str]:
        salt = {} if query.salt is None else {"x-cache-salt": query.salt}
        return JSON | self.of_tenant(query.tenant) | salt

    def sent(self, query: Query) -> bytes:
        """What a connection carries for a request."""
        body = json.dumps(query.body).encode()
        headers = self.headers(query) | {"host": "x", "content-length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {query.path} HTTP/1.1\r\n{head}\r\n".encode() + body

    def of_tenant(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"} if self.keys else {}

    def of_path(self, path: str) -> dict[str, str]:
        """The headers of who may read `path`."""
        if path.startswith("/v1/"):
            return self.of_tenant(next(iter(self.keys), ""))
        return {"authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}


class Client:
    """One client, in a thread of its own.

    Attributes:
        tally: what it counted.
        records: answers that are held against the oracle later.
        num_answers, num_unknown: answers that came complete, and those that may have been begun.
        num_answer_tokens: generated tokens of complete answers, at least.
    """

    def __init__(self, world: World, seed: str) -> None:
        self.tally = RoundTally()
        self.records: list[Record] = []
        self.num_answers = self.num_unknown = self.num_answer_tokens = 0
        self._world = world
        self._random = Random(seed)
        self._malformed = Malformed(self._random.randrange(2**31))
        self._connection: http.client.HTTPConnection | None = None
        self._actions: list[Callable[[], None]] = [
            *[self._ask] * 14, *[self._leave] * 3, *[self._send_malformed] * 2, self._look,
            self._try_to_share,
        ]  # fmt: skip

    def run(self) -> None:
        """Act until the time is over."""
        while not self._world.is_over:
            self.act(self._random.choice(self._actions))
        self.close()

    def act(self, action: Callable[[], None]) -> None:
        """Do something; what goes wrong is noted."""
        try:
            action()
        except RefusedError as refusal:
            self.tally.events[f"refused: {refusal.code}"] += 1
            time.sleep(self._random.uniform(0.0, 0.1))
            known = REFUSALS.get(refusal.code or "") == refusal.status
            if not (known and (refusal.code in self._world.may_refuse or self._world.is_closing)):
                self.note_fault(f"a good request was refused: {refusal}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            if not self._world.is_closing:
                self.note_fault(f"{action.__name__}: {type(error).__name__}: {error}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def note_fault(self, text: str) -> None:
        self.tally.mismatches.append(f"{self._world.name}: {text}"[:1500])

    # ---- requests that are answered

    def _ask(self) -> None:
        self.ask(self._world.talk.draw(self._random))

    def ask(self, query: Query) -> dict[str, Any] | None:
        """Send a request and read its whole answer, which is noted. Returns the usage that came."""
        world = self._world
        begun = world.weights.num_changes
        version = world.weights.version
        self.tally.requests += 1
        self.num_unknown += query.num_answers
        choices, usage = self._answered(query)
        self.num_unknown -= query.num_answers
        self.num_answers += query.num_answers
        self.num_answer_tokens += sum(len(one.tokens or ()) for one in choices)
        fault = wrong_form(query, choices, usage)
        if fault:
            self.note_fault(f"{fault}; asked {json.dumps(query.body)[:600]}")
            return usage
        world.talk.note(query, choices)
        cached = 0
        if usage is not None:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            self.tally.hits += cached > 0
            self.tally.resumed_tokens += cached
        if world.weights.are_those_of(begun):
            self.records.append(Record(query, choices, version, cached, world.name))
        return usage

    def _answered(self, query: Query) -> tuple[list[Choice], dict[str, Any] | None]:
        response = self._sent(query.path, json.dumps(query.body).encode(), self._world.headers(query))
        choices = [Choice() for _ in range(query.num_answers)]
        if query.body.get("stream") and response.status == 200:
            usage = self._read_stream(response, choices)
        else:
            content = self._whole(response)
            if response.status == 429 and response.getheader("retry-after") is None:
                raise RefusedError(429, "without Retry-After")
            if response.status != 200:
                raise _refusal(response.status, json.loads(content))
            answer = json.loads(content)
            usage = answer["usage"]
            for piece in answer["choices"]:
                choices[piece["index"]].add(piece)
        self.tally.events["streams" if query.body.get("stream") else "whole answers"] += 1
        return choices, usage

    def _read_stream(
        self, response: http.client.HTTPResponse, choices: list[Choice]
    ) -> dict[str, Any] | None:
        usage = None
        is_slow = self._random.random() < 0.1
        for event in _events(response):
            if is_slow:
                time.sleep(0.01)
            if event == "[DONE]":
                self._whole(response)
                return usage
            if "error" in event:
                self._whole(response)
                raise _refusal(REFUSALS.get(event["error"]["code"], 0), event)
            usage = event.get("usage") or usage
            for piece in event["choices"]:
                choices[piece["index"]].add(piece)
        raise http.client.IncompleteRead(b"a stream without [DONE]")

    def _sent(self, path: str, body: bytes | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        """The response to a request, on the connection that is open or on a new one."""
        if self._connection is None or self._random.random() < 0.1:
            self.close()
            self._connection = http.client.HTTPConnection("127.0.0.1", self._world.port, timeout=PATIENCE_S)
        self._connection.request("POST" if body is not None else "GET", path, body, headers)
        return self._connection.getresponse()

    def _whole(self, response: http.client.HTTPResponse) -> bytes:
        content = response.read()
        if response.will_close:
            self.close()
        return content

    # ---- clients that leave

    def _leave(self) -> None:
        """Ask, and go away: within the body, before an answer, or in the middle of it."""
        query = self._world.talk.draw(self._random)
        room = LONGEST - max(map(len, query.prompts))
        query.body |= {"stream": True, "max_tokens": self._random.choice([room // 2, room])}
        query.body.pop("stop", None)
        body = json.dumps(query.body).encode()
        sent = self._world.sent(query)
        when = self._random.choice(["within the body", "at once", "before a token", "in the middle"])
        self.tally.events[f"left {when}"] += 1
        self.num_unknown += query.num_answers * (when != "within the body")
        with socket.create_connection(("127.0.0.1", self._world.port), timeout=PATIENCE_S) as client:
            if when == "within the body":
                client.sendall(sent[: -len(body) // 2])
            else:
                client.sendall(sent)
            if when == "before a token":
                time.sleep(self._random.choice([0.001, 0.01, 0.05]))
            if when == "in the middle":
                for _ in range(self._random.randint(1, 6)):
                    client.recv(200)
            if self._random.random() < 0.5:  # a reset in place of an end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    # ---- what is no request for an answer

    def _send_malformed(self) -> None:
        sent = self._malformed.draw()
        query_headers = self._world.of_tenant(next(iter(self._world.keys), ""))
        self.close()
        response = self._sent(sent.path, sent.body, query_headers | sent.headers)
        content = self._whole(response)
        self.tally.events["malformed bodies"] += 1
        if response.status > 500 and json.loads(content)["error"]["code"] in self._world.may_refuse:
            return
        fault = fault_of(response.status, response.headers, content)
        if fault is not None and not self._world.is_closing:
            self.note_fault(f"{sent.kind}: {fault}: {sent.body[:200]!r}: {content[:300]!r}")

    def _look(self) -> None:
        path = self._random.choice(self._world.paths)
        response = self._sent(path, None, self._world.of_path(path))
        content = self._whole(response)
        self.tally.events["looks of operators"] += 1
        if response.status != 200 and not self._world.is_closing and response.status != 503:
            self.note_fault(f"{path} has status {response.status}: {content[:200]!r}")

    def _try_to_share(self) -> None:
        """What one tenant has computed, another one does not resume, nor does the same under another salt."""
        text = random_text(self._random, 70)
        tenants = self._world.talk.tenants
        owner, other = self._random.choice(tenants), self._random.choice(tenants)
        salts = self._random.sample(["one", "two", "three"], 2)
        for tenant, salt, may_resume in ((owner, salts[0], False), (other, salts[1], False)):
            body = {"prompt": text, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
            response = self._sent(
                COMPLETIONS, json.dumps(body).encode(), JSON | self._world.of_tenant(tenant)
            )
            content = json.loads(self._whole(response))
            self.num_unknown += 1
            if response.status != 200:
                raise _refusal(response.status, content)
            cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
            if cached and not may_resume:
                self.note_fault(f"{cached} tokens of another tenant's or salt's prompt were cached")
        self.tally.events["attempts to share"] += 1


def _refusal(status: int, content: dict[str, Any]) -> RefusedError:
    error = content["error"]
    return RefusedError(status, error["code"], error["message"])


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        text = line.decode().strip()
        if text.startswith("data: "):
            yield text[6:] if text == "data: [DONE]" else json.loads(text[6:])
        elif text:
            raise http.client.HTTPException(f"a stream has the line {text[:100]!r}")


@contextmanager
def clients(world: World, number: int) -> Iterator[list[Client]]:
    """So many clients, which act until the world's time is over."""
    made = [Client(world, f"{world.name} {i}") for i in range(number)]
    threads = [threading.Thread(target=client.run, name=f"client {i}") for i, client in enumerate(made)]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        for client, thread in zip(made, threads, strict=True):
            if thread.is_alive():
                client.note_fault("a client waits for ever")
            with suppress(OSError):
                client.close()
