"""A checkpoint's weights, put into a model that was built on the device "meta"."""

import json
import logging
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .checkpoint import Checkpoint, CheckpointError, Tensors
from .float8 import Float8Checkpoint, block_size
from .weight_sources import WeightSources

logger = logging.getLogger(__name__)


def read_config(folder: Path) -> dict[str, Any]:
    """The object in `config.json` of `folder`.

    Raises:
        CheckpointError: the file is missing or holds something else.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no config.json") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return config


def load_weights(
    model: PreTrainedModel, folder: Path, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Give `model` the weights of the checkpoint in `folder`.

    All names and shapes are checked before the first weight is read. Weights are read one after another: at no
    time more is allocated than the weights, and once more the largest tensor that is made of several.

    Args:
        model: a transformers model whose tensors are on the device "meta"; gets new ones. After an error it is
            of no use.
        folder: the checkpoint's.
        config: the checkpoint's `config.json`.
        device: where the weights go.
        dtype: of the weights, except those that transformers keeps in another for this class of models.

    Raises:
        CheckpointError: the files are not what `model` needs; the message names the file or the weight.
    """
    blocks = block_size(folder, config)
    with ExitStack() as stack:
        stored = stack.enter_context(Checkpoint(folder))
        checkpoint: Tensors = stored if blocks is None else Float8Checkpoint(stored, blocks)
        sources = WeightSources.find(model, checkpoint)
        if sources.ignored:
            logger.info("%s: not loaded, not of the text model: %s", folder, ", ".join(sources.ignored))
        dtypes = _Dtypes(model, dtype)
        for source in sources.sources:
            for name, tensor in source.weights(model, checkpoint, device, dtypes.of(source.target)).items():
                _place(model, name, tensor)
                del tensor
        stored_bytes = stored.num_bytes
    model.tie_weights(missing_keys=set(sources.missing), recompute_mapping=False)
    _fill_buffers(model, device)
    if blocks is not None:
        in_memory = sum(weight.nbytes for weight in model.parameters())
        logger.info(
            "%s: FP8 in blocks of %d x %d, %d bytes on disk; loaded as %s, %d bytes in memory",
            folder, *blocks, stored_bytes, dtype, in_memory,
        )  # fmt: skip


class _Dtypes:
    """The dtype of each weight, where the model is to have `dtype`."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._built = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        patterns = model._get_dtype_plan(dtype)
        self._plan = {pattern.replace("*", ".*"): wide for pattern, wide in patterns.items()}

    def of(self, name: str) -> torch.dtype:
        for pattern, wide in self._plan.items():
            if re.search(pattern, name):
                return wide
        return self._built[name]


def _place(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = tensor = nn.Parameter(tensor, requires_grad=False)
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds, for example the frequencies of rotary embeddings."""
    made = {}
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            empty = torch.empty_like(buffer, device=device)
            made[name] = empty.fill_(math.nan) if empty.is_floating_point() else empty.zero_()
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = empty
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    model.initialize_weights()  # leaves alone the tensors that `_place` has marked
    for name in made:
        value = model.get_buffer(name)
        if value.is_floating_point() and value.isnan().any():
            raise CheckpointError(f"{type(model).__name__} does not say what its buffer {name} holds")
