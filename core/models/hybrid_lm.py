"""A small real language model of Mamba-2 mixers, attention and MLPs."""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HybridStateSpec
from ..inference.contexts.step_inputs import StepInputs
from ..inference.kernels.kernel_set import kernel_set
from ..inference.kernels.reference import compute_dtype
from ..validation import INT32_MAX, float_dtype, instance, integer, real, shown
from ..validation import device as checked_device


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Shape of a `HybridLM`.

    Attributes:
        pattern: one letter a layer: "M" a Mamba-2 mixer, "*" attention, "-" an MLP.
        mamba_num_heads, mamba_head_dim, mamba_state_dim: H, P and N of the SSM state [H, P, N].
        mamba_num_groups: groups of heads that share B and C, and that the gated norm normalises alone.
        conv_kernel: taps of the causal convolution, >= 2.
        ssd_chunk_size: tokens of one SSD chunk.
        num_attention_heads, num_kv_heads, head_dim: query heads, the key/value heads they share, even size.
        dtype: of weights, convolution states and KV. Everything that DESIGN calls "no operation narrows" is
            computed, and SSM states are stored, in float32 or wider.
    """

    vocab_size: int
    hidden_size: int
    pattern: str
    mamba_num_heads: int
    mamba_head_dim: int
    mamba_num_groups: int
    mamba_state_dim: int
    conv_kernel: int
    ssd_chunk_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_hidden_size: int
    rotary_base: float = 10000.0
    norm_eps: float = 1e-5
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "mamba_num_heads", "mamba_head_dim", "mamba_num_groups",
            "mamba_state_dim", "ssd_chunk_size", "num_attention_heads", "num_kv_heads", "head_dim",
            "mlp_hidden_size", "conv_kernel",
        ):  # fmt: skip
            minimum = 2 if name == "conv_kernel" else 1
            object.__setattr__(self, name, integer(name, getattr(self, name), minimum, INT32_MAX))
        for name, least in (("rotary_base", 1.0), ("norm_eps", 0.0)):
            object.__setattr__(self, name, real(name, getattr(self, name), least))
        float_dtype("dtype", self.dtype)
        if not isinstance(self.pattern, str) or not self.pattern or set(self.pattern) - set("M*-"):
            raise ValueError(f"pattern is {shown(self.pattern)}; accepted: one or more of 'M', '*' and '-'")
        for name, divisor in (
            ("mamba_num_heads", "mamba_num_groups"),
            ("num_attention_heads", "num_kv_heads"),
        ):
            if getattr(self, name) % getattr(self, divisor):
                raise ValueError(
                    f"{name} is {getattr(self, name)}; accepted: a multiple of {divisor} "
                    f"({getattr(self, divisor)})"
                )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; accepted: an even integer, for rotary pairs")

    @classmethod
    def tiny(cls, dtype: torch.dtype = torch.float32, **overrides: Any) -> "HybridConfig":
        """Vocabulary 256 (bytes), SSD chunk 16, three Mamba layers, one attention layer; fast on a CPU."""
        sizes: dict[str, Any] = {
            "vocab_size": 256,
            "hidden_size": 64,
            "pattern": "M-M*-M-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "mamba_num_groups": 2,
            "mamba_state_dim": 16,
            "conv_kernel": 4,
            "ssd_chunk_size": 16,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "mlp_hidden_size": 128,
        }
        return cls(dtype=dtype, **(sizes | overrides))

    @property
    def inner_dim(self) -> int:
        """Channels of a Mamba mixer, H x P."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_dim + 2 * self.mamba_num_groups * self.mamba_state_dim

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.dtype)


