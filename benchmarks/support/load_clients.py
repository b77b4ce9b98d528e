"""Clients of a server under load: conversations whose every answer is noted, and clients that are killed.

`server_load.py` runs them.
"""

import asyncio
import random
import re
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import openai

SYSTEM = "You write short, plain Python. Each function has one task, a name that says it, and no comment."
ASKS = (
    "Write the function `{name}(self)` that closes every file it has opened.",
    "Now let `{name}` return how many of them it has closed, as an integer.",
    "Raise a ValueError in `{name}` where the object has never been opened at all.",
    "Give `{name}` an argument `force`, which is False where it is not given.",
    "At last, write a test of `{name}` that closes the same file two times.",
)
POLL_S = 0.02
PATIENCE_S = 60.0
NUM_TOKENS_OF_VICTIMS = 1500


@dataclass
class Turn:
    """One answer.

    Attributes:
        number: of the turn in its conversation, from 0.
        messages, seed, max_tokens: what was asked; greedy where the seed is None.
        tokens, text, num_prompt_tokens, num_cached_tokens: what came.
        first_s, gaps_s: seconds to the first piece of a streamed answer, and between pieces.
        error: what came in place of an answer.
    """

    number: int
    messages: list[dict[str, str]]
    seed: int | None
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass
class Load:
    """What the clients do, and what came of it.

    Attributes:
        url: of the server, without "/v1".
        model: its name.
        turns: of a conversation.
        max_tokens: of an answer.
        until_s: `time.monotonic` after which no client asks any more; None for no end.
        conversations: of a client; None for any number.
        answers: the turns of each conversation.
        freed_s: seconds from the death of a client to the end of its request.
        num_not_freed: requests of killed clients that went on.
    """

    url: str
    model: str
    turns: int
    max_tokens: int
    until_s: float | None
    conversations: int | None
    answers: list[list[Turn]] = field(default_factory=list)
    freed_s: list[float] = field(default_factory=list)
    num_not_freed: int = 0

    @property
    def over(self) -> bool:
        return self.until_s is not None and time.monotonic() >= self.until_s

    async def run(self, clients: int, kills: int | None) -> None:
        """Let so many clients talk, and kill others beside them.

        Args:
            clients: how many talk at once.
            kills: how many are killed, one after the other; None for as many as there is time for.
        """
        async with asyncio.TaskGroup() as tasks:
            talking = [tasks.create_task(self._client(number)) for number in range(clients)]
            killing = tasks.create_task(self._kill(kills))
            await asyncio.wait(talking)
            if kills is None:
                killing.cancel()

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=10 * PATIENCE_S
        )

    async def _client(self, number: int) -> None:
        async with self.client() as client:
            held = 0
            while not self.over and (self.conversations is None or held < self.conversations):
                await self._conversation(client, f"task_{number}_{held}", random.Random(f"{number} {held}"))
                held += 1

    async def _conversation(self, client: openai.AsyncOpenAI, name: str, choice: random.Random) -> None:
        turns: list[Turn] = []
        self.answers.append(turns)
        messages = [{"role": "system", "content": SYSTEM}]
        for number in range(self.turns):
            if self.over:
                return
            messages.append({"role": "user", "content": ASKS[number % len(ASKS)].format(name=name)})
            seed = choice.choice([None, choice.randrange(2**31)])
            turn = Turn(number, list(messages), seed, self.max_tokens)
            turns.append(turn)
            try:
                await (self._streamed if choice.random() < 0.5 else self._whole)(client, turn)
            except Exception as error:  # a request without an answer is a figure, too
                turn.error = f"{type(error).__name__}: {error}"
                return
            messages.append({"role": "assistant", "content": turn.text})

    def _asked(self, turn: Turn) -> dict[str, Any]:
        random_tokens = {"temperature": 0.0} if turn.seed is None else {"temperature": 0.8, "seed": turn.seed}
        return {
            "model": self.model, "messages": turn.messages, "max_completion_tokens": turn.max_tokens,
            "extra_body": {"return_token_ids": True}, **random_tokens,
        }  # fmt: skip

    async def _whole(self, client: openai.AsyncOpenAI, turn: Turn) -> None:
        answer = await client.chat.completions.create(**self._asked(turn))
        turn.text = answer.choices[0].message.content or ""
        turn.tokens = list(answer.choices[0].model_extra["token_ids"])
        _note_usage(turn, answer.usage)

    async def _streamed(self, client: openai.AsyncOpenAI, turn: Turn) -> None:
        before = asked = time.monotonic()
        usage = None
        stream = await client.chat.completions.create(
            **self._asked(turn), stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            ids = chunk.choices[0].model_extra.get("token_ids") if chunk.choices else None
            if ids:
                now = time.monotonic()
                if turn.tokens:
                    turn.gaps_s.append(now - before)
                else:
                    turn.first_s = now - asked
                before = now
                turn.tokens += ids
                turn.text += chunk.choices[0].delta.content or ""
            elif chunk.choices:
                turn.text += chunk.choices[0].delta.content or ""
        _note_usage(turn, usage)

    # ---- clients that are killed

    async def _kill(self, kills: int | None) -> None:
        number = 0
        while not self.over and (kills is None or number < kills):
            await self._victim(number)
            number += 1
            await asyncio.sleep(POLL_S)

    async def _victim(self, number: int) -> None:
        """Ask for a long answer, go away after its first token, and see how long the request lives."""
        before = await self.num_cancelled()
        async with self.client() as client:
            stream = await client.completions.create(
                model=self.model, prompt=f"# victim {number}\n", max_tokens=NUM_TOKENS_OF_VICTIMS,
                stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            await anext(aiter(stream))
            await stream.close()
        died = time.monotonic()
        while await self.num_cancelled() == before:
            if time.monotonic() - died > PATIENCE_S:
                self.num_not_freed += 1
                return
            await asyncio.sleep(POLL_S)
        self.freed_s.append(time.monotonic() - died)

    async def num_cancelled(self) -> int:
        text = (await self.get("/metrics")).decode()
        found = re.search(r'^mambaslots_requests_ended_total\{finish_reason="cancelled"\} (\S+)$', text, re.M)
        return int(float(found[1])) if found else 0

    async def get(self, path: str) -> bytes:
        def read() -> bytes:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
                return bytes(answer.read())

        return await asyncio.to_thread(read)


def _note_usage(turn: Turn, usage: Any) -> None:
    turn.num_prompt_tokens = usage.prompt_tokens
    turn.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
