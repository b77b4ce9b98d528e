"""A model with its text and an engine of a size for this machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import torch

from .config import InferenceConfig
from .engine_sizes import context_length, largest_fitting_config, served_dtype
from .inference.engines.dynamic_engine import DynamicInferenceEngine
from .inference.engines.streams import TokenStream
from .loaded_model import LoadedModel, load
from .params_and_results import GeneratedToken, RequestResult, SamplingParams
from .validation import refused

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
            TypeError: a setting is no field of `InferenceConfig`.
            ValueError: as of `load` and `largest_fitting_config`.
        """
        accepted = [each.name for each in fields(InferenceConfig)]
        if unknown := sorted(settings.keys() - accepted):
            raise TypeError(
                f"LLM has no setting {unknown[0]!r}; accepted: {', '.join(('device', 'dtype', *accepted))}"
            )
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
            raise refused("prompts", prompts, "text, token ids, or a list of them")
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
        codec, results = self.loaded.codec, self.engine.generate(prompts, params)
        return [Completion(codec.decode(result.tokens), result) for result in results]

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
    if not messages:
        raise ValueError("messages is empty; accepted: one message or more")
    marked = loaded.codec.encode_chat_marked(messages)
    plan = engine.config.checkpoint_plan.with_marks(marked.marks)
    return engine.stream(marked.tokens, params, checkpoint_plan=plan)


def _is_one(prompt: object) -> bool:
    """Whether `prompt` is a text or token ids, no list of prompts and no messages."""
    if isinstance(prompt, str | torch.Tensor):
        return True
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Integral)
