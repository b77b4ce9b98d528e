"""What the corrections remember about one host context: its running requests, and its counts."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..inference.contexts.cache.block_tree import GhostList
from ..inference.contexts.cache.cached_states import Span
from ..inference.contexts.cache.pool_stats import SlotCounts, StateRemovalCause, Turnover
from ..inference.contexts.dynamic_request import TokenLedger
from .versions import INFERENCE_REQUEST


class HostCallError(ValueError, AssertionError):
    """A wrong argument, for which megatron-core's own method raises an AssertionError."""


def check_lengths(block_ids: Sequence[int], **lists: Sequence[int] | None) -> None:
    """Raise a HostCallError unless each of `lists` that is given has an entry for each block."""
    num_blocks = len(block_ids)
    for name, entries in lists.items():
        if entries is not None and len(entries) != num_blocks:
            raise HostCallError(f"{name} has {len(entries)} entries; accepted: {num_blocks}, as block_ids")


@dataclass
class RequestTrack:
    """Prompt and sampled tokens of a request, and the host's hashes of the prompt's whole blocks."""

    prompt: Tensor
    prompt_hashes: list[int]  # the host's
    block_size_tokens: int
    generated: list[int] = field(default_factory=list)  # the KV of the last one may be missing
    rolling_block: int = -1  # of the newest decode state that rolls
    _hashes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Any, block_size_tokens: int) -> "RequestTrack | None":
        """The track of a host's request, or None for a request whose blocks are not hashed."""
        if not request.enable_prefix_caching or request.block_size_tokens != block_size_tokens:
            return None
        return cls(request.prompt_tokens, list(request.precomputed_block_hashes), block_size_tokens)

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    def hashes_to(self, blocks: int) -> list[int] | None:
        """The hashes of the first `blocks` blocks; None where the host's hashes of the prompt differ."""
        if blocks > len(self._hashes):  # once a block of the answer: the host keeps hashes, and no digests
            self.prompt = self.prompt.cpu()  # once, because every copy from a GPU waits
            generated = torch.tensor(self.generated, dtype=self.prompt.dtype, device="cpu")
            tokens = torch.cat([self.prompt, generated])[: blocks * self.block_size_tokens]
            requests = importlib.import_module(INFERENCE_REQUEST)
            self._hashes = requests.compute_block_hashes_batched(tokens, self.block_size_tokens)
        shared = min(blocks, len(self.prompt_hashes))
        return self._hashes[:blocks] if self._hashes[:shared] == self.prompt_hashes[:shared] else None


@dataclass
class HostRecord:
    """Counts and running requests of one context; it outlives the context's allocator."""

    num_requests: int = 0
    num_hits: int = 0
    tracks: dict[int, RequestTrack] = field(default_factory=dict)
    spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    ledger: TokenLedger = field(default_factory=TokenLedger)
    match: Any = None  # of the chunk that the host is adding
    kv_ghosts: GhostList = field(default_factory=lambda: GhostList(65536))
    engine: Callable[[], Any] = lambda: None  # a weak reference to what queues the context's requests
    turnover: Turnover[StateRemovalCause] | None = None  # also with allocators before a resume
    slots: SlotCounts = field(default_factory=lambda: SlotCounts(0, 0, 0, 0, 0))
    num_dropped: int = 0
    new_hashes: set[int] = field(default_factory=set)  # of blocks registered since the step was scheduled
    unqueued_ids: list[int] = field(default_factory=list)  # waiting requests that the queue lacks

    def begin(self, request: Any, block_size_tokens: int, spans: tuple[Span, ...]) -> None:
        """A request's first chunk was added; `spans` say why its tokens are computed."""
        request_id = request.request_id
        self.num_requests += 1
        self.remove([request_id])
        self.spans[request_id] = spans
        if track := RequestTrack.of(request, block_size_tokens):
            self.tracks[request_id] = track

    def count_chunk(self, request_id: int, num_finished: int, num_skipped: int, length: int) -> None:
        """Count prompt tokens [num_finished, num_finished + length), the first `num_skipped` resumed."""
        start = num_finished + num_skipped
        stop = num_finished + length
        if num_skipped:
            self.num_hits += 1
        spans = self.spans.get(request_id, ())
        self.ledger += TokenLedger.of_step(range(num_finished, start), range(start, stop), spans, 0, stop)

    def remove(self, request_ids: Iterable[int]) -> None:
        """These requests left the context."""
        for request_id in request_ids:
            self.tracks.pop(request_id, None)
            self.spans.pop(request_id, None)

    def clear(self) -> None:
        """Every request left the context."""
        self.tracks.clear()
        self.spans.clear()


def record_of(context: Any) -> HostRecord:
    """The record of a context, made on first use."""
    record = context.__dict__.get("_mambaslots_record")
    if record is None:
        record = context._mambaslots_record = HostRecord()
    return record  # type: ignore[no-any-return]
