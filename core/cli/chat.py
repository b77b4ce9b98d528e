"""`mambaslots chat`: a conversation in a terminal, and what each turn resumed."""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from .options import add_engine, add_model, chosen_model, count

if TYPE_CHECKING:
    from ..inference.engines.dynamic_engine import DynamicInferenceEngine
    from ..inference.engines.streams import TokenStream
    from ..loaded_model import LoadedModel
    from ..params_and_results import GeneratedToken, SamplingParams

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
    add_engine(parser, max_requests=1)


def run(options: argparse.Namespace) -> int:
    folder, cache = chosen_model(options)
    from .engine_setup import load_model, make_engine

    loaded = load_model(options, folder)
    engine = make_engine(loaded, options, cache)
    params = loaded.sampling_params(max_tokens=options.max_tokens)
    messages: list[dict[str, str]] = []
    for question in questions():
        messages.append({"role": "user", "content": question})
        print("model> ", end="", flush=True)
        num_states = engine.stats().cache.num_states_committed
        answer = ""
        with answer_stream(loaded, engine, messages, params) as stream:
            try:
                for piece in loaded.codec.detokenizer().pieces(generated.token for generated in stream):
                    answer += piece
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                stream.close()
            result = stream.result
        messages.append({"role": "assistant", "content": answer})
        if result is None:
            raise RuntimeError("the answer has ended without a result")
        print(
            f"\n[resumed {result.num_resumed_tokens} of {result.num_prompt_tokens} prompt tokens; states "
            f"stored: {engine.stats().cache.num_states_committed - num_states}; generated "
            f"{len(result.tokens)}, end: {result.finish_reason}]",
            flush=True,
        )
    return 0


def answer_stream(
    loaded: "LoadedModel",
    engine: "DynamicInferenceEngine",
    messages: list[dict[str, str]],
    params: "SamplingParams",
) -> "TokenStream[GeneratedToken]":
    """The answer to a conversation, which without a chat template is one text that grows."""
    from ..llm import chat_stream

    text = loaded.text
    if text is None or text.chat_template is not None:
        return chat_stream(loaded, engine, messages, params)
    conversation = "".join(message["content"] + "\n" for message in messages)
    return engine.stream(text.encode(conversation), params)


def questions() -> Iterator[str]:
    """What the user says, until an empty line."""
    with suppress(EOFError, KeyboardInterrupt):
        while line := input("you> "):
            yield line
