"""What does the bookkeeping of a prefix cache cost: megatron-core's own classes, and ours?

The stock classes of the installed megatron-core and ours get the same calls, in turns, in one process with
one torch thread; our argument checks are on. Figures are medians in microseconds, without the time that
other processes had the core. What both sides return is compared at every repetition, outside the clock.
States are tiny: no row measures copying them.

allocate 8 with eviction    `allocate_slots_batch` of 8 blocks on a full pool of 256 registered states
64 has_state                half of them hits
64 slots, a turn            `allocate_slots_batch` of 64 blocks, `register_block_hashes_batch` of their hashes
                            and `on_kv_blocks_deregistered` of the blocks, on a pool with room; a part each
64 blocks, a life           one sequence of 64 blocks through the KV allocator and the slot allocator that
                            observes it: `allocate_memory_blocks`; hashes into the KV index (stock
                            `register_kv_block_hashes`; ours `register_chain`, which also keeps tokens and
                            finds twins); `allocate_slots_batch` and `register_block_hashes_batch` for all;
                            `release_memory_blocks`. Deregistered, with the callback, are 64 blocks: in a
                            full pool those the allocation evicts; in a free pool these, by an
                            `evict_lru_blocks` that no server would call
one step                    a context with 64 decodes under way takes 16 prompts of 224 tokens, 128 of them
                            cached (block 64, SSD chunk 16), computes them and one token of each decode,
                            stores the 16 states at 192, and lets the 16 go. In a "full" context blocks and
                            states are evicted for it

A step's parts. *admit*: stock `check_availability` and `add_request` of 16 prompts; ours `schedule` of 16
prompts and, since our decodes are scheduled too, of 64 decodes. *prepare*: stock
`initialize_attention_state`: metadata, live states zeroed and restored, and the copy of its staging buffer;
ours `begin_step`: slots reserved, all index tensors (states are read where they are: nothing is restored).
*finish*: stock `commit_intermediate_states`, which copies states, and `update_requests` of 80 rows, 16 of
which end; ours `end_step` (states were written where they stay: nothing is copied), 80 new tokens, `release`
of 16. Ours also registers and checkpoints what decodes complete; stock does neither. Out on both sides:
hashing the prompts, the model, sampling, the engine's queues. The "GPU" is the CPU.
"""

import datetime
import gc
import importlib.metadata
import json
import os
import platform
import random
import reprlib
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any, Protocol

import mambaslots as ms
import torch
from mambaslots.inference.contexts.cache.hashing import PrefixHashChain
from mambaslots.inference.contexts.cache.kv_block_allocator import KVBlockAllocator
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest
from mambaslots.state_spec import HybridStateSpec
from support import stock_host as stock_host
from support.command_line import add_count, make_parser
from support.stock_host import ContextSizes, SlotHost

TURN = 20
Part = tuple[str, Callable[[], object]]


class Side(Protocol):
    """One of the two, stock or ours, in one row of the table."""

    parts: list[Part]
    """What is timed, in order. A part without a name is not."""

    def prepare(self) -> None:
        """Set up the next repetition, and touch what it will touch."""

    def outcome(self) -> object:
        """What the repetition returned; equal on both sides."""


Medians = dict[str, dict[str, float]]


