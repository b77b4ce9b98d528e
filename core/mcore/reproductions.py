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

from .recurrence import BLOCK, KV_BLOCK_BYTES, MODES, RecurrentHost, expect, make_context, tokens

PROMPT = tokens(3 * BLOCK + 2, seed=1)


def a_length_of_1_mod_block() -> None:
    host, prompt = RecurrentHost(make_context()), PROMPT[: 2 * BLOCK + 1]
    expect("resumed", [host.serve(prompt)[0] for _ in range(2)], [0, 2 * BLOCK])
    host.check_idle()


def kv_without_a_state() -> None:
    host, prompt = RecurrentHost(make_context()), tokens(6 * BLOCK, seed=2)
    slots = host.context.mamba_slot_allocator
    host.serve(prompt)
    for block in list(slots.hash_to_block_id.values()):
        slots.invalidate_block(block)
    expect("resumed", host.serve(prompt + PROMPT[:3], chunk=2 * BLOCK)[0], 0)
    expect("resumed", host.serve(prompt + PROMPT[:3])[0], 6 * BLOCK)
    host.check_idle()


def a_prefix_that_is_registered_twice() -> None:
    host = RecurrentHost(make_context())
    host.serve(PROMPT)
    kv = host.context.kv_block_allocator
    before = dict(kv.kv_hash_to_block_id)
    kv.register_kv_block_hashes([40], [next(iter(before))], [0])
    expect("registered blocks", kv.kv_hash_to_block_id, before)


def a_reset() -> None:
    host = RecurrentHost(make_context())
    host.serve(PROMPT)
    host.add(PROMPT)
    host.context.reset_metadata()
    host.running.clear()
    expect("resumed", [host.serve(PROMPT)[0] for _ in range(2)], [0, 3 * BLOCK])
    host.check_idle()


def a_request_that_does_not_fit() -> None:
    host = RecurrentHost(make_context(max_requests=1))
    host.serve(PROMPT)
    number = host.add(tokens(BLOCK + 5, seed=3))
    before = host.context.kv_block_allocator.block_ref_counts.tolist()
    errors = []
    try:
        host.add(PROMPT)
    except Exception as error:
        errors = [type(error).__name__]
    expect("errors", errors, ["RequestOverflowError"])
    expect("references", host.context.kv_block_allocator.block_ref_counts.tolist(), before)
    host.step(finish=(number,))
    host.check_idle()


def suspend_and_resume() -> None:
    for mode, resumed in ((MODES.RECOMPUTE, 0), (MODES.OFFLOAD, 3 * BLOCK)):
        host = RecurrentHost(make_context(kv_cache_management_mode=mode))
        host.serve(PROMPT)
        host.context.deallocate_inference_state_buffers()
        host.context.reinitialize_inference_state_buffers()
        expect("resumed", [host.serve(PROMPT)[0] for _ in range(2)], [resumed, 3 * BLOCK])
        host.check_idle()


def the_end_of_a_chunk() -> None:
    host, prompt = RecurrentHost(make_context()), tokens(4 * BLOCK + 3, seed=4)
    host.serve(prompt, chunk=2 * BLOCK)
    expect("resumed", host.serve(prompt[: 2 * BLOCK] + PROMPT[:5])[0], 2 * BLOCK)


def an_answer_that_is_sent_again() -> None:
    host = RecurrentHost(make_context())
    _, said = host.serve(PROMPT, new_tokens=3 * BLOCK)
    resumed, _ = host.serve(said + PROMPT[:3])
    boundary = 3 * BLOCK if resumed <= 3 * BLOCK else 6 * BLOCK  # answers may not be cached
    expect("resumed", resumed, boundary)
    host.check_idle()


def requests_that_pause() -> None:
    host = RecurrentHost(make_context(blocks=14, slots=4, paused_buffer_size_gb=3 * KV_BLOCK_BYTES / 2**30))
    for seed in range(4):
        host.add(tokens(BLOCK + 3, seed=seed))
    for _ in range(4 * BLOCK):
        host.step()
    while host.running:
        host.step(finish=tuple(host._active()))
    host.check_idle()


REPRODUCTIONS = (
    a_length_of_1_mod_block, kv_without_a_state, a_prefix_that_is_registered_twice, a_reset,
    a_request_that_does_not_fit, suspend_and_resume, the_end_of_a_chunk, an_answer_that_is_sent_again,
    requests_that_pause,
)  # fmt: skip


def failures() -> list[str]:
    """For each reproduction that goes wrong with what is installed: its name, and how."""
    found = []
    with _on_cpu():
        for reproduction in REPRODUCTIONS:
            try:
                reproduction()
            except Exception as error:
                words = " ".join(str(error).split())[:200]
                name = reproduction.__name__.replace("_", " ")
                found.append(f"{name} ({type(error).__name__}{words and ': ' + words})")
    return found


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
