"""Sizes and switches of a context."""

from dataclasses import dataclass, field

from .inference.policies.checkpoint_plan import CheckpointPlan
from .inference.policies.slot_eviction import EVICTION_POLICIES
from .validation import INT32_MAX, boolean, instance, integer, one_of, optional_integer, real, set_field

NO_CACHE = "enable_prefix_caching=False"
MAX_SPECULATIVE_TOKENS = 63  # kernels are compiled for a number of tokens a row, and unroll over them


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
            set_field(self, name, integer(name, getattr(self, name), minimum, INT32_MAX))
        boolean("enable_prefix_caching", self.enable_prefix_caching)
        boolean("enable_chunked_prefill", self.enable_chunked_prefill)
        one_of("prefix_caching_eviction_policy", self.prefix_caching_eviction_policy, EVICTION_POLICIES)
        if self.max_tokens < self.max_requests:
            raise ValueError(
                f"max_tokens is {self.max_tokens}; accepted: at least max_requests ({self.max_requests}), "
                "because every running request decodes one token a step"
            )
        self._check_budget("num_kv_blocks", "buffer_size_gb", required=True)
        self._check_state_budget()
        instance("checkpoint_plan", self.checkpoint_plan, CheckpointPlan)
        graphs = optional_integer("num_cuda_graphs", self.num_cuda_graphs, 1, INT32_MAX)
        set_field(self, "num_cuda_graphs", graphs)
        boolean("use_cuda_graphs_for_non_decode_steps", self.use_cuda_graphs_for_non_decode_steps)
        tokens = integer("cuda_graph_max_tokens", self.cuda_graph_max_tokens, 1, INT32_MAX)
        set_field(self, "cuda_graph_max_tokens", tokens)
        drafts = integer("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        set_field(self, "num_speculative_tokens", drafts)
        if self.enable_prefix_caching:
            self._check_that_hits_are_possible()

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
