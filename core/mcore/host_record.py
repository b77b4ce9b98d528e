"""What the corrections remember about one host context."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..inference.contexts.cache.durable_slots import SlotCounts
from ..inference.contexts.cache.reasons import GhostList, Span, TokenLedger
from .request_track import RequestTrack

DYNAMIC_CONTEXT = "megatron.core.inference.contexts.dynamic_context:DynamicInferenceContext"
STATE_CONFIG = "megatron.core.inference.config:MambaInferenceStateConfig"
KV_ALLOCATOR = "megatron.core.inference.contexts.kv_block_allocator:KVBlockAllocator"
GPU_VIEW = "megatron.core.inference.contexts.gpu_view:ContextGPUView"
MHA_METADATA = "megatron.core.inference.contexts.attention_context.mha_metadata:MHAMetadata"
MAMBA_METADATA = "megatron.core.inference.contexts.attention_context.mamba_metadata:MambaMetadata"
MAMBA_MIXER = "megatron.core.ssm.mamba_mixer:MambaMixer"
NO_SLOTS = SlotCounts(0, 0, 0, 0, 0)
"""The counts of a context without an allocator."""


class HostCallError(ValueError, AssertionError):
    """A wrong argument, for which megatron-core's own method raises an AssertionError."""


def check_lengths(block_ids: Sequence[int], **lists: Sequence[int] | None) -> None:
    """Raise a HostCallError unless each of `lists` that is given has an entry for each block."""
    for name, listed in lists.items():
        if listed is not None and len(listed) != len(block_ids):
            raise HostCallError(f"{name} has {len(listed)} entries; accepted: {len(block_ids)}, as block_ids")


@dataclass
class HostRecord:
    """Counts and running requests of one context; it outlives the context's allocator.

    Attributes:
        tracks: request id -> its tokens, of requests in the context whose blocks are hashed.
        ledger: what became of prompt tokens; tokens already counted before a restart are recomputed ones.
        kv_ghosts: hashes of KV blocks that were evicted.
        retired: counts of allocators that were replaced on resume.
        slots, dropped: counts of the allocator after its last step.
    """

    requests: int = 0
    hits: int = 0
    tracks: dict[int, RequestTrack] = field(default_factory=dict)
    ledger: TokenLedger = field(default_factory=TokenLedger)
    kv_ghosts: GhostList = field(default_factory=lambda: GhostList(65536))
    retired: Counter[str] = field(default_factory=Counter)
    slots: SlotCounts = NO_SLOTS
    dropped: int = 0
    _spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    _counted: dict[int, int] = field(default_factory=dict)
    _restarting: dict[int, int] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)

    def begin(self, request: Any, block_size_tokens: int, spans: tuple[Span, ...]) -> None:
        """A request's first chunk was added; `spans` say why its tokens are computed."""
        request_id = request.request_id
        self.forget([request_id])
        self._spans[request_id] = spans
        self._counted[request_id] = self._restarting.pop(request_id, 0)
        self.requests += not self._counted[request_id]
        if track := RequestTrack.of(request, block_size_tokens):
            self.tracks[request_id] = track

    def count_chunk(self, request_id: int, finished: int, skipped: int, length: int) -> None:
        """Count prompt tokens [finished, finished + length), the first `skipped` of them resumed."""
        num_counted, stop = self._counted.get(request_id, 0), finished + length
        self.hits += skipped > 0
        self.ledger += TokenLedger.of_step(
            resumed_from=finished,
            start=finished + skipped,
            stop=stop,
            spans=self._spans.get(request_id, ()),
            num_counted=num_counted,
            num_prompt_tokens=stop,
        )
        self._counted[request_id] = max(num_counted, stop)

    def forget(self, request_ids: Iterable[int]) -> None:
        """These requests left the context."""
        for request_id in request_ids:
            self.tracks.pop(request_id, None)
            self._spans.pop(request_id, None)
            self._left[request_id] = self._counted.pop(request_id, 0)

    def restart_left(self, request_ids: Iterable[int]) -> None:
        """Of the requests that left since the last call, these will be added again from their beginning."""
        for request_id in request_ids:
            self._restarting[request_id] = self._left.get(request_id, 0)
        self._left.clear()

    def restart_all(self) -> None:
        """Every request leaves, and will be added again."""
        running = list(self._counted)
        self.forget(running)
        self.restart_left(running)

    def clear(self) -> None:
        """Every request is dropped."""
        self.forget(list(self._counted))
        self._left.clear()


def record_of(context: Any) -> HostRecord:
    """The record of a context, made on first use."""
    record = context.__dict__.get("_mambaslots_record")
    if record is None:
        record = context._mambaslots_record = HostRecord()
    return record  # type: ignore[no-any-return]
