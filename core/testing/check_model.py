"""Whether a model keeps the rules of `StepInputs`: its answers in all ways of serving a text, compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import MAX_SPECULATIVE_TOKENS, InferenceConfig
from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.dynamic_request import Batch
from ..inference.contexts.step_inputs import Model, StepInputs, StepShape
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..params_and_results import SamplingParams
from ..state_spec import HybridStateSpec
from ..validation import INT32_MAX, ceil_div, integer, integers, real, refused, shown
from .rules import ModelError, Rule
from .step_memory import StepMemory

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class ModelReport:
    """What `check_model` has compared: `num_compared` results with those of other ways of serving."""

    model: str
    num_calls: int
    num_compared: int
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"{self.model} keeps all rules: {self.num_calls} calls, {self.num_compared} results compared, "
            f"largest difference {self.largest_difference:.1e}"
        )


def check_model(
    model: Model,
    *,
    tolerance: float | None = None,
    vocabulary: Sequence[int] | None = None,
    num_speculative_tokens: int = 3,
    padded_shapes: bool = True,
    seed: int = 0,
) -> ModelReport:
    """Serve random texts with a model in all the ways an engine may, and compare logits, KV and states.

    The texts are prefilled whole and in parts, decoded token by token, batched, resumed from the prefix
    cache, decoded with drafts, and padded. In every call free memory holds NaN, and what the model writes is
    checked. The model's answers are not used. The first call that breaks a rule ends the check. Takes
    seconds for a small model on a CPU: give it a version of the model with few layers, in float64.

    Args:
        model: as for `DynamicInferenceEngine`, on one rank.
        tolerance: largest accepted difference, relative to the largest number of what is compared; by default
            1e-9, 1e-4, 1e-2 or 5e-2 for float64, float32, float16 or bfloat16.
        vocabulary: token ids that the texts are drawn from, at least three; by default all.
        num_speculative_tokens: most drafts a decode row; 0 for a model that never decodes with drafts.
        padded_shapes: whether to check padded steps, which CUDA graphs need.
        seed: of the texts.

    Returns:
        The report, for printing. The model keeps all rules.

    Raises:
        ModelError: the model breaks a rule. The message names it, with what to do.
        ValueError: an argument is not accepted, or the model is split over ranks.

    Example:
        `check_model(ms.models.HybridLM(ms.models.HybridConfig.tiny()))` reports 1,592 results compared.
    """
    drafts = integer("num_speculative_tokens", num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
    seed = integer("seed", seed, 0, INT32_MAX)
    spec = _spec_of(model)
    dtypes = {tensor.dtype for tensor in spec.states} | {spec.kv_dtype}
    accepted = max(TOLERANCES[dtype] for dtype in dtypes) if tolerance is None else tolerance
    texts = _texts(spec, vocabulary, seed)
    trial = _Trial(model, spec, texts, real("tolerance", accepted, 0.0))
    _serve_in_all_ways(trial, drafts, padded_shapes)
    return ModelReport(type(model).__name__, trial.num_calls, trial.num_compared, trial.largest_difference)


def _spec_of(model: object) -> HybridStateSpec:
    """The model's spec; a ModelError says what is wrong with it."""
    state_spec = getattr(model, "state_spec", None)
    if isinstance(model, type) or not callable(model) or not callable(state_spec):
        accepted = "an object with state_spec() and __call__(inputs)"
        raise ModelError(Rule.SPEC, f"the model is {shown(model)}; accepted: {accepted}")
    try:
        spec = state_spec()
        new_spec = state_spec()
    except Exception as error:
        raise ModelError(Rule.SPEC, f"state_spec() raises {type(error).__name__}: {error}") from error
    if not isinstance(spec, HybridStateSpec):
        raise ModelError(Rule.SPEC, f"state_spec() returns {shown(spec)}; accepted: a HybridStateSpec")
    if spec != new_spec:
        raise ModelError(Rule.SPEC, f"state_spec() returns {spec}, then {new_spec}; accepted: the same twice")
    if spec.groups.is_split:
        raise ValueError(f"model is {shown(model)}, split over ranks; accepted: a whole model on one rank")
    if not any(tensor.num_layers for tensor in spec.states):
        raise ModelError(Rule.SPEC, "state_spec().states has no layer; accepted: at least one")
    return spec


