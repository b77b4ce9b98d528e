"""A `resume` that runs out of memory leaves a suspended engine, whichever allocation fails."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts import device_memory, request_states
from mambaslots.inference.contexts.device_memory import DeviceMemory, StatePool
from mambaslots.mcore.slot_allocator import HostSlotAllocator
from oracle.fake_host import FakeHost
from oracle.faults import Interrupted
from oracle.model_kinds import WITH_ATTENTION
from oracle.serving import random_tokens, serve_checked, small_engine

PROMPTS = [random_tokens(40, seed=1), random_tokens(23, seed=2)]
NUM_TENSORS = 2  # KV, states


def on_each_kind(test: Callable[..., None]) -> Callable[..., None]:
    """With each kind of state, and attention: both tensors have bytes."""
    test = pytest.mark.usefixtures("kind")(test)
    return pytest.mark.parametrize("kind", WITH_ATTENTION, indirect=True)(test)


@contextmanager
def allocations_fail(number: int) -> Iterator[list["weakref.ref[torch.Tensor]"]]:
    """The allocation of that number raises; what was allocated before it is noted."""
    made: list[weakref.ref[torch.Tensor]] = []
    inside: list[bool] = []  # `zeroed` calls torch.zeros on a GPU

    def counted(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            inside.append(True)
            tensor = real(*args, **kwargs)
            inside.pop()
            if inside or tensor.nbytes == 0:
                return tensor
            if len(made) == number:
                raise torch.OutOfMemoryError("no memory left")
            made.append(weakref.ref(tensor))
            return tensor

        return allocate

    zeroed = counted(request_states.zeroed)
    with (
        patch.object(torch, "zeros", counted(torch.zeros)),
        patch.object(request_states, "zeroed", zeroed),
        patch.object(device_memory, "zeroed", zeroed),
    ):
        yield made


def suspended_engine() -> ms.DynamicInferenceEngine:
    engine = small_engine()
    serve_checked(engine, PROMPTS)
    engine.suspend()
    return engine


def assert_suspended(engine: ms.DynamicInferenceEngine) -> None:
    assert not engine.context.memory.is_allocated
    with pytest.raises(RuntimeError, match="step is called on a suspended engine; resume it first"):
        engine.step()


@on_each_kind
def test_resuming_allocates_so_many_tensors() -> None:
    engine = suspended_engine()
    with allocations_fail(NUM_TENSORS) as made:
        engine.resume()
    assert len(made) == NUM_TENSORS
    assert engine.context.memory.is_allocated


@on_each_kind
@pytest.mark.parametrize("number", range(NUM_TENSORS))
def test_a_failed_resume_leaves_a_suspended_engine_that_can_be_resumed(number: int) -> None:
    engine = suspended_engine()
    for _ in range(2):
        try:
            with allocations_fail(number) as made:
                engine.resume()
        except torch.OutOfMemoryError:
            assert [tensor() for tensor in made] == [None] * number  # a handler may need that memory
        else:
            pytest.fail("resume did not fail")
        assert_suspended(engine)
        memory = engine.context.memory
        pool = memory.state_pool
        assert [t.nbytes for t in (memory.kv_cache, pool.memory)] == [0, 0]
    engine.resume()
    serve_checked(engine, PROMPTS)
    engine.check_integrity()


@on_each_kind
@pytest.mark.parametrize("number", range(NUM_TENSORS))
def test_a_failed_resume_can_be_reset(number: int) -> None:
    engine = suspended_engine()
    with allocations_fail(number), pytest.raises(torch.OutOfMemoryError):
        engine.resume()
    engine.reset()
    assert_suspended(engine)
    engine.resume()
    serve_checked(engine, PROMPTS)


@pytest.mark.sampled
@on_each_kind
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DeviceMemory, "_new_memory"), (DeviceMemory, "deallocate"),
        (StatePool, "_zeros"), (StatePool, "_put"), (StatePool, "deallocate"),
    ],
)  # fmt: skip
def test_an_interrupted_resume_can_be_repeated(owner: type, name: str, after: bool) -> None:
    engine = suspended_engine()
    real: Callable[..., object] = getattr(owner, name)

    def interrupted(*args: object) -> object:
        if after:
            real(*args)
        raise Interrupted

    with patch.object(owner, name, interrupted), pytest.raises(Interrupted):
        engine.resume()
    assert_suspended(engine)
    engine.resume()
    memory = engine.context.memory
    assert min(t.nbytes for t in (memory.kv_cache, memory.state_pool.memory)) > 0
    serve_checked(engine, PROMPTS)


@on_each_kind
@pytest.mark.parametrize(("owner", "name"), [(DeviceMemory, "deallocate"), (StatePool, "deallocate")])
def test_an_interrupted_suspend_leaves_a_suspended_engine(owner: type, name: str) -> None:
    engine = small_engine()
    serve_checked(engine, PROMPTS)
    real: Callable[..., object] = getattr(owner, name)

    def interrupted(*args: object) -> object:
        real(*args)
        raise Interrupted

    with patch.object(owner, name, interrupted), pytest.raises(Interrupted):
        engine.suspend()
    assert not engine.context.memory.is_allocated
    engine.resume()
    serve_checked(engine, PROMPTS)


# ---- megatron-core's pool


@pytest.mark.parametrize("number", [0, 1])
def test_the_pool_of_a_host_comes_back_whole_or_not_at_all(number: int) -> None:
    slots = FakeHost().allocator(5, HostSlotAllocator)
    slots.deallocate_pool()
    for _ in range(2):
        with allocations_fail(number), pytest.raises(torch.OutOfMemoryError):
            slots.allocate_pool()
        assert (slots.conv_states.shape[1], slots.ssm_states.shape[1]) == (0, 0)
    slots.allocate_pool()
    assert (slots.conv_states.shape[1], slots.ssm_states.shape[1]) == (5, 5)


@pytest.mark.parametrize("number", [0, 1])
def test_an_offloaded_pool_survives_a_failed_resume(number: int) -> None:
    slots = FakeHost().allocator(5, HostSlotAllocator)
    slots.conv_states.fill_(2)
    slots.ssm_states.fill_(3)
    slots.offload_pool()
    real, seen = torch.Tensor.to, list[torch.Tensor]()

    def to(tensor: torch.Tensor, *args: object) -> torch.Tensor:
        seen.append(tensor)
        if len(seen) == number + 1:
            raise torch.OutOfMemoryError("no memory left")
        return real(tensor, *args)  # type: ignore[call-overload, no-any-return]

    with patch.object(torch.Tensor, "to", to), pytest.raises(torch.OutOfMemoryError):
        slots.allocate_pool()
    assert (slots.conv_states.shape[1], slots.ssm_states.shape[1]) == (0, 0)
    slots.allocate_pool()
    assert slots.conv_states.shape[1] == slots.ssm_states.shape[1] == 5
    assert slots.conv_states.eq(2).all()
    assert slots.ssm_states.eq(3).all()
