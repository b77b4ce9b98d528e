"""One rank's part of a model of transformers: which rows and columns of each weight."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..layers.weight_part import (
    WeightPart,
    checked_part,
    delta_net_channels,
    mamba2_channels,
    set_weight,
    shifted,
    span,
    vocabulary_part_of,
)
from ..model_parts import Part
from ..parallel_groups import ParallelGroups
from ..validation import shown
from .architectures import ARCHITECTURES
from .fused_modules import mlp_projections


class ModuleSplit:
    """The parts of a module's weights by name (None: of another rank), and its attributes' new sizes."""

    def __init__(self, module: nn.Module, groups: ParallelGroups) -> None:
        self.module: Any = module
        self.groups = groups
        self.parts: dict[str, WeightPart | None] = {}
        self.sizes: dict[str, Any] = {}

    def part(self, name: str, total: int | None = None, *, shared: bool = False) -> Part:
        """The `checked_part` of what the attribute `name` counts, or of `total`."""
        total = getattr(self.module, name) if total is None else total
        return checked_part(f"{name} of {type(self.module).__name__}", total, self.groups, shared=shared)

    def rows(self, name: str, ranges: Iterable[range]) -> None:
        """A child computes these outputs of a projection or convolution."""
        ranges = tuple(ranges)
        for weight in ("weight", "bias"):
            if getattr(getattr(self.module, name), weight) is not None:
                self.tensor(f"{name}.{weight}", ranges)

    def columns(self, name: str, ranges: Iterable[range]) -> None:
        """A child reads these inputs; the ranks' outputs are summed, and the first rank adds the bias."""
        self.tensor(f"{name}.weight", ranges, dim=1)
        self.on_first_rank(name)

    def on_first_rank(self, name: str) -> None:
        """The first rank alone adds the bias of a child whose outputs are summed."""
        if getattr(self.module, name).bias is not None and self.groups.tensor_rank > 0:
            self.parts[f"{name}.bias"] = None

    def tensor(self, name: str, ranges: Iterable[range], dim: int = 0) -> None:
        """These indices of a parameter or buffer."""
        path, _, leaf = name.rpartition(".")
        weight = getattr(self.module.get_submodule(path), leaf)
        self.parts[name] = WeightPart(dim, tuple(ranges), weight.shape[dim])