def _texts(spec: HybridStateSpec, vocabulary: Sequence[int] | None, seed: int) -> list[list[int]]:
    """Three texts of four KV blocks and 3 tokens that differ from their first token on."""
    block = ceil_div(8, spec.grid) * spec.grid
    ids = list(range(spec.vocab_size)) if vocabulary is None else vocabulary
    ids = list(dict.fromkeys(integers("vocabulary", ids, 0, spec.vocab_size - 1)))
    if len(ids) < 3:
        accepted = f"at least three different token ids below the model's vocab_size ({spec.vocab_size})"
        raise refused("vocabulary", vocabulary, accepted)
    generator = torch.Generator().manual_seed(seed)
    firsts = torch.randperm(len(ids), generator=generator, device="cpu")[:3].tolist()
    tails = torch.randint(len(ids), (3, 4 * block + 3), generator=generator, device="cpu").tolist()
    return [[ids[index] for index in (first, *tail)] for first, tail in zip(firsts, tails, strict=True)]


_Span = tuple[list[int], int, int]
"""text, prompt, stop: text[prompt:stop] is generated after text[:prompt]; one token where stop <= prompt."""


class _Token(NamedTuple):
    """A token of a step: the sequence up to it, and what follows in its text."""

    prefix: tuple[int, ...]
    next: int


