"""Do answers stay the same while states and KV exchange memory, and what does the shared layout cost?

Two engines serve the same prompts greedily: one with a pool of its own for states and for KV, one with
`total_gb`. The second moves units of memory between states and KV after steps, in both directions, while
requests run and CUDA graphs are launched. Tokens and log-probs are compared: in float64 on a CPU within 1e-9,
in bfloat16 on a GPU, where both engines are batch-invariant, to the bit.

Then times, in microseconds, medians: stores of keys and values, attention of decodes and prefills, copies of
states, and whole decode steps, once with KV laid out layer by layer, as pools of their own have it, and once
block by block, as the shared memory has it. On a GPU kernels are launches of a CUDA graph.

    python benchmarks/one_memory.py --json out.json                (one GPU)
    python benchmarks/one_memory.py --device cpu
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from support.command_line import add_device, check_device, make_parser
from support.graph_timing import graph_us

if TYPE_CHECKING:
    import mambaslots as ms

ROUNDS = 6
TOLERANCE = 1e-9  # of log-probs in float64; a hit sums in another order


@dataclass(frozen=True)
class Scale:
    """Sizes on one kind of device."""

    block: int
    max_requests: int
    max_tokens_per_step: int
    longest: int
    answer: int
    num_units: int
    kv_rows: int
    kv_tokens: int


SCALES = {
    "cpu": Scale(8, 4, 64, 128, 8, 10, 3, 64),
    "cuda": Scale(256, 16, 2048, 4096, 64, 40, 32, 4096),
}


@dataclass
class Report:
    """What was found.

    Attributes:
        moves: units that `Churn` moved to states, and to KV.
        graphs: what the engine with `total_gb` says of its CUDA graphs before and after the moves.
        same_addresses: whether the pools lie where they lay before the moves.
        equal_tokens, equal_bits: of how many answers, of `num_answers`, the tokens, and the log-probs too.
        largest_difference: of log-probs.
        microseconds: name -> (layer by layer, block by block).
    """

    device: str
    moves: tuple[int, int] = (0, 0)
    graphs: tuple[str, str] = ("", "")
    same_addresses: bool = False
    num_answers: int = 0
    equal_tokens: int = 0
    equal_bits: int = 0
    largest_difference: float = 0.0
    microseconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Whether all answers are as equal as promised, and units moved both ways."""
        equal = self.equal_bits if self.device == "cuda" else self.equal_tokens
        close = self.largest_difference <= TOLERANCE
        return equal == self.num_answers and close and min(self.moves) > 0 and self.same_addresses


class Churn:
    """Observes a context, and moves units after its steps: now to states, now to KV."""

    def __init__(self, engine: "ms.DynamicInferenceEngine") -> None:
        self._cache = engine.context.prefix_cache
        self._num_steps = 0
        self.moves = [0, 0]  # units that it moved to states, and to KV
        engine.context.observers.append(self)

    def step_begun(self, steps: object, inputs: object) -> None: ...

    def step_ended(self, steps: object) -> None:
        self._num_steps += 1
        kv: Any = self._cache.kv_blocks
        before = sum(kv.unit_borrower.units.for_states)
        if self._num_steps % 10 == 0:
            kv.evict_lru_blocks(kv.num_cached)
            kv.unit_borrower.borrow_slots(len(self._cache.slots.free_slots) + 8)
        elif self._num_steps % 5 == 0:
            kv.unit_borrower.borrow_blocks(kv.total_avail + 8)
        change = sum(kv.unit_borrower.units.for_states) - before
        self.moves[change < 0] += abs(change)


def model_on(device: str) -> "ms.models.HybridLM":
    """A model of small layers, in the dtype of the comparison."""
    import mambaslots as ms
    import torch

    if device == "cpu":
        return ms.models.HybridLM(ms.models.HybridConfig.tiny(torch.float64, ssd_chunk_size=4), seed=0)
    config = ms.models.HybridConfig.tiny(
        torch.bfloat16, hidden_size=1024, pattern="M-M*-M-M*-", mamba_num_heads=32, mamba_head_dim=64,
        mamba_num_groups=8, mamba_state_dim=128, ssd_chunk_size=128, num_attention_heads=16, num_kv_heads=8,
        head_dim=128, mlp_hidden_size=2048,
    )  # fmt: skip
    return ms.models.HybridLM(config, seed=0).to(device)


