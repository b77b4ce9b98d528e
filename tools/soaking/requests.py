"""What the clients of a soak ask over HTTP, and what is wrong with an answer that they get."""

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.malformed_bodies import CHATS, COMPLETIONS
from soaking.model import (
    MAX_TOPS,
    TOLERANCE,
    Expected,
    Oracle,
    random_sampling,
    random_text,
    seeded,
    text_of,
)

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from oracle.served import SPECIALS
from oracle.toy_answers import Ask

LONGEST = 320  # tokens of a prompt and its answer
LONGEST_PROMPT = LONGEST - 32
MAX_MESSAGES = 7
_LOWEST = -9999.0  # what JSON has for minus infinity


@dataclass
class Query:
    """A request over HTTP."""

    path: str
    body: dict[str, Any]
    tenant: str
    salt: str | None
    prompts: list[tuple[int, ...]]
    ask: Ask
    conversation: "Conversation | None" = None

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.num_choices

    def ask_of(self, index: int, version: int) -> Ask:
        """What answer `index` is the answer to."""
        prompt, number = divmod(index, self.num_choices)
        ask = seeded(self.ask, number)
        return Ask(
            self.prompts[prompt], ask.length, version, ask.temperature, ask.top_k, ask.top_p, ask.seed,
            ask.stops,
        )  # fmt: skip


@dataclass
class Choice:
    """One answer, as a client has got it."""

    text: str = ""
    tokens: list[int] | None = None
    log_probs: list[float] | None = None
    tops: list[list[float]] | None = None
    finish_reason: str | None = None

    def add(self, piece: dict[str, Any]) -> None:
        """Take a choice of a whole answer, or of an event of a stream."""
        message = piece.get("message") or piece.get("delta") or piece
        self.text += message.get("text", message.get("content")) or ""
        self.finish_reason = piece["finish_reason"] or self.finish_reason
        if "token_ids" in piece:
            self.tokens = [*(self.tokens or []), *piece["token_ids"]]
        log_probs = piece.get("logprobs")
        if log_probs is None:
            return
        if "content" in log_probs:
            values = [one["logprob"] for one in log_probs["content"]]
            tops = [[top["logprob"] for top in one["top_logprobs"]] for one in log_probs["content"]]
        else:
            values = log_probs["token_logprobs"]
            tops = [sorted(one.values(), reverse=True) for one in log_probs["top_logprobs"] or []]
        self.log_probs = [*(self.log_probs or []), *values]
        self.tops = [*(self.tops or []), *tops]


