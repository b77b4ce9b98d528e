"""No slot, row or buffer is used again before its reader is done: each wait is needed, all are enough."""

import gc
from collections.abc import Callable
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.errors import MambaSlotCapacityError
from mambaslots.inference.contexts import tier_copies as host_copies
from mambaslots.inference.contexts.cache.state_slots import StateSlots
from mambaslots.inference.contexts.cache.state_tiers import StateTiers
from mambaslots.inference.contexts.step_builder import StepBuffer
from mambaslots.inference.contexts.step_inputs import StepShape
from mambaslots.inference.contexts.tier_copies import HostCopies
from mambaslots.inference.engines.cuda_graphs import GraphRunner
from mambaslots.inference.engines.step_runner import DeviceReadback
from mambaslots.net.transfer.format import TransferError
from mambaslots.net.transfer.pieces import NUM_BUFFERS, PoolLease, Staging, receive_pieces, send_pieces
from mambaslots.net.transfer.pipe import NcclPipe
from oracle.budget import dear
from oracle.kv_index import host_tree
from oracle.streams import CUDA, RaceError, Simulator, Site, ordering_calls
from torch import Tensor

pytestmark = pytest.mark.usefixtures("without_logs")

BYTES = 16
FILES = "files"
Scenario = Callable[[Simulator, Random], None]


def pattern(number: int) -> Tensor:
    return torch.full((BYTES,), number % 251 + 1, dtype=torch.uint8)


def expect(values: Tensor, expected: Tensor, what: str) -> Callable[[], None]:
    def look() -> None:
        assert torch.equal(values, expected), f"{what} finds wrong bytes"

    return look


class LateFiles:
    """What `StateFiles` does, in memory: its thread works at any later time."""

    def __init__(self, simulator: Simulator) -> None:
        self.copies: Any = None
        self.num_loaded = 0
        self._simulator = simulator
        self._work: list[tuple[dict[str, int], Callable[[], None]]] = []
        self._held: dict[int, tuple[int, int, Tensor]] = {}
        simulator.guessing.add(FILES)

    def save(self, file: int, serial: int, row: Tensor, checksum: Callable[[], int | None]) -> None:
        version = list(self.copies._versions)

        def write() -> None:
            try:
                value = checksum()
                if value is None:
                    return
                data = row.clone()
                if checksum() == value:
                    self._held[file] = serial, value, data
            except RaceError:
                if self.copies._versions == version:  # else the thread finds out that the row was changed
                    raise
                self._simulator.races.clear()

        self._work.append((dict(self._simulator.host_clock), write))

    def run(self) -> None:
        if self._work:
            clock, write = self._work.pop(0)
            with self._simulator.thread(FILES, clock):
                write()

    def load(self, file: int, serial: int, row: Tensor) -> int | None:
        written, value, data = self._held.get(file, (-1, 0, row))
        if written != serial:
            return None
        row.copy_(data)
        self.num_loaded += 1
        return value

    def delete(self, files: object) -> None: ...


