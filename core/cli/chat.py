"""`mambaslots chat`: a conversation in a terminal, and what each turn resumed."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .options import add_engine, add_json, add_model, count, text_file

if TYPE_CHECKING:
    from ..inference.contexts.request import GeneratedToken
    from ..inference.engines.dynamic_engine import DynamicInferenceEngine
    from ..inference.engines.streams import TokenStream
    from ..loaded_model import LoadedModel

TEXT = """\
Every turn sends the whole conversation. The prefix cache resumes from the deepest state that it holds of it,
so that little more than the new words is computed. A line after each answer says how many of the prompt's
tokens were resumed, and how many states were stored on the way.

    mambaslots chat models/tiny-code

An empty line or the end of the input ends the conversation; Control-C ends an answer."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--max-tokens", type=count(), default=512, metavar="N", help="of an answer (default: %(default)s)"
    )
    parser.add_argument("--script", type=text_file, metavar="FILE", help="turns, one a line; no terminal")
    add_json(parser, "the turns")
    add_engine(parser, max_requests=1)


def run(options: argparse.Namespace) -> int:
    from .setup import load_model, make_engine

    loaded = load_model(options)
    chat = Chat(loaded, make_engine(loaded, options), options.max_tokens)
    turns = []
    try:
        for question in questions(options.script):
            print("model> ", end="", flush=True)
            turn = chat.ask(question)
            print(turn, flush=True)
            turns.append(asdict(turn))
    finally:
        if options.json:
            options.json.write_text(json.dumps(turns, indent=2) + "\n")
    return 0


@dataclass
class Turn:
    """What was said, and what the answer cost."""

    question: str
    answer: str
    num_prompt_tokens: int
    num_resumed_tokens: int
    num_generated_tokens: int
    num_states_stored: int
    finish_reason: str

    def __str__(self) -> str:
        return (
            f"[resumed {self.num_resumed_tokens} of {self.num_prompt_tokens} prompt tokens; states stored: "
            f"{self.num_states_stored}; generated {self.num_generated_tokens}, end: {self.finish_reason}]"
        )


class Chat:
    """One conversation. Without a chat template it is one text that grows."""

    def __init__(self, loaded: "LoadedModel", engine: "DynamicInferenceEngine", max_tokens: int) -> None:
        self._loaded = loaded
        self._engine = engine
        self._params = loaded.sampling_params(max_tokens=max_tokens)
        self._messages: list[dict[str, str]] = []

    def ask(self, question: str) -> Turn:
        """Print the answer piece by piece, and remember both."""
        self._messages.append({"role": "user", "content": question})
        stored = self._num_states_stored()
        detokenizer = self._loaded.codec.detokenizer()
        pieces = []
        with self._stream() as stream:
            try:
                for piece in detokenizer.pieces(generated.token for generated in stream):
                    pieces.append(piece)
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                stream.close()
            result = stream.result
        print(flush=True)
        if result is None:
            raise RuntimeError("the answer has ended without a result")
        answer = "".join(pieces)
        self._messages.append({"role": "assistant", "content": answer})
        return Turn(
            question,
            answer,
            result.num_prompt_tokens,
            result.num_resumed_tokens,
            len(result.tokens),
            self._num_states_stored() - stored,
            result.finish_reason,
        )

    def _stream(self) -> "TokenStream[GeneratedToken]":
        from ..llm import chat_stream

        text = self._loaded.text
        if text is None or text.chat_template is not None:
            return chat_stream(self._loaded, self._engine, self._messages, self._params)
        so_far = "".join(message["content"] + "\n" for message in self._messages)
        return self._engine.stream(text.encode(so_far), self._params)

    def _num_states_stored(self) -> int:
        return self._engine.stats().cache.num_states_committed


def questions(script: Path | None) -> Iterator[str]:
    """What the user says: lines of the script, or of the terminal until an empty one."""
    if script is not None:
        for line in filter(None, script.read_text("utf-8").splitlines()):
            print(f"you> {line}")
            yield line
        return
    while True:
        try:
            line = input("you> ")
        except (EOFError, KeyboardInterrupt):
            line = ""
        if not line:
            return
        yield line
