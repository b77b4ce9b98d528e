"""A checkpoint's weights, put into a model that was built on the device "meta"."""

import logging
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .checkpoint import Checkpoint, Tensors
from .float8 import Float8Checkpoint
from .weight_sources import Parts, WeightSources, listed

logger = logging.getLogger(__name__)


def load_weights(
    model: PreTrainedModel,
    folder: Path,
    blocks: tuple[int, int] | None,
    device: torch.device,
    parts: Parts | None = None,
) -> None:
    """Give `model` the weights of the checkpoint in `folder`.

    All names and shapes are checked before the first weight is read. Weights are read one after another: at
    no time more is allocated than the weights, and once more the largest tensor that is made of several or
    stored in another dtype.

    Args:
        model: a transformers model whose tensors are on the device "meta"; gets new ones, of the same dtypes.
            Buffers that no checkpoint holds stay as they are. After an error the model is of no use.
        folder: the checkpoint's.
        blocks: what `float8.block_size` says of the checkpoint.
        device: where the weights go.
        parts: what this rank keeps of the weights that ranks split, by their names; None for a weight of
            another rank, which stays on the device "meta".

    Raises:
        CheckpointError: the files are not what `model` needs; the message names the file or the weight.
    """
    with ExitStack() as stack:
        stored = stack.enter_context(Checkpoint(folder))
        checkpoint: Tensors = stored if blocks is None else Float8Checkpoint(stored, blocks)
        sources = WeightSources.find(model, checkpoint)
        if sources.ignored:
            logger.info("%s: not loaded, not of the text model: %s", folder, listed(sources.ignored))
        if isinstance(checkpoint, Float8Checkpoint) and checkpoint.activation_scales:
            scales = listed(checkpoint.activation_scales)
            logger.info("%s: not used, activations are not quantised: %s", folder, scales)
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        for source in sources.sources:
            weights = source.weights(model, checkpoint, device, dtypes[source.target], parts or {})
            for name in tuple(weights):
                _place(model, name, weights.pop(name))
        stored_bytes = stored.num_bytes
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
        module._parameters[leaf] = tensor = nn.Parameter(tensor, requires_grad=False)
