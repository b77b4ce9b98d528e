"""What a body asks for, read and checked."""

from dataclasses import dataclass
from typing import Any

from .errors import bad_field
from .fields import Fields, checked_ids, short
from .messages import Chat, read_chat
from .options import COMMON, MAX_TOP_LOG_PROBS, Options, check_model, check_names, read_options

MAX_MARKS = 1024
_COMPLETION = COMMON | {"prompt", "checkpoints"}
_CHAT = COMMON | {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs",
}  # fmt: skip


@dataclass(frozen=True)
class CompletionRequest:
    """A body of /v1/completions.

    Attributes:
        prompts: texts, or lists of token ids.
        checkpoints: positions in each prompt where the client wants a state to be cached.
        options: the rest.
    """

    prompts: list[str] | list[list[int]]
    checkpoints: tuple[int, ...]
    options: Options


@dataclass(frozen=True)
class ChatRequest:
    """A body of /v1/chat/completions: messages and options."""

    chat: Chat
    options: Options


@dataclass(frozen=True)
class Reader:
    """Reads bodies for one model.

    Attributes:
        model_name: the name that clients may ask for.
        vocab_size: token ids are less.
        max_prompts: prompts of one completion.
    """

    model_name: str
    vocab_size: int
    max_prompts: int

    def completion(self, body: dict[str, Any], header_salt: str | None) -> CompletionRequest:
        """The completion that `body` asks for; a RequestError names the first field that is wrong."""
        fields = Fields(body)
        check_names(fields, _COMPLETION)
        check_model(fields, self.model_name)
        top = fields.integer("logprobs", 0, MAX_TOP_LOG_PROBS)
        return CompletionRequest(
            self._prompts(fields),
            fields.positions("checkpoints", MAX_MARKS),
            self._options(fields, top, header_salt),
        )

    def chat(self, body: dict[str, Any], header_salt: str | None) -> ChatRequest:
        """The chat that `body` asks for; a RequestError names the first field that is wrong."""
        fields = Fields(body)
        check_names(fields, _CHAT)
        check_model(fields, self.model_name)
        top = fields.integer("top_logprobs", 0, MAX_TOP_LOG_PROBS)
        if not fields.boolean("logprobs"):
            if top:
                raise bad_field(
                    "top_logprobs", "top_logprobs is set and logprobs is not true; accepted: both"
                )
            top = None
        else:
            top = top or 0
        return ChatRequest(read_chat(fields), self._options(fields, top, header_salt))

    def _options(self, fields: Fields, num_top_log_probs: int | None, header_salt: str | None) -> Options:
        return read_options(
            fields,
            vocab_size=self.vocab_size,
            num_top_log_probs=num_top_log_probs,
            header_salt=header_salt,
        )

    def _prompts(self, fields: Fields) -> list[str] | list[list[int]]:
        prompt = fields.required("prompt")
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise fields.wrong("prompt", "a string, a list of token ids, or a list of either")
        if type(prompt[0]) is int:
            return [checked_ids("prompt", prompt, self.vocab_size - 1)]
        if len(prompt) > self.max_prompts:
            raise bad_field(
                "prompt", f"prompt has {len(prompt)} entries; accepted: at most {self.max_prompts}"
            )
        if isinstance(prompt[0], str):
            for i, each in enumerate(prompt):
                if not isinstance(each, str):
                    raise bad_field(
                        "prompt", f"prompt[{i}] is {short(each)}; accepted: a string as prompt[0] is"
                    )
            return prompt
        return [checked_ids(f"prompt[{i}]", each, self.vocab_size - 1) for i, each in enumerate(prompt)]
