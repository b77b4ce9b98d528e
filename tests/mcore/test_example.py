"""The example in small: its table is true, and mambaslots' answers are those without a cache."""

import json

import mcore_dynamic_inference as example
import pytest
from conversation_texts import conversations


@pytest.mark.long
def test_conversations_with_stock_and_with_the_drop_in(
    machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first prompt has 86 bytes: the answer reaches the third block's end, and little beyond.
    monkeypatch.setattr(example, "SYSTEM_PROMPT_BYTES", 25)
    monkeypatch.setattr(example, "ANSWER_TOKENS", 12)
    without, stock, ours = example.three_runs(conversations(1, 2))
    assert ours.identical(without) == ours.requests == 2
    assert without.num_resumed_tokens == 0
    assert ours.num_resumed_tokens == ours.stats.num_resumed_tokens > stock.num_resumed_tokens
    assert (
        json.loads(json.dumps(example.figures(without, stock, ours)))["mambaslots"]["identical_answers"] == 2
    )
    capsys.readouterr()
    example.print_table(without, stock, ours)
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["no", "cache", "stock", "mambaslots"]
    assert table[3].split() == ["resumed", "0", str(stock.num_resumed_tokens), str(ours.num_resumed_tokens)]
