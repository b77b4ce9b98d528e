"""What a cache would have resumed: traces, served by the engine's bookkeeping without a model.

trace, read_trace, trace_line        requests in their order, from files
recorder, hashed_requests, generate  an engine's own traffic as hashes; tokens for hashes; made-up traces
setting, engine_replay, cache_rows   sizes and memory; one replay; the policies that are compared
report                               the table, and how much memory to give
"""

from .cache_rows import replay
from .generate import generate
from .read_trace import read_trace
from .setting import model_shape

__all__ = ["generate", "model_shape", "read_trace", "replay"]
