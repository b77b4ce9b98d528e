"""What clients ask for: the fields of a body as pydantic models."""

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from ..validation import INT32_MAX, INT64_MAX, ints_within
from .error_answers import RequestError, bad_field, shortened

MAX_CHOICES = 128
MAX_BIASES = 1024
NOT_VARIABLES = frozenset((
    "self", "messages", "conversation", "add_generation_prompt", "marked_messages", "tools", "tool_choice",
    "chat_template", "continue_final_message", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "documents",
    "sanitize_control_tokens",
))  # fmt: skip
"""Names that mean something to the function that renders a template; all others are a template's own."""
_OFF: tuple[tuple[Any, str], ...] = (
    (None, "audio guided_choice guided_grammar guided_json guided_regex json_schema prompt_embeds "
     "prompt_logprobs reasoning_effort regex structured_outputs truncate_prompt_tokens verbosity "
     "web_search_options"),
    (False, "continue_final_message echo include_stop_str_in_output use_beam_search"),
    (True, "add_generation_prompt add_special_tokens skip_special_tokens spaces_between_special_tokens"),
    (0, "dry_multiplier no_repeat_ngram_size"),
    (1, "best_of length_penalty typical_p"),
    ("", "grammar suffix"),
    ([], "allowed_token_ids bad_words documents functions logits_processors"),
    ("none", "function_call"),
    (["text"], "modalities"),
    ({"type": "text"}, "response_format"),
)  # fmt: skip
_NEUTRAL = {name: value for value, names in _OFF for name in names.split()}
"""Fields of other servers that change answers, with the value of each that changes none, besides null."""
_IGNORED = frozenset((
    "metadata", "parallel_tool_calls", "prediction", "priority", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store", "user",
))  # fmt: skip
"""Fields that change no answer."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "min_tokens",
)  # fmt: skip
"""Fields that are arguments of `SamplingParams` as they are."""
_LEFT_OUT = "^(Input should be|(List|String) should have) | after validation.*| or (instance|object) .*"
"""What is left out of pydantic's messages."""


def _number(value: Any) -> Any:
    """JSON knows one kind of number: 2.0 is an integer."""
    return int(value) if type(value) is float and value.is_integer() else value


def _token_ids(value: Any, validate: Any, info: ValidationInfo) -> list[int]:
    context: Any = info.context
    return _checked_ids(str(info.field_name), value, context.vocab_size - 1)


def _checked_ids(name: str, value: Any, highest: int) -> list[int]:
    """`value` as a list of integers from 0 to `highest`; the error names the first other entry."""
    if not isinstance(value, list):
        raise bad_field(name, f"{name} is {shortened(value)}; accepted: a list of integers")
    if not value or ints_within(value, 0, highest):
        return value
    i, entry = next((i, token) for i, token in enumerate(value) if not ints_within([token], 0, highest))
    raise bad_field(name, f"{name}[{i}] is {shortened(entry)}; accepted: an integer from 0 to {highest}")


def _biases(biases: dict[str, Any], info: ValidationInfo) -> dict[int, float]:
    """OpenAI's form: token ids as strings."""
    context: Any = info.context
    highest = context.vocab_size - 1
    if len(biases) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens")
    for token, bias in biases.items():
        is_number = type(bias) in (int, float) and -100 <= bias <= 100
        is_id = token.isdecimal() and len(token) <= len(str(highest)) and token == str(int(token))
        if not is_number or not is_id or int(token) > highest:
            raise ValueError(f"token ids up to {highest}, as strings, with numbers from -100 to 100")
    return {int(token): float(bias) for token, bias in biases.items()}


Integer = Annotated[int, BeforeValidator(_number)]
Size = Annotated[Integer, Field(ge=1, le=INT32_MAX)]
TopLogProbs = Annotated[Integer, Field(ge=0, le=20)]
TokenIds = Annotated[list[int], WrapValidator(_token_ids)]


class Fields(BaseModel):
    """A JSON object. A field that is null counts as one that is missing."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Fields):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class BodyLimits(BaseModel):
    """What bodies are checked against: the model's name and vocabulary, and the most prompts of one body."""

    model_name: str
    vocab_size: int
    max_prompts: int


class AnswerRequest(Fields):
    """What completions and chats share; names are OpenAI's."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        Field(max_length=4),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    seed: Annotated[Integer, Field(ge=0, le=INT64_MAX)] | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # -1 keeps all tokens, too.
    top_k: Annotated[Integer, Field(ge=-1, le=INT32_MAX), AfterValidator(lambda k: max(k, 0))] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Any], AfterValidator(_biases)] | None = None
    min_tokens: Annotated[Integer, Field(ge=0, le=INT32_MAX)] | None = None
    max_tokens: Size | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_token_ids: bool = False

    @classmethod
    def read(cls, body: dict[str, Any], context: BodyLimits, header_salt: str | None) -> Self:
        """The request in `body`; a RequestError names the first field that is wrong."""
        cls._check_names(body)
        if header_salt is not None:
            if body.get("cache_salt") not in (None, header_salt):
                message = "cache_salt and the header X-Cache-Salt differ; accepted: one of the two"
                raise bad_field("cache_salt", message)
            body = body | {"cache_salt": header_salt}
        try:
            request = cls.model_validate(body, context=context)
        except ValidationError as error:
            raise _first_error(error, body) from None
        if request.model not in (None, context.model_name):
            message = f"there is no such model here; accepted: {context.model_name!r}"
            raise RequestError(404, message, param="model", code="model_not_found")
        if "stream_options" in request.model_fields_set and not request.stream:
            raise bad_field("stream_options", "stream_options is set and stream is not true; accepted: both")
        return request

    @classmethod
    def _check_names(cls, body: dict[str, Any]) -> None:
        """Refuse a field that would change the answer if it were not ignored."""
        fields = cls.model_fields
        for name, value in body.items():
            if name in fields or name in _IGNORED:
                continue
            if name not in _NEUTRAL:
                message = f"the field {name!r} is unknown; accepted: {', '.join(sorted(fields))}"
                if "chat_template_kwargs" in fields:
                    message += "; a variable of the chat template goes into chat_template_kwargs"
                raise bad_field(name[:60], message, "unknown_parameter")
            neutral = _NEUTRAL[name]
            is_neutral = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            if value is not None and not is_neutral:
                raise bad_field(name, f"{name} is not supported; leave it out", "unsupported_parameter")

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `SamplingParams` that the body names."""
        return {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}

    @property
    def num_top_log_probs(self) -> int | None:
        """The number of likeliest tokens to name with each token; None without log-probs."""
        return None