class HybridLM(nn.Module):
    """Token embedding, pre-norm residual layers as `config.pattern` says, a norm and an untied LM head.

    The weights are random. They depend on `seed` alone (drawn in float64, then rounded to `config.dtype`),
    and are made so that the caches matter: the slowest Mamba heads remember hundreds of tokens, the fastest
    tens, and logits have a standard deviation of a few units. Nothing here needs a gradient. `device`: where
    they are drawn; a GPU draws large models faster, and other weights than a CPU.
    """

    def __init__(self, config: HybridConfig, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = instance("config", config, HybridConfig)
        seed = integer("seed", seed, 0, (1 << 63) - 1)
        draw = _Weights(config, seed, checked_device("device", device))
        self.embedding = draw.normal(config.vocab_size, config.hidden_size, std=1.0)
        layers: list[nn.Module] = []
        for index, kind in enumerate(config.pattern):
            layer_index = config.pattern[:index].count(kind)
            if kind == "M":
                layers.append(MambaMixer(config, layer_index, draw))
            elif kind == "*":
                layers.append(Attention(config, layer_index, draw))
            else:
                layers.append(MLP(config, draw))
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ParameterList([draw.ones(config.hidden_size) for _ in layers])
        self.final_norm = draw.ones(config.hidden_size)
        self.lm_head = draw.linear(config.vocab_size, config.hidden_size, gain=3.0)
        self.eval()

    def state_spec(self) -> HybridStateSpec:
        """What the context allocates for this model, on the device its weights are on."""
        config = self.config
        return HybridStateSpec(
            num_mamba_layers=config.pattern.count("M"),
            conv_states_shape=(config.conv_dim, config.conv_kernel - 1),
            ssm_states_shape=(config.mamba_num_heads, config.mamba_head_dim, config.mamba_state_dim),
            conv_states_dtype=config.dtype,
            ssm_states_dtype=config.compute_dtype,
            num_attention_layers=config.pattern.count("*"),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_dtype=config.dtype,
            ssd_chunk_size=config.ssd_chunk_size,
            vocab_size=config.vocab_size,
            device=self.embedding.device,
            separate_states=kernel_set(self.embedding.device, config.dtype).SEPARATE_STATES,
        )

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits of `inputs.logit_tokens`, [L, vocab_size] in float32 or wider.

        Writes the step's keys and values into `inputs.kv_cache` and its states into `inputs.state_pool`.
        """
        config = self.config
        kernels = kernel_set(self.embedding.device, config.dtype)
        hidden = self.embedding[inputs.token_ids].to(config.compute_dtype)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            normed = kernels.rms_norm(hidden, norm, config.norm_eps).to(config.dtype)
            out: Tensor = layer(normed, inputs, kernels)
            hidden = hidden + out
        hidden = kernels.rms_norm(hidden[inputs.logit_tokens], self.final_norm, config.norm_eps)
        return F.linear(hidden, self.lm_head.to(hidden.dtype))


class MambaMixer(nn.Module):
    """Mamba-2's block (arXiv 2405.21060, section 7.1), with biased convolution and a norm in groups."""

    def __init__(self, config: HybridConfig, layer_index: int, draw: "_Weights") -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        heads, conv_dim, kernel = config.mamba_num_heads, config.conv_dim, config.conv_kernel
        # Memory is in tokens; dt falls with its square root, so that all heads' states are of one size.
        memory = torch.logspace(math.log10(8.0), math.log10(512.0), heads, dtype=torch.float64)
        dt = 1.5 * memory.rsqrt()
        self.in_proj = draw.linear(config.inner_dim + conv_dim + heads, config.hidden_size)
        self.conv_weight = draw.normal(conv_dim, kernel, std=kernel**-0.5)
        # About where SiLU of a standard normal has mean zero: slow heads would sum up any other mean.
        self.conv_bias = draw.constant(torch.full((conv_dim,), -0.5, dtype=torch.float64))
        self.dt_bias = draw.constant(dt.expm1().log(), wide=True)
        self.A_log = draw.constant(-(memory * dt).log(), wide=True)
        self.D = draw.constant(torch.full((heads,), 0.5, dtype=torch.float64), wide=True)
        self.norm = draw.ones(config.inner_dim)
        self.out_proj = draw.linear(config.hidden_size, config.inner_dim)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: ModuleType) -> Tensor:
        config, decodes, decoded = self.config, inputs.num_decodes, inputs.num_decode_tokens
        conv_states = inputs.state_pool.conv_states[self.layer_index]
        ssm_states = inputs.state_pool.ssm_states[self.layer_index]
        gate, raw, dt = torch.split(
            F.linear(hidden, self.in_proj),
            [config.inner_dim, config.conv_dim, config.mamba_num_heads],
            dim=-1,
        )
        dt = torch.logaddexp(dt + self.dt_bias, self.dt_bias.new_zeros(()))  # softplus without a threshold
        A = -self.A_log.exp()
        outputs = []
        if decodes:
            sources, destinations = inputs.state_sources[:decodes], inputs.decode_destinations
            raw_by_row, dt_by_row = (
                torch.unflatten(packed[:decoded], 0, destinations.shape) for packed in (raw, dt)
            )
            xBC = kernels.causal_conv1d_update(
                raw_by_row, self.conv_weight, self.conv_bias, conv_states, sources, destinations
            )
            y = kernels.selective_state_update(
                self._x(xBC), dt_by_row, A, *self._BC(xBC), self.D, ssm_states, sources, destinations
            )
            outputs.append(y.flatten(0, 1))
        if inputs.num_prefills:
            sources, destinations = inputs.state_sources[decodes:], inputs.prefill_destinations
            chunks, checkpoints = inputs.chunks, inputs.checkpoints
            xBC = kernels.causal_conv1d_prefill(
                raw[decoded:], self.conv_weight, self.conv_bias, conv_states, sources, destinations,
                chunks.query_start_loc, chunks.token_rows,
                checkpoints.rows, checkpoints.token_ends, checkpoints.destinations,
            )  # fmt: skip
            outputs.append(
                kernels.ssd_chunk_scan(
                    self._x(xBC), dt[decoded:], A, *self._BC(xBC), self.D,
                    ssm_states, sources, destinations, config.ssd_chunk_size,
                    chunks.cu_chunk_seqlens, chunks.seq_idx, chunks.row_chunk_starts, chunks.destinations,
                )
            )  # fmt: skip
        y = torch.cat(outputs).flatten(1)
        normed = kernels.gated_rms_norm(y, gate, self.norm, config.mamba_num_groups, config.norm_eps)
        return F.linear(normed.to(config.dtype), self.out_proj)

    def _x(self, xBC: Tensor) -> Tensor:
        """[..., conv_dim] -> x [..., H, P], a view."""
        return torch.unflatten(xBC[..., : self.config.inner_dim], -1, (self.config.mamba_num_heads, -1))

    def _BC(self, xBC: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N802
        """[..., conv_dim] -> B and C [..., G, N], views."""
        both = torch.unflatten(xBC[..., self.config.inner_dim :], -1, (2, self.config.mamba_num_groups, -1))
        return both[..., 0, :, :], both[..., 1, :, :]


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over the paged KV cache."""

    def __init__(self, config: HybridConfig, layer_index: int, draw: "_Weights") -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        query_dim = config.num_attention_heads * config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        # Sharp scores, or random keys would average the context away.
        self.q_proj = draw.linear(query_dim, config.hidden_size, gain=3.0)
        self.k_proj = draw.linear(kv_dim, config.hidden_size)
        self.v_proj = draw.linear(kv_dim, config.hidden_size)
        self.o_proj = draw.linear(config.hidden_size, query_dim)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: ModuleType) -> Tensor:
        config, decodes, decoded = self.config, inputs.num_decodes, inputs.num_decode_tokens
        kv_cache = inputs.kv_cache[self.layer_index]
        query, key, value = (
            torch.unflatten(F.linear(hidden, weight), 1, (-1, config.head_dim))
            for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = kernels.apply_rotary(query, inputs.positions, config.rotary_base)
        key = kernels.apply_rotary(key, inputs.positions, config.rotary_base)
        kernels.write_kv(kv_cache, key, value, inputs.kv_write_tokens, inputs.kv_write_positions)
        outputs = []
        if decodes:
            table, lengths = inputs.block_table[:decodes], inputs.kv_lengths[:decodes]
            if decoded == decodes:
                attended = kernels.paged_attention_decode(query[:decodes], kv_cache, table, lengths)
            else:
                by_row = decodes, inputs.shape.decode_tokens
                tokens = torch.unflatten(query[:decoded], 0, by_row)
                positions = inputs.positions[:decoded].view(by_row)
                attended = kernels.paged_attention_verify(tokens, kv_cache, table, lengths, positions)
                attended = attended.flatten(0, 1)
            outputs.append(attended)
        if inputs.num_prefills:
            outputs.append(
                kernels.paged_attention_prefill(
                    query[decoded:], kv_cache, inputs.block_table[decodes:],
                    inputs.chunks.query_start_loc, inputs.kv_lengths[decodes:], inputs.shape.max_query_tokens,
                )
            )  # fmt: skip
        return F.linear(torch.cat(outputs).flatten(1).to(config.dtype), self.o_proj)


class MLP(nn.Module):
    """Two projections around a squared ReLU (arXiv 2109.08668)."""

    def __init__(self, config: HybridConfig, draw: "_Weights") -> None:
        super().__init__()
        self.up_proj = draw.linear(config.mlp_hidden_size, config.hidden_size)
        self.down_proj = draw.linear(config.hidden_size, config.mlp_hidden_size)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: ModuleType) -> Tensor:
        return F.linear(F.relu(F.linear(hidden, self.up_proj)).square(), self.down_proj)


class _Weights:
    """Draws a model's parameters, in order, from one generator; the global one stays as it is."""

    def __init__(self, config: HybridConfig, seed: int, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def constant(self, values: Tensor, wide: bool = False) -> nn.Parameter:
        dtype = self._config.compute_dtype if wide else self._config.dtype
        return nn.Parameter(values.to(self._device, dtype), requires_grad=False)

    def ones(self, size: int) -> nn.Parameter:
        return self.constant(torch.ones(size, dtype=torch.float64))

    def normal(self, *shape: int, std: float) -> nn.Parameter:
        drawn = torch.randn(*shape, generator=self._generator, dtype=torch.float64, device=self._device)
        return self.constant(drawn * std)

    def linear(self, out_features: int, in_features: int, gain: float = 1.0) -> nn.Parameter:
        """[out, in]; outputs are `gain` times as large as inputs."""
        return self.normal(out_features, in_features, std=gain * in_features**-0.5)
