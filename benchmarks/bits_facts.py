"""Which operations keep a row's bits, whatever stands beside it: the facts that `batch_invariant` rests on.

Each operation computes rows alone, in parts, as a suffix, and in other batches. Every time, its rows are
compared with those of the largest case, bit by bit. "As torch chooses" and "splits chosen" show what happens
without the setting.

    python benchmarks/bits_facts.py --json out.json     (one Hopper GPU, with tokenspeed-fa3 and fla-core)

Shapes are those of Nemotron-H-8B and Qwen3.5-4B, in bfloat16 and float16.
"""

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from mambaslots.inference.contexts.padding import invariant_buckets
from mambaslots.inference.kernels import attention, delta, ssd
from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet
from mambaslots.inference.kernels.step_rows import AttentionRows, ScanRows
from support.command_line import add_device, check_device, make_parser
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
BUCKETS = tuple(invariant_buckets(3840))
OTHER_ROWS = (1, 3, 8, 33, 100, 777, 1000)
PRODUCTS = (  # outputs, inputs
    (18560, 4096), (4096, 8192), (21504, 4096), (4096, 21504), (6144, 4096), (4096, 4096),
    (12352, 2560), (10240, 2560), (2560, 4096), (19456, 2560), (2560, 9728),
)  # fmt: skip
HEADS = ((131072, 4096), (248320, 2560))
HEAD_LAYOUTS = ((128, 32, 8), (64, 32, 8), (256, 16, 4))
PAGES = (256, 128, 64, 16)
LENGTH = 1024
ENDS = (1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 300, 511, 513, 700, 1000, 1023)


@dataclass
class Fact:
    """How often rows of an operation had other bits than in its largest case."""

    operation: str
    cases: int = 0
    differing: int = 0

    def add(self, equal: bool) -> None:
        self.cases += 1
        self.differing += not equal

    def line(self) -> str:
        return f"{self.operation:66} {self.cases:6,} cases {self.differing:6,} differ"


@contextmanager
def without_split_k() -> Iterator[None]:
    """Products add over K in one order: cuBLASLt, and no split-K."""
    matmul = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    torch.backends.cuda.preferred_blas_library("cublaslt")
    for name in names:
        setattr(matmul, name, (False, False))
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        for name, value in before.items():
            setattr(matmul, name, value)


def products(device: torch.device) -> list[Fact]:
    """Linear layers and heads of every invariant bucket, beside their 4,096 rows."""
    facts = [Fact("products in invariant buckets, as torch chooses")]
    _products(device, facts[0], BUCKETS)
    with without_split_k():
        facts += [
            Fact("products in invariant buckets, without split-K"),
            Fact("products of other rows, likewise"),
        ]
        _products(device, facts[1], BUCKETS)
        _products(device, facts[2], OTHER_ROWS)
        facts.append(Fact("logits in float32 in invariant buckets, without split-K"))
        for dtype in DTYPES:
            for outputs, inputs in HEADS:
                _rows_of(
                    facts[3], GpuKernelSet.head_product, outputs, inputs, dtype, device, BUCKETS[:6], 1024
                )
    return facts


def _products(device: torch.device, fact: Fact, numbers: Sequence[int]) -> None:
    for dtype in DTYPES:
        for outputs, inputs in PRODUCTS:
            _rows_of(fact, F.linear, outputs, inputs, dtype, device, numbers, 4096)


def _rows_of(
    fact: Fact,
    product: Callable[[Tensor, Tensor], Tensor],
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    numbers: Sequence[int],
    most: int,
) -> None:
    x = torch.randn(most, inputs, dtype=dtype, device=device)
    weight = torch.randn(outputs, inputs, dtype=dtype, device=device) * 0.02
    whole = product(x, weight)
    for number in numbers:
        fact.add(torch.equal(product(x[:number], weight), whole[:number]))


@dataclass(frozen=True)
class Part:
    """Tokens [start, stop) of one sequence in a scan; `states`: position -> slot, of states to store."""

    start: int
    stop: int
    source: int
    destination: int
    states: tuple[tuple[int, int], ...] = ()