@dataclass
class Conversation:
    """A chat of one tenant, which goes on, is repeated, and forks."""

    tenant: str
    salt: str | None
    messages: list[dict[str, str]]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt, as the template writes it."""
        found = [SPECIALS["<|begin|>"]]
        for message in self.messages:
            found += f"{message['role']}:{message['content']}".encode()
            found.append(SPECIALS["<|end|>"])
        return (*found, *b"assistant:")


@dataclass
class Talk:
    """What all clients talk about: texts that prompts share, and chats that go on."""

    random: Random
    tenants: Sequence[str]
    texts: list[str] = field(init=False)
    answers: deque[str] = field(default_factory=lambda: deque(["ab", "e"], maxlen=20))
    conversations: deque[Conversation] = field(default_factory=lambda: deque(maxlen=6))
    prompts: deque[str] = field(default_factory=lambda: deque(maxlen=6))

    def __post_init__(self) -> None:
        self.texts = [random_text(self.random, 200) for _ in range(3)]

    def draw(self, random: Random) -> Query:
        """A request that repeats, extends or forks others, or a new one."""
        return self._chat(random) if random.random() < 0.5 else self._completion(random)

    def _completion(self, random: Random) -> Query:
        prompts = [self._prompt(random) for _ in range(random.choice([1, 1, 1, 1, 2]))]
        tokens = [tuple(prompt.encode()) for prompt in prompts]
        given: Any = random.choice([prompts, [list(one) for one in tokens]])
        if len(prompts) == 1:
            given = random.choice([given, given[0]])
        fields: dict[str, Any] = {"prompt": given}
        if random.random() < 0.3:
            fields["logprobs"] = random.randint(0, MAX_TOPS)
        if random.random() < 0.2:
            fields["checkpoints"] = [random.randint(1, min(map(len, tokens)))]
        tenant = random.choice(self.tenants)
        return self._query(random, COMPLETIONS, fields, tokens, tenant, self._salt(random))

    def _prompt(self, random: Random) -> str:
        if self.prompts and random.random() < 0.6:
            head = random.choice(list(self.prompts))
            return (head + random_text(random, random.choice([0, 0, 1, 5])))[:250]
        head = random.choice(self.texts)[: random.choice([0, 16, 33, 64, 128, 200])]
        prompt = (head + random_text(random, random.choice([0, 0, 1, 5, 20]))) or "x"
        self.prompts.append(prompt)
        return prompt

    def _chat(self, random: Random) -> Query:
        chat = self._conversation(random)
        fields: dict[str, Any] = {"messages": [dict(message) for message in chat.messages]}
        if random.random() < 0.3:
            fields |= {"logprobs": True, "top_logprobs": random.randint(0, MAX_TOPS)}
        query = self._query(random, CHATS, fields, [chat.tokens], chat.tenant, chat.salt)
        query.conversation = chat
        return query

    def _conversation(self, random: Random) -> Conversation:
        """A chat that goes on, from its end or from an earlier turn, or is asked again, or a new one."""
        known = list(self.conversations)
        if known and random.random() < 0.75:
            chat = random.choice(known)
            messages = list(chat.messages)
            if random.random() < 0.3:
                messages = messages[: random.randrange(1, len(messages) + 1, 2)]  # it ends with a user's
            chat = Conversation(chat.tenant, chat.salt, messages)
            if len(messages) < MAX_MESSAGES and random.random() < 0.8:
                answer = random.choice(list(self.answers))[:12]
                chat.messages.append({"role": "assistant", "content": answer})
                chat.messages.append(self._user(random))
        else:
            chat = Conversation(random.choice(self.tenants), self._salt(random), [self._user(random)])
        return chat if len(chat.tokens) <= LONGEST_PROMPT else Conversation(
            chat.tenant, chat.salt, chat.messages[:1]
        )  # fmt: skip

    def _user(self, random: Random) -> dict[str, str]:
        text = random.choice(self.texts)[: random.choice([3, 20, 60])]
        return {"role": "user", "content": text + random_text(random, random.choice([0, 4]))}

    def _salt(self, random: Random) -> str | None:
        return random.choice([None, None, None, None, "a salt"])

    def _query(
        self, random: Random, path: str, fields: dict[str, Any], prompts: list[tuple[int, ...]], tenant: str,
        salt: str | None,
    ) -> Query:  # fmt: skip
        length = random.choice([1, 2, 5, 8, 16, 24])
        sampling = random_sampling(random)
        seed = random.choice([0, 7, random.randrange(2**31), 2**63 - 2])
        stop_ids = random.sample(range(97, 123), random.choice([0, 0, 0, 2]))
        body = {"max_tokens": length, "seed": seed, **sampling, **fields}
        if stop_ids:
            body["stop_token_ids"] = stop_ids
        if random.random() < 0.3:
            body["stop"] = self._stops(random)
        if len(prompts) == 1 and random.random() < 0.25:
            body["n"] = random.choice([2, 3])
        if random.random() < 0.5:
            body["stream"] = True
            if random.random() < 0.9:
                body["stream_options"] = {"include_usage": True}
        if random.random() < 0.8:
            body["return_token_ids"] = True
        ask = Ask(prompts[0], length, 0, **sampling, seed=seed, stops=tuple(stop_ids))
        return Query(path, body, tenant, salt, prompts, ask)

    def _stops(self, random: Random) -> list[str]:
        answer = random.choice(list(self.answers)).replace("\ufffd", "") or "x"
        start = random.randrange(len(answer))
        return [answer[start : start + random.randint(1, 2)], *random.sample(["e", "zz", "é"], 1)]

    def note(self, query: Query, choices: Sequence[Choice]) -> None:
        """What came: the chat may go on."""
        self.answers.append(choices[0].text or "x")
        if query.conversation is not None:
            self.conversations.append(query.conversation)


def wrong_form(query: Query, choices: Sequence[Choice], usage: dict[str, Any] | None) -> str:
    """What is wrong with an answer of status 200, whatever the model says; "" for nothing."""
    if len(choices) != query.num_answers or any(one.finish_reason is None for one in choices):
        return f"{len(choices)} answers with the reasons {[one.finish_reason for one in choices]}"
    if usage is not None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if usage["prompt_tokens"] != sum(map(len, query.prompts)):
            return f"{usage['prompt_tokens']} prompt tokens of {sum(map(len, query.prompts))}"
        if not 0 <= cached <= usage["prompt_tokens"] - len(query.prompts):
            return f"{cached} of {usage['prompt_tokens']} tokens were cached"
        if all(one.tokens is not None for one in choices) and "stop" not in query.body:
            total = sum(len(one.tokens or ()) for one in choices)
            if usage["completion_tokens"] != total:
                return f"{usage['completion_tokens']} answer tokens of {total}"
    for one in choices:
        if one.log_probs is not None and one.tokens is not None and len(one.log_probs) != len(one.tokens):
            return f"{len(one.log_probs)} log-probs of {len(one.tokens)} tokens"
        if ("return_token_ids" in query.body) is not (one.tokens is not None):
            return "token ids are there, or not, against what was asked"
    return ""


def wrong_answer(query: Query, choice: Choice, expected: Expected, ask: Ask) -> str:
    """What differs from what the recurrence says; "" for nothing."""
    tokens = list(expected.tokens)
    text, is_stopped = before_stop(text_of(tokens), query.body.get("stop", ()))
    reason = "stop" if is_stopped or tokens[-1] in ask.stops else "length"
    if (choice.text, choice.finish_reason) != (text, reason):
        return f"{choice.text!r} ends with {choice.finish_reason}; expected {text!r}, {reason}"
    if choice.tokens is not None:
        known = tokens[: len(choice.tokens)] if is_stopped else tokens
        if choice.tokens != known or not text.startswith(text_of(choice.tokens).rstrip("\ufffd")):
            return f"tokens {choice.tokens}; expected {tokens}"
    if choice.log_probs is not None:
        for value, right in zip(choice.log_probs, expected.log_probs, strict=not is_stopped):
            if not abs(value - max(right, _LOWEST)) <= TOLERANCE:
                return f"log-probs {choice.log_probs}; expected {expected.log_probs}"
        for values, rights in zip(choice.tops or (), expected.tops, strict=False):
            if query.path == COMPLETIONS:  # by text, which several tokens share
                values, rights = values[:1], rights[:1]
            if any(abs(one - right) > TOLERANCE for one, right in zip(values, rights, strict=False)):
                return f"likeliest log-probs {values}; expected {rights}"
    return ""


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, and whether there is one."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)], True
    return text, False


@dataclass
class Record:
    """An answer that is held against the oracle later."""

    query: Query
    choices: list[Choice]
    version: int
    num_cached: int
    name: str

    def check(self, oracle: Oracle) -> tuple[int, str]:
        """How many tokens were compared, and what is wrong; "" for nothing."""
        num_tokens = 0
        for index, choice in enumerate(self.choices):
            ask = self.query.ask_of(index, self.version)
            expected = oracle.answer(ask)
            num_tokens += len(expected.tokens)
            fault = wrong_answer(self.query, choice, expected, ask)
            if fault:
                asked = f"weights {self.version}, asked {json.dumps(self.query.body)[:600]}"
                return num_tokens, f"{self.name}, answer {index}: {fault}; {asked}"
        return num_tokens, ""
