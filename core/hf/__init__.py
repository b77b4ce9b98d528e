"""Models of transformers, served: `mambaslots.hf.load(folder_or_name)`. Needs the extra `mambaslots[hf]`."""

from importlib.util import find_spec

if not find_spec("transformers"):
    raise ImportError("mambaslots.hf needs transformers: pip install 'mambaslots[hf]'")

from ..files import CheckpointError
from .hub import checkpoint_folder
from .load import load, stored_dtype
from .served_model import ServedModel
from .text import load_text

__all__ = ["load", "stored_dtype", "load_text", "checkpoint_folder", "ServedModel", "CheckpointError"]
