"""One process computes prompts, and another one generates the answers: prefill apart from decode.

    python examples/disaggregated_prefill.py                         (starts both on the CPU)
    python examples/disaggregated_prefill.py --device cuda           (starts both, each with a GPU)
    torchrun --nproc-per-node 2 examples/disaggregated_prefill.py    (the same by hand)

Rank 0 is the prefill worker, rank 1 the decode engine. They meet in torchrun's store. Rank 1 asks rank 0 for
the prompts, all at once, imports what rank 0 has computed, and answers. A short prompt it computes itself.

Each request has a line: how many of its tokens the decode engine resumed, how long rank 0 took to compute the
prompt, its wait for other prompts included, and how long the hand-over took. The last line says whether all
answers are those of one engine without a cache; the exit code is 1 if they are not. It takes ten seconds.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import torch
import torch.distributed as dist
from arguments import check_device

BLOCK = 32
LENGTHS = (700, 520, 333, 600, 40)
SHARED = 256  # leading tokens that the long prompts share
MIN_PREFILL_TOKENS = 64
SAMPLING = ms.SamplingParams(max_tokens=24)


@dataclass
class Answer:
    """A request's result, and what became of its prompt at the prefill worker; None: it was not asked."""

    prefill: Any
    result: ms.RequestResult


def new_engine(device: torch.device, caching: bool = True) -> ms.DynamicInferenceEngine:
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(torch.float64), seed=0, device=device)
    config = ms.InferenceConfig(
        block_size_tokens=BLOCK, max_requests=8, max_tokens_per_step=256, max_sequence_length=1024,
        num_kv_blocks=256,
        num_mamba_slots=32 if caching else None, enable_prefix_caching=caching,
    )  # fmt: skip
    engine = ms.DynamicInferenceEngine(model, config)
    engine.set_weights_version("seed 0")  # states of weights with another name are refused
    return engine


def make_prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(256, (length,), generator=draw).tolist() for length in (SHARED, *LENGTHS)]
    return [(tokens[0] + own)[:length] for own, length in zip(tokens[1:], LENGTHS, strict=True)]


async def compute_prompts(device: torch.device, store: dist.Store) -> None:
    """Rank 0: serve until rank 1 is done."""
    serving = asyncio.create_task(msd.PrefillWorker(new_engine(device), store).serve())
    while not (serving.done() or store.check(["done"])):
        await asyncio.sleep(0.05)
    serving.cancel()
    await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()  # raises what ended the worker


async def answer(server: msd.DisaggregatedEngine, prompt: list[int]) -> Answer:
    # `generate` alone would do this, too, and report nothing of it.
    prefill = await server.prefill(prompt[:-1])
    return Answer(prefill, await server.generate(prompt, SAMPLING))


async def answer_prompts(device: torch.device, store: dist.Store, prompts: list[list[int]]) -> list[Answer]:
    """Rank 1: answer all prompts at once."""
    engine = new_engine(device)
    async with msd.DisaggregatedEngine(engine, store, min_prefill_tokens=MIN_PREFILL_TOKENS) as server:
        if not await server.connected(timeout_s=120):
            raise SystemExit("the prefill worker did not come")
        return await asyncio.gather(*(answer(server, prompt) for prompt in prompts))


def show(number: int, one: Answer, is_equal: bool) -> bool:
    """Print a request's line; whether it was served as it should be."""
    result, prefill = one.result, one.prefill
    if prefill is None:
        way, as_meant = "computed here, because it is short", True
    elif prefill.failure:
        way, as_meant = f"computed here: {prefill.failure}", False
    else:
        way = f"prefill {prefill.prefill_s * 1e3:5.0f} ms, hand-over {prefill.hand_over_s * 1e3:4.0f} ms"
        as_meant = result.num_prompt_tokens - result.num_resumed_tokens <= BLOCK
    print(
        f"request {number}  prompt tokens {result.num_prompt_tokens:4d}  "
        f"resumed {result.num_resumed_tokens:4d}  {way}  answer {'equal' if is_equal else 'DIFFERENT'}"
    )
    return as_meant and is_equal


def run_rank(device_type: str) -> int:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        asyncio.run(compute_prompts(device, store))
        return 0
    prompts = make_prompts()
    answers = asyncio.run(answer_prompts(device, store, prompts))
    store.set("done", "")
    expected = new_engine(device, caching=False).generate(prompts, SAMPLING)
    served = [
        show(number, one, one.result.tokens == alone.tokens)
        for number, (one, alone) in enumerate(zip(answers, expected, strict=True))
    ]
    print(f"outputs identical: {'yes' if all(served) else 'no'}")
    return 0 if all(served) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    args = parser.parse_args()
    check_device(parser, args.device)
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        parser.error("argument --device: 'cuda' needs two GPUs; accepted here: cpu")
    if "RANK" in os.environ:
        if os.environ.get("WORLD_SIZE") != "2":
            parser.error("torchrun starts another number of ranks than 2")
        return run_rank(args.device)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*torchrun, __file__, "--device", args.device], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