def split_attention(split: ModuleSplit) -> None:
    """Attention by heads. Where there are fewer KV heads than ranks, several ranks hold the same KV head."""
    attention = split.module
    config = attention.config
    heads = split.part("num_attention_heads", config.num_attention_heads)
    kv_heads = split.part("num_key_value_heads", config.num_key_value_heads, shared=True)
    # With a gate of the output, a head's rows are its query and its gate.
    split.rows("q_proj", [span(heads, attention.q_proj.out_features // config.num_attention_heads)])
    for name in ("k_proj", "v_proj"):
        split.rows(name, [span(kv_heads, attention.head_dim)])
    output_name = "o_proj" if hasattr(attention, "o_proj") else "out_proj"
    split.columns(output_name, [span(heads, attention.head_dim)])


def split_mlp(split: ModuleSplit) -> None:
    """An MLP by the columns between its projections."""
    mlp = split.module
    *input_names, output_name = mlp_projections(mlp)
    width = getattr(mlp, output_name).in_features
    channels = [span(split.part(f"the width of {output_name}", width), 1)]
    for name in input_names:
        split.rows(name, [*channels, *shifted(channels, width)] if name == "input_linear" else channels)
    split.columns(output_name, channels)


def split_experts(split: ModuleSplit) -> None:
    """Whole experts. A token's experts on other ranks get the number after the last expert of this rank."""
    experts = split.module
    total = experts.num_experts
    rank = split.groups.tensor_rank
    size = split.groups.tensor_size
    if total < size:
        raise ValueError(
            f"num_experts of {type(experts).__name__} is {total}; accepted: at least one expert for each of "
            f"the {size} ranks of the tensor group"
        )
    part = Part(total * rank // size, total * (rank + 1) // size, total)
    for name, weight in experts.named_parameters(recurse=False):
        if weight.shape[0] != part.total:
            raise ValueError(
                f"{name} of {type(experts).__name__} has the shape {shown(tuple(weight.shape))}; accepted: "
                f"one row for each of {part.total} experts"
            )
        split.tensor(name, [span(part, 1)])
    split.sizes |= {"num_experts": part.count, "mambaslots_experts": part}
    split.sizes["_is_expert_parallel"] = True  # transformers then skips the number after the last expert


def split_latent_experts(split: ModuleSplit) -> None:
    """A mixture of experts of Nemotron-H: its last projection multiplies sums that are yet to be added up."""
    projection = getattr(split.module, "fc2_latent_proj", None)
    if projection is not None and hasattr(projection, "bias"):
        split.on_first_rank("fc2_latent_proj")


def split_mamba2(split: ModuleSplit) -> None:
    """A Mamba-2 mixer. Rows of `in_proj` are the gate, x, B, C and the time steps."""
    mixer = split.module
    heads = split.part("num_heads")
    groups = split.part("n_groups", shared=True)
    x, conv, projected = mamba2_channels(heads, mixer.head_dim, groups, mixer.ssm_state_size)
    split.rows("in_proj", projected)
    split.rows("conv1d", conv)
    for name in ("A_log", "D", "dt_bias"):
        split.tensor(name, [span(heads, 1)])
    if getattr(mixer, "norm", None) is not None and getattr(mixer, "mamba_rms_norm", True):
        split.tensor("norm.weight", [x])
    if hasattr(mixer, "mup_vector"):
        split.tensor("mup_vector", projected, dim=2)
    split.columns("out_proj", [x])
    split.sizes |= {"num_heads": heads.count, "n_groups": groups.count, "intermediate_size": len(x)}
    split.sizes["conv_dim"] = sum(map(len, conv))


def split_gated_delta_net(split: ModuleSplit) -> None:
    """A gated delta net of Qwen3-Next or Qwen3.5; value heads of a rank read key heads of the same rank."""
    mixer = split.module
    keys = split.part("num_k_heads", shared=True)
    heads = split.part("num_v_heads")
    conv = delta_net_channels(keys, mixer.head_k_dim, heads, mixer.head_v_dim)
    v = span(heads, mixer.head_v_dim)
    if hasattr(mixer, "in_proj_qkvz"):
        _split_interleaved(split)
    else:
        split.rows("in_proj_qkv", conv)
        split.rows("in_proj_z", [v])
        split.rows("in_proj_b", [span(heads, 1)])
        split.rows("in_proj_a", [span(heads, 1)])
    split.rows("conv1d", conv)
    for name in ("A_log", "dt_bias"):
        split.tensor(name, [span(heads, 1)])
    split.columns("out_proj", [v])
    split.sizes |= {"num_k_heads": keys.count, "num_v_heads": heads.count}
    split.sizes |= {"key_dim": len(conv[0]), "value_dim": len(v), "conv_dim": sum(map(len, conv))}


def _split_interleaved(split: ModuleSplit) -> None:
    """Qwen3-Next's rows: for each key head q, k, and of its value heads v and the gates; then b and a."""
    mixer = split.module
    value_dim = mixer.head_v_dim
    keys = split.part("num_k_heads", shared=True)
    heads = split.part("num_v_heads")
    per_key = mixer.num_v_heads // mixer.num_k_heads
    qkvz_rows = []
    ba_rows = []
    for key in keys.indices:
        first_head = key * per_key  # of the key head's value heads, in the whole model
        start = max(heads.start, first_head) - first_head
        stop = min(heads.stop, first_head + per_key) - first_head
        values = [range(start * value_dim, stop * value_dim)]
        qk_start = key * 2 * (mixer.head_k_dim + per_key * value_dim)
        v_start = qk_start + 2 * mixer.head_k_dim
        qkvz_rows.append(range(qk_start, v_start))
        qkvz_rows += [*shifted(values, v_start), *shifted(values, v_start + per_key * value_dim)]
        value_heads = [range(start, stop)]
        ba_rows += [*shifted(value_heads, 2 * first_head), *shifted(value_heads, 2 * first_head + per_key)]
    split.rows("in_proj_qkvz", qkvz_rows)
    split.rows("in_proj_ba", ba_rows)


def split_short_conv(split: ModuleSplit) -> None:
    """A short convolution of LFM2. Rows of `in_proj` are two gates and what is convolved."""
    size = split.module.conv.out_channels
    channels = [span(split.part("hidden_size", size), 1)]
    split.rows("in_proj", [*channels, *shifted(channels, size), *shifted(channels, 2 * size)])
    split.rows("conv", channels)
    split.columns("out_proj", channels)


_SPLITTERS: dict[str, Callable[[ModuleSplit], None]] = {
    "Attention": split_attention, "MLP": split_mlp, "Experts": split_experts, "MoE": split_latent_experts,
    "Mixer": split_mamba2, "Mamba2Mixer": split_mamba2, "MambaLayer": split_mamba2,
    "GatedDeltaNet": split_gated_delta_net, "ShortConv": split_short_conv,
}  # fmt: skip
"""By the name of a class after the prefix of its architecture."""


class ModelSplit:
    """The `parts` of a whole model's weights by name (None: of another rank), and its modules' new sizes."""

    def __init__(self, model: nn.Module, config: Any, groups: ParallelGroups) -> None:
        self._model: Any = model
        self._modules: dict[str, ModuleSplit] = {}
        self.parts: dict[str, WeightPart | None] = {}
        if groups.pipeline_size > 1:
            raise ValueError(
                f"groups.pipeline has {groups.pipeline_size} ranks; accepted for a model of transformers: "
                "None or one rank, because its layers are not split into stages"
            )
        if groups.tensor_size > 1:
            if not ARCHITECTURES[config.model_type].splits:
                accepted = sorted(name for name, row in ARCHITECTURES.items() if row.splits)
                raise ValueError(
                    f"model_type is {config.model_type!r}, and groups.tensor has {groups.tensor_size} ranks; "
                    f"accepted where ranks split a model of transformers: {', '.join(accepted)}"
                )
            self._find_parts(config, groups)
        vars(model)["mambaslots_split"] = self

    def _find_parts(self, config: Any, groups: ParallelGroups) -> None:
        model = self._model
        prefix = ARCHITECTURES[config.model_type].prefix
        for path, module in model.named_modules():
            kind = type(module).__name__
            if kind.startswith(prefix) and (splitter := _SPLITTERS.get(kind.removeprefix(prefix))):
                split = self._modules[path] = ModuleSplit(module, groups)
                splitter(split)
                self.parts |= {f"{path}.{name}": part for name, part in split.parts.items()}
        head = vocabulary_part_of(config.vocab_size, groups)
        self._head = WeightPart(0, (span(head, 1),), head.total)
        if "lm_head.weight" not in model.all_tied_weights_keys:
            self.parts["lm_head.weight"] = self._head

    @classmethod
    def of(cls, model: nn.Module, config: Any, groups: ParallelGroups) -> "ModelSplit":
        """The split that was made for a model before its weights were read, or one of a whole model."""
        split: ModelSplit | None = vars(model).get("mambaslots_split")
        return split or cls(model, config, groups)

    def apply(self) -> None:
        """Reduce the model to this rank's part: whole weights become copies of a part, a tied head a view."""
        for path, split in self._modules.items():
            for name, part in split.parts.items():
                self._keep(f"{path}.{name}", part)
            for name, value in split.sizes.items():
                setattr(split.module, name, value)
            for child in split.module.children():
                _fit(child)
        if self._modules:
            head = self._model.lm_head
            embedding = self._model.get_input_embeddings()
            if head.weight is embedding.weight:
                (index,) = self._head.slices(2)
                head.weight = nn.Parameter(embedding.weight.data[index], requires_grad=False)
            else:
                self._keep("lm_head.weight", self._head)
            _fit(head)

    def _keep(self, name: str, part: WeightPart | None) -> None:
        path, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(path)
        tensor = getattr(module, leaf)
        if part is None:
            setattr(module, leaf, None)
        elif tensor.shape[part.dim] == part.total != part.size:
            set_weight(module, leaf, part.take(tensor.data))


def _fit(module: Any) -> None:
    """Let a linear module or a convolution say the sizes of its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Conv1d):
        module.in_channels = module.out_channels = module.groups = len(module.weight)
