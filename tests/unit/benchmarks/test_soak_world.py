"""Short rounds of the soak over HTTP: a server, and two replicas. A wrong answer or a leak is noticed."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

ROOT = Path(__file__).parents[3]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the soak by their last names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import soak_checks
    import soak_model
    import soak_replicas
    import soak_requests
    import soak_server

    return {
        "model": soak_model,
        "replicas": soak_replicas,
        "requests": soak_requests,
        "server": soak_server,
        "checks": soak_checks,
    }


@pytest.mark.parametrize("kind", ["server", "replicas"])
def test_a_short_round(soak: Any, kind: str) -> None:
    tally = soak[kind].run_round(3, 1.5, "cpu")
    assert tally.mismatches == []
    assert tally.requests > 0
    assert tally.comparisons > 0
    assert tally.tokens_compared >= tally.comparisons
    if kind == "replicas":
        assert tally.events["hand-overs in the end"] == 2
        assert tally.events["tokens resumed behind hand-overs"] > 0


def test_a_wrong_answer_is_noticed(soak: Any) -> None:
    requests, model = soak["requests"], soak["model"]
    ask = model.Ask((1, 2, 3), 4, 0)
    expected = model.Oracle("Mamba-2").answer(ask)
    query = requests.Query("/v1/completions", {"return_token_ids": True}, "x", None, [ask.prompt], ask)
    tokens = list(expected.tokens)

    def judged(tokens: list[int], log_probs: list[float], reason: str = "length") -> str:
        choice = requests.Choice(model.text_of(tokens), tokens, log_probs, [], reason)
        return str(requests.wrong_answer(query, choice, expected, ask))

    log_probs = list(expected.log_probs)
    assert judged(tokens, log_probs) == ""
    assert "expected" in judged([*tokens[:3], (tokens[3] + 1) % 256], log_probs)
    assert "log-probs" in judged(tokens, [*log_probs[:3], log_probs[3] + 1e-8])
    assert "ends with stop" in judged(tokens, log_probs, "stop")


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("abcd", ["cd"], ("ab", True)),
        ("abcd", ["x"], ("abcd", False)),
        ("abcd", ["bc", "abcd", "b"], ("a", True)),
        ("", ["a"], ("", False)),
    ],
)
def test_the_text_before_a_stop_string(soak: Any, text: str, stops: list[str], before: object) -> None:
    assert soak["requests"].before_stop(text, stops) == before


def test_what_is_left_is_noticed(soak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = soak["checks"]
    monkeypatch.setattr(checks.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(checks.gc, "collect", lambda: None)
    watch = checks.Watch()
    assert watch.left() == ""
    with Path(__file__).open():
        assert "files" in watch.left()
    assert watch.left() == ""