def tier(simulator: Simulator, random: Random, scrubs: bool = False) -> None:
    """Steps write states and read them; states leave for host memory and files, and come back."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(host_copies, "_pin", simulator.host_memory)
        tier.back = tier_traffic(simulator, random, scrubs, patches)  # type: ignore[attr-defined]
        gc.collect()  # the rows are unpinned


def tier_traffic(
    simulator: Simulator, random: Random, scrubs: bool, patches: pytest.MonkeyPatch
) -> tuple[int, int]:
    """How many states came back from the tier, and from files."""
    memory = simulator.device_memory(torch.zeros(3, BYTES, dtype=torch.uint8))
    files = LateFiles(simulator)
    runtime = SimpleNamespace(cudaHostUnregister=lambda address: simulator.host((), [rows], "unpin"))
    patches.setattr(host_copies, "_runtime", lambda: runtime)
    copies = HostCopies(4, BYTES, memory.__getitem__, CUDA, files, scrubs)  # type: ignore[arg-type]
    rows = copies.memory
    files.copies = SimpleNamespace(_versions=copies._versions)
    held = StateTiers(4, copies, num_files=8, scrubs=scrubs)
    slots = StateSlots(3, "lru", host_tree(), 12, tiers=held)

    def fails(row: Tensor, serial: int) -> Tensor:
        raise torch.OutOfMemoryError

    def step(block: int, fetch_fails: bool = False) -> None:
        """A state that is neither in a slot nor in the tier is computed; then a step reads it."""
        checksum = copies._checksum
        if fetch_fails:
            copies._checksum = fails  # type: ignore[assignment]
        with suppress(MambaSlotCapacityError):
            if block not in slots.cached_states.slot_of_block:
                slots.fetch_state([block], [block + 1], 0, 1)
            copies._checksum = checksum
            if block not in slots.cached_states.slot_of_block:
                (slot,) = slots.reserve_slots([block])
                memory[slot].copy_(simulator.device_memory(pattern(block)), non_blocking=True)
                slots.commit_slots([slot])
            row = memory[slots.cached_states.slot_of(block)]
            simulator.launch(expect(row, pattern(block), "a step"), [row], [], "a step reads a state")

    for _ in range(25):
        call, block = (
            random.choice(["step"] * 6 + ["file"] * 4 + ["free"] + ["fails"] * 3),
            random.randrange(12),
        )
        if call == "file":
            files.run()
        elif call == "free":
            staged = copies._staged
            copies.deallocate_staging()
            if staged is not None:
                simulator.reuse(staged, "a step's own memory")
        else:
            step(block, fetch_fails=call == "fails")
        if random.random() < 0.1:
            held.remove([block + 1])
            held.host.dirty.scrub_all()
    for block in [0, 1, 2, 3] * 3:  # states that have copies leave their slots to others that come back
        step(block)
    for block in range(20, 24):  # the last copy is under way
        step(block)
    return held.stats().num_states_fetched, files.num_loaded


def scrubbed_tier(simulator: Simulator, random: Random) -> None:
    tier(simulator, random, scrubs=True)


LARGEST = StepShape(*[6] * len(StepShape._fields))


def step_buffer(simulator: Simulator, random: Random) -> None:
    """Each step's kernels read what the host wrote for this step."""
    buffer = StepBuffer(LARGEST, CUDA)
    for number in range(8):
        arrays = buffer.arrays(LARGEST)
        simulator.host((), [buffer._hosts[buffer._turn]], "the host writes a step's numbers")
        arrays["token_ids"][:] = number
        tokens = buffer.send(LARGEST)["token_ids"]
        simulator.launch(
            expect(tokens, torch.full_like(tokens, number), "a kernel"), [tokens], [], "a kernel"
        )


def sampled(simulator: Simulator, random: Random) -> None:
    """The host reads tokens once they are there, though the next step is launched before."""
    logits = simulator.device_memory(torch.zeros(4))
    previous = None
    for number in range(5):
        logits.fill_(number)
        results = DeviceReadback({"first": logits[:2], "last": logits[2:]})
        if previous is not None:
            assert previous.read() == dict.fromkeys(("first", "last"), [number - 1.0] * 2)
            simulator.host([previous._numbers], (), "the host reads tokens")
        previous = results


class Layout:
    """Pieces of one row each."""

    pieces = tuple(range(2 * NUM_BUFFERS + 1))
    sizes = (BYTES,) * len(pieces)
    buffer_bytes = BYTES


class Copies:
    """What `PartCopies` does with rows of one pool."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool

    def between(self, piece: int, buffer: Tensor) -> tuple[Tensor, Tensor]:
        return self._pool[piece], buffer

    def gather(self, copy: tuple[Tensor, Tensor]) -> None:
        copy[1].copy_(copy[0], non_blocking=True)

    def scatter(self, copy: tuple[Tensor, Tensor]) -> None:
        copy[0].copy_(copy[1], non_blocking=True)


class Wire:
    """A communicator whose sends and receives run on NCCL's stream."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._pieces: list[Tensor] = []

    def get_async_error(self) -> int:
        return 0

    def send(self, piece: Tensor, peer: int, stream: Any) -> None:
        with self._simulator.on(stream):
            self._simulator.launch(lambda: self._pieces.append(piece.clone()), [piece], [], "NCCL sends")

    def recv(self, piece: Tensor, peer: int, stream: Any) -> None:
        with self._simulator.on(stream):
            self._simulator.launch(lambda: piece.copy_(self._pieces.pop(0)), [], [piece], "NCCL receives")


def pipe_over(wire: Wire, simulator: Simulator) -> NcclPipe:
    pipe = NcclPipe.__new__(NcclPipe)
    pipe._peer, pipe._stream = 1, simulator.new_stream()  # type: ignore[assignment]
    pipe._comm = SimpleNamespace(call=lambda use: use(wire))  # type: ignore[assignment]
    return pipe


