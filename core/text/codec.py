"""Text to tokens and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..validation import boolean, instance, integers, shown
from .detokenizer import Detokenizer


class Tokenizer(Protocol):
    """What a `TextCodec` asks of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. Names of special tokens within `text` become these tokens.

        `add_special_tokens` also adds what the tokenizer puts around each text, for example a first token.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens. Bytes that are no character become U+FFFD."""


class Template(Protocol):
    """What a `TextCodec` asks of a chat template; `ChatTemplate` is one."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str: ...


@dataclass(frozen=True)
class TextCodec:
    """The tokenizer and the chat template of a model.

    Attributes:
        tokenizer: text to tokens and back.
        chat_template: None where the model has none.
    """

    tokenizer: Tokenizer
    chat_template: Template | None = None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around each text."""
        return self.tokenizer.encode(instance("text", text, str), add_special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.tokenizer.decode(integers("token_ids", token_ids, 0))

    def detokenizer(self) -> Detokenizer:
        """A new `Detokenizer`, for the tokens of one answer while they come."""
        return Detokenizer(self.tokenizer.decode)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a chat.

        Args:
            messages: for example [{"role": "user", "content": "Hello"}], oldest first.
            add_generation_prompt: whether an answer is to follow.
            variables: more names that the chat template knows, for example `enable_thinking`.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("the model has no chat template; accepted: `encode` with a text")
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(
                f"messages is {shown(messages)}; accepted: a list of {{'role': ..., 'content': ...}}"
            )
        boolean("add_generation_prompt", add_generation_prompt)
        text = self.chat_template.render(messages, add_generation_prompt, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)
