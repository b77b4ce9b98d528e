"""Whether a model keeps the rules of `StepInputs`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..config import MAX_SPECULATIVE_TOKENS, InferenceConfig
from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.request import RequestStep
from ..inference.contexts.step_inputs import StepInputs, StepShape
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..inference.engines.runner import Model
from ..request import SamplingParams
from ..state_spec import HybridStateSpec
from ..validation import INT32_MAX, integer, integers, real, shown
from .watched_model import Finding, Rule, WatchedModel

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class ModelReport:
    """The result of `check_model`; `print` it. `num_compared`: results held against those of other ways."""

    model: str
    findings: tuple[Finding, ...] = ()
    num_calls: int = 0
    num_compared: int = 0
    largest_difference: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        lines = [f"{self.model} {'keeps all rules' if self.passed else 'breaks rules'}"]
        lines += [f"  {number}. {finding}" for number, finding in enumerate(self.findings, start=1)]
        lines.append(
            f"  {self.num_calls} calls, {self.num_compared} results compared, largest difference "
            f"{self.largest_difference:.1e}"
        )
        return "\n".join(lines)


class ModelError(AssertionError):
    """The model breaks rules; the message is the printed `report`."""

    def __init__(self, report: ModelReport) -> None:
        super().__init__(str(report))
        self.report = report


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
    cache, decoded with drafts, and padded. In every call, memory that the step does not name holds NaN, and
    everything that the model writes is checked. The model's answers are not used. Takes seconds for a small
    model on a CPU: give it a version of the model with few layers, in float64.

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
        ModelError: the model breaks rules. The message lists them with what to do.
        ValueError: an argument is not accepted, or the model is split over ranks.

    Example:
        `check_model(ms.models.HybridLM(ms.models.HybridConfig.tiny())).passed` is True.
    """
    drafts = integer("num_speculative_tokens", num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
    seed = integer("seed", seed, 0, INT32_MAX)
    spec, wrong = _spec_of(model)
    if spec is None:
        raise ModelError(ModelReport(type(model).__name__, (Finding(Rule.SPEC, wrong),)))
    dtypes = {tensor.dtype for tensor in spec.states} | {spec.kv_dtype}
    accepted = max(TOLERANCES[one] for one in dtypes) if tolerance is None else tolerance
    texts = _texts(spec, vocabulary, seed)
    watched = WatchedModel(model, spec, real("tolerance", accepted, 0.0))
    for rule, serve in _WAYS.items():
        skipped = (rule is Rule.DRAFTS_DIFFER and not drafts) or (
            rule is Rule.PADDING_DIFFERS and not padded_shapes
        )
        if not watched.findings and not skipped:
            watched.rule = rule
            serve(_Server(watched, texts, drafts))
    report = ModelReport(
        type(model).__name__, tuple(watched.findings), watched.num_calls, watched.num_compared,
        watched.largest_difference,
    )  # fmt: skip
    if not report.passed:
        raise ModelError(report)
    return report


def _spec_of(model: object) -> tuple[HybridStateSpec | None, str]:
    """The model's spec, or what is wrong with it."""
    state_spec = getattr(model, "state_spec", None)
    if isinstance(model, type) or not callable(model) or not callable(state_spec):
        return (
            None,
            f"the model is {shown(model)}; accepted: an object with state_spec() and __call__(inputs)",
        )
    try:
        spec, again = state_spec(), state_spec()
    except Exception as error:
        return None, f"state_spec() raises {type(error).__name__}: {error}"
    if not isinstance(spec, HybridStateSpec):
        return None, f"state_spec() returns {shown(spec)}; accepted: a HybridStateSpec"
    if spec != again:
        return None, f"state_spec() returns {spec}, then {again}; accepted: the same at every call"
    if spec.groups.is_split:
        raise ValueError(f"model is {shown(model)}, split over ranks; accepted: a whole model on one rank")
    if not any(tensor.num_layers for tensor in spec.states):
        return None, "state_spec().states has no layer; accepted: at least one, from which prompts resume"
    return spec, ""


def _texts(spec: HybridStateSpec, vocabulary: Sequence[int] | None, seed: int) -> list[list[int]]:
    """Three texts of four KV blocks and 3 tokens that differ from their first token on."""
    block = -(-8 // spec.grid) * spec.grid
    ids = list(range(spec.vocab_size)) if vocabulary is None else vocabulary
    ids = list(dict.fromkeys(integers("vocabulary", ids, 0, spec.vocab_size - 1)))
    if len(ids) < 3:
        raise ValueError(
            f"vocabulary is {shown(vocabulary)}; accepted: at least three different token ids below the "
            f"model's vocab_size ({spec.vocab_size})"
        )
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(ids), generator=generator, device="cpu")[:3].tolist()
    rest = torch.randint(len(ids), (3, 4 * block + 3), generator=generator, device="cpu").tolist()
    return [[ids[index] for index in (begin, *more)] for begin, more in zip(first, rest, strict=True)]


# ---- ways of serving the same texts: whole and in parts, alone and together, computed and cached


class _Server:
    """Engines whose requests generate the rest of their texts, whatever the model answers."""

    def __init__(self, watched: WatchedModel, texts: list[list[int]], num_drafts: int) -> None:
        self.texts, self.num_drafts = texts, num_drafts
        self.block = (len(texts[0]) - 4) // 4
        self._watched = watched
        self._text_of: dict[int, list[int]] = {}
        self._turn = 0
        self.engine: DynamicInferenceEngine

    def begin(self, max_tokens: int, max_requests: int = 1, drafts: int = 0, **settings: object) -> None:
        """A new engine, with a prefix cache unless `settings` say otherwise."""
        longest = len(self.texts[0]) + 1
        sizes: dict[str, object] = {
            "block_size_tokens": self.block,
            "max_requests": max_requests,
            "max_tokens": max(max_tokens, max_requests),
            "max_sequence_length": longest,
            "num_kv_blocks": (3 + max_requests) * -(-longest // min(self.block, 8)),
            "num_mamba_slots": 24,
            "num_speculative_tokens": drafts,
        }
        config = InferenceConfig(**(sizes | settings))  # type: ignore[arg-type]
        self.engine = DynamicInferenceEngine(self._watched, config, drafter=self if drafts else None)
        self.engine.context.observe(self)

    def pad(self) -> None:
        """Pad all steps from now on."""
        context, begin_step = self.engine.context, self.engine.context.begin_step
        context.begin_step = lambda steps, padding=None, sampled_tokens=None: begin_step(  # type: ignore[method-assign]
            steps, _larger_shape, sampled_tokens
        )

    def step_begun(self, steps: Sequence[RequestStep], inputs: StepInputs) -> None:
        self._watched.texts = [self._text_of[step.request.request_id] for step in steps]

    def step_ended(self, steps: Sequence[RequestStep]) -> None: ...

    def add(
        self, text: list[int], prompt: int, stop: int = 0, salt: str | None = None, scores: bool = False,
        plan: CheckpointPlan | None = None,
    ) -> None:  # fmt: skip
        """Ask for text[prompt:stop] after text[:prompt]; `scores`: logits of all prompt tokens."""
        length = max(1, stop - prompt)
        params = SamplingParams(num_tokens_to_generate=length, skip_prompt_log_probs=not scores)
        number = self.engine.add_request(text[:prompt], params, cache_salt=salt, checkpoint_plan=plan)
        self._text_of[number] = text

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """What the text says, or other tokens, and any number of them, by turns."""
        known, length = list(tokens), len(tokens)
        text = next(text for text in self._text_of.values() if text[:length] == known)
        follows = text[length : length + max_drafts]
        self._turn += 1
        wrong = (self._turn % 4 - 1) % 4  # the place of a draft that is wrong: 0 to 3
        if self._turn % 4 == 3 or wrong >= len(follows):
            return follows[: 1 + self._turn % 3]
        follows[wrong] = next(token for token in text if token != follows[wrong])
        return follows


def _larger_shape(shape: StepShape) -> StepShape:
    """A shape with padding of every kind that a step of `shape` can have, as CUDA graphs need it."""
    decodes = shape.decodes + 2 if shape.decodes else 0
    prefills = shape.prefills + 2 if shape.prefills else 0
    tokens = shape.prefill_tokens + 5 if prefills else 0
    return StepShape(
        decodes=decodes,
        prefills=prefills,
        prefill_tokens=tokens,
        max_query_tokens=tokens,
        table_blocks=shape.table_blocks + 1,
        kv_writes=decodes * shape.decode_tokens + tokens,
        chunks=shape.chunks + 3 if prefills else 0,
        checkpoints=shape.checkpoints + 2 if prefills else 0,
        logits=shape.logits + 3,
        decode_tokens=shape.decode_tokens,
    )


def _cuts(server: _Server) -> None:
    """Prompts whole, of other lengths, and cut on the chunk grid and elsewhere."""
    (x, y, z), block = server.texts, server.block
    every = CheckpointPlan.every_block(block)
    server.begin(4 * block)
    for number, (text, length) in enumerate(((x, 4 * block), (y, 2 * block + 3), (z, 2 * block + 3))):
        server.add(text, length, salt=f"{number}", scores=True, plan=every)
        server.finish()
    for length in (1, 2, block, 2 * block + 1):
        server.add(x, length, salt=f"{length} tokens", plan=every)
        server.finish()
    for text, length, budget in ((x, 6, 1), (y, 9, 2), (x, 3 * block + 2, max(2, block // 3))):
        server.begin(budget, enable_prefix_caching=False, num_mamba_slots=None)
        server.add(text, length, scores=True)
        server.finish()
    server.begin(block)
    server.add(x, 4 * block, plan=every)
    server.finish()


def _decodes(server: _Server) -> None:
    """The rest of the text token by token, from prompts of different lengths."""
    block = server.block
    server.begin(4 * block)
    spans = [(1, min(2 * block + 4, 48)), (block - 2, block + 5), (4 * block - 4, 4 * block)]
    for number, (prompt, stop) in enumerate(spans):
        server.add(server.texts[0], prompt, stop, salt=str(number))
        server.finish()


def _together(server: _Server, padded: bool = False) -> None:
    """Requests of different lengths at once: decodes with prefills."""
    (x, y, z), block = server.texts, server.block
    server.begin(8 * block, max_requests=5)
    if padded:
        server.pad()
    server.add(x, block + 3, block + 9, salt="a")
    server.add(y, 1, 8, salt="b")
    server.add(z, block, block + 3, salt="c", scores=True)
    for _ in range(2):
        server.engine.step()
    server.add(y, 2 * block + 1, salt="d")
    server.add(x, 2, 6, salt="e", scores=True)
    server.engine.step()
    server.add(z, block - 1, block + 2, salt="f")
    server.finish()


def _cached(server: _Server) -> None:
    """A prompt, then repeats, extensions and forks of it, which resume from cached states."""
    (x, y, z), block = server.texts, server.block
    server.begin(4 * block + 2, max_requests=2)
    fork, late_fork = (x[: block + 1] + other[: block + 4] for other in (y, z))
    asked = [(x, 2 * block + 3, 2 * block + 5), (fork, 2 * block, 0), (x, 2 * block + 3, 2 * block + 5)]
    asked += [(x, 2 * block, 2 * block + 2), (x, 3 * block - 2, 3 * block + 3), (x, 4 * block, 4 * block + 2)]
    for text, prompt, stop in (*asked, (late_fork, 2 * block, 0)):
        server.add(text, prompt, stop)
        server.finish()
    server.add(x, 2 * block + 4, 2 * block + 6)
    server.add(late_fork, 2 * block + 2)
    server.finish()


def _drafts(server: _Server) -> None:
    """Decode rows of several tokens, whose drafts are right, wrong, or too few."""
    (x, y, z), block = server.texts, server.block
    server.begin(4 * block, max_requests=3, drafts=server.num_drafts)
    server.add(x, block - 3, block + 12, salt="a")
    server.add(y, 2, 12, salt="b")
    for _ in range(3):
        server.engine.step()
    server.add(z, block + 1, block + 4, salt="c")
    server.finish()


_WAYS: dict[Rule, Callable[[_Server], None]] = {
    Rule.CUTS_DIFFER: _cuts,
    Rule.DECODE_DIFFERS: _decodes,
    Rule.BATCH_DIFFERS: _together,
    Rule.CACHE_DIFFERS: _cached,
    Rule.DRAFTS_DIFFER: _drafts,
    Rule.PADDING_DIFFERS: lambda server: _together(server, padded=True),
}
