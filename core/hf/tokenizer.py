"""A model's own tokenizer and chat template, as transformers reads them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..files import ModelFolderError
from ..text import TextCodec
from ..text.chat_template import Cut

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "*.tiktoken",
)  # fmt: skip


class TransformersTokenizer:
    """A transformers tokenizer, as a `Tokenizer` and a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self.encode("", add_special_tokens=True)  # sets what the file had different: later, threads share it

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def encode_with_cuts(self, text: str) -> tuple[list[int], list[Cut]]:
        """`encode` without special tokens, and a cut for each added token, if the tokenizer is fast."""
        if not self.tokenizer.is_fast:
            return self.encode(text, add_special_tokens=False), []
        encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)
        ids: list[int] = encoding["input_ids"]
        places = ((i, encoding.token_to_chars(i)) for i, token in enumerate(ids) if token in self._added)
        return ids, [Cut(span.start, span.end, i) for i, span in places if span is not None]

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a chat, from the model's template; a ValueError where it refuses the messages."""
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            chat = [dict(message) for message in messages]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, **variables)
        except Exception as error:  # a template is code
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return str(text)


def load_text(folder: Path) -> TextCodec | None:
    """The tokenizer and chat template in `folder`; None where it has no file of a tokenizer."""
    if not any(file for pattern in _FILES for file in folder.glob(pattern)):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raise plain Exceptions
        raise ModelFolderError(f"the tokenizer in {folder} cannot be read: {error}") from error
    tokenizer_and_template = TransformersTokenizer(tokenizer)
    return TextCodec(tokenizer_and_template, tokenizer_and_template if tokenizer.chat_template else None)