def alternate(row: str, repeats: int, **sides: Side) -> Medians:
    """Median microseconds of each part of each side, and of "all" of them.

    The sides take turns of 20 repetitions, so that what else the machine does hits both, and neither
    works with caches that hold the other's memory. Exits when their outcomes differ.
    """
    times: dict[str, list[dict[str, int]]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    for first in range(-TURN, repeats, TURN):
        turn = range(first, min(first + TURN, repeats))
        outcomes = []
        for name, side in sides.items():
            taken = [_repeat(side) for _ in turn]
            outcomes.append([outcome for outcome, _ in taken])
            times[name] += [parts for _, parts in taken if first >= 0]
        for repetition, (one, other) in enumerate(zip(*outcomes, strict=True), start=first):
            if one != other:
                raise SystemExit(
                    f"{row}: repetition {repetition} gives {' and '.join(sides)} different outcomes: "
                    f"{reprlib.repr(one)}, {reprlib.repr(other)}"
                )
    gc.enable()
    return {
        name: {part: statistics.median(t[part] for t in taken) / 1000 for part in taken[0]}
        for name, taken in times.items()
    }


def _repeat(side: Side) -> tuple[object, dict[str, int]]:
    side.prepare()
    taken = {}
    for part, call in side.parts:
        cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
        call()
        wall = time.perf_counter_ns() - begin
        taken[part] = min(wall, time.thread_time_ns() - cpu)  # less when another process had the core
    taken.pop("", None)
    return side.outcome(), taken | {"all": sum(taken.values())}


# ---- the slot allocators, each with a host that has stock's KV allocator


class EvictingSlots:
    """A full pool in which 8 blocks of anywhere get slots; states leave in the order they came."""

    SLOTS = 256

    def __init__(self, allocator: type[Any], num_kv_blocks: int) -> None:
        self._host = SlotHost(num_kv_blocks)
        self._slots = self._host.slot_allocator(allocator, self.SLOTS)
        self._blocks = cycle(random.Random(0).sample(range(num_kv_blocks - 1), 8 * self.SLOTS))
        self._clock = count(1)
        for _ in range(self.SLOTS // 16):
            self.prepare()
            self._allocate()
            self.outcome()
        self.parts = [("allocate", self._allocate)]

    def _allocate(self) -> None:
        self._allocated = self._slots.allocate_slots_batch(self._batch)

    def prepare(self) -> None:
        """Allocate for 8 others; the 16 get unique times, by which both evict in the order of allocation."""
        kv = self._host.kv_block_allocator
        self._new = [next(self._blocks) for _ in range(16)]
        self._times = [next(self._clock) for _ in range(16)]
        kv.block_timestamps[self._new] = kv.block_hashes[self._new] = torch.tensor(self._times)
        self._batch = self._new[:8]
        self._allocate()
        self._batch = self._new[8:]

    def outcome(self) -> object:
        self._slots.register_block_hashes_batch(self._new, self._times)
        return self._allocated, self._slots.hash_to_block_id.copy(), self._slots.free_count


class LookedUpSlots:
    """64 blocks in any order, half of them with a state."""

    def __init__(self, allocator: type[Any], num_kv_blocks: int) -> None:
        self._slots = SlotHost(num_kv_blocks).slot_allocator(allocator, 256)
        self._blocks = random.Random(0).sample(range(num_kv_blocks - 1), 64)
        self._slots.allocate_slots_batch(self._blocks[::2])
        self.parts = [("has_state", self._look_up)]
        self.prepare = self._look_up

    def _look_up(self) -> None:
        has_state = self._slots.has_state
        self._found = [has_state(block) for block in self._blocks]

    def outcome(self) -> object:
        return self._found


class TurningSlots:
    """64 blocks in any order get slots and hashes, and are deregistered."""

    def __init__(self, allocator: type[Any], num_kv_blocks: int) -> None:
        self._slots = SlotHost(num_kv_blocks).slot_allocator(allocator, 4096)
        self._blocks = random.Random(0).sample(range(num_kv_blocks - 1), 64)
        self._hashes = count(1)
        self.parts = [
            ("allocate", lambda: self._slots.allocate_slots_batch(self._blocks)),
            ("", self._look),
            ("register", lambda: self._slots.register_block_hashes_batch(self._blocks, self._keys)),
            ("deregister", lambda: self._slots.on_kv_blocks_deregistered(self._blocks, self._gone)),
        ]

    def prepare(self) -> None:
        self._keys = [next(self._hashes) for _ in self._blocks]
        self._gone = set(self._keys)

    def _look(self) -> None:
        self._found = [self._slots.has_state(block) for block in self._blocks]

    def outcome(self) -> object:
        return self._found, self._slots.hash_to_block_id.copy(), self._slots.free_count


# ---- both allocators together


class BlockLives(ABC):
    """64 blocks of one sequence: allocated, registered, given states, released, deregistered.

    In a full pool the allocation deregisters the 64 blocks used longest ago; in a free one that is asked for.
    """

    BLOCKS = 64
    TOKENS = bytes(4 * SlotHost.block_size_tokens)

    def __init__(self, num_kv_blocks: int, policy: str, full: bool) -> None:
        self._asks = not full and policy == "lru"
        self._hashes = count(1)
        self._connect(num_kv_blocks, policy)
        self.parts = [("life", self._live)]
        for _ in range(num_kv_blocks // self.BLOCKS if full else 1):
            self.prepare()
            self._live()

    @abstractmethod
    def _connect(self, num_kv_blocks: int, policy: str) -> None:
        """Make `_kv`, its map `_registered`, and `_slots`, with a slot for every block."""

    @abstractmethod
    def _live(self) -> None: ...

    def _sequence(self) -> list[int]:
        return [next(self._hashes) for _ in range(self.BLOCKS)]

    def prepare(self) -> None:
        self._keys = self._sequence()
        self._live()
        self._keys = self._sequence()

    def outcome(self) -> object:
        """What is indexed now, and how much is free; which block a sequence gets is each side's affair."""
        maps = self._registered, self._slots.hash_to_block_id
        return [set(of) for of in maps], self._kv.total_avail, self._slots.free_count


class StockBlockLives(BlockLives):
    def _connect(self, num_kv_blocks: int, policy: str) -> None:
        host = SlotHost(num_kv_blocks + 1, stock_host.PrefixCachingEvictionPolicy(policy))
        self._host, self._kv = host, host.kv_block_allocator
        self._registered = self._kv.kv_hash_to_block_id
        self._slots = host.slot_allocator(stock_host.MambaSlotAllocator, num_kv_blocks)

    def _live(self) -> None:
        kv, slots, keys = self._kv, self._slots, self._keys
        tensor = kv.allocate_memory_blocks(self.BLOCKS)
        blocks = tensor.tolist()
        kv.register_kv_block_hashes(blocks, keys, [0, *keys[:-1]])
        slots.allocate_slots_batch(blocks)
        slots.register_block_hashes_batch(blocks, keys)
        kv.release_memory_blocks(tensor)
        self._host.prefix_cache_lru_clock += 1
        if self._asks:
            kv.evict_lru_blocks(self.BLOCKS)


class OurBlockLives(BlockLives):
    def _connect(self, num_kv_blocks: int, policy: str) -> None:
        host = SlotHost(2)
        self._kv = host.kv_block_allocator = KVBlockAllocator(num_kv_blocks)
        self._registered = self._kv.tree.block_of_hash
        self._slots = host.slot_allocator(ms.MambaSlotAllocator, num_kv_blocks)

    def _live(self) -> None:
        kv, slots, keys = self._kv, self._slots, self._keys
        blocks = kv.allocate_memory_blocks(self.BLOCKS)
        kv.register_chain(b"", blocks, keys, [self.TOKENS] * self.BLOCKS)
        slots.allocate_slots_batch(blocks)
        slots.register_block_hashes_batch(blocks, keys)
        kv.release_memory_blocks(blocks)
        if self._asks:
            kv.evict_lru_blocks(self.BLOCKS)


# ---- a whole step


DECODES, PROMPTS = 64, 16
SYSTEM_PROMPT, PROMPT = 128, 224
ROOM = ContextSizes(
    block_size_tokens=64,
    ssd_chunk_size=16,
    max_requests=96,
    max_tokens=4096,
    max_sequence_length=4096,
    num_kv_blocks=32768,
    num_mamba_slots=16384,
)
FULL = replace(ROOM, num_kv_blocks=2048, num_mamba_slots=256)
STEPS_UNTIL_FULL = 160
MAX_GROWTH = 1.2
MAX_REPEATS = 800  # `ROOM` is not full by then, and in `FULL` the decodes fit


@dataclass(frozen=True)
class RowStep:
    """What a step does for one request; positions are tokens of its sequence."""

    start: int
    stop: int
    blocks: int
    prompt_states: tuple[int, ...]


class Steps(ABC):
    """A context with 64 decodes under way, of prompts that end anywhere in a block; 16 others come and go.

    Everybody's first 128 tokens are the same, and their state is cached.
    """

    def __init__(self, sizes: ContextSizes, warm_up: int = 0) -> None:
        self._build(sizes)
        self._draw = random.Random(0)
        self._ids = count()
        self._system = self._tokens(SYSTEM_PROMPT)
        self.parts = [
            ("admit", self._admit),
            ("prepare", self._prepare),
            ("", self._look),
            ("finish", self._finish),
        ]
        self._arrive([40], stay=False)
        self._step()
        self._arrive(range(2, DECODES + 2), stay=True)
        self._step()
        for _ in range(warm_up):
            self.prepare()
            self._step()

    def _tokens(self, length: int) -> list[int]:
        return [self._draw.randrange(1000) for _ in range(length)]

    def _arrive(self, own_tokens: Iterable[int], stay: bool) -> None:
        self._new = [self._request(next(self._ids), self._system + self._tokens(n)) for n in own_tokens]
        self._leaving = [] if stay else [request.request_id for request in self._new]

    def _step(self) -> None:
        for _, call in self.parts:
            call()

    def prepare(self) -> None:
        self._arrive([PROMPT - SYSTEM_PROMPT] * PROMPTS, stay=False)

    def outcome(self) -> object:
        return self._rows, self._chunk_starts

    @abstractmethod
    def _build(self, sizes: ContextSizes) -> None: ...

    @abstractmethod
    def _request(self, request_id: int, tokens: list[int]) -> Any:
        """A request with its prompt hashed."""

    @abstractmethod
    def _admit(self) -> None: ...

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _look(self) -> None:
        """Note `_rows`, by request id, and `_chunk_starts`, the SSD chunks of the prompts."""

    @abstractmethod
    def _finish(self) -> None: ...


class StockSteps(Steps):
    def _build(self, sizes: ContextSizes) -> None:
        self._sizes = sizes
        self._context = stock_host.stock_context(sizes)

    def _request(self, request_id: int, tokens: list[int]) -> Any:
        return stock_host.stock_request(request_id, tokens, self._sizes)

    def _admit(self) -> None:
        for request in self._new:
            if not all(self._context.check_availability(request)):
                raise SystemExit(f"stock cannot admit request {request.request_id}")
            self._context.add_request(request)

    def _prepare(self) -> None:
        self._context.initialize_attention_state()

    def _look(self) -> None:
        context, slots = self._context, self._context.mamba_slot_allocator
        columns = (
            context.request_ids, context.request_kv_length_offsets, context.request_query_lengths,
            context.request_kv_block_counts, slots._intermediate_counts_cpu, slots._eos_cache_block_id_cpu,
        )  # fmt: skip
        offsets = slots._intermediate_offsets_cpu.tolist()
        decodes = context.num_decode_requests
        self._rows = {}
        table = zip(*(column[: context.total_request_count].tolist() for column in columns), strict=True)
        for row, (request_id, start, length, blocks, states, last_block) in enumerate(table):
            taken = [start + offset for offset in offsets[row][:states]] + [start + length] * (
                last_block >= 0
            )
            self._rows[request_id] = RowStep(
                start, start + length, blocks, tuple(taken) if row >= decodes else ()
            )
        cuts = context.mamba_metadata.cu_chunk_seqlens.tolist() if self._new else [0]
        self._chunk_starts = sorted(set(cuts))
        running = context.request_ids[: context.total_request_count]
        self._stays = torch.isin(
            running, torch.tensor(self._leaving, dtype=running.dtype), invert=True
        ).byte()
        self._sampled = torch.full((len(running),), 7)

    def _finish(self) -> None:
        self._context.mamba_slot_allocator.commit_intermediate_states()
        self._context.update_requests(self._stays, self._sampled)
        self._context.prefix_cache_lru_clock += 1


class OurSteps(Steps):
    def _build(self, sizes: ContextSizes) -> None:
        spec = HybridStateSpec(
            states=(
                ms.StateTensor("conv", 1, sizes.conv_states_shape, torch.float32),
                ms.StateTensor("ssm", 1, sizes.ssm_states_shape, torch.float32, sizes.ssd_chunk_size),
            ),
            num_attention_layers=1,
            num_kv_heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            kv_dtype=torch.float32,
            vocab_size=1000,
            device=torch.device("cpu"),
        )
        config = ms.InferenceConfig(
            block_size_tokens=sizes.block_size_tokens,
            max_requests=sizes.max_requests,
            max_tokens_per_step=sizes.max_tokens,
            max_sequence_length=sizes.max_sequence_length,
            num_kv_blocks=sizes.num_kv_blocks,
            num_mamba_slots=sizes.num_mamba_slots,
        )
        self._context = DynamicInferenceContext(spec, config)
        self._running: dict[int, DynamicInferenceRequest] = {}

    def _request(self, request_id: int, tokens: list[int]) -> Any:
        config = self._context.config
        sampling = ms.SamplingParams(max_tokens=config.max_sequence_length)
        chain = PrefixHashChain(config.block_size_tokens)
        chain.extend_to(tokens)
        return DynamicInferenceRequest(request_id, tokens, sampling, config.checkpoint_plan, chain, 0.0)

    def _admit(self) -> None:
        self._running |= {request.request_id: request for request in self._new}
        budget = self._context.config.max_tokens_per_step
        self._chunks = []
        for request in self._running.values():
            chunk = self._context.admission.schedule_request(request, budget)
            if chunk is None:
                raise SystemExit(f"ours cannot go on with request {request.request_id}")
            self._chunks.append(chunk)
            budget -= chunk.length

    def _prepare(self) -> None:
        self._inputs = self._context.begin_step(self._chunks)

    def _look(self) -> None:
        self._rows = {}
        for chunk in self._context.batch:
            taken = () if chunk.decoding else tuple(sorted(chunk.destinations))
            request = chunk.request
            self._rows[request.request_id] = RowStep(
                chunk.start, chunk.stop, len(request.allocation.path.blocks), taken
            )
        self._chunk_starts = self._inputs.chunks.cu_chunk_seqlens.tolist()

    def _finish(self) -> None:
        self._context.end_step()
        for request in self._running.values():
            request.tokens.append(7)
        for request_id in self._leaving:
            self._context.release(self._running.pop(request_id))


# ---- the table


@dataclass(frozen=True)
class Row:
    """`least`: how many times faster than stock ours must be."""

    name: str
    stock: Callable[[], Side]
    ours: Callable[[], Side]
    least: float | None = None


def rows() -> Iterator[Row]:
    both = (stock_host.MambaSlotAllocator, ms.MambaSlotAllocator)
    for blocks, least in ((4096, None), (65536, 10.0), (524288, 40.0)):
        sides = [partial(EvictingSlots, allocator, blocks) for allocator in both]
        yield Row(f"allocate 8 with eviction, {blocks:,} KV blocks", *sides, least)
    sides = [partial(LookedUpSlots, allocator, 65536) for allocator in both]
    yield Row("64 has_state, 65,536 KV blocks", *sides, 5.0)
    sides = [partial(TurningSlots, allocator, 65536) for allocator in both]
    yield Row("64 slots, a turn, 65,536 KV blocks", *sides, 3.0)
    for blocks, policy, full, name in (
        (4096, "lru", True, "full pool of 4,096"),
        (65536, "lru", True, "full pool of 65,536"),
        (4096, "lru", False, "free pool of 4,096"),
        (65536, "lru", False, "free pool of 65,536"),
    ):
        sides = [partial(side, blocks, policy, full) for side in (StockBlockLives, OurBlockLives)]
        yield Row(f"64 blocks, a life, {name}", *sides, 2.0)
    yield Row("one step, room", partial(StockSteps, ROOM), partial(OurSteps, ROOM))
    warm_up = STEPS_UNTIL_FULL
    yield Row("one step, full", partial(StockSteps, FULL, warm_up), partial(OurSteps, FULL, warm_up))


def main() -> None:
    parser = make_parser(__doc__)
    add_count(parser, "--repeats", 301, "timed calls of each")
    parser.add_argument(
        "--rows", nargs="+", default=[""], metavar="TEXT", help="rows with such a name (default: all)"
    )
    arguments = parser.parse_args()
    if arguments.repeats > MAX_REPEATS:
        parser.error(f"--repeats is {arguments.repeats}; accepted: 1 to {MAX_REPEATS}")
    chosen = [row for row in rows() if any(text in row.name for text in arguments.rows)]
    if not chosen:
        parser.error(f"--rows is {arguments.rows}; accepted: parts of {[row.name for row in rows()]}")
    torch.set_num_threads(1)

    print(f"median us of {arguments.repeats}; least: how many times stock's speed is required\n")
    print(f"{'':46}{'stock':>10}{'ours':>10}{'times':>8}{'least':>7}")
    report = []
    with stock_host.cpu_as_gpu():
        for row in chosen:
            medians = alternate(row.name, arguments.repeats, stock=row.stock(), ours=row.ours())
            report.append(_report(row, medians))
            gc.collect()
    requirements = [
        {"name": entry["row"], "required": entry["least"], "got": entry["times"]["all"], "met": entry["met"]}
        for entry in report
        if entry["least"]
    ]
    requirements.append(_growth(arguments.repeats))
    print("\nrequirements")
    for requirement in requirements:
        met = "met" if requirement["met"] else "NOT MET"
        print(f"  {met:8}{requirement['name']:60}{requirement['required']:6.1f}x{requirement['got']:9.2f}x")
    if arguments.json is not None:
        _write(arguments.json, arguments.repeats, report, requirements)


def _growth(repeats: int) -> dict[str, Any]:
    """Our eviction in a large pool against the same in a small one, one after the other."""
    small, large = (EvictingSlots(ms.MambaSlotAllocator, blocks) for blocks in (4096, 524288))
    small.outcome = large.outcome = lambda: None  # other blocks  # type: ignore[method-assign]
    medians = alternate("growth", repeats, small=small, large=large)
    got = medians["large"]["all"] / medians["small"]["all"]
    name = "allocate 8: ours at 524,288 against ours at 4,096, at most"
    return {"name": name, "required": MAX_GROWTH, "got": got, "met": got <= MAX_GROWTH}


def _report(row: Row, medians: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Print a row, a step's also by part, and return it."""
    stock, ours = medians["stock"], medians["ours"]
    times = {part: stock[part] / ours[part] for part in stock}
    least = f"{row.least:.0f}x" if row.least else ""
    print(f"{row.name:46}{stock['all']:10.1f}{ours['all']:10.1f}{times['all']:7.1f}x{least:>7}")
    if len(times) > 2:
        for part in [part for part in times if part != "all"]:
            print(f"    {part:42}{stock[part]:10.1f}{ours[part]:10.1f}{times[part]:7.1f}x")
    return {
        "row": row.name,
        "median_us": medians,
        "times": times,
        "least": row.least,
        "met": None if row.least is None else times["all"] >= row.least,
    }


def _write(path: Path, repeats: int, report: list[Any], requirements: list[Any]) -> None:
    packages = ("megatron-core", "mambaslots", "torch", "numpy")
    document = {
        "benchmark": "bookkeeping",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "torch_threads": 1,
        },
        "versions": {"python": sys.version.split()[0]}
        | {package: importlib.metadata.version(package) for package in packages},
        "repeats": repeats,
        "rows": report,
        "requirements": requirements,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def processor() -> str:
    """The CPU's name, where the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
