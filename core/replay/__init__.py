"""What a cache would have resumed: traces, served by the engine's bookkeeping without a model.

May import `engines` (the scheduler), `contexts`, `cache`, and `hf`, whose state sizes it reads.
"""

from .generate import generate
from .ours import replay
from .read_trace import read_trace
from .setting import model_shape

__all__ = ["generate", "model_shape", "read_trace", "replay"]
