"""A conversation in a terminal with a model of a folder or of the hub, and what each turn resumed.

The model is a checkpoint of transformers, which needs `pip install 'mambaslots[hf]'` (on a
GPU `[hf,megatron,fla]`), or a saved `HybridLM`.
Every turn sends the whole conversation. The prefix cache resumes from the deepest state that it holds of it,
so that little more than the new words is computed. A line after each answer says how many of the prompt's
tokens were resumed, and how many states were stored on the way.

    python examples/hf_chat.py ibm-granite/granite-4.0-h-350m --device cuda

An empty line or the end of the input ends the conversation; Control-C ends an answer. `--script FILE` reads
the turns from the lines of a file, empty ones left out.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import mambaslots as ms
import torch
from arguments import add_count, add_device, check_device, make_parser

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
MIN_BLOCK = 64
NUM_STATES = 32


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

    def __init__(self, loaded: ms.LoadedModel, max_tokens: int, max_context: int) -> None:
        self._loaded = loaded
        self._params = loaded.sampling_params(num_tokens_to_generate=max_tokens)
        grid = loaded.model.state_spec().grid
        block = -(-MIN_BLOCK // grid) * grid
        config = ms.InferenceConfig(
            block_size_tokens=block,
            max_requests=1,
            max_tokens=max(2048, block),
            max_sequence_length=max(max_context, block + 1),
            num_kv_blocks=2 + -(-max_context // block),
            num_mamba_slots=NUM_STATES,
        )
        self._engine = ms.DynamicInferenceEngine(loaded.model, config)
        self._messages: list[dict[str, str]] = []

    def ask(self, question: str) -> Turn:
        """Print the answer piece by piece, and remember both."""
        self._messages.append({"role": "user", "content": question})
        prompt = self._prompt()
        stored = self._num_states_stored()
        detokenizer = self._loaded.detokenizer()
        pieces = []
        with self._engine.stream(prompt, self._params) as stream:
            try:
                for generated in stream:
                    pieces.append(detokenizer.push(generated.token))
                    print(pieces[-1], end="", flush=True)
            except KeyboardInterrupt:
                stream.close()
            pieces.append(detokenizer.finish())
            print(pieces[-1], flush=True)
            result = stream.result
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

    def _prompt(self) -> list[int]:
        text = self._loaded.text
        if text is not None and text.chat_template is None:
            return text.encode("\n".join(message["content"] for message in self._messages) + "\n")
        return self._loaded.encode_chat(self._messages)

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


def existing_file(text: str) -> Path:
    if not (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a file")
    try:
        path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no text in UTF-8: {error}") from error
    return path


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("model", metavar="FOLDER_OR_NAME", help="a folder with config.json, or a hub name")
    add_device(parser, "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's)")
    add_count(parser, "--max-tokens", 512, "tokens of an answer, at most")
    add_count(parser, "--max-context", 8192, "tokens of the conversation, at most", at_least=128)
    parser.add_argument("--script", type=existing_file, metavar="FILE", help="turns, one a line")
    args = parser.parse_args()
    check_device(parser, args.device)
    try:
        loaded = ms.load(args.model, args.device, DTYPES.get(args.dtype))
        chat = Chat(loaded, args.max_tokens, args.max_context)
    except (ValueError, OSError, ImportError) as error:
        print(f"{args.model}: {error}", file=sys.stderr)
        return 1
    turns = []
    for question in questions(args.script):
        print("model> ", end="", flush=True)
        try:
            turn = chat.ask(question)
        except ValueError as error:  # no tokenizer, a template that refuses, a conversation that is too long
            print(f"\n{error}", file=sys.stderr)
            return 1
        print(turn, flush=True)
        turns.append(asdict(turn))
    if args.json:
        args.json.write_text(json.dumps(turns, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