class CompletionRequest(AnswerRequest):
    """A body of /v1/completions; `checkpoints` are positions in each prompt where states are cached."""

    prompt: list[str] | list[list[int]]
    checkpoints: Annotated[list[int], Field(max_length=1024)] = []
    logprobs: TopLogProbs | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _prompts(cls, prompt: Any, validate: Any, info: ValidationInfo) -> list[str] | list[list[int]]:
        context: Any = info.context
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("a string, a list of token ids, or a list of either")
        highest = context.vocab_size - 1
        if type(prompt[0]) is int:
            return [_checked_ids("prompt", prompt, highest)]
        if len(prompt) > context.max_prompts:
            message = f"prompt has {len(prompt)} entries; accepted: at most {context.max_prompts}"
            raise bad_field("prompt", message)
        if not isinstance(prompt[0], str):
            return [_checked_ids(f"prompt[{i}]", entry, highest) for i, entry in enumerate(prompt)]
        for i, entry in enumerate(prompt):
            if not isinstance(entry, str):
                message = f"prompt[{i}] is {shortened(entry)}; accepted: a string as prompt[0] is"
                raise bad_field("prompt", message)
        return prompt

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _positions(cls, positions: Any) -> list[int]:
        return _checked_ids("checkpoints", positions, INT32_MAX)

    @property
    def num_top_log_probs(self) -> int | None:
        return self.logprobs


class CacheControl(Fields):
    type: Literal["ephemeral"]


class TextPart(Fields):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


def _text_or_object(value: Any) -> Any:
    if not isinstance(value, str | dict | None):
        raise ValueError("a string or an object")
    return value


class Function(Fields):
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[Any, AfterValidator(_text_or_object)] = None


class ToolCall(Fields):
    function: Function


class Message(Fields):
    """A message; fields of other APIs' answers, which clients send back, reach the template as they are."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    content: Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(None, validate_default=True)
    cache_control: CacheControl | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, content: Any, info: ValidationInfo) -> Any:
        if isinstance(content, str):
            return [TextPart(type="text", text=content)]
        calls_tools = info.data.get("role") == "assistant" and info.data.get("tool_calls")
        if not isinstance(content, list) and not (content is None and calls_tools):
            raise ValueError("a string, or a list of parts of type text")
        return content

    @property
    def is_marked(self) -> bool:
        """Whether the message, or one of its parts, has the field `cache_control`."""
        return any(part.cache_control is not None for part in (self, *(self.content or ())))

    def for_template(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`fields`, this message as the client wrote it, in the form that chat templates read."""
        message = {name: value for name, value in fields.items() if value is not None}
        message.pop("cache_control", None)
        message["content"] = "\n".join(part.text for part in self.content or ())
        if self.tool_calls is not None:
            message["tool_calls"] = [_with_arguments(call) for call in fields["tool_calls"]]
        return message


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates expect; what is no JSON object stays text."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


class Tool(Fields):
    type: Literal["function"]
    function: Function


class ChatRequest(AnswerRequest):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Size | None = None
    logprobs: bool = False
    top_logprobs: TopLogProbs = 0
    tools: Annotated[list[Tool], Field(fail_fast=True)] = []
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, choice: Any) -> Any:
        if choice not in ("none", "auto"):
            message = "a call cannot be forced; accepted: tool_choice 'auto' or 'none'"
            raise bad_field("tool_choice", message, "unsupported_parameter")
        return choice

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, variables: dict[str, Any]) -> dict[str, Any]:
        for name in variables:
            if name in NOT_VARIABLES or not name.isidentifier():
                accepted = "accepted: a template's own variables"
                message = f"chat_template_kwargs has the name {shortened(name)}; {accepted}"
                raise bad_field("chat_template_kwargs", message)
        return variables

    @model_validator(mode="after")
    def _check_agreement(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "top_logprobs is set and logprobs is not true; accepted: both")
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                message = "max_tokens and max_completion_tokens differ; accepted: one of the two"
                raise bad_field("max_completion_tokens", message)
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def num_top_log_probs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def _first_error(error: ValidationError, body: dict[str, Any]) -> RequestError:
    """The first error of a body: its field, the value and what is accepted."""
    details = error.errors(include_url=False)[0]
    name = ""
    value: Any = body
    for step in details["loc"]:
        if isinstance(value, dict):
            name += f".{step}" if name else str(step)
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            name += f"[{step}]"
            value = value[step]
    if details["type"] == "extra_forbidden":
        return bad_field(name, f"the field {name!r} is unknown", "unknown_parameter")
    if details["type"] == "missing":
        return bad_field(name, f"{name} is missing")
    if details["type"] == "value_error":
        accepted = str(details["ctx"]["error"])
    else:
        accepted = re.sub(_LEFT_OUT, "", details["msg"]).replace("a valid dictionary", "an object")
    return bad_field(name, f"{name} is {shortened(value)}; accepted: {accepted}")
