"""A folder's weights, put into a model of transformers by transformers' own rules."""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
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

from ..files import ModelFolderError
from ..layers.weight_part import WeightPart, set_weight
from ..progress import ProgressBar
from .moved_hooks import names_moved_hooks
from .weight_files import WeightFiles

Parts = Mapping[str, WeightPart | None]
"""What a rank keeps of the weights that ranks split, by their names; None: nothing."""

PROGRESS_S = 2.0  # a load that takes longer shows a bar, which changes so seldom

logger = logging.getLogger(__name__)

_MAX_SHOWN = 20
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class WeightSource:
    """The tensors of a folder that make one weight of the model: one, or several side by side.

    Attributes:
        target: name of the weight.
        groups: the tensors' names by the pattern of transformers' conversion that they matched, in the order
            of layers and experts; one pattern where there is no conversion.
        stacks: whether a group is stacked along a new first dimension: the experts of a layer.
        dim: along which the groups are concatenated.

    Example: 8 experts with gate and up projections [512, 64]: 2 groups of 8 make one weight [8, 1024, 64].
    """

    target: str
    groups: dict[str, list[str]]
    stacks: bool = False
    dim: int = 0

    @classmethod
    def of(cls, target: str, converter: WeightConverter | None) -> "WeightSource":
        """A source without tensors; a ModelFolderError where transformers does more than stack and join."""
        if converter is None:
            return cls(target, {target: []})
        operations = list(converter.operations)
        merges = [step for step in operations if isinstance(step, MergeModulelist) and not step.dim]
        joins = [step for step in operations if isinstance(step, Concatenate)]
        if [*merges, *joins] != operations or max(len(merges), len(joins)) > 1:
            kinds = ", ".join(type(step).__name__ for step in operations)
            raise ModelFolderError(f"{target} is made by {kinds}; accepted: MergeModulelist and Concatenate")
        groups: dict[str, list[str]] = {pattern: [] for pattern in converter.source_patterns}
        return cls(target, groups, bool(merges), joins[0].dim if joins else 0)

    @property
    def is_one_tensor(self) -> bool:
        return len(self.groups) == 1 and not self.stacks

    @property
    def names(self) -> list[str]:
        return [name for names in self.groups.values() for name in names]

    def places(
        self, weight: Tensor, files: WeightFiles, part: WeightPart | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor's name, and the view of `weight` that it fills; of a stack `part` alone."""
        groups = list(self.groups.values())
        if part is not None:
            groups = [[names[i] for span in part.ranges for i in span] for names in groups]
        views: Sequence[Tensor] = [weight]
        if len(groups) > 1:
            widths = [files.shape(names[0])[self.dim - self.stacks] for names in groups]
            views = torch.split_with_sizes(weight, widths, self.dim)
        for names, view in zip(groups, views, strict=True):
            yield from zip(names, view.unbind() if self.stacks else [view], strict=True)

    def weight(
        self, shape: torch.Size, files: WeightFiles, device: torch.device, dtype: torch.dtype,
        part: WeightPart | None,
    ) -> Tensor:  # fmt: skip
        """A new tensor: the weight, of `shape` as a whole, or its `part`."""
        if self.is_one_tensor:
            return files.read(self.names[0], device, dtype, part)
        weight = torch.empty(shape if part is None else part.shape(shape), dtype=dtype, device=device)
        for name, view in self.places(weight, files, part):
            view.copy_(files.read(name, device, dtype))
        return weight


def find_sources(
    model: PreTrainedModel, files: WeightFiles
) -> tuple[list[WeightSource], list[str], set[str]]:
    """The source of each weight, tensors to ignore, and tied weights; a ModelFolderError names others."""
    weights = model.state_dict()
    kind = type(model).__name__
    by_target, unmatched = _match(model, weights, files.names)
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    ignored_names = [
        name
        for name, new_name in unmatched.items()
        if any(re.search(pattern, name) or re.search(pattern, new_name) for pattern in patterns)
    ]
    if superfluous := [name for name in unmatched if name not in ignored_names]:
        raise ModelFolderError(f"the folder has weights that {kind} has not: {joined_names(superfluous)}")
    for source in by_target.values():
        _check(source, weights[source.target].shape, files)
    missing_names = weights.keys() - by_target.keys()
    ties = [{name, twin} for name, twin in model.all_tied_weights_keys.items()]
    tied_names = set().union(*(tie for tie in ties if not tie.isdisjoint(by_target.keys())))
    if absent_names := sorted(missing_names - tied_names, key=dot_natural_key):
        raise ModelFolderError(f"the folder lacks weights of {kind}: {joined_names(absent_names)}")
    return list(by_target.values()), ignored_names, missing_names


def _match(
    model: PreTrainedModel, weights: dict[str, Tensor], names: Iterable[str]
) -> tuple[dict[str, WeightSource], dict[str, str]]:
    """Sources by target, and the names that have no place in the model, each with what it is renamed to."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    by_target: dict[str, WeightSource] = {}
    unmatched: dict[str, str] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        if target not in weights and name in weights:
            target = name
            pattern = None
        if target not in weights:
            unmatched[name] = rename_source_key(name, renamings, [])[0]
            continue
        converter = None if pattern is None else by_pattern[pattern]
        source = by_target.setdefault(target, WeightSource.of(target, converter))
        if source.names and pattern not in source.groups:
            raise ModelFolderError(f"{source.names[0]} and {name} of the folder are both {target}")
        source.groups[pattern or target].append(name)
    return by_target, unmatched


def _check(source: WeightSource, shape: torch.Size, files: WeightFiles) -> None:
    """Raise a ModelFolderError that names a tensor that is missing, or cannot be a part of the weight."""
    names = source.names
    for name in names:
        if (dtype := files.dtype(name)) not in _DTYPES:
            accepted = ", ".join(map(str, _DTYPES))
            raise ModelFolderError(f"{name} of the folder has the dtype {dtype}; accepted: {accepted}")
    if source.is_one_tensor:
        if files.shape(names[0]) != shape:
            raise ModelFolderError(
                f"{names[0]} of the folder has the shape {files.shape(names[0])}; accepted for "
                f"{source.target}: {tuple(shape)}"
            )
        return
    for pattern, group in source.groups.items():
        if not group:
            raise ModelFolderError(f"the folder lacks all weights {pattern!r} of {source.target}")
        _check_experts(source, pattern, group, shape[0] if source.stacks else 1)
    try:
        places = list(source.places(torch.empty(shape, device="meta"), files))
        fit = all(files.shape(name) == view.shape for name, view in places)
    except (ValueError, RuntimeError, IndexError):
        fit = False
    if not fit:
        raise ModelFolderError(
            f"{source.target} cannot be made of {names[0]} to {names[-1]}: their number or a shape does not "
            f"fit {tuple(shape)}"
        )


def _check_experts(source: WeightSource, pattern: str, names: list[str], num_experts: int) -> None:
    """Raise a ModelFolderError that names the experts whose tensors are missing."""
    prefix, _, suffix = pattern.partition("*")
    number = re.compile(rf"{re.escape(prefix)}(\d+){re.escape(suffix)}")
    matches = [match for name in names if (match := number.search(name))]
    absent_numbers = sorted(set(range(num_experts)) - {int(match[1]) for match in matches})
    if matches and absent_numbers:
        name = matches[0].string
        start, stop = matches[0].span(1)
        absent_names = joined_names([f"{name[:start]}{index}{name[stop:]}" for index in absent_numbers])
        raise ModelFolderError(f"the folder lacks weights of {source.target}: {absent_names}")


def joined_names(names: Collection[str]) -> str:
    """Names for a message: the first ones, and how many more there are."""
    shown_names = list(names)[:_MAX_SHOWN]
    num_more = len(names) - len(shown_names)
    return ", ".join(shown_names) + (f" and {num_more} more" if num_more else "")


@names_moved_hooks
def load_weights(
    model: PreTrainedModel, folder: Path, blocks: tuple[int, int] | None, device: torch.device,
    parts: Parts,
) -> None:  # fmt: skip
    """Give `model`, on "meta", the weights in `folder`, of which all names and shapes are checked first.

    Besides the weights, memory is needed for the largest one that is made of several.
    """
    with WeightFiles(folder, blocks) as files:
        sources, ignored_names, missing_names = find_sources(model, files)
        if ignored_names:
            logger.info("%s: not loaded, not of the text model: %s", folder, joined_names(ignored_names))
        if files.activation_scales:
            scales = joined_names(files.activation_scales)
            logger.info("%s: not used, activations are not quantised: %s", folder, scales)
        weights = model.state_dict()
        with ProgressBar(
            desc=folder.name, total=sum(weights[source.target].nbytes for source in sources), unit="B",
            unit_scale=True, delay=PROGRESS_S, mininterval=PROGRESS_S,
        ) as bar:  # fmt: skip
            for source in sources:
                name = source.target
                target = weights[name]
                if name not in parts or parts[name] is not None:
                    weight = source.weight(target.shape, files, device, target.dtype, parts.get(name))
                    set_weight(model, name, weight)
                    del weight
                bar.update(target.nbytes)
    model.tie_weights(missing_keys=missing_names, recompute_mapping=False)
    if blocks is not None:
        logger.info("%s: FP8 in blocks of %d x %d, loaded as %s", folder, *blocks, model.dtype)
