"""A model with its text and an engine of a size for this machine."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import torch

from .config import InferenceConfig
from .files import CONFIG, read_object
from .inference.contexts.pool_sizes import PoolSizes, available_gb
from .inference.contexts.request import GeneratedToken
from .inference.engines.dynamic_engine import DynamicInferenceEngine
from .inference.engines.streams import TokenStream
from .loaded_model import LoadedModel, load, stored_dtype
from .request import RequestResult, SamplingParams
from .state_spec import HybridStateSpec
from .validation import shown

logger = logging.getLogger(__name__)

SMALLEST_BLOCK = {"cpu": 16, "cuda": 64}  # small blocks resume more, large ones are faster to attend to
MAX_REQUESTS = {"cpu": 32, "cuda": 128}
CUDA_GRAPHS = 64
SHORTEST_CONTEXT = 8192
"""Contexts are not lowered below it before rows are."""
SHARE_OF_ROWS = 0.5
"""What running requests and one sequence of the whole context may take of the memory; the rest caches."""

Messages = Sequence[Mapping[str, Any]]
TextOrTokens = str | Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class Completion:
    """An answer: its text, and the engine's result (tokens, resumed tokens, finish reason)."""

    text: str
    result: RequestResult


class LLM:
    """Answers text with a model, resuming prompts from the prefix cache.

    Example: `LLM("models/tiny-code").chat([{"role": "user", "content": "Write a class."}]).text`.

    Attributes:
        loaded: the model with its tokenizer, chat template and defaults.
        engine: the `DynamicInferenceEngine` behind all calls, which may be called as well.
    """

    def __init__(
        self,
        folder_or_name: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        """Load a model and allocate the pools.

        Args:
            folder_or_name: a folder with `config.json`, or a name on the hub.
            device: None for the GPU where torch sees one, else the CPU.
            dtype: of the weights; None for the model's, and float32 for 16-bit weights on a CPU.
            settings: fields of `InferenceConfig`. `largest_fitting_config` chooses those that are left out.
                Example: `LLM("models/tiny-code", total_gb=0.5, max_requests=4)`.

        Raises:
            ValueError: as of `load` and `largest_fitting_config`.
        """
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.loaded = load(folder_or_name, place, dtype or served_dtype(folder_or_name, place))
        spec = self.loaded.model.state_spec()
        config = largest_fitting_config(spec, context_length(self.loaded.folder), **settings)
        self.engine = DynamicInferenceEngine(self.loaded.model, config)

    def __repr__(self) -> str:
        """One line: model, device, and how full the pools are."""
        return f"<LLM: {self.loaded!r}, {self.engine!r}>"

    @overload
    def generate(
        self, prompts: TextOrTokens, sampling_params: SamplingParams | None = None, **params: Any
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: Sequence[TextOrTokens], sampling_params: SamplingParams | None = None, **params: Any
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: TextOrTokens | Sequence[TextOrTokens],
        sampling_params: SamplingParams | None = None,
        **params: Any,
    ) -> Completion | list[Completion]:
        """Answer one prompt, or several at once.

        Args:
            prompts: a text, or a list of token ids, or a list of texts and lists of token ids.
            sampling_params: how tokens are chosen; None for the model's defaults with `params`, which
                are arguments of `SamplingParams`. Example: `generate("def", max_tokens=64)`.

        Returns:
            A `Completion`, or a list of them where `prompts` is a list of prompts.

        Raises:
            ValueError: a prompt is neither text nor token ids, or can never run.
        """
        chosen = self._params(sampling_params, params)
        if _is_one(prompts):
            return self._answers([self._tokens(prompts)], chosen)[0]
        if not isinstance(prompts, Sequence):
            raise ValueError(f"prompts is {shown(prompts)}; accepted: text, token ids, or a list of them")
        return self._answers([self._tokens(prompt) for prompt in prompts], chosen)

    def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **params: Any
    ) -> Completion:
        """Answer a conversation, rendered with the model's chat template; arguments as of `generate`.

        Example: `chat([{"role": "user", "content": "Write a class."}], max_tokens=64).text`.
        """
        with chat_stream(self.loaded, self.engine, messages, self._params(sampling_params, params)) as stream:
            tokens = [generated.token for generated in stream]
        assert stream.result is not None  # a stream that was read to its end
        return Completion(self.loaded.codec.decode(tokens), stream.result)

    def stream(
        self, prompt: TextOrTokens | Messages, sampling_params: SamplingParams | None = None, **params: Any
    ) -> Iterator[str]:
        """The pieces of an answer's text as they are generated; `prompt` is text, token ids or messages.

        The request is cancelled where the iterator is closed. Example:
        `for piece in llm.stream("def add(", max_tokens=64): print(piece, end="")`.
        """
        detokenizer, chosen = self.loaded.codec.detokenizer(), self._params(sampling_params, params)
        given: Any = prompt
        if _is_one(given) or not isinstance(given, Sequence) or not given:
            stream = self.engine.stream(self._tokens(given), chosen)
        else:
            stream = chat_stream(self.loaded, self.engine, given, chosen)
        with stream:
            yield from detokenizer.pieces(generated.token for generated in stream)

    def _answers(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
        return [
            Completion(self.loaded.codec.decode(result.tokens), result)
            for result in self.engine.generate(prompts, params)
        ]

    def _params(self, given: SamplingParams | None, params: dict[str, Any]) -> SamplingParams:
        if given is None:
            return self.loaded.sampling_params(**params)
        if params:
            raise ValueError(f"sampling_params and {sorted(params)} are given; accepted: one of the two")
        return given

    def _tokens(self, prompt: Any) -> Any:
        return self.loaded.codec.encode(prompt) if isinstance(prompt, str) else prompt


def chat_stream(
    loaded: LoadedModel, engine: DynamicInferenceEngine, messages: Messages, params: SamplingParams
) -> TokenStream[GeneratedToken]:
    """The stream of an answer to a conversation; also stores states where conversations branch."""
    marked = loaded.codec.encode_chat_marked(messages)
    if not messages:
        raise ValueError("messages is empty; accepted: one message or more")
    plan = engine.config.checkpoint_plan.with_marks(marked.marks)
    return engine.stream(marked.tokens, params, checkpoint_plan=plan)


def _is_one(prompt: object) -> bool:
    """Whether `prompt` is a text or token ids, no list of prompts and no messages."""
    if isinstance(prompt, str | torch.Tensor):
        return True
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Integral)


