"""A checkpoint's own tokenizer and chat template, as transformers reads them."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..files import CheckpointError
from ..text import TextCodec
from ..text.chat import Cut

_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("vocab.json", "vocab.txt", "*.tiktoken"),
)


class CheckpointTokenizer:
    """A transformers tokenizer, as a `Tokenizer` and a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self.encode("", add_special_tokens=True)  # sets what the file had different: later, threads share it

    @cached_property
    def longest_token(self) -> int | None:
        """Characters of the longest token of a byte-level BPE; None of other tokenizers."""
        if not self.tokenizer.is_fast:
            return None
        return _longest_token(json.loads(self.tokenizer.backend_tokenizer.to_str()))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def encode_with_cuts(self, text: str) -> tuple[list[int], list[Cut]]:
        """`encode` without added special tokens, and a cut for each added token; no cuts of a tokenizer in
        Python.
        """
        if not self.tokenizer.is_fast:
            return self.encode(text, add_special_tokens=False), []
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)
        ids: list[int] = found["input_ids"]
        places = ((i, found.token_to_chars(i)) for i, token in enumerate(ids) if token in self._added)
        return ids, [Cut(span.start, span.end, i) for i, span in places if span is not None]

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a chat, from the checkpoint's template; a ValueError where it refuses the messages."""
        try:
            chat, variables["add_generation_prompt"] = (
                [dict(each) for each in messages],
                add_generation_prompt,
            )
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, **variables)
        except Exception as error:  # a template is code
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return str(text)


def _longest_token(pipeline: Mapping[str, Any]) -> int | None:
    """How many characters of a text one token stands for at most, by the content of `tokenizer.json`.

    Tokens are made of bytes, and a character is one byte or more. None where a step may drop characters, join
    any number of them, or is not known here.
    """
    normalizer, before, model = pipeline["normalizer"], pipeline["pre_tokenizer"], pipeline["model"]
    steps = before["pretokenizers"] if before and before["type"] == "Sequence" else [before or {"type": None}]
    kinds = [step["type"] for step in steps]
    added = pipeline["added_tokens"]
    is_known = (
        model["type"] == "BPE"
        and "ByteLevel" in kinds
        and {*kinds} <= {"ByteLevel", "Split", "Digits"}
        and all(step.get("behavior") != "Removed" for step in steps)
        and model["vocab"].keys() >= {*ByteLevel.alphabet()}
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    # A character in form NFC is made of at most 4 (Unicode Standard Annex #15, table of expansions).
    factor = {None: 1, "NFC": 4}.get(normalizer and normalizer["type"])
    if not is_known or factor is None:
        return None
    return factor * max(map(len, [*model["vocab"], *(token["content"] for token in added)]))


def load_text(folder: Path) -> TextCodec | None:
    """The tokenizer and chat template in `folder`; None where it has no file of a tokenizer."""
    if not any(found for pattern in _FILES for found in folder.glob(pattern)):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raise plain Exceptions
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from error
    both = CheckpointTokenizer(tokenizer)
    return TextCodec(both, both if tokenizer.chat_template else None)
