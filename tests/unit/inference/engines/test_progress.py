"""The bar that shows how far `generate` and `score` are."""

import io
import sys

import mambaslots as ms
import pytest


@pytest.fixture(scope="module")
def engine() -> ms.DynamicInferenceEngine:
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0)
    config = ms.InferenceConfig(
        block_size_tokens=32, max_tokens_per_step=64, num_kv_blocks=64, num_mamba_slots=8
    )
    return ms.DynamicInferenceEngine(model, config)


PARAMS = ms.SamplingParams(max_tokens=3)


def test_without_the_option_nothing_is_written(
    engine: ms.DynamicInferenceEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.generate([[1, 2]], PARAMS)
    engine.score([[1, 2]])
    assert capsys.readouterr() == ("", "")


def test_the_bar_counts_requests_and_tokens(
    engine: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    results = engine.generate([[1, 2], [3, 4, 5]], PARAMS, progress=True)
    engine.score([list(range(200))], progress=True)
    both, one, _ = sys.stderr.getvalue().split("\n")  # type: ignore[attr-defined]
    first, *_, last = both.split("\r")[1:]
    assert "0/2 [" in first
    assert "2/2 [" in last
    assert "tokens=6" in last
    assert "1/1 [" in one
    plain = engine.generate([[1, 2], [3, 4, 5]], PARAMS)
    assert [each.tokens for each in results] == [each.tokens for each in plain]


class Failing(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize(
    "stream", [None, Failing(ValueError("closed")), Failing(BrokenPipeError(32, "broken"))]
)
def test_a_stderr_that_cannot_be_written_fails_nothing(
    engine: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    (result,) = engine.generate([[1, 2]], PARAMS, progress=True)
    assert len(result.tokens) == 3
    engine.check_integrity()


def test_no_prompts_and_a_wrong_option(
    engine: ms.DynamicInferenceEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine.generate([], progress=True) == []
    assert capsys.readouterr().err.startswith("\r0request [")
    for call in (engine.generate, engine.score):
        with pytest.raises(ValueError, match="progress is 1; accepted: "):
            call([[1, 2]], progress=1)  # type: ignore[operator]
