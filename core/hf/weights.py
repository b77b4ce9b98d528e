"""A checkpoint's weights, put into a model of transformers by transformers' own rules."""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..files import CheckpointError, LoadProgress
from .checkpoint import Checkpoint
from .moved_hooks import names_moved_hooks
from .weight_part import WeightPart

Parts = Mapping[str, WeightPart | None]
"""What a rank keeps of the weights that ranks split, by their names; None: nothing."""

logger = logging.getLogger(__name__)

_META = torch.device("meta")
_MAX_SHOWN = 20
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class WeightSource:
    """Tensors of a checkpoint that make one weight of the model, or several by one conversion.

    Attributes:
        target: name of the weight, or of the first of them.
        converter: transformers' conversion; None where one tensor is the weight.
        names: the tensors, as the checkpoint names them, in the order of their layers and experts.
        patterns: for each tensor, which of the converter's source patterns it matched.
    """

    target: str
    converter: WeightConverter | None
    names: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)

    def weights(
        self, model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype,
        parts: Parts = MappingProxyType({}),
    ) -> dict[str, Tensor]:  # fmt: skip
        """The model's weights, name to new tensor, of which `parts` are kept; on "meta" nothing is read."""

        def read(name: str) -> Tensor:
            if device == _META:
                return torch.empty(checkpoint.shape(name), dtype=dtype, device=device)
            return checkpoint.read(name, device, dtype)

        part = parts.get(self.target)
        if self.converter is None:
            if self.target in parts and part is None:
                return {}
            whole = part is None or device == _META
            tensor = read(self.names[0]) if whole else checkpoint.read(self.names[0], device, dtype, part)
            return {self.target: tensor}
        merged = None if device == _META else self._merged(model, checkpoint, device, dtype, part)
        if merged is not None:
            return {self.target: merged}
        converter = deepcopy(self.converter)
        for name, pattern in zip(self.names, self.patterns, strict=True):
            converter.add_tensor(self.target, name, pattern, partial(read, name))
        made = converter.convert(self.target, model=model, config=model.config)
        weights = {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}
        for name in weights.keys() & parts.keys():
            part, whole = parts[name], weights.pop(name)
            if part is not None:
                weights[name] = part.take(whole)
        return weights

    def _merged(
        self, model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype,
        part: WeightPart | None,
    ) -> Tensor | None:  # fmt: skip
        """The weight, filled tensor by tensor: transformers' own operations hold all tensors and their result
        at once.

        None where a conversion does more than stack and concatenate, or where ranks split it otherwise than
        by what is stacked.
        """
        operations = [] if self.converter is None else list(self.converter.operations)
        merge = operations.pop(0) if operations and isinstance(operations[0], MergeModulelist) else None
        join = operations.pop(0) if operations and isinstance(operations[0], Concatenate) else None
        if self.converter is None or operations or (join is None and merge is None):
            return None
        shape = model.get_parameter(self.target).shape
        if part is not None:
            if merge is None or merge.dim != part.dim:
                return None
            shape = part.shape(shape)
        weight = torch.empty(shape, dtype=dtype, device=device)
        begin = 0
        for pattern in self.converter.source_patterns:
            names = [name for name, its in zip(self.names, self.patterns, strict=True) if its == pattern]
            if part is not None:
                names = [names[index] for span in part.ranges for index in span]
            for group in [names] if merge else [[name] for name in names]:
                sizes = list(checkpoint.shape(group[0]))
                if merge:
                    sizes.insert(merge.dim, len(group))
                place = weight.narrow(join.dim, begin, sizes[join.dim]) if join else weight
                for one, name in zip(place.unbind(merge.dim) if merge else [place], group, strict=True):
                    one.copy_(checkpoint.read(name, device, dtype))
                begin += sizes[join.dim] if join else 0
        return weight


class WeightSources(NamedTuple):
    """Where each weight of a model comes from.

    Attributes:
        sources: one for each weight, or for weights that one conversion makes; checked against the model.
        ignored: tensors of the checkpoint that transformers ignores for this class of models, too.
        missing: weights that are no tensor of the checkpoint and are tied to another weight.
    """

    sources: tuple[WeightSource, ...]
    ignored: tuple[str, ...]
    missing: frozenset[str]


def find_sources(model: PreTrainedModel, checkpoint: Checkpoint) -> WeightSources:
    """Sources of all weights of `model`; a CheckpointError names a missing, superfluous or misshapen
    weight."""
    wanted, kind = model.state_dict(), type(model).__name__
    by_target, strange = _match(model, wanted, checkpoint.names)
    ignored = _ignored(model, strange)
    if superfluous := [name for name in strange if name not in ignored]:
        raise CheckpointError(f"the checkpoint has weights that {kind} has not: {listed(superfluous)}")
    made: set[str] = set()
    for source in by_target.values():
        _check_dtypes(source, checkpoint)
        _check_merged(source, wanted[source.target].shape)
        made.update(_checked_shapes(source, model, wanted, checkpoint))
    missing = wanted.keys() - made
    ties = [{name, other} for name, other in model.all_tied_weights_keys.items()]
    tied = set().union(*(tie for tie in ties if not tie.isdisjoint(made)))
    if absent := sorted(missing - tied, key=dot_natural_key):
        raise CheckpointError(f"the checkpoint lacks weights of {kind}: {listed(absent)}")
    return WeightSources(tuple(by_target.values()), tuple(ignored), frozenset(missing))