def served_dtype(folder_or_name: str | Path, device: torch.device) -> torch.dtype | None:
    """None for the model's own dtype; float32 for 16-bit weights on a CPU."""
    if device.type == "cpu" and stored_dtype(folder_or_name).itemsize == 2:
        return torch.float32
    return None


def context_length(folder: Path) -> int | None:
    """The longest sequence that a model's config names; None where it names none."""
    config = read_object(folder / CONFIG)
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 1 else None


def largest_fitting_config(
    spec: HybridStateSpec,
    context: int | None,
    *,
    total_gb: float | None = None,
    max_requests: int | None = None,
    max_sequence_length: int | None = None,
    block_size_tokens: int | None = None,
    **settings: Any,
) -> InferenceConfig:
    """The `InferenceConfig` that serves a model on its device: sizes that are None are chosen.

    Rows (32 on a CPU, 128 on a GPU) and the context (the model's own, `context`) are halved until running
    requests and one sequence of the whole context take at most half of the memory: the context to no less
    than 8,192, then the rows, then the context again to 512. Where that is not enough, they may take all of
    the memory. What was lowered is logged as a warning.

    Example: 2 GB, 51.5 MB a state, a context of 262,144 with 32 KB of KV a token: 8 requests of 16,384.

    Raises:
        ValueError: not even one request fits, or a setting is none that `InferenceConfig` accepts.
    """
    kind = spec.device.type
    block = block_size_tokens or -(-SMALLEST_BLOCK[kind] // spec.grid) * spec.grid
    pools_are_given = any(settings.get(pool) is not None for pool in ("num_kv_blocks", "num_mamba_slots"))
    if not pools_are_given and total_gb is None:
        total_gb = available_gb(spec.device)
    settings.setdefault("num_cuda_graphs", CUDA_GRAPHS if kind == "cuda" else None)
    steps = settings.pop("max_tokens_per_step", None)

    def config(rows: int, length: int, gb: float | None) -> InferenceConfig:
        return InferenceConfig(
            block_size_tokens=block, max_requests=rows, max_sequence_length=length, total_gb=gb,
            max_tokens_per_step=max(2048, rows, block) if steps is None else steps, **settings,
        )  # fmt: skip

    rows = MAX_REQUESTS[kind] if max_requests is None else max_requests
    length = (context or SHORTEST_CONTEXT) if max_sequence_length is None else max_sequence_length
    if pools_are_given or total_gb is None:
        return config(rows, length, total_gb)
    config(rows, length, total_gb)  # wrong values are refused here
    fewest = 1 if max_requests is None else rows
    shortest = min(length, SHORTEST_CONTEXT) if max_sequence_length is None else length
    sizes = [(rows, each) for each in _halved(length, shortest)]
    sizes += [(each, shortest) for each in _halved(rows, fewest)][1:]
    least = 512 if max_sequence_length is None else length
    sizes += [(fewest, each) for each in _halved(shortest, least)][1:]
    error: ValueError | None = None
    for share in (SHARE_OF_ROWS, 1.0):
        for chosen in sizes:
            try:
                PoolSizes.of(_with_inputs(config(*chosen, total_gb * share), spec), spec)
            except ValueError as refused:
                error = refused
                continue
            if chosen != (rows, length):
                logger.warning(
                    "%.3g GB hold %d requests at once (of %d) and a context of %s tokens (of %s)",
                    total_gb, chosen[0], rows, f"{chosen[1]:,}", f"{length:,}",
                )  # fmt: skip
            found = config(*chosen, total_gb)
            log_room(_with_inputs(found, spec), spec)
            return found
    assert error is not None  # `sizes` is not empty
    raise error


def _with_inputs(config: InferenceConfig, spec: HybridStateSpec) -> InferenceConfig:
    """With the memory that `batch_invariant` takes, where a check of the model will decide."""
    return replace(config, batch_invariant=True) if config.why_not_invariant(spec.device) is None else config


def log_room(config: InferenceConfig, spec: HybridStateSpec) -> None:
    """Say how many conversations of 4,096 tokens the pools hold: KV and two states each."""
    sizes, tokens = PoolSizes.of(config, spec), min(4096, config.max_sequence_length)
    blocks = -(-tokens // config.block_size_tokens)
    if sizes.division is not None:
        units = sizes.division.num_units
        room = units // (2 + -(-blocks // max(1, sizes.num_kv_blocks // units)))
    else:
        room = min(sizes.num_kv_blocks // blocks, max(1, sizes.num_mamba_slots // 2))
    logger.info(
        "%d requests at once, a context of %s tokens, room for about %s conversations of %s tokens",
        config.max_requests, f"{config.max_sequence_length:,}", f"{room:,}", f"{tokens:,}",
    )  # fmt: skip


def _halved(start: int, end: int) -> Iterator[int]:
    """`start`, its halves above `end`, and `end`."""
    while start > end:
        yield start
        start //= 2
    yield end
