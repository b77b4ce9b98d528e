"""Whether a model keeps the rules of `StepInputs`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import MAX_SPECULATIVE_TOKENS
from ..inference.engines.runner import Model
from ..state_spec import HybridStateSpec
from ..validation import INT32_MAX, integer, integers, real, shown
from .watched_model import Finding, Rule, WatchedModel
from .ways import WAYS, Server

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
    for rule, serve in WAYS.items():
        skipped = (rule is Rule.DRAFTS_DIFFER and not drafts) or (
            rule is Rule.PADDING_DIFFERS and not padded_shapes
        )
        if not watched.findings and not skipped:
            watched.rule = rule
            serve(Server(watched, texts, drafts))
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
