"""The faults of megatron-core's own cache that the drop-in corrects, as docs/megatron.md numbers them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Fault(NamedTuple):
    """What stock megatron-core does, and what that costs."""

    sentence: str
    effect: str


FAULTS: Mapping[int, Fault] = {
    1: Fault(
        "A repeat of a prompt of n blocks and one token is rounded down to a boundary without a state.",
        "other tokens",
    ),
    2: Fault("A continuation chunk, or memory-only mode, skips tokens on a KV match alone.", "other tokens"),
    3: Fault(
        "A chunk shorter than the convolution loses the window before it.",
        "other tokens, also without a cache",
    ),
    4: Fault(
        "A restore that fails zeroes the state, and the tokens are skipped all the same.",
        "other tokens (follows from 1 and 2)",
    ),
    5: Fault("A prefix that is registered twice names the block without a state.", "wrong map"),
    6: Fault("`reset_metadata()` keeps the index of states.", "serves states of old weights"),
    7: Fault("A reset leaves restores and zero-fills in their queues.", "a stale entry writes a live slot"),
    8: Fault("The number of a live slot is a view of the free stack.", "the number changes later"),
    9: Fault("Slots are freed only if some hash of the batch is known.", "leaks slots"),
    10: Fault("Requests without hashes take snapshots.", "evicts the states of others"),
    11: Fault("Evicting a duplicate of a hash removes the entry of the other block.", "loses the entry"),
    12: Fault("A pool is smaller than the snapshots of one step.", "`RuntimeError`: the step is lost"),
    13: Fault("An `add_request` overflows.", "leaks references and blocks"),
    14: Fault("A suspend keeps the pool, and a resume holds two.", "needs twice the memory"),
    15: Fault(
        "Pipeline stages size their pools alone. A stage without Mamba layers skips on KV alone.",
        "stages skip differently",
    ),
    16: Fault("A boundary that is a chunk's end is not captured.", "loses hits"),
    17: Fault("The divergence ignores blocks of earlier chunks.", "loses hits"),
    18: Fault("Nothing is cached while decoding.", "prefills answers that are sent again"),
    19: Fault("A KV match refreshes states that no request used.", "evicts worse"),
    20: Fault("The block is no multiple of the SSD chunk.", "never hits, silently"),
    21: Fault(
        "Restores run one by one; commits gather and scatter.", "2 copies a request, 4 small transfers"
    ),
    22: Fault("Checkpoint metadata is rebuilt on the GPU.", "12 kernels, 2 synchronisations"),
    23: Fault("Eviction scans all KV blocks.", "slower with more blocks"),
    24: Fault(
        "Paused requests wait for free blocks while cached blocks could be evicted.",
        "`AssertionError`: the step is lost",
    ),
}
"""Number -> fault."""


def described_faults(numbers: Iterable[int]) -> str:
    """One line for each fault: its number, its effect and its sentence."""
    lines = [
        f"  fault {number} ({FAULTS[number].effect}): {FAULTS[number].sentence}"
        for number in sorted(set(numbers))
    ]
    return "\n".join(lines)
