"""The example in small: its table is true, and mambaslots' answers are those without a cache."""

import argparse
import json
from dataclasses import replace

import mcore_report
import mcore_rig
import mcore_runs
import pytest
from conversation_texts import conversations

LOAD = replace(mcore_runs.LOADS["tiny"], system_prompt=25, answer=12)
"""The first prompt has 86 bytes: the answer reaches the third block's end, and little beyond."""


@pytest.mark.long
def test_conversations_with_stock_and_with_the_drop_in(
    machine: None, model: mcore_rig.HybridModel, capsys: pytest.CaptureFixture[str]
) -> None:
    host = mcore_runs.Host(model, conversations(1, 2), LOAD)
    without = host.reference()
    stock, ours = host.cached(without)
    assert ours.identical(without) == ours.requests == 2
    assert without.num_resumed_tokens == 0
    assert ours.num_resumed_tokens == ours.stats.num_resumed_tokens > stock.num_resumed_tokens
    mcore_runs.agree_on_all_ranks([without, stock, ours])
    args = argparse.Namespace(shape="tiny", dtype="float32", conversations=1, turns=2, json=None)
    written = json.loads(json.dumps(mcore_report.figures(args, without, [stock, ours])))["runs"]
    assert [run["identical_answers"] for run in written] == [2, stock.identical(without), 2]
    capsys.readouterr()
    mcore_report.print_table(without, stock, ours)
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["no", "cache", "stock", "mambaslots"]
    assert table[3].split() == ["resumed", "0", str(stock.num_resumed_tokens), str(ours.num_resumed_tokens)]
