"""The examples of docs/distributed.md for torchrun, on the ranks that are here.

tests/unit/net/test_docs_example.py starts them as a reader does.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from oracle.distributed_world import World
from oracle.texts import ROOT, Block, blocks_of

EXAMPLES = [
    block for block in blocks_of(ROOT / "docs/distributed.md") if block.words == ["python", "torchrun"]
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.name)
def test_an_example_for_several_ranks_runs(
    world: World, folder: Path, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The group of all ranks is there, and the tests after this one need it.
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block.code, block.name, "exec"), names)
    results = names.get("results") or [names[name] for name in ("result",) if name in names]
    assert all((len(result.tokens), result.finish_reason) == (16, "length") for result in results)
    assert results or world.rank > 0
    world.gathered(None)
    assert len(list((folder / "prefixes").glob("*.safetensors"))) == world.size
