"""Models of transformers, served: `mambaslots.hf.load(folder_or_name)`. Needs the extra `mambaslots[hf]`.

A model's modules stay those of transformers; their forwards are replaced by ones over a step's sequences.

load, tokenizer                      a model's folder: config and weights; tokenizer and chat template
weight_files, weight_sources         its tensors, and the modules to which they go
architectures, served_model          which architectures are served, and such a model as an engine calls it
current_step, mixer_forwards         a step's sequences while the model runs; mixers that read cached states
layer_forwards, fused_modules        layers, norms, attention and MLPs in fewer launches; experts
joint_linear                         linear modules of one input, multiplied as one
moved_hooks                          private parts of transformers that another version lacks
split                                a rank's part of each weight
"""

from importlib.util import find_spec

if not find_spec("transformers"):
    raise ImportError("mambaslots.hf needs transformers: pip install 'mambaslots[hf]'")

from ..files import ModelFolderError
from .moved_hooks import moved_hook

try:
    from .load import load
    from .served_model import ServedModel
except ImportError as error:
    if moved := moved_hook(error):
        raise moved from error
    raise

__all__ = ["load", "ServedModel", "ModelFolderError"]
