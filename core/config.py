"""Sizes and switches of an engine and its context."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from .inference.contexts.cache.checkpoint_plan import CheckpointPlan
from .inference.contexts.cache.eviction import PolicyChoice, checked_policy
from .inference.contexts.cache.hashing import key_bytes
from .validation import INT32_MAX, boolean, check_fields, instance, integer, one_of, real, refused, set_field

if TYPE_CHECKING:
    import torch

MAX_SPECULATIVE_TOKENS = 63  # kernels are compiled for a number of tokens a row, and unroll over them
DurableDtype = Literal["bfloat16", "int8"]
DURABLE_DTYPES: tuple[DurableDtype, ...] = get_args(DurableDtype)
FreeMemory = Literal["keep", "zero"]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Sizes and switches of a `DynamicInferenceEngine`. Lengths are counted in tokens, GB are 2**30 bytes.

    Sizes:
        block_size_tokens: tokens of one KV block; with prefix caching a multiple of the model's grid.
        max_requests: requests that run at once.
        max_tokens_per_step: tokens computed in one step; at least `max_requests`, and at least one block.
            With `decode_by_replay` at least `max_requests` - 1 and one chunk.
        max_sequence_length: longest prompt plus answer.
        num_kv_blocks: blocks of the KV pool. Where decodes replay, blocks for their inputs are added.
        num_mamba_slots: cached states, in addition to the live states of `max_requests` requests (times
            1 + `num_speculative_tokens`, without replay). Slots of idle rows hold cached states as well,
            unless these are encoded.
        total_gb: bytes of all pools together, in place of `num_kv_blocks` and `num_mamba_slots`. Live states
            are allocated first. Cached states, KV and inputs of decodes by replay share the rest, and the
            borders move while the engine runs; encoded states have a fixed half. They have at most 262,144
            slots or blocks; a warning says what is not used. Ranks of a split model may have different
            budgets. Where no pool has a size, 85 % of what is free on the GPU when the engine is made, or
            half of what is free on a CPU, at most 16.

    Cache:
        enable_prefix_caching: match prompts with cached prefixes, and cache what is computed.
        eviction_policy: which state is evicted for a new one. "value": the one whose loss costs the fewest
            expected recomputed tokens, which may be the new one; "lru": the least recently used.
        checkpoint_plan: which states are cached; a request may bring its own plan.
        durable_state_dtype: how cached states are stored: None as live states are; "bfloat16" with matrices
            and windows in bfloat16; "int8" with matrices in int8, a scale for each head and state index, and
            windows in bfloat16. A request that resumes starts from a rounded state, so that its tokens may
            differ from those without a cache. Not with `decode_by_replay` or `batch_invariant`.
        host_cache_gb: pinned host memory for evicted states; 0.0 for none. A state is copied back if it
            saves a token for each MiB of its size, from a file for each 64 KiB.
        disk_cache: a directory and the GB of its files, for states that host memory has no room for;
            None for none. The files hold what prompts hold.
        salt_key: the secret under which cache salts are hashed, at least 16 bytes. Replicas that exchange
            salted prefixes need one key. None reads the environment variable MAMBASLOTS_SALT_KEY, and without
            it draws a key. Never shown.

    Execution:
        num_speculative_tokens: most draft tokens of a request in one step, which verifies them; 0 for none.
            Each costs one more live slot per request, unless decodes replay.
        num_cuda_graphs: most CUDA graphs of decode steps, and again of steps with prefills; None captures
            none. No effect on a CPU, and with float64 weights, whose kernels synchronise.
        async_scheduling: launch a step before the tokens of the step before it are read. When `step`
            returns, the next step may run already, and may read the weights. None: on a GPU, without drafts.
        decode_by_replay: a decode computes its token from the state at the last grid point and the inputs
            since, and writes a state once a chunk; else it updates the state at each token. Rounds as a
            prefill does.
        batch_invariant: the tokens and log-prob bits of a request depend on its own tokens, sampling
            parameters and seed alone: not on the cache, other requests, cuts, CUDA graphs, drafts or
            preemption. For bfloat16 and float16 models on a GPU. Implies `decode_by_replay`. An engine checks
            itself at its start, and refuses what it cannot promise. None: on where the model, the GPU and
            the other settings allow it and the check passes; else off, and `describe()` says why.

    Memory:
        free_memory: what free states, KV blocks, inputs of decodes, slots of host memory and files hold.
            "keep": stale values. "zero": zeros before another request can get it, which costs a write of what
            is freed.

    Example: `InferenceConfig(block_size_tokens=256, num_kv_blocks=1024, num_mamba_slots=64)` caches the KV of
    262,144 tokens and at least 64 states.
    """

    block_size_tokens: int = 256
    max_requests: int = 32
    max_tokens_per_step: int = 2048
    max_sequence_length: int = 4096
    num_kv_blocks: int | None = None
    num_mamba_slots: int | None = None
    total_gb: float | None = None

    enable_prefix_caching: bool = True
    eviction_policy: PolicyChoice = "value"
    checkpoint_plan: CheckpointPlan = field(default_factory=CheckpointPlan)
    durable_state_dtype: DurableDtype | None = None
    host_cache_gb: float = 0.0
    disk_cache: tuple[str, float] | None = None
    salt_key: bytes | str | None = field(default=None, repr=False)

    num_speculative_tokens: int = 0
    num_cuda_graphs: int | None = None
    async_scheduling: bool | None = None
    decode_by_replay: bool = False
    batch_invariant: bool | None = None

    free_memory: FreeMemory = "keep"

    def __post_init__(self) -> None:
        check_fields(
            self, integer, block_size_tokens=(1, INT32_MAX), max_requests=(1, INT32_MAX),
            max_tokens_per_step=(1, INT32_MAX), max_sequence_length=(2, INT32_MAX),
            num_speculative_tokens=(0, MAX_SPECULATIVE_TOKENS),
        )  # fmt: skip
        check_fields(self, integer, or_none=True, num_cuda_graphs=(1, INT32_MAX))
        check_fields(self, boolean, enable_prefix_caching=(), decode_by_replay=())
        check_fields(self, boolean, or_none=True, async_scheduling=(), batch_invariant=())
        check_fields(self, real, or_none=True, total_gb=(0.0, _MAX_GB))
        check_fields(self, real, host_cache_gb=(0.0, _MAX_GB))
        checked_policy("eviction_policy", self.eviction_policy)
        one_of("free_memory", self.free_memory, get_args(FreeMemory))
        instance("checkpoint_plan", self.checkpoint_plan, CheckpointPlan)
        if self.salt_key is not None:
            key_bytes("salt_key", self.salt_key)
        self._check_pools()
        self._check_tiers()
        self._check_execution()

    def _check_pools(self) -> None:
        by_memory = self.total_gb is not None or self.num_kv_blocks is self.num_mamba_slots is None
        for name, hint, needed in (
            ("num_kv_blocks", "", True),
            ("num_mamba_slots", _WITHOUT_SLOTS, self.enable_prefix_caching),
        ):
            count = getattr(self, name)
            if count is not None and self.total_gb is not None:
                sizes = f"total_gb is {self.total_gb} and {name} is {count!r}"
                raise ValueError(f"{sizes}; accepted: total_gb alone, or a size for each pool")
            if needed and not by_memory and (count is None or (type(count) is int and count == 0)):
                raise ValueError(f"{name} is {count}; accepted: an integer from 1 on, or total_gb{hint}")
            check_fields(self, integer, or_none=True, **{name: (int(needed), INT32_MAX)})
        if self.max_tokens_per_step < self.max_requests:
            accepted = f"at least max_requests ({self.max_requests}), as each running request decodes a token"
            raise refused("max_tokens_per_step", self.max_tokens_per_step, accepted)
        if self.enable_prefix_caching:
            if self.block_size_tokens >= self.max_sequence_length:
                accepted = f"less than max_sequence_length ({self.max_sequence_length})"
                raise refused("block_size_tokens", self.block_size_tokens, accepted)
            if self.max_tokens_per_step < self.block_size_tokens:
                accepted = f"at least block_size_tokens ({self.block_size_tokens})"
                raise refused("max_tokens_per_step", self.max_tokens_per_step, accepted)
            self.checkpoint_plan.check_block_size(self.block_size_tokens)

    def _check_tiers(self) -> None:
        if self.host_cache_gb and not self.enable_prefix_caching:
            accepted = "0.0 where enable_prefix_caching is False, because no state is cached"
            raise refused("host_cache_gb", self.host_cache_gb, accepted)
        if self.disk_cache is None:
            return
        pair = self.disk_cache
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
            raise refused("disk_cache", pair, "a directory and GB, or None")
        if not self.host_cache_gb:
            accepted = "None where host_cache_gb is 0.0, because files pass through host memory"
            raise refused("disk_cache", pair, accepted)
        set_field(self, "disk_cache", (pair[0], real("disk_cache[1]", pair[1], 0.0, _MAX_GB)))

    def _check_execution(self) -> None:
        if self.async_scheduling and self.num_speculative_tokens:
            raise ValueError(
                f"async_scheduling is True and num_speculative_tokens is {self.num_speculative_tokens}; "
                "accepted: one of the two"
            )
        if self.durable_state_dtype is not None:
            one_of("durable_state_dtype", self.durable_state_dtype, DURABLE_DTYPES)
            if self.replays:
                raise ValueError(
                    f"durable_state_dtype is {self.durable_state_dtype!r} and {self.replay_argument} "
                    "is True; accepted: one of the two, because decodes by replay start from exact states"
                )

    @property
    def replays(self) -> bool:
        """Whether decodes replay the inputs since the last grid point."""
        return self.decode_by_replay or bool(self.batch_invariant)

    @property
    def replay_argument(self) -> str:
        """The setting that makes decodes replay, for messages."""
        return "batch_invariant" if self.batch_invariant else "decode_by_replay"

    def why_not_async(self, device: "torch.device") -> str | None:
        """Why an engine on `device` has no async scheduling; None where it has."""
        if self.num_speculative_tokens:
            return "num_speculative_tokens"
        if self.async_scheduling is None:
            return None if device.type == "cuda" else "a CPU"
        return None if self.async_scheduling else "async_scheduling"

    def why_not_invariant(self, device: "torch.device") -> str | None:
        """Why answers may depend on the batch, whatever the model is; None where a check of it decides."""
        if self.batch_invariant is not None:
            return None if self.batch_invariant else "the setting is False"
        if self.durable_state_dtype is not None:
            return f"durable_state_dtype is {self.durable_state_dtype!r}"
        return None if device.type == "cuda" else f"the model is on {device.type}"


_MAX_GB = 2.0**33  # 2**63 bytes
_WITHOUT_SLOTS = "; to serve without state slots, set enable_prefix_caching=False"
