"""Whether a model keeps the rules of `StepInputs`."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..config import MAX_SPECULATIVE_TOKENS
from ..inference.engines.model import Model
from ..state_spec import HybridStateSpec
from ..validation import INT32_MAX, boolean, integer, integers, optional_integer, real, shown
from .differences import TOLERANCES
from .model_audit import ModelAudit
from .prefix_book import Observation, PrefixBook
from .report import Findings, ModelError, ModelReport, ScenarioReport
from .rules import Rule
from .scenarios import (
    SCENARIOS,
    Texts,
    serve_in_cuts,
    serve_together,
    serve_token_by_token,
    serve_whole,
)
from .step_memory import WriteKind

_SHORTEST_BLOCK = 8


def check_model(
    model: Model,
    *,
    tolerance: float | None = None,
    vocabulary: Sequence[int] | None = None,
    num_tokens: int | None = None,
    num_speculative_tokens: int = 3,
    padded_shapes: bool = True,
    seed: int = 0,
) -> ModelReport:
    """Serve texts with a model in all the ways an engine may, and check everything that it reads and writes.

    Every call of the model is made on scratch memory, in which all that the step does not name holds random
    numbers or NaN. The same texts are prefilled whole and in parts, decoded token by token, batched, resumed
    from the prefix cache and decoded with drafts; logits, KV and states of a token must be the same in all.
    The texts are random, and what the model answers is not used. Takes seconds for a small model on a CPU;
    give it a version of the model with few layers. Float64 shows mistakes best.

    Args:
        model: as for `DynamicInferenceEngine`, on one rank.
        tolerance: the largest difference accepted, relative to the largest number of what is compared. By
            default 1e-9, 1e-4, 1e-2 or 5e-2 where the coarsest dtype of the spec is float64, float32,
            float16 or bfloat16.
        vocabulary: token ids that the texts are drawn from, at least three different ones; by default all.
        num_tokens: tokens of the longest text; by default four KV blocks, each of at least 8 tokens and of
            whole chunks.
        num_speculative_tokens: most drafts a decode row; 0 for a model that is never to decode with drafts.
        padded_shapes: whether to check padded steps, which CUDA graphs need.
        seed: of the texts and of the contents of scratch memory.

    Returns:
        The report, for printing. The model keeps all rules.

    Raises:
        ModelError: the model breaks rules. The message lists them with what to do; `report` is the report.
        ValueError: an argument is no such thing.
    """
    begin = time.perf_counter()
    drafts = integer("num_speculative_tokens", num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
    boolean("padded_shapes", padded_shapes)
    seed = integer("seed", seed, 0, INT32_MAX)
    if tolerance is not None:
        tolerance = real("tolerance", tolerance, 0.0)
    name = type(model).__name__
    findings = Findings()
    spec = _checked_spec(model, findings)
    if spec is None:
        raise ModelError(ModelReport(name, findings.listed(), seconds=time.perf_counter() - begin))
    texts = _texts(spec, vocabulary, num_tokens, drafts, seed)
    accepted = _default_tolerance(spec) if tolerance is None else tolerance
    block = texts.block

    def watched(length: int) -> bool:
        return length <= 12 or length % block <= 4 or length % block == block - 1

    audit = ModelAudit(model, spec, accepted, seed, watched, padded_shapes)
    reports = _serve(audit, texts, accepted)
    report = ModelReport(
        model=name,
        findings=audit.findings.listed(),
        scenarios=reports,
        tolerance=accepted,
        reached=dict(audit.reached),
        num_calls=audit.num_calls,
        seconds=time.perf_counter() - begin,
    )
    if not report.passed:
        raise ModelError(report)
    return report


def _checked_spec(model: object, findings: Findings) -> HybridStateSpec | None:
    """The model's spec; None, with a finding, where nothing can be served by it."""
    state_spec = getattr(model, "state_spec", None)
    if isinstance(model, type) or not callable(model) or not callable(state_spec):
        findings.add(
            Rule.SPEC,
            f"the model is {shown(model)}; accepted: an object with state_spec() and __call__(inputs)",
        )
        return None
    try:
        spec, again = state_spec(), state_spec()
    except Exception as error:
        findings.add(Rule.SPEC, f"state_spec() raises {type(error).__name__}: {error}")
        return None
    if not isinstance(spec, HybridStateSpec):
        findings.add(Rule.SPEC, f"state_spec() returns {shown(spec)}; accepted: a HybridStateSpec")
    elif spec != again:
        findings.add(
            Rule.SPEC, f"state_spec() returns {spec}, then {again}; accepted: the same at every call"
        )
    elif spec.groups.is_split:
        raise ValueError(f"model is {shown(model)}, split over ranks; accepted: a whole model on one rank")
    elif not any(tensor.num_layers for tensor in spec.states):
        findings.add(
            Rule.SPEC,
            "state_spec().states has no layer; accepted: at least one, because prompts resume from states of "
            "recurrent layers",
        )
    else:
        return spec
    return None


