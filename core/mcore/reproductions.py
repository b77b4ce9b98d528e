"""What `install` asks of a host whose sources it does not know: the faults' reproductions, in about a second.

They run on the CPU, in tiny contexts whose states, KV and bookkeeping are checked after every step. Not
tested: the mixer's kernels, async scheduling, and several pipeline stages.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .recurrence import BLOCK, KV_BLOCK_BYTES, MODES, RecurrenceDriver, expect, make_context, tokens

PROMPT = tokens(3 * BLOCK + 2, seed=1)


def a_length_of_1_mod_block() -> None:
    driver = RecurrenceDriver(make_context())
    expect("resumed", [driver.serve(PROMPT[: 2 * BLOCK + 1])[0] for _ in range(2)], [0, 2 * BLOCK])
    driver.check_idle()


def kv_without_a_state() -> None:
    driver = RecurrenceDriver(make_context())
    prompt = tokens(6 * BLOCK, seed=2)
    slots = driver.context.mamba_slot_allocator
    driver.serve(prompt)
    for block in list(slots.hash_to_block_id.values()):
        slots.invalidate_block(block)
    expect("resumed", driver.serve(prompt + PROMPT[:3], chunk=2 * BLOCK)[0], 0)
    expect("resumed", driver.serve(prompt + PROMPT[:3])[0], 6 * BLOCK)
    driver.check_idle()


def a_prefix_that_is_registered_twice() -> None:
    driver = RecurrenceDriver(make_context())
    driver.serve(PROMPT)
    kv = driver.context.kv_block_allocator
    block_of_hash = dict(kv.kv_hash_to_block_id)
    kv.register_kv_block_hashes([40], [next(iter(block_of_hash))], [0])
    expect("registered blocks", kv.kv_hash_to_block_id, block_of_hash)


def a_reset() -> None:
    driver = RecurrenceDriver(make_context())
    driver.serve(PROMPT)
    driver.add(PROMPT)
    driver.context.reset_metadata()
    driver.running.clear()
    expect("resumed", [driver.serve(PROMPT)[0] for _ in range(2)], [0, 3 * BLOCK])
    driver.check_idle()


def a_request_that_does_not_fit() -> None:
    driver = RecurrenceDriver(make_context(max_requests=1))
    driver.serve(PROMPT)
    number = driver.add(tokens(BLOCK + 5, seed=3))
    references = driver.context.kv_block_allocator.block_ref_counts.tolist()
    errors = []
    try:
        driver.add(PROMPT)
    except Exception as error:
        errors = [type(error).__name__]
    expect("errors", errors, ["RequestOverflowError"])
    expect("references", driver.context.kv_block_allocator.block_ref_counts.tolist(), references)
    driver.step(finish=(number,))
    driver.check_idle()


def suspend_and_resume() -> None:
    for mode, num_resumed in ((MODES.RECOMPUTE, 0), (MODES.OFFLOAD, 3 * BLOCK)):
        driver = RecurrenceDriver(make_context(kv_cache_management_mode=mode))
        driver.serve(PROMPT)
        driver.context.deallocate_inference_state_buffers()
        driver.context.reinitialize_inference_state_buffers()
        expect("resumed", [driver.serve(PROMPT)[0] for _ in range(2)], [num_resumed, 3 * BLOCK])
        driver.check_idle()


def the_end_of_a_chunk() -> None:
    driver = RecurrenceDriver(make_context())
    prompt = tokens(4 * BLOCK + 3, seed=4)
    driver.serve(prompt, chunk=2 * BLOCK)
    expect("resumed", driver.serve(prompt[: 2 * BLOCK] + PROMPT[:5])[0], 2 * BLOCK)


def an_answer_that_is_sent_again() -> None:
    driver = RecurrenceDriver(make_context())
    _, sequence = driver.serve(PROMPT, new_tokens=3 * BLOCK)
    resumed, _ = driver.serve(sequence + PROMPT[:3])
    boundary = 3 * BLOCK if resumed <= 3 * BLOCK else 6 * BLOCK  # answers may not be cached
    expect("resumed", resumed, boundary)
    driver.check_idle()


def requests_that_pause() -> None:
    driver = RecurrenceDriver(
        make_context(blocks=14, slots=4, paused_buffer_size_gb=3 * KV_BLOCK_BYTES / 2**30)
    )
    for seed in range(4):
        driver.add(tokens(BLOCK + 3, seed=seed))
    for _ in range(4 * BLOCK):
        driver.step()
    while driver.running:
        driver.step(finish=tuple(driver._active()))
    driver.check_idle()


REPRODUCTIONS = (
    a_length_of_1_mod_block, kv_without_a_state, a_prefix_that_is_registered_twice, a_reset,
    a_request_that_does_not_fit, suspend_and_resume, the_end_of_a_chunk, an_answer_that_is_sent_again,
    requests_that_pause,
)  # fmt: skip


def failures() -> list[str]:
    """For each reproduction that goes wrong with what is installed: its name, and how."""
    messages = []
    with _on_cpu():
        for reproduction in REPRODUCTIONS:
            try:
                reproduction()
            except Exception as error:
                words = " ".join(str(error).split())[:200]
                fault = f"{type(error).__name__}: {words}" if words else type(error).__name__
                messages.append(f"{reproduction.__name__.replace('_', ' ')} ({fault})")
    return messages


@contextmanager
def _on_cpu() -> Iterator[None]:
    """The device of new contexts is the CPU: a script may not have chosen its GPU yet."""

    def nothing(*args: object, **kwargs: object) -> None:
        pass

    def stream(*args: object, **kwargs: object) -> Any:
        names = ("record", "wait", "wait_event", "wait_stream", "synchronize")
        return SimpleNamespace(query=lambda: True, **dict.fromkeys(names, nothing))

    def pageable(make: Any) -> Any:
        return lambda *args, pin_memory=False, **named: make(*args, **named)

    cuda: dict[str, Any] = {"current_device": lambda: torch.device("cpu"), "synchronize": nothing}
    cuda |= dict.fromkeys(("Event", "Stream", "current_stream"), stream)
    makers = ("full", "empty", "zeros", "ones", "empty_like", "tensor", "arange")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        for name in makers:
            stack.enter_context(mock.patch.object(torch, name, pageable(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *args: tensor))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        yield