class _Trial:
    """Serves the texts with a model, and compares each result with the first one of the same prefix."""

    def __init__(self, model: Model, spec: HybridStateSpec, texts: list[list[int]], tolerance: float) -> None:
        self.texts = texts
        self.block = (len(texts[0]) - 4) // 4
        self.rule = Rule.CUTS_DIFFER
        self.num_calls = self.num_compared = 0
        self.largest_difference = 0.0
        self._model = model
        self._spec = spec
        self._tolerance = tolerance
        self._first_results: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # (name, prefix) -> result
        self._text_of: dict[int, list[int]] = {}  # of each request
        self._rows: list[list[int]] = []  # the texts of the next step's rows
        self._num_drafted = 0

    def serve(self, rule: Rule, waves: list[list[_Span]], **settings: Any) -> None:
        """Serve the spans with a new engine; `rule`: what is broken where a result differs.

        With one row a wave ends before the next one is added; else each wave is added a step after the last.
        """
        self.rule = rule
        rows = settings.setdefault("max_requests", 1)
        max_length = len(self.texts[0]) + 1
        sizes: dict[str, Any] = {
            "block_size_tokens": self.block,
            "max_tokens_per_step": 4 * self.block,
            "max_sequence_length": max_length,
            "num_kv_blocks": (3 + rows) * ceil_div(max_length, min(self.block, 8)),
            "num_mamba_slots": 24 if settings.get("enable_prefix_caching", True) else None,
            "batch_invariant": False,
        }
        drafter = self if "num_speculative_tokens" in settings else None
        engine = DynamicInferenceEngine(self, InferenceConfig(**(sizes | settings)), drafter=drafter)
        engine.context.observers.append(self)
        if rule is Rule.PADDING_DIFFERS:
            begin_step = engine.context.begin_step
            engine.context.begin_step = lambda batch, padding=None, unread_tokens=None: begin_step(  # type: ignore[method-assign]
                batch, _larger_shape, unread_tokens
            )
        shares_cache = rule is Rule.CACHE_DIFFERS
        plan = None if shares_cache else CheckpointPlan.every_block(self.block)
        for wave in waves:
            for text, prompt, stop in wave:
                params = SamplingParams(
                    max_tokens=max(1, stop - prompt), skip_prompt_log_probs=shares_cache or prompt % 2 == 0
                )
                salt = None if shares_cache else str(len(self._text_of))
                number = engine.add_request(text[:prompt], params, cache_salt=salt, checkpoint_plan=plan)
                self._text_of[number] = text
            engine.step()
            while rows == 1 and engine.has_unfinished_requests():
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """What the text says, or other tokens, and any number of them, by turns."""
        length = len(tokens)
        text = next(text for text in self._text_of.values() if text[:length] == list(tokens))
        drafts = text[length : length + max_drafts]
        self._num_drafted += 1
        wrong_index = (self._num_drafted % 4 - 1) % 4  # of a draft that is wrong: 0 to 3
        if self._num_drafted % 4 == 3 or wrong_index >= len(drafts):
            return drafts[: 1 + self._num_drafted % 3]
        drafts[wrong_index] = next(token for token in text if token != drafts[wrong_index])
        return drafts

    def step_begun(self, batch: Batch, inputs: StepInputs) -> None:
        self._rows = [self._text_of[scheduled.request.request_id] for scheduled in batch]

    def step_ended(self, batch: Batch) -> None: ...

    def state_spec(self) -> HybridStateSpec:
        return self._spec

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Logits that continue the texts; a ModelError where the call breaks a rule."""
        self.num_calls += 1
        tokens = self._tokens(inputs)
        logit_tokens = inputs.logit_tokens.tolist()[: inputs.num_logits]
        copies = {
            f"{type(part).__name__}.{name}": (value, value.clone())
            for part in (inputs, inputs.chunks, inputs.checkpoints)
            for name, value in vars(part).items()
            if isinstance(value, Tensor) and value is not inputs.kv_cache
        }
        memory = StepMemory(inputs)
        logits = self._logits(inputs)
        for name, (value, copy) in copies.items():
            if not torch.equal(value, copy):
                raise ModelError(Rule.INPUTS_CHANGED, f"the model writes to {name}")
        memory.restore()
        answer = torch.zeros_like(logits)
        for row, token in enumerate(logit_tokens):
            self._compare("logits", tokens[token].prefix, logits[row])
            answer[row, tokens[token].next] = 1.0
        kv = inputs.kv_cache
        size = kv.shape[3]
        for place, token in memory.places.items():
            self._compare("KV", tokens[token].prefix, kv[:, :, place // size, place % size])
        for slot, token in memory.slots.items():
            for tensor, pool in zip(self._spec.states, inputs.state_pool.tensors, strict=True):
                self._compare(f"state {tensor.name!r}", tokens[token].prefix, pool[:, slot])
        return answer

    def _tokens(self, inputs: StepInputs) -> dict[int, _Token]:
        """The real tokens of a step by their places."""
        columns = inputs.query_start_loc[:-1], inputs.query_lengths, inputs.kv_lengths
        rows = [row for row in zip(*(column.tolist() for column in columns), strict=True) if row[1]]
        ids = inputs.token_ids.tolist()
        tokens = {}
        for text, (start, count, length) in zip(self._rows, rows, strict=True):
            prefix = text[: length - count]
            for token in range(start, start + count):
                prefix.append(ids[token])
                tokens[token] = _Token(tuple(prefix), text[len(prefix)] if len(prefix) < len(text) else 0)
        return tokens

    def _logits(self, inputs: StepInputs) -> Tensor:
        padding = Rule.PADDING_DIFFERS if self.rule is Rule.PADDING_DIFFERS else None
        try:
            logits = self._model(inputs)
        except Exception as error:
            raise ModelError(padding or Rule.RAISES, f"{type(error).__name__}: {error}") from error
        accepted = (len(inputs.logit_tokens), self._spec.vocab_size)
        if isinstance(logits, Tensor) and logits.shape == accepted and logits.is_floating_point():
            return logits
        returned = f"{tuple(logits.shape)} {logits.dtype}" if isinstance(logits, Tensor) else shown(logits)
        message = f"the model returns {returned[:80]}; accepted: floats of shape {accepted}"
        raise ModelError(padding or Rule.LOGITS, message)

    def _compare(self, name: str, prefix: tuple[int, ...], value: Tensor) -> None:
        """Hold a result against the first one of the same prefix."""
        length = len(prefix)
        if not value.isfinite().all():
            raise ModelError(
                Rule.FREE_MEMORY,
                f"{name} after {length} tokens is NaN or infinite, and memory that the step does not "
                "name is NaN: it was not written, or that memory was read",
            )
        if length > 12 and 4 < length % self.block < self.block - 1 and name.startswith("state"):
            return  # a state of any other length: they take memory
        expected = self._first_results.setdefault((name, prefix), value.clone())
        if not expected.numel():
            return
        scale = float(expected.double().abs().max()) or 1.0
        difference = float((expected - value).double().abs().max()) / scale
        self.num_compared += 1
        self.largest_difference = max(self.largest_difference, difference)
        if difference > self._tolerance:
            message = f"{name} after {length} tokens differs by {difference:.1e} of its maximum"
            raise ModelError(self.rule, message)


def _serve_in_all_ways(trial: _Trial, num_drafts: int, padded_shapes: bool) -> None:
    x, y, z = trial.texts
    block = trial.block
    whole_texts = [(x, 4 * block, 0), (y, 2 * block + 3, 0), (z, 2 * block + 3, 0)]
    whole_texts += [(x, length, 0) for length in (1, 2, block, 2 * block + 1)]
    trial.serve(Rule.CUTS_DIFFER, [[span] for span in whole_texts])
    for span, budget in (((x, 7, 0), 1), ((y, 9, 0), 2), ((x, 3 * block + 1, 0), max(2, block // 3))):
        trial.serve(Rule.CUTS_DIFFER, [[span]], max_tokens_per_step=budget, enable_prefix_caching=False)
    trial.serve(Rule.CUTS_DIFFER, [[(x, 4 * block, 0)]], max_tokens_per_step=block)
    spans = [(1, min(2 * block + 4, 48)), (block - 2, block + 5), (4 * block - 4, 4 * block)]
    trial.serve(Rule.DECODE_DIFFERS, [[(x, prompt, stop)] for prompt, stop in spans])

    first_wave = [(x, block + 3, block + 9), (y, 1, 8), (z, block, block + 3)]
    waves = [first_wave, [], [(y, 2 * block + 1, 0), (x, 3, 6)], [(z, block - 1, block + 2)]]
    together: dict[str, Any] = {"max_tokens_per_step": 8 * block, "max_requests": 5}
    trial.serve(Rule.BATCH_DIFFERS, waves, **together)

    fork, late_fork = (x[: block + 1] + text[: block + 4] for text in (y, z))
    repeated = [(x, 2 * block + 3, 2 * block + 5), (fork, 2 * block, 0), (x, 2 * block + 3, 2 * block + 5)]
    repeated += [(x, 2 * block, 2 * block + 2), (x, 3 * block - 2, 3 * block + 3)]
    repeated += [(x, 4 * block, 4 * block + 2), (late_fork, 2 * block, 0)]
    trial.serve(Rule.CACHE_DIFFERS, [[span] for span in repeated])
    if num_drafts:
        drafted = [[(x, block - 3, block + 12), (y, 2, 12)], [], [], [(z, block + 1, block + 4)]]
        trial.serve(Rule.DRAFTS_DIFFER, drafted, max_requests=3, num_speculative_tokens=num_drafts)
    if padded_shapes:
        trial.serve(Rule.PADDING_DIFFERS, waves, **together)


def _larger_shape(shape: StepShape) -> StepShape:
    """A shape with padding of every kind that a step of `shape` can have, as CUDA graphs need it."""
    decodes = shape.decodes + 2 if shape.decodes else 0
    prefills = shape.prefills + 2 if shape.prefills else 0
    tokens = shape.prefill_tokens + 5 if prefills else 0
    return shape._replace(
        decodes=decodes,
        prefills=prefills,
        prefill_tokens=tokens,
        max_query_tokens=tokens,
        block_columns=shape.block_columns + 1,
        kv_writes=decodes * shape.decode_tokens + tokens,
        chunks=shape.chunks + 3 if prefills else 0,
        checkpoints=shape.checkpoints + 2 if prefills else 0,
        logits=shape.logits + 3,
    )
