"""What the corrections remember about one host context: its running requests, and its counts."""

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..inference.contexts.cache.hashing import GhostList
from ..inference.contexts.cache.pool_stats import SlotCounts
from ..inference.contexts.cache.prefix_match import ComputeReason, Span, TokenLedger
from .versions import INFERENCE_REQUEST

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
class RequestTrack:
    """Prompt and generated tokens of a request, and the hashes of their whole blocks.

    Attributes:
        prompt_keys: the host's keys of the prompt's whole blocks.
        generated: sampled tokens, in order; the KV of the last one may be missing.
        rolling_block: the block of the newest decode state that rolls, or -1.
    """

    prompt: Tensor
    prompt_keys: list[int]
    block_size_tokens: int
    generated: list[int] = field(default_factory=list)
    rolling_block: int = -1
    _keys: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Any, block_size_tokens: int) -> "RequestTrack | None":
        """The track of a host's request, or None for a request whose blocks are not hashed."""
        if not request.enable_prefix_caching or request.block_size_tokens != block_size_tokens:
            return None
        return cls(request.prompt_tokens, list(request.precomputed_block_hashes), block_size_tokens)

    @property
    def known_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    def keys(self, blocks: int) -> list[int] | None:
        """The keys of the first `blocks` blocks; None where the host's keys of the prompt differ."""
        if blocks > len(self._keys):  # once a block of the answer: the host keeps keys, and no digests
            self.prompt = self.prompt.cpu()  # once, because every copy from a GPU waits
            generated = torch.tensor(self.generated, dtype=self.prompt.dtype, device="cpu")
            tokens = torch.cat([self.prompt, generated])[: blocks * self.block_size_tokens]
            requests = importlib.import_module(INFERENCE_REQUEST)
            self._keys = requests.compute_block_hashes_batched(tokens, self.block_size_tokens)
        shared = min(blocks, len(self.prompt_keys))
        return self._keys[:blocks] if self._keys[:shared] == self.prompt_keys[:shared] else None


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


@dataclass(frozen=True)
class HostStats:
    """A snapshot of one context. Token counts count prompt tokens.

    Attributes:
        num_requests: requests that were added.
        num_hits: chunks that resumed from a state.
        num_prompt_tokens: num_resumed_tokens + num_computed_tokens.
        computed_by_reason: why tokens were computed; see `cache_stats.COMPUTE_REASONS`.
        num_recomputed_tokens: tokens computed again after a request was evicted and restarted; no other count
            includes them.
        num_dropped_checkpoints: planned boundaries whose states could not be stored.
    """

    num_requests: int
    num_hits: int
    num_prompt_tokens: int
    num_resumed_tokens: int
    num_computed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    num_recomputed_tokens: int
    num_free_slots: int
    num_reserved_slots: int
    num_committed_slots: int
    num_states_committed: int
    num_states_evicted: int
    num_dropped_checkpoints: int

    @classmethod
    def of(cls, record: HostRecord, slots: SlotCounts, num_dropped: int) -> "HostStats":
        """Put together what a context and its allocator count."""
        retired = record.retired
        return cls(
            num_requests=record.requests,
            num_hits=record.hits,
            **record.ledger.counts(),
            num_free_slots=slots.free,
            num_reserved_slots=slots.reserved,
            num_committed_slots=slots.committed,
            num_states_committed=retired["committed"] + slots.committed_total,
            num_states_evicted=retired["evicted"] + slots.evicted_total,
            num_dropped_checkpoints=retired["dropped"] + num_dropped,
        )

    @property
    def hit_rate(self) -> float:
        """Resumed of all prompt tokens; 0 where there were none."""
        return self.num_resumed_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
