"""What does attention cost whose split points are fixed positions, beside one split and automatic splits?

FlashAttention-3, bfloat16, 32 heads and 8 KV heads of 128 numbers, KV blocks of 256 tokens. "one split"
leaves each sequence whole, "automatic" lets FlashAttention-3 choose, "512 2048" cuts sequences at multiples
of 512 tokens up to token 4,096, and of 2,048 behind. Block tables have as many columns as a captured graph
has, a power of two. Times are medians of launches of a CUDA graph, in microseconds a call.

    python benchmarks/attention_segments.py --json out.json        (one GPU)
"""

import json
import sys
from dataclasses import asdict, dataclass

from support.command_line import make_parser, parse_on_gpu
from support.graph_timing import graph_us

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 256
CUTS = ((512, 2048), (1024, 2048), (2048, 2048), (4096, 4096))


@dataclass(frozen=True)
class Case:
    """A step: tokens before, and new tokens of every row."""

    rows: int
    before: int
    new: int = 1
    is_decode: bool = True

    def __str__(self) -> str:
        kind = f"decode of {self.new} tokens" if self.new > 1 else "decode"
        kind = kind if self.is_decode else f"prefill of {self.new}"
        return f"{kind}, {self.rows} x {self.before}"


CASES = (
    Case(1, 512),
    Case(1, 4096),
    Case(1, 8300),
    Case(1, 32_767),
    Case(8, 32_767),
    Case(32, 3000),
    Case(32, 8300),
    Case(1, 32_764, 4),
    Case(8, 32_764, 4),
    Case(1, 0, 4096, is_decode=False),
    Case(1, 0, 8192, is_decode=False),
    Case(1, 28_672, 4096, is_decode=False),
)


def measure(case: Case) -> dict[str, float]:
    """Column -> microseconds."""
    import torch
    from mambaslots.inference.kernels import attention, attention_segments
    from mambaslots.inference.kernels.step_rows import AttentionRows

    device = torch.device("cuda")
    length = case.before + case.new
    columns = -(-length // BLOCK)
    width = 1 << (columns - 1).bit_length()
    cache = torch.randn(2, case.rows * columns, BLOCK, KV_HEADS, HEAD_DIM, device=device).bfloat16()
    query = torch.randn(case.rows * case.new, HEADS, HEAD_DIM, device=device).bfloat16()
    blocks = torch.randperm(case.rows * columns, device=device).view(case.rows, columns).int()
    index = {"dtype": torch.int32, "device": device}
    rows = AttentionRows(
        block_table=torch.nn.functional.pad(blocks, (0, width - columns)),
        kv_lengths=torch.full((case.rows,), length, **index),
        query_start_loc=torch.arange(case.rows + 1, **index) * case.new,
        query_lengths=torch.full((case.rows,), case.new, **index),
        positions=torch.arange(case.before, length, device=device).repeat(case.rows),
        num_decodes=case.rows if case.is_decode else 0,
        decode_tokens=case.new if case.is_decode else 1,
        max_query_tokens=0 if case.is_decode else case.new,
    )

    def attend(batch_invariant: bool) -> float:
        step = rows._replace(batch_invariant=batch_invariant)
        return graph_us(lambda: attention.flash_attention(query, cache, step, None), calls=5)

    found = {"automatic": attend(False)}
    usual = attention_segments.SEGMENTS
    for short, long in (*CUTS, (1 << 30, 1 << 30)):
        attention_segments.SEGMENTS = attention_segments.Segments(short, 4096 if short < long else 0, long)
        found[f"{short} {long}" if long < 1 << 30 else "one split"] = attend(True)
    attention_segments.SEGMENTS = usual
    return found


def main() -> int:
    parser = make_parser(__doc__)
    arguments = parse_on_gpu(parser)
    import torch
    from mambaslots.inference.kernels import attention

    if reason := attention.flash_rejection(torch.device("cuda"), torch.bfloat16, HEAD_DIM):
        sys.exit(reason)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds\n")
    results = []
    for case in CASES:
        found = measure(case)
        if not results:
            print(f"{'':32}" + "".join(f"{name:>11}" for name in found))
        print(f"{case!s:32}" + "".join(f"{us:11.1f}" for us in found.values()), flush=True)
        results.append({"case": asdict(case), "us": found})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
