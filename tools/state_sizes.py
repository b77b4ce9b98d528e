"""How large a state is compared with the KV of a token, computed from configs alone.

`python tools/state_sizes.py FOLDER_OR_CONFIG.json ...` prints a table.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mambaslots.hf import architectures
from mambaslots.replay.setting import name_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class StateSizes:
    """What one sequence of a model costs in the cache: bytes of one state, and of the KV of a token."""

    name: str
    model_type: str
    dtype: torch.dtype
    state_bytes: int
    kv_bytes_per_token: int

    @property
    def num_equal_tokens(self) -> float | None:
        """The tokens whose KV is as large as one state; None for a model without attention."""
        return self.state_bytes / self.kv_bytes_per_token if self.kv_bytes_per_token else None


def state_sizes(name: str, config: "PreTrainedConfig", dtype: torch.dtype | None = None) -> StateSizes:
    """The sizes of a model of this config, without weights; `dtype` None: the config's, or bfloat16."""
    text: Any = architectures.text_config(config)
    kept = dtype or text.dtype or config.dtype or torch.bfloat16
    spec = architectures.state_spec(text, kept)
    return StateSizes(name, text.model_type, kept, spec.state_bytes, spec.kv_block_bytes(1))


def table(rows: Sequence[StateSizes]) -> str:
    """The sizes, one model a line; MB are 10**6 bytes."""
    width = max(len("model"), *(len(row.name) for row in rows))
    head = f"{'architecture':18}  {'state, MB':>9}  {'KV, bytes/token':>15}  equal tokens"
    lines = [f"{'model':{width}}  {head}"]
    for row in rows:
        tokens = row.num_equal_tokens
        equal = "no KV" if tokens is None else f"{tokens:,.0f}"
        lines.append(
            f"{row.name:{width}}  {row.model_type:18}  {row.state_bytes / 1e6:9.1f}  "
            f"{row.kv_bytes_per_token:15,}  {equal:>12}"
        )
    return "\n".join(lines)


def main(paths: Sequence[str]) -> int:
    """Print the table of the models at `paths`; the exit status."""
    if not paths:
        print("usage: python tools/state_sizes.py FOLDER_OR_CONFIG.json ...", file=sys.stderr)
        return 2
    try:
        rows = [state_sizes(name_of(path), architectures.read_config(path)) for path in map(Path, paths)]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
