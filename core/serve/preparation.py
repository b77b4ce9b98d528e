"""From what a client asks for to what the engine is given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..loaded_model import LoadedModel, LoadedText
from ..sampling_params import SamplingParams
from ..text import PromptTooLongError, TextCodec
from ..validation import INT64_MAX
from .errors import RequestError, bad_field
from .options import MAX_CHOICES, Options
from .requests import ChatRequest, CompletionRequest
from .served_engine import EngineFacts

_DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's server


@dataclass(frozen=True)
class Choice:
    """One answer that the engine is to generate.

    Attributes:
        index: its number among the answers to the request.
        prompt: the number of its prompt.
        tokens: the prompt.
        sampling: how the answer is chosen.
        plan: which states are cached on the way.
    """

    index: int
    prompt: int
    tokens: list[int]
    sampling: SamplingParams
    plan: CheckpointPlan


@dataclass(frozen=True)
class Job:
    """All answers that one request wants, and how they are sent back."""

    choices: Sequence[Choice]
    options: Options

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum({choice.prompt: len(choice.tokens) for choice in self.choices}.values())


@dataclass(frozen=True)
class Lengths:
    """How long prompt and answer together may be.

    Attributes:
        max_sequence_length: the engine's setting.
        pool: tokens that its whole KV pool holds.
    """

    max_sequence_length: int
    pool: int

    @classmethod
    def of(cls, facts: EngineFacts) -> "Lengths":
        return cls(facts.max_sequence_length, facts.pool_tokens)

    @property
    def longest(self) -> int:
        return min(self.max_sequence_length, self.pool)

    def answer_tokens(self, num_prompt_tokens: int, asked: int | None, default: int | None) -> int:
        """The most tokens of an answer.

        Args:
            num_prompt_tokens: length of the prompt.
            asked: what the client asks for.
            default: for clients that ask for nothing, where as many fit; None for all that fit.

        Raises:
            RequestError: prompt and answer are too long; the message has both limits.
        """
        room = self.longest - num_prompt_tokens
        wanted = asked if asked is not None else max(1, min(room, default or room))
        if wanted > room:
            raise self.too_long(num_prompt_tokens, wanted)
        return wanted

    def longest_prompt(self, asked: int | None) -> int:
        """The most tokens of a prompt before an answer of `asked` tokens, or of at least one."""
        return self.longest - (1 if asked is None else asked)

    def too_long(self, num_prompt_tokens: int, asked: int | None, is_exact: bool = True) -> RequestError:
        """The error of a prompt of so many tokens, or of so many at least, and an answer."""
        found = f"{'' if is_exact else 'at least '}{num_prompt_tokens}"
        message = (
            f"the prompt has {found} tokens and the answer up to {1 if asked is None else asked}; accepted: "
            f"together at most max_sequence_length ({self.max_sequence_length}) and the KV pool ({self.pool})"
        )
        return bad_field("max_tokens", message, "context_length_exceeded")


class Preparation:
    """Turns requests into jobs: tokens, sampling parameters and checkpoint plans.

    It works on text, which takes time; call it outside the event loop, in any threads.

    Args:
        facts: the engine's limits and plan.
        loaded: the model's text and defaults.
        max_choices: answers to one request.
    """

    def __init__(self, facts: EngineFacts, loaded: LoadedModel | LoadedText, max_choices: int) -> None:
        self.lengths = Lengths.of(facts)
        self._plan = facts.checkpoint_plan
        self._loaded = loaded
        self._max_choices = max_choices

    def completion(self, request: CompletionRequest) -> Job:
        """The job of a completion; a RequestError where its prompts or lengths are wrong."""
        for prompt in request.prompts:
            if isinstance(prompt, str):
                self._check_text(prompt, request.options.max_tokens)
        prompts = [(self._tokens(prompt), request.checkpoints) for prompt in request.prompts]
        for tokens, marks in prompts:
            if marks and max(marks) > len(tokens):
                message = f"checkpoints holds {max(marks)}; accepted: positions up to {len(tokens)}"
                raise bad_field("checkpoints", message)
        return self._job("prompt", prompts, request.options, _DEFAULT_COMPLETION_TOKENS)

    def chat(self, request: ChatRequest) -> Job:
        """The job of a chat; a RequestError where the model's template refuses the messages."""
        chat, text = request.chat, self._text("messages")
        if text.chat_template is None:
            raise bad_field(
                "messages", "the model has no chat template; accepted: /v1/completions with a prompt"
            )
        asked = request.options.max_tokens
        try:
            marked = text.encode_chat_marked(
                chat.messages,
                marked_messages=chat.marked,
                max_prompt_tokens=self.lengths.longest_prompt(asked),
                **chat.variables,
            )
        except PromptTooLongError as error:
            raise self.lengths.too_long(error.num_tokens, asked, error.is_exact) from None
        except ValueError as error:
            raise bad_field("messages", str(error)) from None
        default = self._loaded.generation.num_tokens_to_generate
        return self._job("messages", [(marked.tokens, marked.marks)], request.options, default)

    def _check_text(self, prompt: str, asked: int | None) -> None:
        """Refuse a text that is too long whatever its tokens are."""
        longest = self.lengths.longest_prompt(asked)
        if len(prompt) > longest < (fewest := self._text("prompt").fewest_tokens(prompt)):
            raise self.lengths.too_long(fewest, asked, is_exact=False)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        return self._text("prompt").encode(prompt) if isinstance(prompt, str) else prompt

    def _text(self, field: str) -> TextCodec:
        if self._loaded.text is None:
            raise bad_field(field, "the model has no tokenizer; accepted: /v1/completions with token ids")
        return self._loaded.text

    def _job(
        self,
        field: str,
        prompts: list[tuple[list[int], tuple[int, ...]]],
        options: Options,
        default: int | None,
    ) -> Job:
        if options.stops:
            self._text("stop")
        num_choices = len(prompts) * options.num_choices
        if num_choices > self._max_choices:
            message = (
                f"{len(prompts)} prompts times n are {num_choices} answers; accepted: {self._max_choices}"
            )
            if self._max_choices < MAX_CHOICES:
                message += ", the server's max_waiting_requests"
            raise bad_field("n", message)
        choices: list[Choice] = []
        for number, (tokens, marks) in enumerate(prompts):
            if not tokens:
                raise bad_field(field, f"{field} is empty; accepted: at least one token")
            plan = replace(self._plan, marks=(*self._plan.marks, *marks))
            most = self.lengths.answer_tokens(len(tokens), options.max_tokens, default)
            for i in range(options.num_choices):
                sampling = self._sampling(options, most, i)
                choices.append(Choice(len(choices), number, tokens, sampling, plan))
        return Job(choices, options)

    def _sampling(self, options: Options, most: int, number: int) -> SamplingParams:
        """The parameters of answer `number` to a prompt. Each answer has a seed of its own."""
        given: dict[str, Any] = dict(options.sampling)
        more_stops = given.pop("more_stop_token_ids", ())
        stops = given.pop("stop_token_ids", self._loaded.generation.stop_token_ids)
        seed = None if options.seed is None else (options.seed + number) & INT64_MAX
        try:
            return self._loaded.sampling_params(
                **given,
                num_tokens_to_generate=most,
                stop_token_ids=(*stops, *more_stops),
                seed=seed,
                return_log_probs=options.num_top_log_probs is not None,
                num_top_log_probs=options.num_top_log_probs or 0,
            )
        except ValueError as error:
            raise RequestError(400, str(error)) from None
