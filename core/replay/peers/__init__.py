"""Other systems' prefix caches, emulated as rows of the table. Nothing here is used by the engine."""

from ..setting import ReplayRow
from .marconi import MarconiRow
from .plans import TakenStates
from .rows import BlockRow
from .sglang import SGLangRow
from .states import PathCapSlots
from .stock import StockRow
from .vllm import VLLMRow

__all__ = ["PEERS"]

_USED_NODE = TakenStates(tail=True, branch=True, chunk_ends=True, decode=True)

PEERS: tuple[ReplayRow, ...] = (
    StockRow(),
    BlockRow(
        "every-block", "a state at every block of prompts and answers, LRU by use", TakenStates(every=True)
    ),
    BlockRow("tail", "the state at the last block of each prompt, LRU by use", TakenStates(tail=True)),
    BlockRow(
        "used-node-cap-3",
        "tail, branch, chunk ends and last decode state, LRU by use of the state, at most 3 a path",
        _USED_NODE,
        lambda index, capacity: PathCapSlots(index, capacity, 3),
    ),
    BlockRow(
        "used-node", "tail, branch, chunk ends and last decode state, LRU by use of the state", _USED_NODE
    ),
    BlockRow("tail-branch", "tail and branch, LRU by use of the state", TakenStates(tail=True, branch=True)),
    MarconiRow(),
    SGLangRow(),
    SGLangRow("sglang-cap-3", "the same with --mamba-max-states-per-path 3", max_states_per_path=3),
    SGLangRow("sglang-coverage", "the same with eviction that thins paths (pull request 38000)", thins=True),
    VLLMRow(),
)
"""A row each; every one takes settings with `state_gb` and `kv_gb`, and with `total_gb`."""