def _match(
    model: PreTrainedModel, wanted: dict[str, Tensor], names: Iterable[str]
) -> tuple[dict[str, WeightSource], list[str]]:
    """Sources by target, and the names that have no place in the model."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    by_target: dict[str, WeightSource] = {}
    strange = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted:
            strange.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        source = by_target.setdefault(target, WeightSource(target, converter))
        if source.names and pattern is None:
            raise CheckpointError(f"{source.names[0]} and {name} of the checkpoint are both {target}")
        source.names.append(name)
        source.patterns.append(pattern or name)
    return by_target, strange


def _ignored(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Names that transformers does not expect to find a place for in this class of models."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]

    def is_ignored(name: str) -> bool:
        renamed, _ = rename_source_key(name, renamings, [])
        return any(re.search(pattern, each) for pattern in patterns for each in (name, renamed))

    return [name for name in names if is_ignored(name)]


def _check_dtypes(source: WeightSource, checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError that names a tensor whose elements cannot be weights."""
    for name in source.names:
        if (dtype := checkpoint.dtype(name)) not in _DTYPES:
            raise CheckpointError(
                f"{name} of the checkpoint has the dtype {dtype}; accepted: {', '.join(map(str, _DTYPES))}"
            )


def _check_merged(source: WeightSource, shape: torch.Size) -> None:
    """Raise a CheckpointError that names the experts that a merged weight lacks."""
    if source.converter is None:
        return
    merges = [each for each in source.converter.operations if isinstance(each, MergeModulelist)]
    for pattern in source.converter.source_patterns if merges else ():
        before, _, after = pattern.partition("*")
        number = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
        names = [name for name, its in zip(source.names, source.patterns, strict=True) if its == pattern]
        matches = [match for name in names if (match := number.search(name))]
        if not matches:
            raise CheckpointError(f"the checkpoint lacks all weights {pattern!r} of {source.target}")
        begin, end = matches[0].string[: matches[0].start(1)], matches[0].string[matches[0].end(1) :]
        if absent := sorted(set(range(shape[merges[0].dim])) - {int(match[1]) for match in matches}):
            lacking = listed([f"{begin}{index}{end}" for index in absent])
            raise CheckpointError(f"the checkpoint lacks weights of {source.target}: {lacking}")


def _checked_shapes(
    source: WeightSource, model: PreTrainedModel, wanted: dict[str, Tensor], checkpoint: Checkpoint
) -> Iterator[str]:
    """The weights that `source` makes."""
    names = f"{source.names[0]} to {source.names[-1]}" if len(source.names) > 1 else source.names[0]
    try:
        weights = source.weights(model, checkpoint, _META, torch.float32)
    except Exception as error:  # an operation of transformers', on shapes that do not fit
        raise CheckpointError(f"{source.target} cannot be made of {names}: {error}") from error
    for name, weight in weights.items():
        if name not in wanted:
            raise CheckpointError(f"{names}: transformers makes {name} of it, which the model has not")
        if weight.shape != wanted[name].shape:
            raise CheckpointError(
                f"{names} of the checkpoint has the shape {tuple(weight.shape)}; accepted for {name}: "
                f"{tuple(wanted[name].shape)}"
            )
        yield name


def listed(names: Collection[str]) -> str:
    """Names for a message: the first ones, and how many more there are."""
    shown = list(names)[:_MAX_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


@names_moved_hooks
def load_weights(
    model: PreTrainedModel, folder: Path, blocks: tuple[int, int] | None, device: torch.device,
    parts: Parts | None = None,
) -> None:  # fmt: skip
    """Give `model`, whose tensors are on the device "meta", the weights of the checkpoint in `folder`.

    All names and shapes are checked before the first weight is read. Weights are read one after another: at
    no time more is allocated than the weights, and once more the largest tensor that is made of several or
    stored in another dtype. After an error the model is of no use.

    Args:
        blocks: what `block_size` says of the checkpoint.
        parts: what this rank keeps of the weights that ranks split; None for a weight of another rank.
    """
    with Checkpoint(folder, blocks) as checkpoint:
        sources = find_sources(model, checkpoint)
        if sources.ignored:
            logger.info("%s: not loaded, not of the text model: %s", folder, listed(sources.ignored))
        if checkpoint.activation_scales:
            scales = listed(checkpoint.activation_scales)
            logger.info("%s: not used, activations are not quantised: %s", folder, scales)
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        progress = LoadProgress(folder, len(sources.sources))
        for source in sources.sources:
            weights = source.weights(model, checkpoint, device, dtypes[source.target], parts or {})
            for name in tuple(weights):
                _place(model, name, weights.pop(name))
            progress.loaded()
        stored_bytes = checkpoint.num_bytes
    model.tie_weights(missing_keys=set(sources.missing), recompute_mapping=False)
    if blocks is not None:
        in_memory = sum(weight.nbytes for weight in model.parameters())
        message = "%s: FP8 in blocks of %d x %d, %d bytes on disk; as %s, %d bytes in memory"
        logger.info(message, folder, *blocks, stored_bytes, model.dtype, in_memory)


def _place(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
