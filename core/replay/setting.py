"""What a replay serves a trace with, and what came of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .trace import Trace


@dataclass(frozen=True)
class ModelShape:
    """What a model costs in the cache and to compute.

    Attributes:
        name: what tables call it.
        state_bytes: of one state, as live states are kept.
        durable_state_bytes: of one cached state; less than `state_bytes` where cached states are encoded.
        kv_bytes_per_token: of all attention layers.
        grid_tokens: a KV block is a multiple of this.
        hidden_size, num_recurrent_layers, num_attention_layers, num_mlp_layers, state_size: for the
            arithmetic of a prefill.
    """

    name: str
    state_bytes: int
    durable_state_bytes: int
    kv_bytes_per_token: int
    grid_tokens: int
    hidden_size: int
    num_recurrent_layers: int
    num_attention_layers: int
    num_mlp_layers: int
    state_size: int

    @property
    def encodes(self) -> bool:
        """Whether cached states are encoded, so that they cannot lie in live slots."""
        return self.durable_state_bytes != self.state_bytes


@dataclass(frozen=True)
class StepCost:
    """How long a step takes: `base_s`, and more for each prefill token and each decoding request."""

    base_s: float = 0.007
    prefill_token_s: float = 40e-6
    decode_row_s: float = 50e-6

    def seconds(self, num_prefill_tokens: int, num_decode_rows: int) -> float:
        return self.base_s + num_prefill_tokens * self.prefill_token_s + num_decode_rows * self.decode_row_s


@dataclass(frozen=True)
class ReplaySetting:
    """Memory and limits, in which all rows of a table are compared.

    Attributes:
        shape: of the model.
        state_gb, kv_gb: memory for states and for KV (2**30 bytes), where they are given apart.
        total_gb: memory for both, where a row divides it itself; then the other two are None.
        max_requests: requests that run at once; 1 replays one after another.
        max_tokens: tokens of one step.
        block_size_tokens: of a KV block, for rows that have no block size of their own.
        cost: how long a step takes.
        host_gb: memory of the host tier; 0 for none.
    """

    shape: ModelShape
    state_gb: float | None = None
    kv_gb: float | None = None
    total_gb: float | None = None
    max_requests: int = 32
    max_tokens: int = 2048
    block_size_tokens: int = 256
    cost: StepCost = field(default_factory=StepCost)
    host_gb: float = 0.0


@dataclass(frozen=True)
class ReplayResult:
    """What one row made of one trace.

    Attributes:
        num_requests: requests served.
        prompt_tokens, resumed_tokens: of all prompts, each token counted once.
        lost_by_reason: computed prompt tokens by reason; empty for rows that do not tell.
        num_states_taken: states that were stored.
        state_capacity: states that fit, live ones left out; 0 where a row has no such number.
        resumed_lengths: resumed tokens of each request of the trace, in its order; empty for rows that do not
            tell.
    """

    num_requests: int
    prompt_tokens: int
    resumed_tokens: int
    lost_by_reason: Mapping[str, int] = field(default_factory=dict)
    num_states_taken: int = 0
    state_capacity: int = 0
    resumed_lengths: tuple[int, ...] = field(default=(), repr=False)

    @property
    def share(self) -> float:
        """Resumed tokens / prompt tokens."""
        return self.resumed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


Progress = Callable[[int, int], None]
"""Called with the number of requests served, and of all requests."""


class ReplayRow(Protocol):
    """A cache, with its policies, as one row of the table.

    Attributes:
        name: what the table calls it.
        source: what it emulates, in one line.
    """

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...

    def replay(self, trace: Trace, setting: ReplaySetting, progress: Progress) -> ReplayResult:
        """Serve the trace. Changes nothing of its arguments; two calls give equal results."""
