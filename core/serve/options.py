"""What both endpoints take: how an answer is chosen, where it ends and what is sent back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..validation import INT32_MAX, INT64_MAX
from .errors import RequestError, bad_field
from .fields import Fields, is_neutral

MAX_STOPS = 4
MAX_STOP_LENGTH = 1000
MAX_CHOICES = 128
MAX_TOP_LOG_PROBS = 20
MAX_SALT_LENGTH = 256

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "add_special_tokens": (True,), "allowed_token_ids": ([],), "audio": (),
    "bad_words": ([],), "best_of": (1,), "continue_final_message": (False,),
    "documents": ([],), "dry_multiplier": (0,), "echo": (False,), "frequency_penalty": (0,),
    "function_call": ("none",), "functions": ([],), "guided_choice": (),
    "guided_grammar": (), "guided_json": (), "guided_regex": (),
    "grammar": ("",),
    "include_stop_str_in_output": (False,), "json_schema": (), "length_penalty": (1,), "logit_bias": ({},),
    "logits_processors": ([],), "min_p": (0,), "min_tokens": (0,), "modalities": (["text"],),
    "no_repeat_ngram_size": (0,), "parallel_tool_calls": (True,), "presence_penalty": (0,),
    "prompt_embeds": (), "prompt_logprobs": (), "reasoning_effort": (), "regex": (),
    "repetition_penalty": (1,), "response_format": ({"type": "text"},), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "structured_outputs": (), "suffix": ("",),
    "truncate_prompt_tokens": (), "typical_p": (1,), "use_beam_search": (False,), "verbosity": (),
    "web_search_options": (),
}  # fmt: skip
"""Fields of other servers that change answers, with the values of each that change none."""

IGNORED = frozenset((
    "metadata", "prediction", "priority", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "safety_identifier", "service_tier", "store", "user",
))  # fmt: skip
"""Fields that change no answer."""

COMMON = frozenset((
    "model", "stream", "stream_options", "stop", "stop_token_ids", "ignore_eos", "logprobs", "seed", "n",
    "temperature", "top_p", "top_k", "max_tokens", "cache_salt", "return_token_ids",
))  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The fields that completions and chats share.

    Attributes:
        sampling: arguments of `SamplingParams` that the client gave.
        max_tokens: None where the client gave none.
        num_choices: answers to one prompt.
        stops: stop strings.
        seed: of the first answer to a prompt; None for the engine's own.
        num_top_log_probs: likeliest tokens to name with each token; None without log-probs.
        streams: whether tokens are sent as they come.
        includes_usage: whether a stream ends with the counts of its tokens.
        returns_token_ids: whether token ids are sent beside the text.
        cache_salt: None where the client gave none.
    """

    sampling: Mapping[str, Any]
    max_tokens: int | None
    num_choices: int
    stops: tuple[str, ...]
    seed: int | None
    num_top_log_probs: int | None
    streams: bool
    includes_usage: bool
    returns_token_ids: bool
    cache_salt: str | None


def check_names(body: Fields, known: frozenset[str]) -> None:
    """Raise a RequestError for a field that would change the answer if it were not ignored.

    Args:
        body: the fields of a request.
        known: the fields that the endpoint reads.
    """
    for name, value in body.values.items():
        if name in known or name in IGNORED:
            continue
        if name not in NEUTRAL:
            message = f"the field {name!r} is unknown; accepted: {', '.join(sorted(known))}"
            raise bad_field(name[:60], message, "unknown_parameter")
        if not is_neutral(value, NEUTRAL[name]):
            raise bad_field(name, f"{name} is not supported; leave it out", "unsupported_parameter")


def check_model(body: Fields, model_name: str) -> None:
    """Raise a RequestError where the client asks for another model."""
    name = body.text("model")
    if name not in (None, model_name):
        message = f"there is no such model here; accepted: {model_name!r}"
        raise RequestError(404, message, param="model", code="model_not_found")


def read_options(
    body: Fields, *, vocab_size: int, num_top_log_probs: int | None, header_salt: str | None
) -> Options:
    """The options of a request.

    Args:
        body: the fields of the request.
        vocab_size: of the model.
        num_top_log_probs: as the endpoint's own fields say it; None without log-probs.
        header_salt: the salt in the request's header, if there is one.
    """
    streams = body.boolean("stream")
    return Options(
        sampling=_sampling(body, vocab_size),
        max_tokens=_max_tokens(body),
        num_choices=body.integer("n", 1, MAX_CHOICES) or 1,
        stops=body.strings("stop", MAX_STOPS, MAX_STOP_LENGTH),
        seed=_seed(body),
        num_top_log_probs=num_top_log_probs,
        streams=streams,
        includes_usage=_includes_usage(body, streams),
        returns_token_ids=body.boolean("return_token_ids"),
        cache_salt=_salt(body, header_salt),
    )


def _sampling(body: Fields, vocab_size: int) -> dict[str, Any]:
    top_k = body.integer("top_k", -1, INT32_MAX)
    given: dict[str, Any] = {
        "temperature": body.number("temperature", 0, 1e6),
        "top_p": body.number("top_p", 0, 1, above=True),
        "top_k": 0 if top_k == -1 else top_k,
        "stop_token_ids": () if body.boolean("ignore_eos") else None,
    }
    more_stops = body.token_ids("stop_token_ids", vocab_size)
    if more_stops is not None:
        given["more_stop_token_ids"] = more_stops
    return {name: value for name, value in given.items() if value is not None}


def _max_tokens(body: Fields) -> int | None:
    either = {
        name: body.integer(name, 1, INT32_MAX)
        for name in ("max_tokens", "max_completion_tokens")
        if body.values.get(name) is not None
    }
    if len(set(either.values())) > 1:
        message = "max_tokens and max_completion_tokens differ; accepted: one of the two"
        raise bad_field("max_completion_tokens", message)
    return next(iter(either.values()), None)


def _seed(body: Fields) -> int | None:
    seed = body.integer("seed", -INT64_MAX - 1)
    return None if seed is None else seed & INT64_MAX  # the engine's seeds are not negative


def _includes_usage(body: Fields, streams: bool) -> bool:
    if body.values.get("stream_options") is None:
        return False
    options = body.object("stream_options")
    if not streams:
        raise bad_field("stream_options", "stream_options is set and stream is not true; accepted: both")
    for name in options.values:
        if name not in ("include_usage", "include_obfuscation"):
            raise bad_field(
                "stream_options", f"stream_options has the field {name!r}; accepted: include_usage"
            )
    return options.boolean("include_usage")


def _salt(body: Fields, header_salt: str | None) -> str | None:
    salt = body.text("cache_salt", MAX_SALT_LENGTH)
    if header_salt is None:
        return salt
    if not 1 <= len(header_salt) <= MAX_SALT_LENGTH:
        raise bad_field("X-Cache-Salt", f"X-Cache-Salt is empty or longer than {MAX_SALT_LENGTH} characters")
    if salt not in (None, header_salt):
        raise bad_field(
            "cache_salt", "cache_salt and the header X-Cache-Salt differ; accepted: one of the two"
        )
    return header_salt
