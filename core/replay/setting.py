"""What a replay serves a trace with: a model's sizes, memory and limits; and its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import CONFIG, check_served
from ..validation import refused

if TYPE_CHECKING:
    from ..state_spec import HybridStateSpec

STATE_DTYPES = ("float32", "bfloat16", "int8")
"""How cached states may be stored. Live states are as the model has them."""


@dataclass(frozen=True)
class ModelShape:
    """What a model costs in the cache and, by the last five numbers, to compute."""

    name: str
    state_bytes: int  # of one live state
    durable_state_bytes: int  # of one cached state; fewer where cached states are encoded
    kv_bytes_per_token: int  # of all attention layers
    grid_tokens: int  # a KV block is a multiple of this
    hidden_size: int
    num_recurrent_layers: int
    num_attention_layers: int
    num_mlp_layers: int
    state_size: int

    @property
    def encodes(self) -> bool:
        """Whether cached states are encoded, so that they cannot lie in live slots."""
        return self.durable_state_bytes != self.state_bytes

    def prefill_flops(self, num_tokens: int) -> int:
        """Floating-point operations of a prefill from the start (Marconi, arXiv 2411.19379)."""
        tokens, hidden, state = num_tokens, self.hidden_size, self.state_size
        recurrent = 12 * tokens * hidden**2 + 16 * tokens * hidden * state + 10 * tokens * hidden
        attention = 8 * tokens * hidden**2 + 4 * tokens**2 * hidden
        return (
            self.num_recurrent_layers * recurrent
            + self.num_attention_layers * attention
            + self.num_mlp_layers * 16 * tokens * hidden**2
        )


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
    """Memory and limits of one replay.

    Attributes:
        shape: of the model.
        state_gb, kv_gb: memory for cached states and for KV (2**30 bytes), where they are given apart.
        total_gb: memory for live states, cached states and KV; then the other two are None.
        max_requests: requests that run at once; 1 replays one after another.
        max_tokens_per_step: tokens of one step.
        block_size_tokens: of a KV block.
        cost: how long a step takes.
        host_gb: memory of the host tier; 0 for none.
    """

    shape: ModelShape
    state_gb: float | None = None
    kv_gb: float | None = None
    total_gb: float | None = None
    max_requests: int = 32
    max_tokens_per_step: int = 2048
    block_size_tokens: int = 256
    cost: StepCost = field(default_factory=StepCost)
    host_gb: float = 0.0


@dataclass(frozen=True)
class ReplayResult:
    """What a cache resumed of a trace; each token of a prompt counts once."""

    num_requests: int
    prompt_tokens: int
    resumed_tokens: int
    lost_by_reason: Mapping[str, int] = field(default_factory=dict)  # computed prompt tokens
    num_states_taken: int = 0
    state_capacity: int = 0  # cached states that fit
    resumed_lengths: tuple[int, ...] = field(default=(), repr=False)  # of each request

    @property
    def share(self) -> float:
        """Resumed tokens / prompt tokens."""
        return self.resumed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


MODELS = ("nemotron-h-8b", "qwen3.5-35b")  # Nemotron-H-8B and Qwen3.5-35B-A3B, which need no config


def model_shape(model: str, state_dtype: str | None = None) -> ModelShape:
    """The shape of a model.

    Args:
        model: one of `MODELS`, or the path of a config.json or of its folder, read with transformers.
        state_dtype: one of `STATE_DTYPES`, for cached states; None stores them as live states are.

    Raises:
        ValueError: the model, or its architecture, or the dtype is not known.
        ImportError: a config is given, and transformers is not installed.
    """
    if state_dtype is not None and state_dtype not in STATE_DTYPES:
        raise refused("state_dtype", state_dtype, ", ".join(STATE_DTYPES))
    if model in MODELS:
        return shape_of(model, *_known_model(model), state_dtype)
    path = Path(model)
    if not path.exists():
        raise refused("model", model, f"{', '.join(MODELS)}, or the path of a config.json that is there")
    check_served(path / CONFIG if path.is_dir() else path)
    import torch

    from ..hf import architectures

    config = architectures.read_config(path)
    text: Any = architectures.text_config(config)
    spec = architectures.state_spec(text, text.dtype or config.dtype or torch.bfloat16)
    named = [name in ("mlp", "moe") for name in text.layer_types]
    num_mlp_layers = sum(named) if any(named) or text.model_type == "mamba2" else len(named)
    return shape_of(name_of(path), spec, text.hidden_size, num_mlp_layers, state_dtype)


def _known_model(model: str) -> "tuple[HybridStateSpec, int, int]":
    """Of one of `MODELS`: spec, hidden size and number of MLP layers."""
    import torch

    from ..state_spec import HybridStateSpec, gated_delta_net_states, mamba2_states

    bf16, vocab_size, device = torch.bfloat16, 1 << 17, torch.device("cpu")
    if model == "nemotron-h-8b":
        states = mamba2_states(
            layers=24, heads=128, head_dim=64, groups=8, state_dim=128, conv_kernel=4,
            conv_dtype=bf16, ssm_dtype=torch.float32, grid=128,
        )  # fmt: skip
        return HybridStateSpec(states, 4, 8, 128, bf16, vocab_size, device), 4096, 24
    states = gated_delta_net_states(
        layers=30, key_heads=16, key_dim=128, value_heads=32, value_dim=128, conv_kernel=4,
        conv_dtype=bf16, state_dtype=torch.float32,
    )  # fmt: skip
    return HybridStateSpec(states, 10, 2, 256, bf16, vocab_size, device), 2048, 40


def name_of(path: Path) -> str:
    """What a table calls the model of a config: its folder, or the file without its ending."""
    file = path.resolve()
    return file.parent.name if file.name == "config.json" else file.name.removesuffix(".json")


def shape_of(
    name: str, spec: "HybridStateSpec", hidden_size: int, num_mlp_layers: int, state_dtype: str | None = None
) -> ModelShape:
    """The shape of a model with this spec; `state_dtype` as for `model_shape`."""
    widths = {"ssm": 2, "delta": 1}  # where the shape of a recurrent tensor has its state size
    sizes = [tensor.shape[widths[tensor.name]] for tensor in spec.states if tensor.name in widths]
    return ModelShape(
        name=name if state_dtype is None else f"{name}, cached states in {state_dtype}",
        state_bytes=spec.slot_bytes,
        durable_state_bytes=spec.durable_slot_bytes(None if state_dtype == "float32" else state_dtype),
        kv_bytes_per_token=spec.kv_block_bytes(1),
        grid_tokens=spec.grid,
        hidden_size=hidden_size,
        num_recurrent_layers=max((tensor.num_layers for tensor in spec.states), default=0),
        num_attention_layers=spec.num_attention_layers,
        num_mlp_layers=num_mlp_layers,
        state_size=max(sizes, default=0),
    )
