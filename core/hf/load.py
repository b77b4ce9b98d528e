"""A served model from transformers' files, in a folder or on the hub."""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from .. import validation
from ..files import CONFIG, ModelFolderError, model_folder, read_object, section
from ..parallel_groups import ParallelGroups, checked_groups
from . import architectures
from .architectures import restore_buffers, skeleton
from .served_model import ServedModel
from .split import ModelSplit
from .weight_files import weight_block_size
from .weight_sources import load_weights

_MAX_LAYERS = 10_000


def load(
    path_or_name: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    groups: ParallelGroups | None = None,
) -> ServedModel:
    """A model that an engine can serve, from a model of transformers. Only its text part is loaded.

    Weights are read shard by shard, straight to `device`. At no time more is allocated than the weights, and
    once more the largest tensor that is made of several or stored in another dtype.

    Args:
        path_or_name: a folder with `config.json` and safetensors files, or a name on the hub.
        device: where the weights go.
        dtype: of the weights, also of block-scaled FP8 ones; None for the dtype that its config names.
        groups: the ranks that the model is split over, each of which reads its part; None for one rank.

    Raises:
        ModelFolderError: a ValueError that names the file or the weight that is missing, superfluous,
            truncated, of another shape or quantised in a way that is not served.
        ConnectionError, OSError: the hub cannot be reached, or its files cannot be written.
        ValueError: the architecture is not served, or a size cannot be split over `groups`.
    """
    target = validation.device("device", device)
    groups = checked_groups(groups)
    if dtype is not None:
        validation.float_dtype("dtype", dtype)
    folder = model_folder("path_or_name", path_or_name)
    blocks = weight_block_size(folder, read_object(folder / CONFIG))
    config = _config(folder)
    try:
        model = skeleton(config, dtype or _named_dtype(config))
    except (ValueError, ImportError):
        raise
    except Exception as error:  # transformers' modules, built of sizes that do not fit
        raise ModelFolderError(f"{folder / CONFIG} describes no model: {error}") from error
    parts = ModelSplit(model, architectures.text_config(config), groups).parts
    load_weights(model, folder, blocks, target, parts)
    restore_buffers(model, target)
    return ServedModel(model, groups)


def _config(folder: Path) -> PretrainedConfig:
    """The config; a ModelFolderError for more layers or experts than a model has: transformers lists them."""
    fields = read_object(folder / CONFIG)
    for part in (fields, section(folder / CONFIG, fields, "text_config")):
        for name, count in part.items():
            is_count = isinstance(count, int) and ("layers" in name or "experts" in name)
            if is_count and count > _MAX_LAYERS:
                accepted = f"at most {_MAX_LAYERS}"
                raise ModelFolderError(f"{folder / CONFIG}: {name} is {count}; accepted: {accepted}")
    return architectures.read_config(folder / CONFIG)


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that the config in `folder` names; reads no weights."""
    return _named_dtype(_config(folder))


def _named_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype that a config names, its text part first; float32 where it names none."""
    dtype = config.get_text_config().dtype or config.dtype or torch.float32
    return validation.float_dtype("the config's dtype", dtype)
