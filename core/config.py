"""Sizes and switches of a context."""

from dataclasses import dataclass, field

import torch

from .inference.contexts.cache.checkpoint_plan import CheckpointPlan
from .inference.contexts.cache.salt_key import key_bytes
from .inference.contexts.cache.slot_eviction import EVICTION_POLICIES
from .state_encoding import DURABLE_DTYPES, DurableDtype
from .validation import (
    INT32_MAX,
    INT64_MAX,
    boolean,
    instance,
    integer,
    one_of,
    optional_integer,
    real,
    set_field,
    shown,
)

NO_CACHE = "enable_prefix_caching=False"
MAX_SPECULATIVE_TOKENS = 63  # kernels are compiled for a number of tokens a row, and unroll over them


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Sizes and switches of a `DynamicInferenceContext`. Lengths are counted in tokens.

    Attributes:
        block_size_tokens: tokens of one KV block; with prefix caching a multiple of the model's grid.
        max_requests: requests that run at once: rows of a step, and owners of live state slots.
        max_tokens: tokens computed in one step; at least `max_requests`, and at least one block. Where
            decodes replay, at least one chunk; with less than a chunk and `max_requests` together, prompts
            may wait for decodes.
        max_sequence_length: longest prompt plus answer.
        num_kv_blocks, buffer_size_gb: size of the KV pool, as a number of blocks or in GB (2**30 bytes).
            Exactly one of the two is set.
        num_mamba_slots, prefix_caching_mamba_gb: room for cached states, as a number of slots or in GB,
            beside the `max_requests` live states (times 1 + `num_speculative_tokens`, unless decodes replay).
            The slots of idle rows hold cached states, too, unless these are encoded. Exactly one of the two
            is set with prefix caching, at most one without.
        total_gb: bytes of all pools together, in GB, in place of the four settings before: live states and
            inputs of running requests first, then cached states and KV. These two share one memory, and
            borrow from each other while the engine runs, unless cached states are encoded. Ranks of a split
            model may have different budgets.
        durable_state_dtype: how cached states are stored: None as live states are; "bfloat16" with the
            matrices of scans and the windows of convolutions in bfloat16; "int8" with the matrices in int8, a
            scale for each head and state index, and the windows in bfloat16. Fewer bytes a state make more
            slots of the same memory. Live states stay as they are. A request that resumes starts from a
            rounded state, so that its tokens may differ from those without a cache. Not with decodes by
            replay, and so not with `batch_invariant`.
        enable_prefix_caching: match prompts with what was computed before, and cache what is computed.
        enable_chunked_prefill: spread a prompt over several steps; without it a prompt must fit into one
            step.
        host_cache_gb: GB of pinned host memory for states that are evicted from their slots; 0.0 for none. A
            later prompt brings such a state back, as long as the KV of its prefix is cached.
        host_cache_min_tokens: a state is brought back where that saves at least so many tokens. None measures
            at start how many tokens are computed in the time of a copy.
        disk_cache_gb: GB of files for states, behind host memory; 0.0 for none.
        disk_cache_path: the directory of these files, which hold what prompts hold; set where `disk_cache_gb`
            is.
        prefix_caching_eviction_policy: which state goes when a slot is needed. "value": the one whose loss is
            expected to cost the fewest recomputed tokens, which may be the new one; "lru": the one used
            longest ago. Both keep unreferenced KV blocks until their memory is needed. "ref_zero" drops a
            block and its state when the block's last user leaves.
        checkpoint_plan: which states are cached; a request may bring its own plan.
        num_cuda_graphs: maximum number of CUDA graphs of decode steps, and again of steps with prefills; None
            captures none. Without effect on a CPU, and with float64 weights, whose kernels synchronise.
        use_cuda_graphs_for_non_decode_steps: also capture steps with prefills.
        cuda_graph_max_tokens: maximum number of prefill tokens, padding included, of a captured step.
        num_speculative_tokens: maximum number of tokens that a decoding request drafts in one step; the same
            step verifies them. 0 drafts none. Each drafted token takes one more live state slot per request,
            unless decodes replay.
        async_scheduling: whether a decode step is launched before the tokens of the step before it are read,
            wherever nothing but its inputs depends on these tokens. The device then waits for no bookkeeping.
            When `step` returns, the next step may run already, and may read the weights. None: on a GPU,
            without drafts, which need the tokens first.
        batch_invariant: whether the tokens of a request, and the bits of its log-probs, depend on its own
            tokens, sampling parameters and seed alone: not on what was cached, what runs beside it, how its
            prompt is cut, CUDA graphs, drafts or preemption. For bfloat16 and float16 models on a GPU. An
            engine checks itself at its start, and refuses what it cannot promise. Takes `decode_by_replay`.
        decode_by_replay: whether a decode computes its token from the state at the last grid point and the
            inputs since, which the request keeps, and writes a state once in a chunk. Otherwise a decode
            updates the state at each token. A replay rounds as a prefill does, and drafts take no further
            states. None: with `batch_invariant`.
        max_overtaking_requests: how many later requests may be admitted while a request waits for memory, at
            most, before no further one passes.
        poison_free_memory: for debugging a model. Before every forward, memory that nobody may read is filled
            with NaN: state slots, KV blocks, and rows of KV blocks that no token is stored in yet. Rows of a
            block that is begun hold the largest finite number instead. A step whose logits are NaN raises
            RuntimeError. Costs a pass over the free memory per step; works with CUDA graphs.
        scrub: whether memory that somebody leaves is zeroed before anybody else has it: states, KV blocks,
            inputs of decodes by replay, rows of host memory, files of states and staging memory. A cached
            prefix is not left until it is evicted or forgotten. Costs a write of what is left.
        seed: seed of the random numbers of requests without a seed of their own, from 0 to 2**63 - 1. Two
            engines with the same seed and the same order of requests give the same answers.
        salt_key: the secret under which cache salts are hashed, at least 16 bytes. Replicas that exchange
            salted prefixes need one key. None reads the environment variable MAMBASLOTS_SALT_KEY, and draws a
            key at start where that is not set. Never shown.
    """

    block_size_tokens: int = 256
    max_requests: int = 32
    max_tokens: int = 2048
    max_sequence_length: int = 4096
    num_kv_blocks: int | None = None
    buffer_size_gb: float | None = None
    num_mamba_slots: int | None = None
    prefix_caching_mamba_gb: float | None = None
    total_gb: float | None = None
    durable_state_dtype: DurableDtype | None = None
    host_cache_gb: float = 0.0
    host_cache_min_tokens: int | None = None
    disk_cache_gb: float = 0.0
    disk_cache_path: str | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    prefix_caching_eviction_policy: str = "value"
    checkpoint_plan: CheckpointPlan = field(default_factory=CheckpointPlan)
    num_cuda_graphs: int | None = None
    use_cuda_graphs_for_non_decode_steps: bool = True
    cuda_graph_max_tokens: int = 512
    num_speculative_tokens: int = 0
    async_scheduling: bool | None = None
    batch_invariant: bool = False
    decode_by_replay: bool | None = None
    max_overtaking_requests: int = 64
    poison_free_memory: bool = False
    scrub: bool = False
    seed: int = 0
    salt_key: bytes | str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("block_size_tokens", "max_requests", "max_tokens", "max_sequence_length"):
            minimum = 2 if name == "max_sequence_length" else 1
            set_field(self, name, integer(name, getattr(self, name), minimum, INT32_MAX))
        boolean("enable_prefix_caching", self.enable_prefix_caching)
        boolean("enable_chunked_prefill", self.enable_chunked_prefill)
        one_of("prefix_caching_eviction_policy", self.prefix_caching_eviction_policy, EVICTION_POLICIES)
        if self.max_tokens < self.max_requests:
            raise ValueError(
                f"max_tokens is {self.max_tokens}; accepted: at least max_requests ({self.max_requests}), "
                "because every running request decodes one token a step"
            )
        if self.total_gb is None:
            self._check_budget("num_kv_blocks", "buffer_size_gb", required=True)
            self._check_state_budget()
        else:
            self._check_total()
        self._check_tiers()
        instance("checkpoint_plan", self.checkpoint_plan, CheckpointPlan)
        graphs = optional_integer("num_cuda_graphs", self.num_cuda_graphs, 1, INT32_MAX)
        set_field(self, "num_cuda_graphs", graphs)
        boolean("use_cuda_graphs_for_non_decode_steps", self.use_cuda_graphs_for_non_decode_steps)
        tokens = integer("cuda_graph_max_tokens", self.cuda_graph_max_tokens, 1, INT32_MAX)
        set_field(self, "cuda_graph_max_tokens", tokens)
        drafts = integer("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        set_field(self, "num_speculative_tokens", drafts)
        self._check_async_scheduling()
        self._check_replay()
        overtaking = integer("max_overtaking_requests", self.max_overtaking_requests, 1, INT32_MAX)
        set_field(self, "max_overtaking_requests", overtaking)
        boolean("poison_free_memory", self.poison_free_memory)
        if boolean("scrub", self.scrub) and self.poison_free_memory:
            raise ValueError(
                "scrub is True and poison_free_memory is True; accepted: one of the two, because free memory "
                "is either zeros or NaN"
            )
        set_field(self, "seed", integer("seed", self.seed, 0, INT64_MAX))
        if self.salt_key is not None:
            key_bytes("salt_key", self.salt_key)
        if self.enable_prefix_caching:
            self._check_that_hits_are_possible()

    def _check_tiers(self) -> None:
        for name in ("host_cache_gb", "disk_cache_gb"):
            set_field(self, name, real(name, getattr(self, name), 0.0))
        if self.host_cache_gb and not self.enable_prefix_caching:
            raise ValueError(
                f"host_cache_gb is {self.host_cache_gb}; accepted: 0.0 where enable_prefix_caching is False, "
                "because no state is cached"
            )
        if self.disk_cache_gb and not self.host_cache_gb:
            raise ValueError(
                f"disk_cache_gb is {self.disk_cache_gb}; accepted: 0.0 where host_cache_gb is 0.0, because "
                "states go to files and come back by way of host memory"
            )
        path = self.disk_cache_path
        if not isinstance(path, str | None) or bool(path) != bool(self.disk_cache_gb):
            raise ValueError(
                f"disk_cache_path is {shown(path)} and disk_cache_gb is {self.disk_cache_gb}; accepted: a "
                "directory's path where disk_cache_gb is above 0.0, else None"
            )
        tokens = optional_integer("host_cache_min_tokens", self.host_cache_min_tokens, 1, INT32_MAX)
        set_field(self, "host_cache_min_tokens", tokens)

    def _check_async_scheduling(self) -> None:
        if self.async_scheduling is None:
            return
        if not isinstance(self.async_scheduling, bool):
            raise ValueError(
                f"async_scheduling is {shown(self.async_scheduling)}; accepted: True, False or None"
            )
        if self.async_scheduling and self.num_speculative_tokens:
            raise ValueError(
                f"async_scheduling is True and num_speculative_tokens is {self.num_speculative_tokens}; "
                "accepted: one of the two"
            )

    def _check_replay(self) -> None:
        boolean("batch_invariant", self.batch_invariant)
        if self.decode_by_replay is not None:
            boolean("decode_by_replay", self.decode_by_replay)
        if self.batch_invariant and self.decode_by_replay is False:
            raise ValueError(
                "decode_by_replay is False and batch_invariant is True; accepted: True or None, because a "
                "state that decodes update rounds otherwise than that of a prefill"
            )

        if self.durable_state_dtype is None:
            return
        one_of("durable_state_dtype", self.durable_state_dtype, DURABLE_DTYPES)
        if self.replays:
            setting = "batch_invariant" if self.batch_invariant else "decode_by_replay"
            raise ValueError(
                f"durable_state_dtype is {self.durable_state_dtype!r} and {setting} is True; accepted: one "
                "of the two, because decodes by replay start from exact states"
            )

    @property
    def replays(self) -> bool:
        """Whether decodes replay the inputs since the last grid point; see `decode_by_replay`."""
        return self.batch_invariant if self.decode_by_replay is None else self.decode_by_replay

    def looks_ahead_on(self, device: torch.device) -> bool:
        """Whether an engine on `device` launches decode steps ahead; see `async_scheduling`."""
        return self.why_steps_wait(device) is None

    def why_steps_wait(self, device: torch.device) -> str | None:
        """What keeps an engine on `device` from launching decode steps ahead; None where nothing does."""
        if self.num_speculative_tokens:
            return "num_speculative_tokens"
        if self.async_scheduling is None:
            return None if device.type == "cuda" else "a CPU"
        return None if self.async_scheduling else "async_scheduling"

    def _check_total(self) -> None:
        set_field(self, "total_gb", real("total_gb", self.total_gb, 0.0))
        for name in ("num_kv_blocks", "buffer_size_gb", "num_mamba_slots", "prefix_caching_mamba_gb"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"total_gb is {self.total_gb} and {name} is {shown(getattr(self, name))}; accepted: "
                    "total_gb alone, or a size for each pool"
                )

    def _check_state_budget(self) -> None:
        caching = self.enable_prefix_caching
        try:
            self._check_budget("num_mamba_slots", "prefix_caching_mamba_gb", caching, minimum=int(caching))
        except ValueError as error:
            slots = self.num_mamba_slots
            if caching and (slots is None or (isinstance(slots, int) and slots == 0)):
                raise ValueError(f"{error}; to serve without state slots, set {NO_CACHE}") from None
            raise

    def _check_budget(self, count_name: str, gb_name: str, required: bool, minimum: int = 1) -> None:
        count = optional_integer(count_name, getattr(self, count_name), minimum, INT32_MAX)
        set_field(self, count_name, count)
        gb = getattr(self, gb_name)
        if gb is not None:
            set_field(self, gb_name, real(gb_name, gb, 0.0))
        if count is not None and gb is not None:
            raise ValueError(f"{count_name} is {count} and {gb_name} is {gb}; accepted: one of the two")
        if required and count is None and gb is None:
            raise ValueError(f"{count_name} is None and {gb_name} is None; accepted: one of the two set")

    def _check_that_hits_are_possible(self) -> None:
        if self.block_size_tokens >= self.max_sequence_length:
            raise ValueError(
                f"block_size_tokens is {self.block_size_tokens}; accepted: less than max_sequence_length "
                f"({self.max_sequence_length}), or no prompt ever holds a whole block to share"
            )
        if self.max_tokens < self.block_size_tokens:
            raise ValueError(
                f"max_tokens is {self.max_tokens}; accepted: at least block_size_tokens "
                f"({self.block_size_tokens})"
            )
        self.checkpoint_plan.check_useful()
        self.checkpoint_plan.check_block_size(self.block_size_tokens)
