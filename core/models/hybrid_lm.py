"""A small real language model of Mamba-2 mixers, attention and MLPs."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..inference.contexts.step_inputs import StepInputs
from ..inference.kernels.kernel_set import KernelSet, kernel_set
from ..model_shard import Part
from ..parallel_groups import ParallelGroups
from ..state_spec import HybridStateSpec
from ..tensor_validation import device as checked_device
from ..validation import instance, integer
from .hybrid_config import HybridConfig
from .layer_steps import attend, convolve, scan_ssd


class HybridLM(nn.Module):
    """A token embedding, residual layers in the order of `config.pattern`, a norm and an untied LM head.

    Each layer normalises its input.

    The weights are random, and need no gradients. They depend on `seed` and on the kind of `device` alone.
    The weights are drawn in float64 and rounded to `config.dtype`. Their scale makes the caches matter: the
    slowest Mamba heads remember hundreds of tokens, the fastest tens, and logits have a standard deviation of
    a few units.

    A model can be split over ranks as in Megatron. Each rank draws all weights and keeps its part: heads, MLP
    columns and vocabulary rows over the tensor group, consecutive layers over the pipeline group. A step runs
    the stages one after the other, and all ranks get all logits.

    Args:
        config: the shape.
        seed: seed of the weights.
        device: where the weights are drawn. A GPU draws large models faster, and draws other weights than a
            CPU.
        groups: the ranks that the model is split over; None for one rank.
    """

    def __init__(
        self,
        config: HybridConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        groups: ParallelGroups | None = None,
    ) -> None:
        super().__init__()
        self.config = instance("config", config, HybridConfig)
        self.seed = integer("seed", seed, 0, (1 << 63) - 1)
        self.groups = ParallelGroups() if groups is None else instance("groups", groups, ParallelGroups)
        draw = _Weights(config, self.seed, checked_device("device", device), self.groups)
        self.shard = draw.shard
        embedding = draw.normal(config.vocab_size, config.hidden_size, std=1.0)
        self.layers = nn.ModuleList()
        first, stop = config.stage_layers(self.groups)
        for index, kind in enumerate(config.pattern):
            layer_index = config.pattern[first:index].count(kind)
            layer = _LAYERS[kind](config, layer_index, draw)
            if first <= index < stop:
                self.layers.append(layer)
        self.norms = nn.ParameterList([draw.ones(config.hidden_size) for _ in self.layers])
        lm_head = draw.linear(config.vocab_size, config.hidden_size, gain=3.0, rows=draw.vocabulary_rows())
        if self.groups.is_first_stage:
            self.embedding = embedding
        if self.groups.is_last_stage:
            self.final_norm = draw.ones(config.hidden_size)
            self.lm_head = lm_head
        self.eval()

    def state_spec(self) -> HybridStateSpec:
        """What a context allocates for this model, on the device of the weights."""
        config, shard, device = self.config, self.shard, self.norms[0].device
        return HybridStateSpec(
            states=config.states(self.groups),
            num_attention_layers=shard.attention_layers.count,
            num_kv_heads=shard.kv_heads.count,
            head_dim=config.head_dim,
            kv_dtype=config.dtype,
            vocab_size=config.vocab_size,
            device=device,
            separate_states=kernel_set(device, config.dtype).SEPARATE_STATES,
            shard=shard,
            groups=self.groups,
            model=f"{config}, seed {self.seed}",
        )

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits of `inputs.logit_tokens`, [L, vocab_size] in float32 or wider.

        Writes the step's keys and values into `inputs.kv_cache` and its states into `inputs.state_pool`.
        """
        config, groups, device = self.config, self.groups, inputs.token_ids.device
        kernels = kernel_set(device, config.dtype)
        if groups.is_first_stage:
            hidden = self.embedding[inputs.token_ids].to(config.compute_dtype)
        else:
            shape = len(inputs.token_ids), config.hidden_size
            hidden = torch.empty(shape, dtype=config.compute_dtype, device=device)
            groups.receive_from_previous_stage(hidden)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            normed = kernels.rms_norm(hidden, norm, config.norm_eps).to(config.dtype)
            partial = layer(normed, inputs, kernels).to(config.compute_dtype)
            hidden = hidden + groups.sum_partials(partial)
        if groups.is_last_stage:
            hidden = kernels.rms_norm(hidden[inputs.logit_tokens], self.final_norm, config.norm_eps)
            logits = groups.gather_columns(F.linear(hidden, self.lm_head.to(hidden.dtype)))
            logits = logits[:, : config.vocab_size].contiguous()
        else:
            groups.send_to_next_stage(hidden)
            shape = len(inputs.logit_tokens), config.vocab_size
            logits = torch.empty(shape, dtype=config.compute_dtype, device=device)
        return groups.share_from_last_stage(logits)


