"""Which part of each weight of a model of transformers one rank keeps."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ...parallel_groups import ParallelGroups
from ..architectures import ARCHITECTURES, architecture_of
from ..fused.install import FUSIONS
from .layers import mlp_width, split_attention, split_experts, split_latent_experts, split_mlp
from .mixers import split_gated_delta_net, split_mamba2, split_short_conv
from .module_split import ModuleSplit
from .weight_part import WeightPart, span, vocabulary_part_of

Splitter = Callable[[ModuleSplit], None]

_SPLITTERS: dict[str, Splitter] = {
    "Attention": split_attention,
    "MLP": split_mlp,
    "Experts": split_experts,
    "MoE": split_latent_experts,
    "Mixer": split_mamba2,
    "Mamba2Mixer": split_mamba2,
    "MambaLayer": split_mamba2,
    "GatedDeltaNet": split_gated_delta_net,
    "ShortConv": split_short_conv,
}
"""By the name of a class behind the prefix of its architecture."""

_EXPERTS = "n_routed_experts", "num_local_experts", "num_experts"
_WIDTHS = (
    "intermediate_size",
    "shared_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
)


class ModelSplit:
    """The parts of all weights of a whole model.

    Args:
        model: a causal language model of transformers, whole, with its weights or on the device "meta". Gets
            an attribute, by which `of` finds this object.
        config: of the text model.
        groups: the ranks. Of one rank, nothing is split.

    Attributes:
        parts: by the names of parameters and buffers; None where another rank keeps the whole weight. Others
            stay whole.

    Raises:
        ValueError: the architecture or a size cannot be split over these ranks.
    """

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
            self._find_parts(config, groups)
        vars(model)["mambaslots_split"] = self

    def _find_parts(self, config: Any, groups: ParallelGroups) -> None:
        model = self._model
        _check_sizes(model, config, groups)
        for path, module, splitter in _split_modules(model, config):
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
        found: ModelSplit | None = vars(model).get("mambaslots_split")
        return found or cls(model, config, groups)

    def apply(self) -> None:
        """Reduce the model to this rank's part.

        Weights that are whole are replaced by copies of their parts; those that were loaded in parts stay. A
        head that is tied to the embeddings becomes a view of their rows.
        """
        for path, split in self._modules.items():
            for name, part in split.parts.items():
                self._keep(f"{path}.{name}", part)
            for name, value in split.sizes.items():
                setattr(split.module, name, value)
            for child in split.module.children():
                _fit(child)
        if self._modules:
            head, embedding = self._model.lm_head, self._model.get_input_embeddings()
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
            taken = part.take(tensor.data)
            if leaf in module._buffers:
                module._buffers[leaf] = taken
            else:
                module._parameters[leaf] = nn.Parameter(taken, requires_grad=False)


def _split_modules(model: nn.Module, config: Any) -> Iterator[tuple[str, Any, Splitter]]:
    """The path of each module that is split, the module, and how it is split."""
    prefix = FUSIONS[config.model_type].prefix
    for path, module in model.named_modules():
        kind = type(module).__name__
        if kind.startswith(prefix) and (splitter := _SPLITTERS.get(kind.removeprefix(prefix))) is not None:
            if splitter is split_latent_experts and not hasattr(module, "fc2_latent_proj"):
                continue
            yield path, module, splitter


def _fit(module: Any) -> None:
    """Let a linear module or a convolution say the sizes of its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Conv1d):
        module.in_channels = module.out_channels = module.groups = len(module.weight)


def _check_sizes(model: nn.Module, config: Any, groups: ParallelGroups) -> None:
    """Raise a ValueError that names the field of the config that cannot be split."""
    size = groups.tensor_size
    architecture = architecture_of(config)
    if not architecture.divided:
        split = sorted(name for name, row in ARCHITECTURES.items() if row.divided)
        raise ValueError(
            f"model_type is {config.model_type!r}, and groups.tensor has {size} ranks; accepted where ranks "
            f"split a model of transformers: {', '.join(split)}"
        )
    divided, shared = list(architecture.divided), list(architecture.shared)
    if any(name in architecture.attention_layers for name in config.layer_types):
        divided.append("num_attention_heads")
        shared.append("num_key_value_heads")
    for name in divided:
        _check_divided(name, getattr(config, name), size)
    for name in shared:
        total = getattr(config, name)
        if total % size and size % total:
            raise ValueError(
                f"{name} is {total}; accepted: a multiple or a divisor of the {size} ranks of the tensor "
                "group"
            )
    for _, module, splitter in _split_modules(model, config):
        if splitter is split_mlp:
            width = mlp_width(module)
            fields = [name for name in _WIDTHS if getattr(config, name, None) == width]
            _check_divided((fields or ["the width that follows from intermediate_size"])[0], width, size)
        elif splitter is split_experts and module.num_experts < size:
            name = next(name for name in _EXPERTS if getattr(config, name, None) == module.num_experts)
            raise ValueError(
                f"{name} is {module.num_experts}; accepted: at least one expert for each of the {size} "
                "ranks of the tensor group"
            )


def _check_divided(name: str, total: int, size: int) -> None:
    if total % size:
        raise ValueError(f"{name} is {total}; accepted: a multiple of the {size} ranks of the tensor group")
