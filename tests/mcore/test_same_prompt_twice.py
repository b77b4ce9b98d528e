"""The example of docs/megatron.md as a script; tests/unit/test_docs.py runs the page's own block."""

import mambaslots.mcore
import pytest
from same_prompt_twice import serve_twice

PROMPT = list(range(97))


@pytest.mark.long
def test_stock_answers_differ_and_ours_are_the_first(
    machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = serve_twice("stock", PROMPT, num_tokens=4, seed=1)
    with mambaslots.mcore.installed():
        ours = serve_twice("ours", PROMPT, num_tokens=4, seed=1)
    assert wrong != right
    assert ours == [right, right]
    resumed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line[0] != "="]
    assert resumed == ["0", "64", "0", "96"]