class MambaMixer(nn.Module):
    """Mamba-2's block (arXiv 2405.21060, section 7.1), with a biased convolution and a norm per group."""

    def __init__(self, config: HybridConfig, layer_index: int, draw: "_Weights") -> None:
        super().__init__()
        self.config = local = config.of_one_rank(draw.groups)
        self.layer_index = layer_index
        self.groups = draw.groups
        self.heads = config.part_of("mamba_num_heads", draw.groups)
        self.head_groups = config.part_of("mamba_num_groups", draw.groups)
        heads, kernel = self.heads.indices, config.conv_kernel
        # `memory` counts tokens. dt falls with the square root of `memory`: so all heads' states have one
        # magnitude.
        shortest, longest = math.log10(8.0), math.log10(512.0)
        memory = torch.logspace(shortest, longest, config.mamba_num_heads, dtype=torch.float64, device="cpu")[
            list(heads)
        ]
        dt = 1.5 * memory.rsqrt()
        # Rows of the projection: the gate, then what is convolved (x, B and C), then dt.
        x, conv = _mixer_channels(config, self.heads, self.head_groups)
        after = config.inner_dim + config.conv_dim
        rows = [*x, *(config.inner_dim + channel for channel in conv), *(after + head for head in heads)]
        self.in_proj = draw.linear(after + config.mamba_num_heads, config.hidden_size, rows=rows)
        self.conv_weight = draw.normal(config.conv_dim, kernel, std=kernel**-0.5, rows=conv)
        # With this bias SiLU of a standard normal has a mean near zero. Slow heads would sum up any other
        # mean.
        self.conv_bias = draw.full(local.conv_dim, -0.5)
        self.dt_bias = draw.constant(dt.expm1().log(), wide=True)
        self.A_log = draw.constant(-(memory * dt).log(), wide=True)
        self.D = draw.full(len(heads), 0.5, wide=True)
        self.norm = draw.ones(local.inner_dim)
        self.out_proj = draw.linear(config.hidden_size, config.inner_dim, columns=x)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        config, pool = self.config, inputs.state_pool
        gate, raw, dt = torch.split(
            F.linear(hidden, self.in_proj),
            [config.inner_dim, config.conv_dim, config.mamba_num_heads],
            dim=-1,
        )
        dt = torch.logaddexp(dt + self.dt_bias, self.dt_bias.new_zeros(()))  # softplus without a threshold
        A = -self.A_log.exp()
        conv_states, ssm_states = pool["conv"][self.layer_index], pool["ssm"][self.layer_index]
        xBC = convolve(raw, self.conv_weight, self.conv_bias, conv_states, inputs, kernels)
        B, C = self._BC(xBC)
        y = scan_ssd(self._x(xBC), dt, A, B, C, self.D, ssm_states, inputs, kernels).flatten(1)
        if self.groups.tensor_size > self.head_groups.total:
            normed = self._norm_over_ranks(y, gate)
        else:
            normed = kernels.gated_rms_norm(y, gate, self.norm, config.mamba_num_groups, config.norm_eps)
        return F.linear(normed.to(config.dtype), self.out_proj)

    def _norm_over_ranks(self, y: Tensor, gate: Tensor) -> Tensor:
        """`gated_rms_norm` where a group's heads lie on several ranks: the ranks add up their squares."""
        config, group = self.config, self.head_groups
        gated = y.to(config.compute_dtype) * F.silu(gate.to(config.compute_dtype))
        squares = gated.new_zeros(len(gated), group.total)
        squares[:, group.start] = gated.square().sum(-1)
        mean = self.groups.sum_partials(squares)[:, group.start, None]
        ranks = self.groups.tensor_size // group.total
        scale = torch.rsqrt(mean / (config.inner_dim * ranks) + config.norm_eps)
        return gated * scale * self.norm.to(config.compute_dtype)

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
        queries = draw.part_of(query_dim)
        kv = _channels(draw.shard.kv_heads.indices, config.head_dim)
        # The gain makes scores sharp. With a gain of 1, random keys would average the context away.
        self.q_proj = draw.linear(query_dim, config.hidden_size, gain=3.0, rows=queries)
        self.k_proj = draw.linear(kv_dim, config.hidden_size, rows=kv)
        self.v_proj = draw.linear(kv_dim, config.hidden_size, rows=kv)
        self.o_proj = draw.linear(config.hidden_size, query_dim, columns=queries)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        config, kv_cache = self.config, inputs.kv_cache[self.layer_index]
        query, key, value = (
            torch.unflatten(F.linear(hidden, weight), 1, (-1, config.head_dim))
            for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = kernels.apply_rotary(query, inputs.positions, config.rotary_base)
        key = kernels.apply_rotary(key, inputs.positions, config.rotary_base)
        attended = attend(query, key, value, kv_cache, inputs, kernels)
        return F.linear(attended.flatten(1).to(config.dtype), self.o_proj)


class MLP(nn.Module):
    """Two projections around a squared ReLU (arXiv 2109.08668)."""

    def __init__(self, config: HybridConfig, layer_index: int, draw: "_Weights") -> None:
        super().__init__()
        own = draw.part_of(config.mlp_hidden_size)
        self.up_proj = draw.linear(config.mlp_hidden_size, config.hidden_size, rows=own)
        self.down_proj = draw.linear(config.hidden_size, config.mlp_hidden_size, columns=own)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        return F.linear(F.relu(F.linear(hidden, self.up_proj)).square(), self.down_proj)


_LAYERS: dict[str, type[MambaMixer] | type[Attention] | type[MLP]] = {
    "M": MambaMixer,
    "*": Attention,
    "-": MLP,
}


def _channels(units: Iterable[int], width: int, offset: int = 0) -> list[int]:
    """The channels of heads or groups that are `width` wide and begin at `offset`."""
    return [offset + unit * width + channel for unit in units for channel in range(width)]


def _mixer_channels(config: HybridConfig, heads: Part, head_groups: Part) -> tuple[list[int], list[int]]:
    """One rank's channels of x, and all channels that the rank convolves: x, then its groups' B and C."""
    groups, width = head_groups.indices, config.mamba_state_dim
    x = _channels(heads.indices, config.mamba_head_dim)
    B = _channels(groups, width, config.inner_dim)
    C = _channels(groups, width, config.inner_dim + config.mamba_num_groups * width)
    return x, [*x, *B, *C]


class _Weights:
    """Draws a model's parameters, in order, from one generator; torch's global generator is not used.

    All numbers of a parameter are drawn, so that parameters do not depend on how the model is split. A rank
    keeps the rows and columns that it asks for.
    """

    def __init__(self, config: HybridConfig, seed: int, device: torch.device, groups: ParallelGroups) -> None:
        self.groups = groups
        self.shard = config.shard(groups)
        self._config = config
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def part_of(self, total: int) -> range:
        """This rank's equal part of `total` heads, channels or rows."""
        return Part.of_rank(total, self.groups.tensor_rank, self.groups.tensor_size).indices

    def vocabulary_rows(self) -> range:
        """This rank's equal part of the vocabulary, rounded up: the last rows may be padding."""
        size = self.groups.tensor_size
        return self.part_of(-(-self._config.vocab_size // size) * size)

    def constant(self, values: Tensor, wide: bool = False) -> nn.Parameter:
        """`values` as a parameter; `wide` stores it in float32 or wider."""
        dtype = self._config.compute_dtype if wide else self._config.dtype
        return nn.Parameter(values.to(self._device, dtype), requires_grad=False)

    def full(self, size: int, value: float, wide: bool = False) -> nn.Parameter:
        return self.constant(torch.full((size,), value, dtype=torch.float64, device="cpu"), wide)

    def ones(self, size: int) -> nn.Parameter:
        return self.full(size, 1.0)

    def normal(
        self, *shape: int, std: float, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None
    ) -> nn.Parameter:
        """Normal numbers of this shape. Only `rows` and `columns` are kept; rows beyond the end are zeros."""
        drawn = torch.randn(*shape, generator=self._generator, dtype=torch.float64, device=self._device)
        for dim, indices in ((0, rows), (1, columns)):
            if indices is not None and len(indices) < shape[dim]:
                inside = [index for index in indices if index < shape[dim]]
                drawn = drawn.index_select(dim, torch.tensor(inside, dtype=torch.int64, device=self._device))
                if len(inside) < len(indices):
                    drawn = F.pad(drawn, (0, 0, 0, len(indices) - len(inside)))
        return self.constant(drawn * std)

    def linear(
        self,
        out_features: int,
        in_features: int,
        gain: float = 1.0,
        rows: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> nn.Parameter:
        """[out, in]; outputs are `gain` times as large as inputs."""
        std = gain * in_features**-0.5
        return self.normal(out_features, in_features, std=std, rows=rows, columns=columns)