def indices_of(parts: Sequence[Part], chunk: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The packed tokens of the parts, and the index tensors that every scan takes."""
    tokens: list[int] = []
    ends, rows, row_starts, destinations = [0], [], [0], []
    for number, part in enumerate(parts):
        tokens += range(part.start, part.stop)
        for position in range(part.start, part.stop, chunk):
            end = min(position + chunk, part.stop)
            ends.append(ends[-1] + end - position)
            rows.append(number)
            destinations.append(dict(part.states).get(end, -1))
        row_starts.append(len(rows))
    index = [
        torch.tensor([part.source for part in parts], device=device),
        torch.tensor([part.destination for part in parts], device=device),
        *(torch.tensor(column, dtype=torch.int32, device=device) for column in (ends, rows, row_starts)),
        torch.tensor(destinations, device=device),
    ]
    return torch.tensor(tokens, device=device), index


Scan = Callable[[Sequence[Part], Tensor], Tensor]
"""Runs parts on a pool of states, and returns their rows."""


def scan_facts(name: str, scan: Scan, pool: Tensor, chunk: int) -> list[Fact]:
    """Prefix runs, replays of a chunk from the state before it, states, and a batch of replays."""
    prefixes, replays = (
        Fact(f"{name}: prefix runs"),
        Fact(f"{name}: a part of a chunk, from the state before"),
    )
    states, batches = Fact(f"{name}: the state behind a chunk"), Fact(f"{name}: parts of five chunks at once")
    points = range(chunk, LENGTH, chunk)
    stored = {point: 1 + number for number, point in enumerate(points)}
    whole = scan([Part(0, LENGTH, -1, 0, tuple(stored.items()))], pool)
    spare = len(pool) - 1
    for end in ENDS:
        prefixes.add(torch.equal(scan([Part(0, end, -1, spare)], pool), whole[:end]))
        grid = (end - 1) // chunk * chunk
        rows = scan([Part(grid, end, stored.get(grid, -1), spare)], pool)
        replays.add(torch.equal(rows, whole[grid:end]))
    for point in points[:-1]:
        scan([Part(point, point + chunk, stored[point], spare)], pool)
        states.add(torch.equal(pool[spare], pool[stored[point + chunk]]))
    lengths = (1, chunk // 2, chunk, chunk - 1, 3)
    parts = [
        Part(p, p + n, stored[p], spare - i) for i, (p, n) in enumerate(zip(points, lengths, strict=False))
    ]
    rows = scan(parts, pool)
    for part in parts:
        length = part.stop - part.start
        batches.add(torch.equal(rows[:length], whole[part.start : part.stop]))
        rows = rows[length:]
    return [prefixes, replays, states, batches]


def ssd_facts(device: torch.device) -> list[Fact]:
    """Mamba-2's scan of Nemotron-H-8B."""
    return added([_ssd_facts(dtype, device) for dtype in DTYPES])


def _ssd_facts(dtype: torch.dtype, device: torch.device) -> list[Fact]:
    heads, channels, size, groups, chunk = 128, 64, 128, 8, 128
    x = torch.randn(LENGTH, heads, channels, device=device).to(dtype)
    dt, A = 0.1 * torch.rand(LENGTH, heads, device=device), -8 * torch.rand(heads, device=device) - 0.5
    B, C = (torch.randn(LENGTH, groups, size, device=device).to(dtype) for _ in range(2))
    D = torch.randn(heads, device=device)

    def scan(parts: Sequence[Part], pool: Tensor) -> Tensor:
        at, (sources, destinations, *cuts) = indices_of(parts, chunk, device)
        rows = ScanRows(sources, destinations, chunk, *cuts)
        return ssd.ssd_chunk_scan(x[at], dt[at], A, B[at], C[at], D, pool, rows)

    pool = torch.zeros(24, heads, channels, size, device=device)
    return scan_facts("SSD scan", scan, pool, chunk)


def delta_facts(device: torch.device) -> list[Fact]:
    """The gated delta rule of Qwen3.5-4B."""
    return added([_delta_facts(dtype, device) for dtype in DTYPES])


def _delta_facts(dtype: torch.dtype, device: torch.device) -> list[Fact]:
    key_heads, heads, size, chunk = 16, 32, 128, 64
    q, k = (F.normalize(torch.randn(LENGTH, key_heads, size, device=device), dim=-1).to(dtype) for _ in "qk")
    v = torch.randn(LENGTH, heads, size, device=device).to(dtype)
    g, beta = -0.5 * torch.rand(LENGTH, heads, device=device), torch.rand(LENGTH, heads, device=device)

    def scan(parts: Sequence[Part], pool: Tensor) -> Tensor:
        at, (sources, destinations, *cuts) = indices_of(parts, chunk, device)
        rows = ScanRows(sources, destinations, chunk, *cuts)
        return delta.gated_delta_rule_scan(q[at], k[at], v[at], g[at], beta[at], pool, rows)

    pool = torch.zeros(24, heads, size, size, device=device)
    return scan_facts("gated delta rule", scan, pool, chunk)


def added(runs: Sequence[list[Fact]]) -> list[Fact]:
    """Facts of the same operations in several runs, added up."""
    return [
        Fact(alike[0].operation, sum(one.cases for one in alike), sum(one.differing for one in alike))
        for alike in zip(*runs, strict=True)
    ]


def attention_facts(device: torch.device) -> list[Fact]:
    """FlashAttention-3: suffixes, decodes and drafts, beside the rows of the whole prompt."""
    one, chosen = Fact("attention with one split"), Fact("attention, splits chosen by FlashAttention-3")
    for fact, invariant in ((one, True), (chosen, False)):
        for head_dim, heads, kv_heads in HEAD_LAYOUTS:
            for page in PAGES if invariant else PAGES[:1]:
                _attention(fact, invariant, head_dim, heads, kv_heads, page, device)
    return [one, chosen]


def _attention(
    fact: Fact, invariant: bool, head_dim: int, heads: int, kv_heads: int, page: int, device: torch.device
) -> None:
    length, dtype = 4096, torch.bfloat16
    pages = length // page
    kv_cache = torch.randn(2, 2 * pages, page, kv_heads, head_dim, device=device).to(dtype)
    table = torch.randperm(2 * pages, device=device)[:pages].to(torch.int32)
    query = torch.randn(length, heads, head_dim, device=device).to(dtype)

    def rows_of(spans: Sequence[tuple[int, int]]) -> Tensor:
        """Rows of queries [start, stop), each over the KV before its end."""
        places = [0]
        for start, stop in spans:
            places.append(places[-1] + stop - start)
        lengths = torch.tensor([stop - start for start, stop in spans], dtype=torch.int32, device=device)
        rows = AttentionRows(
            block_table=table.expand(len(spans), -1).contiguous(),
            kv_lengths=torch.tensor([stop for _, stop in spans], dtype=torch.int32, device=device),
            query_start_loc=torch.tensor(places, dtype=torch.int32, device=device),
            query_lengths=lengths,
            positions=torch.cat([torch.arange(*span, device=device) for span in spans]),
            num_decodes=0,
            decode_tokens=1,
            max_query_tokens=max(stop - start for start, stop in spans),
            batch_invariant=invariant,
        )
        packed = torch.cat([query[start:stop] for start, stop in spans])
        return attention.paged_attention(packed, kv_cache, rows)

    whole = rows_of([(0, length)])
    for start in (256, 1000, 2048, 3000, length - 64, length - 5, length - 2, length - 1):
        fact.add(torch.equal(rows_of([(start, length)]), whole[start:]))
    for end in (1, 17, 64, 129, 256, 1000, 3001):
        for count in (1, 2, 4):
            if end >= count:
                fact.add(torch.equal(rows_of([(end - count, end)]), whole[end - count : end]))
    spans = [(999, 1000), (2996, 3000), (0, 700), (1000, 1064), (length - 1, length)]
    fact.add(torch.equal(rows_of(spans), torch.cat([whole[start:stop] for start, stop in spans])))


def row_facts(device: torch.device) -> list[Fact]:
    """log_softmax, and products of rows that are grouped by expert."""
    softmax, experts = Fact("log_softmax of rows"), Fact("products of experts: rows alone or among others")
    logits = torch.randn(512, 131072, device=device)
    whole = torch.log_softmax(logits, dim=-1)
    for number in (1, 2, 8, 32, 33, 100):
        softmax.add(torch.equal(torch.log_softmax(logits[:number], dim=-1), whole[:number]))
    count, inputs, outputs = 64, 2048, 1536
    weights = torch.randn(count, inputs, outputs, device=device).to(torch.bfloat16) * 0.02
    x = torch.randn(4096, inputs, device=device).to(torch.bfloat16)
    expert = torch.randint(count, (4096,), device=device)

    def grouped(x: Tensor, expert: Tensor) -> Tensor:
        order = torch.argsort(expert, stable=True)
        ends = torch.bincount(expert, minlength=count).cumsum(0).to(torch.int32)
        out = torch.empty(len(x), outputs, dtype=x.dtype, device=device)
        out[order] = torch._grouped_mm(x[order], weights, offs=ends)
        return out

    whole = grouped(x, expert)
    for number in (1, 2, 8, 32, 33, 100, 1000, 2048):
        experts.add(torch.equal(grouped(x[:number], expert[:number]), whole[:number]))
    return [softmax, experts]


@torch.no_grad()
def main() -> None:
    parser = make_parser(__doc__)
    add_device(parser, "cuda")
    args = parser.parse_args()
    check_device(parser, args.device)
    if args.device == "cpu":
        parser.error(
            "argument --device: 'cpu'; accepted: cuda, because the facts are those of a GPU's kernels"
        )
    device = torch.device(args.device)
    torch.manual_seed(0)
    document: dict[str, Any] = {
        "benchmark": "bits_facts",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "facts": [],
    }
    print(f"{document['device']}, torch {torch.__version__}")
    for measure in (products, ssd_facts, delta_facts, attention_facts, row_facts):
        for fact in measure(device):
            print(fact.line(), flush=True)
            document["facts"].append(asdict(fact))
        torch.cuda.empty_cache()
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