def _texts(
    spec: HybridStateSpec, vocabulary: Sequence[int] | None, num_tokens: int | None, drafts: int, seed: int
) -> Texts:
    block = -(-_SHORTEST_BLOCK // spec.grid) * spec.grid
    chunk = spec.chunk_tokens(block)
    last = spec.vocab_size - 1
    ids = list(range(spec.vocab_size)) if vocabulary is None else integers("vocabulary", vocabulary, 0, last)
    ids = list(dict.fromkeys(ids))
    if len(ids) < 3:
        raise ValueError(
            f"vocabulary is {shown(vocabulary)}; accepted: at least three different token ids below the "
            f"model's vocab_size ({spec.vocab_size})"
        )
    length = optional_integer("num_tokens", num_tokens, 3 * block + 8, INT32_MAX) or 4 * block
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(ids), generator=generator, device="cpu")[:3].tolist()
    drawn = torch.randint(len(ids), (3, length + 3), generator=generator, device="cpu").tolist()
    x, y, z = (
        tuple(ids[index] for index in (begin, *rest)) for begin, rest in zip(first, drawn, strict=True)
    )
    return Texts((x, y, z), length, block, chunk, drafts)


def _default_tolerance(spec: HybridStateSpec) -> float:
    dtypes = {tensor.dtype for tensor in spec.states} | {spec.kv_dtype}
    return max(TOLERANCES[dtype] for dtype in dtypes)


def _serve(audit: ModelAudit, texts: Texts, tolerance: float) -> tuple[ScenarioReport, ...]:
    """Serve all scenarios, judge what each call did, and then, if all is well, what they computed."""
    observed: list[tuple[int, list[Observation]]] = []
    for scenario in SCENARIOS:
        audit.scenario = scenario.name
        steps = audit.reached["steps"]
        if scenario.rule is not Rule.DRAFTS_DIFFER or texts.num_speculative_tokens:
            scenario.serve(texts, audit)
        observed.append((audit.reached["steps"] - steps, audit.observations))
        audit.observations = []
    audit.judge_whole()

    reports = [
        ScenarioReport(scenario.name, steps, skipped="" if steps else "not asked for")
        for scenario, (steps, _) in zip(SCENARIOS, observed, strict=True)
    ]
    if audit.findings.rules - {Rule.PADDING_DIFFERS}:
        skipped = "first mend what is said above"
        return tuple(replace(report, skipped=report.skipped or skipped) for report in reports)
    return _compare([observations for _, observations in observed], reports, audit, tolerance)


def _compare(
    observed: list[list[Observation]], reports: list[ScenarioReport], audit: ModelAudit, tolerance: float
) -> tuple[ScenarioReport, ...]:
    """Hold what the scenarios computed against each other; returns their reports with the result."""
    book, findings = PrefixBook(tolerance, audit.writes.states), audit.findings
    compared: list[ScenarioReport] = []
    # States that a prefill leaves on its way are judged last: decoding, whose logits confirm its states, and
    # the ends of prefills are the references.
    withheld: list[Observation] = []
    for scenario, observations, report in zip(SCENARIOS, observed, reports, strict=True):
        if scenario.serve is serve_together:
            book.compare(withheld, scenario.rule, findings)
        broken = [rule for rule in scenario.needs if rule in findings]
        if report.skipped or broken:
            compared.append(replace(report, skipped=report.skipped or f'first mend "{broken[0]}"'))
            continue
        if Rule.DECODE_DIFFERS in findings:
            observations = [known for known in observations if not known.is_state]
        elif scenario.serve is serve_whole:
            withheld = [known for known in observations if known.is_state]
            observations = [known for known in observations if not known.is_state]
        elif scenario.serve in (serve_token_by_token, serve_in_cuts):
            withheld += [known for known in observations if known.kind == WriteKind.INNER]
            observations = [known for known in observations if known.kind != WriteKind.INNER]
        result = book.compare(observations, scenario.rule, findings)
        compared.append(
            replace(report, num_compared=result.num_compared, largest_difference=result.largest_difference)
        )
        if scenario.serve is serve_token_by_token and result.failed:
            book.forget_states()
            withheld = []
    return tuple(compared)
