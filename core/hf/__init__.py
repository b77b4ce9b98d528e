"""Models of transformers, served: `mambaslots.hf.load(folder_or_name)`. Needs the extra `mambaslots[hf]`.

May import `models` (the steps of layers), `text`, `contexts`, `kernels`; no engine.
"""

from importlib.util import find_spec

if not find_spec("transformers"):
    raise ImportError("mambaslots.hf needs transformers: pip install 'mambaslots[hf]'")

from ..files import CheckpointError
from ..version import moved_hook

try:
    from .load import load
    from .served_model import ServedModel
except ImportError as error:
    if moved := moved_hook(error):
        raise moved from error
    raise

__all__ = ["load", "ServedModel", "CheckpointError"]
