"""Requests that a server must refuse, each wrong in one way, drawn from a seed."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_BODY_BYTES = 100_000
"""The limit of the server that these requests are for."""


class Sent(NamedTuple):
    """A request."""

    kind: str
    path: str
    body: bytes
    headers: dict[str, str]


JSON = {"content-type": "application/json"}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0, "seed": 3, "stop": ["\n\n"]},
    CHATS: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True},
}
"""Bodies that are served."""

_SCALARS: list[Any] = [
    True,
    False,
    0,
    -1,
    3,
    2.5,
    10**30,
    -(10**30),
    "",
    "x",
    "7",
    [],
    [[]],
    {},
    {"a": 1},
    [None],
]
_ACCEPTED: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: False,
    "max_tokens": lambda value: value == 3 and value is not True,
    "n": lambda value: value == 3 and value is not True,
    "temperature": lambda value: type(value) in (int, float) and 0 <= value < 1e6,
    "top_p": lambda value: False,
    "top_k": lambda value: type(value) is int and -1 <= value < 10,
    "seed": lambda value: type(value) is int and 0 <= value < 10,
    "stream": lambda value: isinstance(value, bool),
    "stop": lambda value: value in ("x", "7") or value == [],
    "stop_token_ids": lambda value: value == [],
    "ignore_eos": lambda value: isinstance(value, bool),
    "return_token_ids": lambda value: isinstance(value, bool),
    "stream_options": lambda value: False,
    "cache_salt": lambda value: value in ("x", "7"),
    "presence_penalty": lambda value: type(value) is int and -2 <= value <= 2,
    "repetition_penalty": lambda value: type(value) in (int, float) and 0 < value <= 100,
    "min_p": lambda value: type(value) is int and value == 0,
    "min_tokens": lambda value: type(value) is int and 0 <= value <= 4,
    "logit_bias": lambda value: value == {},
    "response_format": lambda value: False,
}
"""Fields of both endpoints, and which of the scalars above they accept."""
_OWN: dict[str, dict[str, Callable[[Any], bool]]] = {
    COMPLETIONS: {
        "prompt": lambda value: value in ("x", "7"),
        "logprobs": lambda value: type(value) is int and 0 <= value < 20,
        "checkpoints": lambda value: value == [],
        "messages": lambda value: False,
    },
    CHATS: {
        "messages": lambda value: False,
        "logprobs": lambda value: isinstance(value, bool),
        "top_logprobs": lambda value: type(value) is int and value == 0,
        "tools": lambda value: value == [],
        "tool_choice": lambda value: False,
        "chat_template_kwargs": lambda value: value == {} or value == {"a": 1},
        "stream_options": lambda value: value == {},  # this one streams
        "max_completion_tokens": lambda value: False,  # beside max_tokens, which is another number
        "prompt": lambda value: False,
    },
}
_WRONG_MESSAGES: list[Any] = [
    [], [3], [[]], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": 3, "content": "x"}],
    [{"role": "user", "content": {}}], [{"role": "user", "content": [3]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text", "text": 3}]}],
    [{"role": "assistant", "tool_calls": 3}], [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
    [{"role": "user", "content": "x", "cache_control": 3}], [{"role": "user", "content": "x", "name": 3}],
]  # fmt: skip
_WRONG_PROMPTS: list[Any] = [
    [-1], [10**9], [1.5], [True], [[1], "x"], ["x", 3], [[1, "x"]], [["x"]], [[]], [[1], [10**9]], [None],
    {"a": 1},
]  # fmt: skip


def wrong_values(path: str) -> list[dict[str, Any]]:
    """A good body with one value that is refused: every field, and each of the scalars above."""
    return [
        GOOD[path] | {name: value}
        for name, accepts in (_ACCEPTED | _OWN[path]).items()
        for value in _SCALARS
        if not accepts(value)
    ]


class Malformed:
    """Draws requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> Sent:
        """A request of any kind."""
        kind = self._random.choice(list(KINDS))
        return self.of(kind)

    def of(self, kind: str) -> Sent:
        """A request that is wrong in this way."""
        path = self._random.choice([COMPLETIONS, CHATS])
        made = KINDS[kind](self, path)
        if isinstance(made, Sent):
            return made
        body = made if isinstance(made, bytes) else json.dumps(made).encode()
        return Sent(kind, path, body, dict(JSON))

    # ---- the kinds

    def wrong_value(self, path: str) -> dict[str, Any]:
        return self._random.choice(wrong_values(path))

    def unknown_field(self, path: str) -> dict[str, Any]:
        name = self._random.choice(["temprature", "", "\0", "é" * 200, "max_token", "__class__", "modl"])
        return GOOD[path] | {name: self._random.choice(_SCALARS)}

    def wrong_messages(self, path: str) -> Sent:
        body = GOOD[CHATS] | {"messages": self._random.choice(_WRONG_MESSAGES)}
        return Sent("wrong messages", CHATS, json.dumps(body).encode(), dict(JSON))

    def wrong_prompt(self, path: str) -> Sent:
        body = GOOD[COMPLETIONS] | {"prompt": self._random.choice(_WRONG_PROMPTS)}
        return Sent("wrong prompt", COMPLETIONS, json.dumps(body).encode(), dict(JSON))

    def no_number(self, path: str) -> bytes:
        name = self._random.choice(["temperature", "top_p", "max_tokens", "seed", "user"])
        number = self._random.choice(
            ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "01", "+1", "0x10", ".5"]
        )
        return self._with(path, f'"{name}": {number}')

    def too_long(self, path: str) -> dict[str, Any]:
        return GOOD[path] | {"max_tokens": self._random.choice([2048, 10**6, 2**31 - 1, 2**31, 2**63])}

    def too_large(self, path: str) -> bytes:
        return self._with(path, f'"user": "{"x" * (MAX_BODY_BYTES + self._random.randrange(1000))}"')

    def truncated(self, path: str) -> bytes:
        whole = json.dumps(GOOD[path]).encode()
        return whole[: self._random.randrange(len(whole))]

    def not_json(self, path: str) -> bytes:
        whole = json.dumps(GOOD[path])
        return self._random.choice([
            whole + "}", whole + whole, "\ufeff" + whole, whole.replace('"', "'"), whole.replace(":", "=", 1),
            whole[:-1] + ",}", "// comment\n" + whole, "data: " + whole, "<x/>", "a=b", "\0" + whole, "",
        ]).encode()  # fmt: skip

    def random_bytes(self, path: str) -> bytes:
        return b"\xfe" + self._random.randbytes(self._random.randrange(200))

    def invalid_utf_8(self, path: str) -> bytes:
        wrong = self._random.choice(
            [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf", b"\x80"]
        )
        return self._with(path, '"user": "@"').replace(b"@", wrong)

    def other_encoding(self, path: str) -> bytes:
        return json.dumps(GOOD[path]).encode(self._random.choice(["utf-16", "utf-32", "utf-16-le"]))

    def half_surrogate(self, path: str) -> bytes:
        half = self._random.choice(["\\ud800", "\\uDFFF", "x\\udc00y", "\\ud800\\ud800", "\\udc00\\ud800"])
        return self._with(
            path, self._random.choice([f'"user": "{half}"', f'"{half}": 1', f'"stop": ["{half}"]'])
        )

    def deep(self, path: str) -> bytes:
        field = self._random.choice(["user", "prompt", "metadata", "tools"])
        # What a field holds that changes no answer may be nested as deeply as the parser goes.
        depths = [5000, 20_000] if field in ("user", "metadata") else [65, 500, 1000, 5000, 20_000]
        depth = self._random.choice(depths)
        opening, closing = self._random.choice([("[", "]"), ('{"a":', "}")])
        inner = self._random.choice(["1", ""]) if opening == "[" else "1"
        nested = opening * depth + inner + closing * depth * self._random.randrange(2)
        return self._with(path, f'"{field}": {nested}')

    def no_object(self, path: str) -> Any:
        return self._random.choice([[], [GOOD[path]], "x", 3, None, True, 1.5, json.dumps(GOOD[path])])

    def wrong_content_type(self, path: str) -> Sent:
        kinds = [
            "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
            "application/json; charset=latin-1", "application/jsonp", "json", ";",
            "application/json, text/plain",
        ]  # fmt: skip
        headers = {"content-type": self._random.choice(kinds)}
        return Sent("wrong content type", path, json.dumps(GOOD[path]).encode(), headers)

    def wrong_header(self, path: str) -> Sent:
        header = self._random.choice([
            {"x-cache-salt": ""}, {"x-cache-salt": "\xff"}, {"x-cache-salt": "s" * 300},
            {"content-encoding": "gzip"},
        ])  # fmt: skip
        return Sent("wrong header", path, json.dumps(GOOD[path]).encode(), JSON | header)

    @staticmethod
    def _with(path: str, field: str) -> bytes:
        """A good body with a field as it is written, behind the others."""
        return f"{json.dumps(GOOD[path])[:-1]}, {field}}}".encode()


KINDS: dict[str, Callable[[Malformed, str], Any]] = {
    name.replace("_", " "): getattr(Malformed, name)
    for name in (
        "wrong_value", "unknown_field", "wrong_messages", "wrong_prompt", "no_number", "too_long",
        "too_large", "truncated", "not_json", "random_bytes", "invalid_utf_8", "other_encoding",
        "half_surrogate", "deep", "no_object", "wrong_content_type", "wrong_header",
    )
}  # fmt: skip
