"""Settings of a context, of a request's sampling, and what a context must know of a model."""

import math
from dataclasses import dataclass, field

import torch

from .inference.policies.checkpoint_plan import CheckpointPlan
from .model_shard import ModelShard
from .parallel_groups import ParallelGroups
from .validation import (
    INT32_MAX,
    boolean,
    device,
    float_dtype,
    instance,
    integer,
    integers,
    one_of,
    optional_integer,
    real,
)

GIGABYTE = 1 << 30
EVICTION_POLICIES = ("lru", "ref_zero")
_UNLIMITED = INT32_MAX + 2  # units that a budget buys where they cost nothing: the other stages decide
MAX_SPECULATIVE_TOKENS = 63  # kernels are compiled for a number of tokens a row, and unroll over them


@dataclass(frozen=True)
class HybridStateSpec:
    """What one sequence costs a hybrid model in cache: the shapes the context allocates by.

    Attributes:
        num_mamba_layers: layers with a recurrent state.
        conv_states_shape, ssm_states_shape: of one layer's state of one sequence.
        conv_states_dtype, ssm_states_dtype: of the stored states.
        num_attention_layers, num_kv_heads, head_dim: the KV of one token is
            `num_attention_layers x 2 x num_kv_heads x head_dim` numbers of `kv_dtype`.
        ssd_chunk_size: tokens of one SSD chunk; states inside a prefill exist at its multiples only.
        vocab_size: token ids are 0 .. vocab_size - 1.
        device: where states, KV and the step's index tensors live.
        separate_states: whether the model's kernels read a state at one pool index and write it at others.
            Where they update it in place, it is copied to where they do, and boundary states from there.
        shard: of a model that is split over ranks, the part that all of the above is about; needed to move
            states between processes. None: not said.
        groups: the ranks that hold the other parts, and take the same decisions.
        model: names the whole model, shape and weights; debug mode compares it between ranks.
    """

    num_mamba_layers: int
    conv_states_shape: tuple[int, ...]
    ssm_states_shape: tuple[int, ...]
    conv_states_dtype: torch.dtype
    ssm_states_dtype: torch.dtype
    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    ssd_chunk_size: int
    vocab_size: int
    device: torch.device
    separate_states: bool = True
    shard: ModelShard | None = None
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    model: str = ""

    def __post_init__(self) -> None:
        for name in ("num_mamba_layers", "num_attention_layers"):
            _keep(self, name, integer(name, getattr(self, name), 0, INT32_MAX))
        for name in ("num_kv_heads", "head_dim", "ssd_chunk_size", "vocab_size"):
            _keep(self, name, integer(name, getattr(self, name), 1, INT32_MAX))
        for name in ("conv_states_dtype", "ssm_states_dtype", "kv_dtype"):
            float_dtype(name, getattr(self, name))
        for name in ("conv_states_shape", "ssm_states_shape"):
            _keep(self, name, tuple(integers(name, getattr(self, name), 1, INT32_MAX)))
        _keep(self, "device", device("device", self.device))
        boolean("separate_states", self.separate_states)
        if self.shard is not None:
            instance("shard", self.shard, ModelShard)
        instance("groups", self.groups, ParallelGroups)
        instance("model", self.model, str)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state, all layers."""
        conv = math.prod(self.conv_states_shape) * self.conv_states_dtype.itemsize
        ssm = math.prod(self.ssm_states_shape) * self.ssm_states_dtype.itemsize
        return self.num_mamba_layers * (conv + ssm)

    def kv_block_bytes(self, block_size_tokens: int) -> int:
        """Bytes of one KV block of `block_size_tokens` tokens, all layers."""
        numbers = self.num_attention_layers * 2 * self.num_kv_heads * self.head_dim
        return numbers * integer("block_size_tokens", block_size_tokens, 1) * self.kv_dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Sizes and switches of a `DynamicInferenceContext`. Lengths are tokens.

    Attributes:
        block_size_tokens: tokens of one KV block; with prefix caching a multiple of the SSD chunk.
        max_requests: requests that run at once (rows, and live state slots).
        max_tokens: tokens computed in one step; at least `max_requests` and one block.
        max_sequence_length: longest prompt plus answer.
        num_kv_blocks or buffer_size_gb: the KV pool, as a count or in GB (2**30 bytes), never both.
        num_mamba_slots or prefix_caching_mamba_gb: the durable state pool, likewise. Needed with prefix
            caching.
        enable_prefix_caching: match prompts with what was computed before, and keep what is computed.
        enable_chunked_prefill: spread a prompt over several steps; without it a prompt must fit one.
        prefix_caching_eviction_policy: "lru" keeps unreferenced blocks until their memory is needed;
            "ref_zero" drops a block, and its state, with its last user.
        checkpoint_plan: which states are taken; a request may bring its own.
        num_cuda_graphs: most CUDA graphs to capture of decode steps, and most of steps with prefills; None
            captures none. Without effect on a CPU, and with float64 weights, whose kernels synchronise.
        use_cuda_graphs_for_non_decode_steps: also capture steps with prefills.
        cuda_graph_max_tokens: most prefill tokens, padding included, of a step that is captured.
        num_speculative_tokens: most tokens that a decoding request drafts ahead in one step, to be verified
            in it; 0 drafts none. Each takes one more live state a request.
    """

    block_size_tokens: int = 256
    max_requests: int = 32
    max_tokens: int = 2048
    max_sequence_length: int = 4096
    num_kv_blocks: int | None = None
    buffer_size_gb: float | None = None
    num_mamba_slots: int | None = None
    prefix_caching_mamba_gb: float | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    prefix_caching_eviction_policy: str = "lru"
    checkpoint_plan: CheckpointPlan = field(default_factory=CheckpointPlan)
    num_cuda_graphs: int | None = None
    use_cuda_graphs_for_non_decode_steps: bool = True
    cuda_graph_max_tokens: int = 512
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size_tokens", "max_requests", "max_tokens", "max_sequence_length"):
            minimum = 2 if name == "max_sequence_length" else 1
            _keep(self, name, integer(name, getattr(self, name), minimum, INT32_MAX))
        boolean("enable_prefix_caching", self.enable_prefix_caching)
        boolean("enable_chunked_prefill", self.enable_chunked_prefill)
        one_of("prefix_caching_eviction_policy", self.prefix_caching_eviction_policy, EVICTION_POLICIES)
        if self.max_tokens < self.max_requests:
            raise ValueError(
                f"max_tokens is {self.max_tokens}; accepted: at least max_requests ({self.max_requests}), "
                "because every running request decodes one token a step"
            )
        self._check_budget("num_kv_blocks", "buffer_size_gb", required=True)
        self._check_budget("num_mamba_slots", "prefix_caching_mamba_gb", self.enable_prefix_caching)
        instance("checkpoint_plan", self.checkpoint_plan, CheckpointPlan)
        graphs = optional_integer("num_cuda_graphs", self.num_cuda_graphs, 1, INT32_MAX)
        _keep(self, "num_cuda_graphs", graphs)
        boolean("use_cuda_graphs_for_non_decode_steps", self.use_cuda_graphs_for_non_decode_steps)
        tokens = integer("cuda_graph_max_tokens", self.cuda_graph_max_tokens, 1, INT32_MAX)
        _keep(self, "cuda_graph_max_tokens", tokens)
        drafts = integer("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        _keep(self, "num_speculative_tokens", drafts)
        if self.enable_prefix_caching:
            self._check_that_hits_are_possible()

    def _check_budget(self, count_name: str, gb_name: str, required: bool) -> None:
        count = optional_integer(count_name, getattr(self, count_name), 0, INT32_MAX)
        _keep(self, count_name, count)
        gb = getattr(self, gb_name)
        if gb is not None:
            _keep(self, gb_name, real(gb_name, gb, 0.0))
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

    def kv_block_count(self, spec: HybridStateSpec) -> int:
        """KV blocks the budget buys on this rank of the model; a ValueError where it buys none."""
        budget = self._kv_budget(spec)
        return budget.checked(budget.affordable)

    def mamba_slot_count(self, spec: HybridStateSpec) -> int:
        """Durable slots it buys here, 0 without prefix caching; a ValueError where it buys none."""
        budget = self._slot_budget(spec)
        return budget.checked(budget.affordable) if self.enable_prefix_caching else 0

    def pool_counts(self, spec: HybridStateSpec) -> tuple[int, int]:
        """KV blocks and durable slots that all ranks of the model can afford; all of them make this call.

        The same ValueError on all ranks where one of them buys none.
        """
        kv, slots = self._kv_budget(spec), self._slot_budget(spec)
        told = spec.groups.gather((kv.affordable, slots.affordable, self.enable_prefix_caching), spec.device)
        if len({caching for *_, caching in told}) > 1:
            raise ValueError(
                f"enable_prefix_caching is {[caching for *_, caching in told]} on the ranks of the model; "
                "accepted: the same on all"
            )
        num_blocks = kv.checked(min(blocks for blocks, *_ in told))
        return num_blocks, slots.checked(min(each[1] for each in told)) if self.enable_prefix_caching else 0

    def _kv_budget(self, spec: HybridStateSpec) -> "_Budget":
        instance("spec", spec, HybridStateSpec)
        unit_bytes = spec.kv_block_bytes(self.block_size_tokens)
        return _Budget("num_kv_blocks", self.num_kv_blocks, "buffer_size_gb", self.buffer_size_gb, unit_bytes)

    def _slot_budget(self, spec: HybridStateSpec) -> "_Budget":
        instance("spec", spec, HybridStateSpec)
        return _Budget(
            "num_mamba_slots", self.num_mamba_slots,
            "prefix_caching_mamba_gb", self.prefix_caching_mamba_gb, spec.state_bytes,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. Without temperature, top_k and top_p decoding is greedy.

    Attributes:
        num_tokens_to_generate: most tokens to generate, >= 1.
        temperature: divides the logits; 0 or None is greedy (None with top_k or top_p means 1).
        top_k: keep the k most likely tokens; None or 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p; None keeps all.
        seed: of this request's random numbers. Token i depends on the seed, i and the distribution only,
            not on the batch, on pauses or on restarts.
        termination_id: token that ends the answer (and is its last token); None or -1 for none.
        stop_token_ids: more of the same.
        return_log_probs: one log-prob a generated token, of the model's own distribution (before
            temperature, top_k and top_p).
        skip_prompt_log_probs: False also returns the log-probs of prompt tokens 1 .. N-1; every prompt
            token is then computed, so the request resumes from no cached state.
    """

    num_tokens_to_generate: int = 16
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    termination_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = True

    def __post_init__(self) -> None:
        length = integer("num_tokens_to_generate", self.num_tokens_to_generate, 1, INT32_MAX)
        _keep(self, "num_tokens_to_generate", length)
        if self.temperature is not None:
            _keep(self, "temperature", real("temperature", self.temperature, 0.0))
        _keep(self, "top_k", optional_integer("top_k", self.top_k, 0))
        if self.top_p is not None:
            _keep(self, "top_p", real("top_p", self.top_p, 0.0, 1.0))
            if self.top_p == 0.0:
                raise ValueError(f"top_p is {self.top_p!r}; accepted: greater than 0, at most 1")
        _keep(self, "seed", integer("seed", self.seed, 0, (1 << 63) - 1))
        _keep(self, "termination_id", optional_integer("termination_id", self.termination_id, -1))
        _keep(self, "stop_token_ids", tuple(integers("stop_token_ids", self.stop_token_ids, 0)))
        boolean("return_log_probs", self.return_log_probs)
        boolean("skip_prompt_log_probs", self.skip_prompt_log_probs)

    @property
    def greedy(self) -> bool:
        if self.temperature is None:
            return not self.top_k and self.top_p is None
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def stops(self) -> tuple[int | None, ...]:
        """The tokens that end the answer."""
        return self.termination_id, *self.stop_token_ids

    @property
    def returns_prompt_log_probs(self) -> bool:
        return not self.skip_prompt_log_probs


def _keep(settings: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass: numpy integers become ints, which neither wrap around nor raise."""
    object.__setattr__(settings, name, value)


@dataclass(frozen=True)
class _Budget:
    """Of units of `unit_bytes` on this rank, as a count or in GB."""

    count_name: str
    count: int | None
    gb_name: str
    gb: float | None
    unit_bytes: int

    @property
    def affordable(self) -> int:
        """At most one more than is accepted, or _UNLIMITED."""
        if self.gb is None:
            return self.count or 0
        if self.unit_bytes == 0:
            return _UNLIMITED
        return int(min(self.gb * GIGABYTE, (INT32_MAX + 1) * self.unit_bytes)) // self.unit_bytes

    def checked(self, count: int) -> int:
        """`count`, what the poorest rank can afford; or a ValueError."""
        if self.gb is None:
            if count < 1:
                raise ValueError(
                    f"{self.count_name} is {self.count}; accepted: an integer >= 1, on every rank, or "
                    f"{self.gb_name} (without state slots, set enable_prefix_caching=False)"
                )
            return count
        if count == _UNLIMITED:
            accepted = f"{self.count_name} instead, for a model whose units are empty"
        elif count > INT32_MAX:
            accepted = f"what buys at most {INT32_MAX} units"
        elif count < 1 and self.affordable < 1:
            accepted = f"at least {self.unit_bytes / GIGABYTE:.3g}, one unit"
        elif count < 1:
            accepted = "what buys one unit on every rank of the model"
        else:
            return count
        raise ValueError(f"{self.gb_name} is {self.gb}; accepted: {accepted}")