def engines_on(
    model: "ms.models.HybridLM", scale: Scale, device: str, **changes: Any
) -> "tuple[ms.DynamicInferenceEngine, ms.DynamicInferenceEngine]":
    """An engine with two pools, and one of equal bytes whose states and KV share one memory."""
    import mambaslots as ms
    from mambaslots.inference.contexts.cache.memory import MemoryDivision, RankBudget, UnitSizes
    from mambaslots.inference.contexts.input_blocks import input_bytes, input_shapes
    from mambaslots.inference.contexts.pool_sizes import PoolSizes

    spec = model.state_spec()
    sizes = UnitSizes(spec.slot_bytes, spec.kv_block_bytes(scale.block))
    settings: dict[str, Any] = {
        "block_size_tokens": scale.block, "max_requests": scale.max_requests,
        "max_tokens_per_step": scale.max_tokens_per_step,
        "max_sequence_length": scale.longest, "batch_invariant": device == "cuda",
        "num_cuda_graphs": 16 if device == "cuda" else None,
    }  # fmt: skip
    settings |= changes
    any_config = ms.InferenceConfig(**settings, num_kv_blocks=1, num_mamba_slots=1)
    input_blocks = PoolSizes.of(any_config, spec).input_blocks
    longest = -(-scale.longest // scale.block) + input_blocks.per_chunk
    division = MemoryDivision.of([RankBudget(sizes, 1 << 50, scale.max_requests)], longest)
    num_units = division.num_kv_units + scale.num_units
    total = division.least_bytes(sizes) + scale.num_units * division.shape.unit_bytes(sizes)
    inputs = input_bytes(input_shapes(any_config, spec, bool(input_blocks.tokens)))
    shared = (total + inputs + 0.5) / (1 << 30)
    pools = {
        "num_kv_blocks": max(
            longest,
            num_units // 2 * division.shape.blocks - input_blocks.num_for_requests(scale.max_requests),
        ),
        "num_mamba_slots": 1 + num_units // 2 * division.shape.slots,
    }
    return (
        ms.DynamicInferenceEngine(model, ms.InferenceConfig(**settings, **pools)),
        ms.DynamicInferenceEngine(model, ms.InferenceConfig(**settings, total_gb=shared)),
    )


def prompts_of(scale: Scale, turn: int) -> list[list[int]]:
    """Prompts that share heads, and every other time long ones that share nothing."""
    import torch

    def tokens(length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        drawn: list[int] = torch.randint(0, 256, (length,), generator=generator).tolist()
        return drawn

    head, longest = 3 * scale.block, scale.longest - scale.answer
    if turn % 2:
        return [tokens(longest - 7 * i, 1000 * turn + i) for i in range(3)]
    return [tokens(head, i % 3) + tokens(scale.block + i, 1000 * turn + i) for i in range(6)]


def compare(device: str, scale: Scale, report: Report) -> None:
    """Serve the same prompts with both engines, and compare."""
    import mambaslots as ms

    fixed, shared = engines_on(model_on(device), scale, device)
    params = ms.SamplingParams(max_tokens=scale.answer, return_log_probs=True)
    for engine in (fixed, shared):
        engine.generate(prompts_of(scale, 0), params)  # captures graphs
    before = _addresses(shared), shared.describe()
    churn = Churn(shared)
    for turn in range(ROUNDS):
        prompts = prompts_of(scale, turn)
        answers = zip(fixed.generate(prompts, params), shared.generate(prompts, params), strict=True)
        for expected, found in answers:
            report.num_answers += 1
            equal = expected.tokens == found.tokens
            report.equal_tokens += equal
            report.equal_bits += equal and list(expected.log_probs) == list(found.log_probs)
            if equal:
                pairs = zip(expected.log_probs, found.log_probs, strict=True)
                report.largest_difference = max(
                    report.largest_difference, *(abs(one - two) for one, two in pairs)
                )
        shared.check_integrity()
    report.moves = churn.moves[0], churn.moves[1]
    report.graphs = _graphs(before[1]), _graphs(shared.describe())
    report.same_addresses = before[0] == _addresses(shared)


def _addresses(engine: "ms.DynamicInferenceEngine") -> tuple[int, int]:
    memory = engine.context.memory
    return memory.kv_cache.data_ptr(), memory.state_pool.memory.data_ptr()


def _graphs(description: str) -> str:
    lines = [line.strip() for line in str(description).splitlines() if "captured" in line]
    return lines[0] if lines else "none"


def time_layouts(device: str, scale: Scale, report: Report) -> None:
    """Kernels on both layouts, and decode steps of both engines."""
    import torch
    from mambaslots.inference.kernels.kernel_set import KernelSet
    from mambaslots.inference.kernels.reference.torch_attention import paged_attention
    from mambaslots.inference.kernels.step_rows import AttentionRows

    heads, kv_heads, dim, layers = (16, 8, 128, 4) if device == "cuda" else (4, 2, 16, 2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    rows, columns = scale.kv_rows, scale.kv_tokens // scale.block
    blocks, part = rows * columns, scale.block * kv_heads * dim
    dense = torch.randn(layers, 2, blocks, scale.block, kv_heads, dim, device=device).to(dtype)
    together = torch.empty(blocks, 2 * layers * part + 256, dtype=dtype, device=device)
    strides = 2 * part, part, together.stride(0), kv_heads * dim, dim, 1
    strided = together.as_strided(dense.shape, strides).copy_(dense)
    if device == "cuda":
        from mambaslots.inference.kernels import write_kv as kernels
    else:
        kernels = KernelSet  # type: ignore[assignment]
    table = torch.randperm(blocks, device=device).view(rows, columns).int()
    index: dict[str, Any] = {"dtype": torch.int32, "device": device}
    for name, new in (("decode", 1), ("prefill", scale.block)):
        attended = AttentionRows(
            block_table=table,
            kv_lengths=torch.full((rows,), scale.kv_tokens, **index),
            query_start_loc=torch.arange(rows + 1, **index) * new,
            query_lengths=torch.full((rows,), new, **index),
            positions=torch.arange(scale.kv_tokens - new, scale.kv_tokens, device=device).repeat(rows),
            num_decodes=rows if new == 1 else 0,
            decode_tokens=1,
            max_query_tokens=0 if new == 1 else new,
        )
        query = torch.randn(rows * new, heads, dim, device=device).to(dtype)
        keys = torch.randn(rows * new, kv_heads, dim, device=device).to(dtype)
        tokens = torch.arange(rows * new, device=device)
        offsets = scale.block - new + torch.arange(new, device=device)
        places = (table[:, -1].long()[:, None] * scale.block + offsets).flatten()
        found = []
        for cache in (dense, strided):
            store = partial(kernels.write_kv, cache[1], keys, keys, tokens, places)
            attend = partial(paged_attention, query, cache[1], attended)
            found.append((microseconds(store, device), microseconds(attend, device), attend()))
        (store_1, attend_1, one), (store_2, attend_2, two) = found
        assert torch.equal(one, two), f"{name}: attention over the two layouts differs"
        assert torch.equal(dense, strided), f"{name}: stores into the two layouts differ"
        report.microseconds[f"write_kv, {name}"] = store_1, store_2
        report.microseconds[f"attention, {name}"] = attend_1, attend_2
    fixed, shared = engines_on(model_on(device), scale, device)
    copies = [_copy_of(engine) for engine in (fixed, shared)]
    report.microseconds["copy of a state"] = (
        microseconds(copies[0], device, False), microseconds(copies[1], device, False)
    )  # fmt: skip
    pairs = [(_decode_step_us(fixed, scale), _decode_step_us(shared, scale)) for _ in range(4)]
    report.microseconds["decode step"] = min(one for one, _ in pairs), min(two for _, two in pairs)


def _copy_of(engine: "ms.DynamicInferenceEngine") -> Callable[[], None]:
    pool = engine.context.memory.state_pool
    return lambda: pool.copy([0], [1])


def _decode_step_us(engine: "ms.DynamicInferenceEngine", scale: Scale) -> float:
    """The median time of a step in which all rows decode, sampling and bookkeeping included."""
    import mambaslots as ms

    params = ms.SamplingParams(max_tokens=scale.answer)
    for row in range(scale.max_requests):
        engine.add_request(prompts_of(scale, 0)[row % 6][: 3 * scale.block], params)
    times = []
    while engine.has_unfinished_requests():
        begun = time.perf_counter()
        engine.step()
        times.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(times[len(times) // 4 :])


def microseconds(call: Callable[[], Any], device: str, captures: bool = True) -> float:
    """The median time of a call."""
    import torch

    if device == "cuda" and captures:
        return graph_us(call)
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(times)


def lines_of(report: Report) -> Sequence[str]:
    """The report as text."""
    found = [
        f"units moved: {report.moves[0]} to states, {report.moves[1]} to KV; "
        f"addresses {'unchanged' if report.same_addresses else 'CHANGED'}",
        f"graphs before: {report.graphs[0]}; after: {report.graphs[1]}",
        f"answers: {report.num_answers}, of them with equal tokens {report.equal_tokens}, with equal bits of "
        f"log-probs {report.equal_bits}, largest difference {report.largest_difference:.3g}",
        f"{'microseconds':24}{'by layer':>12}{'by block':>12}{'ratio':>8}",
    ]
    for name, (layer, block) in report.microseconds.items():
        found.append(f"{name:24}{layer:12.1f}{block:12.1f}{block / layer:8.3f}")
    return found


def main() -> None:
    parser = make_parser(__doc__)
    add_device(parser, "cuda")
    options = parser.parse_args()
    check_device(parser, options.device)
    report, scale = Report(options.device), SCALES[options.device]
    compare(options.device, scale, report)
    time_layouts(options.device, scale, report)
    print(*lines_of(report), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    if not report.succeeded:
        raise SystemExit("answers differ, or units did not move both ways")


if __name__ == "__main__":
    main()