def hand_over(simulator: Simulator, random: Random) -> None:
    """Steps before a hand-over write what it sends, and steps behind it overwrite that, or read what came."""
    num_rows = len(Layout.pieces)
    source = simulator.device_memory(torch.zeros(num_rows, BYTES, dtype=torch.uint8))
    destination = simulator.device_memory(torch.zeros(num_rows, BYTES, dtype=torch.uint8))
    wire, lease = Wire(simulator), PoolLease()
    sums: list[list[int]] = []
    patience = 0

    def wait(condition: Callable[[], bool]) -> None:
        nonlocal patience
        while not condition():
            simulator.run_some()
        patience -= 1
        if not patience:
            raise TransferError("the peer is lost")

    for pool, exchange in ((source, send_pieces), (destination, receive_pieces)):
        patience = random.choice([0, 0, 6])
        pipe, staging = pipe_over(wire, simulator), Staging(CUDA, scrubs=random.random() < 0.5)
        for row in range(num_rows):
            values = pattern(row if pool is source else 99)
            pool[row].copy_(simulator.device_memory(values), non_blocking=True)
        staging.wait_for_engine()
        try:
            result: Any = exchange(pipe, Layout, Copies(pool), staging, lease, wait)  # type: ignore[arg-type]
            sums.append(result[0] if pool is source else result)
            for passage in result[1] if pool is source else ():
                wait(passage.poll_done)
            staging.scrub()
        except TransferError:
            staging.make_engine_wait()
            pool.zero_()  # what the pieces were for, or from, belongs to others
            return
        staging.make_engine_wait()
        if pool is source:
            source.zero_()
        else:
            for row in range(num_rows):
                look = expect(destination[row], pattern(row), "a step")
                simulator.launch(look, [destination[row]], [], "a step reads what came")
        if random.random() < 0.5:
            pipe._stream.wait_event(staging.mark())  # type: ignore[arg-type]
            with simulator.on(pipe._stream):  # type: ignore[arg-type]
                simulator.launch(lambda: None, [], [staging.buffers[0]], "NCCL receives from a lost peer")
        with staging.on_stream():
            if pipe._is_idle():
                simulator.reuse(staging.buffers[0], "memory of an ended hand-over")
            simulator.finish()
    assert sums[0] == sums[1]


def graphs(simulator: Simulator, random: Random) -> None:
    """A graph's memory is given back once it has run."""
    runner = GraphRunner.__new__(GraphRunner)
    runner._spec = SimpleNamespace(device=CUDA)  # type: ignore[assignment]
    memory = simulator.device_memory(torch.zeros(BYTES, dtype=torch.uint8))
    runner._graphs = {LARGEST: object()}  # type: ignore[dict-item]
    simulator.launch(lambda: None, [memory], [memory], "a graph runs")
    runner.clear_graphs()
    simulator.host((), [memory], "the graph's memory is given back")


SCENARIOS: dict[str, tuple[Scenario, ...]] = {
    "inference/contexts/tier_copies.py": (tier, scrubbed_tier),
    "inference/contexts/step_builder.py": (step_buffer,),
    "inference/engines/step_runner.py": (sampled,),
    "net/transfer/pieces.py": (hand_over,),
    "net/transfer/pipe.py": (hand_over,),
    "inference/engines/cuda_graphs.py": (graphs,),
}


def run(scenario: Scenario, seed: int, left_out: Site | None = None) -> Simulator:
    simulator = Simulator(seed, left_out)
    with simulator.instead_of_cuda():
        scenario(simulator, Random(seed))
        simulator.finish()
    assert not simulator.races, simulator.races
    return simulator


def all_scenarios() -> list[Scenario]:
    return list(dict.fromkeys(scenario for several in SCENARIOS.values() for scenario in several))


@pytest.mark.parametrize("scenario", all_scenarios())
def test_no_order_of_work_has_a_race_or_wrong_bytes(scenario: Scenario) -> None:
    @dear()
    @given(st.integers(0, 2**32))
    def in_any_order(seed: int) -> None:
        assert run(scenario, seed).num_launched > 0

    in_any_order()


def test_the_schedules_bring_states_back_from_both_tiers() -> None:
    fetched = loaded = 0
    for seed in range(3):
        run(tier, seed)
        fetched, loaded = fetched + tier.back[0], loaded + tier.back[1]  # type: ignore[attr-defined]
    assert fetched > 5
    assert loaded > 0


SITES = list(ordering_calls())


def test_every_call_that_orders_streams_is_known() -> None:
    assert {site.file for site in SITES} == SCENARIOS.keys()
    assert len(SITES) > 20


def _case(site: Site) -> Any:
    """Schedules of the tier take a second each."""
    marks = [pytest.mark.long] if site.file.endswith("tier_copies.py") and site.function != "store" else []
    return pytest.param(site, id=f"{site.function}-{site.call}-{site.line}", marks=marks)


@pytest.mark.parametrize("site", list(map(_case, SITES)))
def test_each_wait_is_needed(site: Site) -> None:
    """Left out, it is a race in some schedule."""
    for seed in range(40):
        for scenario in SCENARIOS[site.file]:
            try:
                run(scenario, seed, site)
            except AssertionError:
                return
    pytest.fail(f"{site} can be left out unnoticed")
