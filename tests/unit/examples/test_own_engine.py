"""The example of another engine around `PrefixCache`: right as it stands, wrong where a rule is broken."""

import own_engine
import pytest
import torch
from oracle.fresh_process import run_script


def test_as_a_user_starts_it() -> None:
    done = run_script("examples/own_engine.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "prompt tokens 852, resumed 544, computed 308",
        "identical to no cache: yes",
    ]


def test_a_state_that_is_not_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        lambda self, source: self if self.shape == (own_engine.WIDTH,) * 2 else copy(self, source),
    )
    assert own_engine.main() == 1


def test_with_few_pages_requests_wait_and_the_answers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_engine, "PAGES", 26)
    model = own_engine.Model()
    cached, plain = (own_engine.Engine(model, cached=cached) for cached in (True, False))
    assert own_engine.conversations(cached) == own_engine.conversations(plain)
    assert cached.resumed > 0
    cached.cache.check_integrity([])
