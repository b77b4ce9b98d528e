"""Bodies of requests become jobs: the prompts, parameters and plans that the engine is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..loaded_model import LoadedText
from ..params_and_results import SamplingParams
from ..text import TextCodec
from ..validation import INT64_MAX
from .error_answers import RequestError, bad_argument, bad_field
from .requests import MAX_CHOICES, AnswerRequest, BodyLimits, ChatRequest, CompletionRequest
from .served_engine import EngineFacts
from .server_settings import ServerSettings

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's server


@dataclass(frozen=True)
class Choice:
    """One answer that the engine is to generate: the index-th of a request, to its prompt-th prompt."""

    index: int
    prompt: int
    tokens: list[int]
    sampling: SamplingParams
    plan: CheckpointPlan


@dataclass(frozen=True)
class Job:
    """All answers that one request wants, and how they are sent back."""

    choices: Sequence[Choice]
    request: AnswerRequest

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum({choice.prompt: len(choice.tokens) for choice in self.choices}.values())


class JobFactory:
    """Turns bodies into jobs, in any thread; a RequestError says what is wrong with a body."""

    def __init__(self, facts: EngineFacts, loaded: LoadedText, settings: ServerSettings) -> None:
        self.longest = min(facts.max_sequence_length, facts.pool_tokens)
        self._facts = facts
        self._loaded = loaded
        self._limits = BodyLimits(
            model_name=settings.model_name,
            vocab_size=facts.vocab_size,
            max_prompts=min(MAX_CHOICES, settings.max_waiting_requests),
        )

    def completion_job(self, body: bytes, header_salt: str | None) -> Job:
        request = CompletionRequest.read(parsed_object(body), self._limits, header_salt)
        prompts = []
        last_checkpoint = max(request.checkpoints, default=0)
        for prompt in request.prompt:
            tokens = self._codec_for("prompt").encode(prompt) if isinstance(prompt, str) else prompt
            if last_checkpoint > len(tokens):
                message = f"checkpoints holds {last_checkpoint}; accepted: positions up to {len(tokens)}"
                raise bad_field("checkpoints", message)
            prompts.append((tokens, request.checkpoints))
        return self._job("prompt", prompts, request, _DEFAULT_COMPLETION_TOKENS)

    def chat_job(self, body: bytes, header_salt: str | None) -> Job:
        fields = parsed_object(body)
        request = ChatRequest.read(fields, self._limits, header_salt)
        text = self._codec_for("messages")
        if text.chat_template is None:
            message = "the model has no chat template; accepted: /v1/completions with a prompt"
            raise bad_field("messages", message)
        messages = [
            message.for_template(message_fields)
            for message, message_fields in zip(request.messages, fields["messages"], strict=True)
        ]
        marked_messages = tuple(i for i, message in enumerate(request.messages) if message.is_marked)
        tools = {name: fields[name] for name in ("tools", "tool_choice") if fields.get(name)}
        variables = request.chat_template_kwargs | tools
        try:
            prompt = text.encode_chat_marked(messages, marked_messages=marked_messages, **variables)
        except ValueError as error:
            raise bad_field("messages", str(error)) from None
        default = self._loaded.generation.max_tokens
        return self._job("messages", [(prompt.tokens, prompt.marks)], request, default)

    def _codec_for(self, field: str) -> TextCodec:
        if self._loaded.text is None:
            raise bad_field(field, "the model has no tokenizer; accepted: /v1/completions with token ids")
        return self._loaded.text

    def _job(
        self, field: str, prompts: list[tuple[list[int], Any]], request: AnswerRequest, default: int | None
    ) -> Job:
        if request.stop:
            self._codec_for("stop")
        num_choices = len(prompts) * request.n
        max_choices = self._limits.max_prompts
        if num_choices > max_choices:
            message = f"{len(prompts)} prompts times n are {num_choices} answers; accepted: {max_choices}"
            if max_choices < MAX_CHOICES:
                message += ", the server's max_waiting_requests"
            raise bad_field("n", message)
        choices: list[Choice] = []
        for number, (tokens, marks) in enumerate(prompts):
            if not tokens:
                raise bad_field(field, f"{field} is empty; accepted: at least one token")
            plan = self._facts.checkpoint_plan.with_marks(marks)
            room = self.longest - len(tokens)
            max_tokens = request.max_tokens or max(1, min(room, default or room))
            if max_tokens > room:
                message = (
                    f"the prompt has {len(tokens)} tokens and the answer up to {max_tokens}; accepted: "
                    f"together at most max_sequence_length ({self._facts.max_sequence_length}) and the KV "
                    f"pool ({self._facts.pool_tokens})"
                )
                raise bad_field("max_tokens", message, "context_length_exceeded")
            for i in range(request.n):
                sampling = self._sampling(request, max_tokens, i)
                choices.append(Choice(len(choices), number, tokens, sampling, plan))
        return Job(choices, request)

    def _sampling(self, request: AnswerRequest, max_tokens: int, number: int) -> SamplingParams:
        """The parameters of answer `number` to a prompt, which has a seed of its own."""
        stop_token_ids = () if request.ignore_eos else self._loaded.generation.params.stop_token_ids
        seed = None if request.seed is None else (request.seed + number) & INT64_MAX
        try:
            return self._loaded.generation.sampling_params(
                **request.sampling, max_tokens=max_tokens, seed=seed,
                stop_token_ids=(*stop_token_ids, *request.stop_token_ids),
                return_log_probs=request.num_top_log_probs is not None,
                num_top_log_probs=request.num_top_log_probs or 0,
            )  # fmt: skip
        except ValueError as error:
            raise bad_argument(error, type(request).model_fields) from None


def parsed_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` holds; its numbers are finite, and its strings are Unicode."""
    try:
        return _OBJECT.decode(body)
    except RecursionError:
        raise RequestError(400, "the body's objects and lists are nested too deeply") from None
    except ValueError as error:
        reason = str(error).removeprefix("JSON is malformed: ").partition(" - at ")[0]
        raise RequestError(400, f"the body is no JSON object in UTF-8: {reason}") from None
