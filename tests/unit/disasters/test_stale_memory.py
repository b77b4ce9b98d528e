"""Memory of states was given to the next request as the last one left it: a tensor escaped the clearing."""

from collections.abc import Iterator, Sequence

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.device_memory import DeviceMemory
from oracle.drafters import MODES
from oracle.memory_poison import MemoryPoison
from oracle.serving import random_tokens, serve_checked, small_engine
from torch import Tensor

pytestmark = pytest.mark.usefixtures("kind")

STEM = random_tokens(30, seed=30)
PROMPTS = [STEM, STEM[:17] + random_tokens(9, seed=31), STEM + random_tokens(20, seed=32), STEM[:25]]
SERVED = [mode for mode in MODES if mode != "n-grams"]


class FreedBytesAreOnes:
    """Observes a context: behind each step all bytes of memory without a holder are 0xFF, which is NaN.

    Bytes, so that no tensor of a slot can escape, whatever a slot holds.
    """

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self._context = engine.context
        self.fill()
        self._context.observers.append(self)

    def step_begun(self, steps: Sequence[object], inputs: object) -> None:
        """Nothing is to be done."""

    def step_ended(self, steps: Sequence[object]) -> None:
        self.fill()

    def fill(self) -> None:
        context, memory = self._context, self._context.memory
        allocations = [request.allocation for request in context.requests if request.allocation]
        committed = [
            memory.durable_pool.durable_index(s)
            for s in context.prefix_cache.slots.cached_states.slot_of_block.values()
        ]
        committed += [
            memory.durable_pool.durable_index(allocation.path.state_slot)
            for allocation in allocations
            if allocation.path.state_slot >= 0
        ]
        states = [allocation.state_index for allocation in allocations if allocation.num_computed]
        if memory.durable_pool is memory.state_pool:
            _fill_others(memory.state_pool.memory, 0, committed + states)
        else:
            _fill_others(memory.state_pool.memory, 0, states)
            _fill_others(memory.durable_pool.memory, 0, committed)
        blocks = context.prefix_cache.kv_blocks
        held = [
            block
            for allocation in allocations
            for block in (*allocation.path.blocks, *allocation.input_blocks)
        ]
        _fill_others(memory.kv_cache, 2, [*held, *blocks.tree.block_of_hash.values()])
        for inputs in (memory.input_pool[name] for name in memory.shapes_in_rows):
            _fill_others(inputs, 1, [allocation.row for allocation in allocations])


def _fill_others(memory: Tensor, axis: int, kept: Sequence[int]) -> None:
    others = sorted(set(range(memory.shape[axis])) - set(kept))
    value = 0xFF if memory.dtype == torch.uint8 else float("nan")
    memory.index_fill_(axis, torch.tensor(others, dtype=torch.int64), value)


@pytest.mark.sampled
@pytest.mark.disaster(number=2)
@pytest.mark.parametrize("mode", ["", *SERVED])
def test_slots_are_reused_full_of_nan_and_no_answer_changes(mode: str) -> None:
    """Repeats, extensions and forks in a few slots and blocks: many are evicted, and written again."""
    engine = small_engine(num_kv_blocks=14, num_mamba_slots=3, max_tokens_per_step=24, **MODES.get(mode, {}))
    FreedBytesAreOnes(engine)
    for _ in range(2):
        serve_checked(engine, PROMPTS, length=9)
    stats = engine.context.cache_stats()
    assert stats.num_resumed_tokens > 0
    assert stats.num_states_evicted > 0


def tensors_of(found: object, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that an object of the package leads to by its attributes, containers included."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from tensors_of(value, seen)
    elif isinstance(found, list | tuple | set):
        for value in found:
            yield from tensors_of(value, seen)
    elif type(found).__module__.startswith("mambaslots"):
        yield from tensors_of(getattr(found, "__dict__", {}), seen)


@pytest.mark.disaster(number=2)
@pytest.mark.parametrize("mode", ["", "encoded", "replay"])
def test_no_tensor_of_the_device_memory_escapes_the_poison(mode: str) -> None:
    """What a context holds of states, KV and inputs is NaN where nothing is cached, in every tensor."""
    engine = small_engine(num_kv_blocks=16, num_mamba_slots=4, **MODES.get(mode, {}))
    serve_checked(engine, PROMPTS[:2])
    engine.reset()
    MemoryPoison(engine.context).fill()
    memory: DeviceMemory = engine.context.memory
    checked = 0
    for tensor in tensors_of(memory, set()):
        if tensor.is_floating_point() and tensor.numel():
            assert tensor.isnan().all(), f"{list(tensor.shape)} of {tensor.dtype} escaped"
            checked += 1
    spec = engine.context.spec
    inputs = [entry for state in spec.states for entry in state.inputs] if mode == "replay" else []
    pools = 2 if mode == "encoded" else 1
    assert checked == len(spec.states) * pools + len(inputs) + bool(memory.kv_cache.numel())


@pytest.mark.disaster(number=2)
def test_a_new_request_starts_from_zeros_and_not_from_what_its_slot_holds() -> None:
    """Also where the slot is the one that the last request has left, and the prompt no longer than a tap."""
    for length in (1, 2, 3, 9):
        engine = small_engine(max_requests=1, num_mamba_slots=2)
        FreedBytesAreOnes(engine)
        for seed in range(6):
            serve_checked(engine, [random_tokens(length, seed=40 + seed)], length=3)
        (result,) = serve_checked(engine, [random_tokens(length, seed=45)], length=3)
        assert result.num_resumed_tokens == (length - 1) // 8 * 8
