"""The longest sequence that a context allows costs a step of short requests nothing."""

import tracemalloc
from typing import Any

import mambaslots as ms
import numpy as np
import pytest
from mambaslots.inference.contexts.cache.hashing import PrefixHashChain
from mambaslots.inference.contexts.cache.paths import CachedPath
from oracle.serving import assert_answers, random_tokens, small_engine

BLOCK = 8
PROMPTS = [random_tokens(13, seed=seed) for seed in range(16)]
PARAMS = ms.SamplingParams(max_tokens=12, return_log_probs=True)


def bytes_of_a_step(max_sequence_length: int) -> int:
    """The most memory that a decode step of 16 requests takes at once, for a while."""
    engine = small_engine(
        max_sequence_length=max_sequence_length, max_requests=16, max_tokens_per_step=256, num_kv_blocks=2**15
    )
    requests = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    results = {}
    peaks = []
    for _ in range(4):
        engine.step()
    while engine.has_unfinished_requests():
        tracemalloc.start()
        report = engine.step()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        results |= {result.request_id: result for result in report.finished}
    assert engine.context.admission.block_table.shape[1] == min(2**15, max_sequence_length // BLOCK)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert_answers(prompt, results[request])
    return max(peaks)


def test_a_step_copies_no_whole_rows_of_the_block_table() -> None:
    short, long = bytes_of_a_step(256), bytes_of_a_step(2**18)
    assert long < 1.5 * short + 2**14


class RecordedRow:
    """A row of a block table that records how many entries are written."""

    def __init__(self, num_blocks: int) -> None:
        self._row = np.full(num_blocks, -1)
        self.num_written = 0

    def __setitem__(self, index: slice, blocks: Any) -> None:
        self.num_written += len(self._row[index])
        self._row[index] = blocks

    def __getitem__(self, index: slice) -> Any:
        return self._row[index]


@pytest.mark.parametrize(("first", "blocks"), [(0, []), (2, [7, 8, 9]), (4, []), (1, [5])])
def test_blocks_are_replaced_without_a_look_at_the_rest_of_the_row(first: int, blocks: list[int]) -> None:
    row: Any = RecordedRow(2**20)
    path = CachedPath(PrefixHashChain(BLOCK), ms.CheckpointPlan(), row, caches=True)
    path.append([3, 1, 4, 1])
    path.replace(first, blocks)
    assert path.blocks == [3, 1, 4, 1][:first] + blocks
    path.check_integrity()
    assert row.num_written <= 4 + 4 + len(blocks)
