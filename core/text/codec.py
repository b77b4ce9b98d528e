"""Text to tokens and back."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..validation import boolean, instance, integers
from .chat_branches import ChatBranches
from .detokenizer import Detokenizer
from .marked_prompt import MarkedPrompt
from .token_cuts import Cut, branch_tokens


class Tokenizer(Protocol):
    """What a `TextCodec` asks of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. Names of special tokens within `text` become these tokens.

        `add_special_tokens` also adds what the tokenizer puts around each text, for example a first token.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens. Bytes that are no character become U+FFFD."""


@runtime_checkable
class CuttingTokenizer(Tokenizer, Protocol):
    """A tokenizer that says where a text can be cut. Without it a mark costs an encoding of all before it."""

    def encode_with_cuts(self, text: str) -> tuple[list[int], list[Cut]]:
        """`encode` without added special tokens, and a cut for each special token, in order."""


@runtime_checkable
class BoundedTokenizer(Tokenizer, Protocol):
    """A tokenizer that may know how many characters one token stands for.

    Attributes:
        longest_token: no token of any text stands for more characters of it; None where that is not known.
    """

    @property
    def longest_token(self) -> int | None: ...


class PromptTooLongError(ValueError):
    """A chat has more tokens than the caller takes.

    Attributes:
        num_tokens: tokens of the chat, or fewer.
        limit: how many the caller takes.
        is_exact: whether the chat has `num_tokens`, no more.
    """

    def __init__(self, num_tokens: int, limit: int, is_exact: bool) -> None:
        found = f"{'' if is_exact else 'at least '}{num_tokens}"
        super().__init__(f"the chat has {found} tokens; accepted: at most {limit}")
        self.num_tokens = num_tokens
        self.limit = limit
        self.is_exact = is_exact

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.num_tokens, self.limit, self.is_exact), self.__dict__


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

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without encoding it; 0 where none is known."""
        longest = self.tokenizer.longest_token if isinstance(self.tokenizer, BoundedTokenizer) else None
        return -(-len(text) // longest) if longest else 0

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
        text = self._checked_template(messages).render(
            messages, boolean("add_generation_prompt", add_generation_prompt), **variables
        )
        return self._encode_part(text)

    def encode_chat_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        marked_messages: Collection[int] = (),
        max_prompt_tokens: int | None = None,
        **variables: Any,
    ) -> MarkedPrompt:
        """Token ids of a chat, and the positions where conversations that begin like it branch.

        Such positions are the end of the system prompt and the tools, the ends of the last answers and the
        last user messages, and where the next turn leaves this text: a template may drop the thinking of this
        turn. Take states there: `CheckpointPlan(marks=prompt.marks)`.

        Other chats are rendered and compared with this one: at most 9, however long the chat is, and one for
        each of the last 16 marked messages. A chat that the template refuses gives no mark.

        Args:
            messages, add_generation_prompt, variables: as for `encode_chat`.
            marked_messages: indices of messages whose ends are to be marked, too, before all others.
            max_prompt_tokens: a longer chat is refused before marks are looked for; None takes any.

        Returns:
            The tokens of `encode_chat`, and marks.

        Raises:
            PromptTooLongError: the chat has more tokens than `max_prompt_tokens`.
            ValueError: as `encode_chat`; or a marked message does not exist.
        """
        template = self._checked_template(messages)
        listed = list(marked_messages) if isinstance(marked_messages, Set) else marked_messages
        marked = integers("marked_messages", listed, 0, len(messages) - 1)
        generation = boolean("add_generation_prompt", add_generation_prompt)
        text = template.render(messages, generation, **variables)
        limit = len(text) if max_prompt_tokens is None else max_prompt_tokens
        if len(text) > limit < (fewest := self.fewest_tokens(text)):
            raise PromptTooLongError(fewest, limit, is_exact=False)
        if isinstance(self.tokenizer, CuttingTokenizer):
            tokens, cuts = self.tokenizer.encode_with_cuts(text)
        else:
            tokens, cuts = self._encode_part(text), []
        if max_prompt_tokens is not None and len(tokens) > max_prompt_tokens:
            raise PromptTooLongError(len(tokens), max_prompt_tokens, is_exact=True)
        branches = ChatBranches(
            text,
            messages,
            render=lambda other, add: template.render(other, add, **variables),
            has_tools=bool(variables.get("tools")),
        )
        marks = branch_tokens(text, tokens, cuts, branches.find(marked), self._encode_part)
        return MarkedPrompt(tokens, marks)

    def _encode_part(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _checked_template(self, messages: Sequence[Mapping[str, Any]]) -> Template:
        if self.chat_template is None:
            raise ValueError("the model has no chat template; accepted: `encode` with a text")
        accepted = "accepted: a list of {'role': ..., 'content': ...}"
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError(f"messages is of type {type(messages).__name__}; {accepted}")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping):  # its text is the user's
                raise ValueError(f"messages[{number}] is of type {type(message).__name__}; {accepted}")
        return self.chat_template
