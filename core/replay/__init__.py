"""What a cache would have resumed: traces, served by the engine's bookkeeping without a model.

A replay runs the scheduler of `engines` over `contexts` and their cache. `hf` reads the config of a model's
folder, for `setting`.

trace, read_trace                    requests in their order, and a line of a file; files
recorder, hashed_requests, generate  an engine's own traffic as hashes; tokens for hashes; made-up traces
setting                              sizes of a model, memory and limits
engine_replay, compared_caches       one replay; the caches that are compared
report                               the table, and how much memory to give
"""

from typing import TYPE_CHECKING

from ..lazy_names import importer
from .generate import generate
from .read_trace import read_trace
from .setting import model_shape

if TYPE_CHECKING:
    from .compared_caches import replay

__all__ = ["generate", "model_shape", "read_trace", "replay"]

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = importer(globals())
