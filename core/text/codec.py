"""Text and chats to tokens, tokens to text, and how a model chooses tokens."""

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..files import CONFIG, ModelFolderError, read_object, section
from ..params_and_results import SamplingParams
from ..validation import INT32_MAX, boolean, brief_repr, instance, integers
from .chat_template import ChatBranches, Cut, branch_tokens
from .detokenizer import Detokenizer

logger = logging.getLogger(__name__)

_DEFAULTS = "generation_config.json"
_NOT_APPLIED = {
    "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "typical_p": 1, "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": [], "sequence_bias": {},
    "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0,
    "stop_strings": [], "num_beams": 1, "penalty_alpha": None,
}  # fmt: skip
"""Fields of other libraries that change answers, and the value of each that changes none."""


class Tokenizer(Protocol):
    """What a `TextCodec` asks of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens' names in `text` become them. The switch adds those around each text."""

    def encode_with_cuts(self, text: str) -> tuple[list[int], list[Cut]]:
        """`encode` without added tokens, and a cut for each special token; without cuts, marks cost more."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens. Bytes that are no character become U+FFFD."""


class Template(Protocol):
    """What a `TextCodec` asks of a chat template; `ChatTemplate` is one."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str: ...


@dataclass(frozen=True)
class MarkedPrompt:
    """The tokens of a chat and the positions that are worth a state.

    Attributes:
        tokens: token ids of the prompt.
        marks: for `CheckpointPlan(marks=...)`: positions in `tokens`, from 1 to their number, the most
            valuable first: where slots run short, the first marks get them.
    """

    tokens: list[int]
    marks: tuple[int, ...] = ()

    __repr__ = brief_repr


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
        **variables: Any,
    ) -> MarkedPrompt:
        """Token ids of a chat, and the positions where conversations that begin like it branch.

        Such positions are the end of the system prompt and the tools, the ends of the last answers and user
        messages, and where the next turn branches off: a template may drop this turn's thinking. Take states
        there: `CheckpointPlan(marks=prompt.marks)`. At most 9 other chats are rendered, and one for each of
        the last 16 marked messages. Two chats that share a system prompt of 40 tokens: 40 is a mark.

        Args:
            messages, add_generation_prompt, variables: as for `encode_chat`.
            marked_messages: indices of messages whose ends are to be marked, too, before all others.

        Returns:
            The tokens of `encode_chat`, and marks.

        Raises:
            ValueError: as `encode_chat`; or a marked message does not exist.
        """
        template = self._checked_template(messages)
        indices = list(marked_messages) if isinstance(marked_messages, Set) else marked_messages
        checked_indices = integers("marked_messages", indices, 0, len(messages) - 1)
        generation = boolean("add_generation_prompt", add_generation_prompt)
        text = template.render(messages, generation, **variables)
        tokens, cuts = self.tokenizer.encode_with_cuts(text)
        branches = ChatBranches(
            text, messages, render=lambda chat, prompts: template.render(chat, prompts, **variables),
            has_tools=bool(variables.get("tools")),
        )  # fmt: skip
        marks = branch_tokens(text, tokens, cuts, branches.find(checked_indices), self._encode_part)
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


@dataclass(frozen=True)
class GenerationDefaults:
    """What a model's folder says of its answers.

    Attributes:
        params: how tokens are chosen, and which end an answer.
        max_tokens: None where the folder names no number.
    """

    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=INT32_MAX))
    max_tokens: int | None = None

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> "GenerationDefaults":
        """What `generation_config.json` of `folder` says. Stop tokens may also stand in its `config`.

        Without `do_sample` decoding is greedy, as in transformers. Without `top_k` all tokens are kept, where
        transformers keeps the 50 most likely. What the file says and is not applied is named at INFO.

        Raises:
            ModelFolderError: a value is none that `SamplingParams` accepts.
        """
        path = folder / _DEFAULTS
        fields = read_object(path) if path.is_file() else {}
        text_config = section(folder / CONFIG, config, "text_config")
        stops = _first(*(source.get("eos_token_id") for source in (fields, text_config, config)), [])
        ignored_names = [name for name, none in _NOT_APPLIED.items() if fields.get(name) not in (None, none)]
        if ignored_names:
            logger.info("%s: not applied: %s", path, ", ".join(ignored_names))
        names = ["repetition_penalty", "frequency_penalty", "presence_penalty"]
        arguments: dict[str, Any] = {}
        if fields.get("do_sample"):
            names += ["top_k", "top_p", "min_p", "temperature"]
            arguments["temperature"] = 1.0
        arguments |= {name: fields[name] for name in names if fields.get(name) is not None}
        try:
            params = SamplingParams(
                stop_token_ids=tuple(stops if isinstance(stops, list) else [stops]),
                max_tokens=_first(fields.get("max_new_tokens"), INT32_MAX),
                min_tokens=_first(fields.get("min_new_tokens"), 0),
                **arguments,
            )
        except ValueError as error:
            raise ModelFolderError(f"{path}: {error}") from error
        return cls(params, fields.get("max_new_tokens"))

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """`SamplingParams` with these defaults and `overrides`, which are arguments of `SamplingParams`."""
        length = overrides.setdefault("max_tokens", self.max_tokens or SamplingParams.max_tokens)
        if isinstance(length, int):  # the request's length comes first
            overrides.setdefault("min_tokens", min(self.params.min_tokens, length))
        return replace(self.params, **overrides)


def _first(*values: Any) -> Any:
    """The first that is not None, or None."""
    return next((value for value in values if value is not None), None)
