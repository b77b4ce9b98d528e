"""The line that says how far `generate` and `score` are."""

import io
import sys

import mambaslots as ms
import pytest
from mambaslots.inference.engines import engine_observer as module


class Clock:
    """Seconds that pass at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_a_terminal_has_one_line(engine: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "monotonic", Clock(0.25))
    monkeypatch.setattr(sys, "stderr", Terminal())
    results = engine.generate([[1, 2], [3, 4, 5]], PARAMS, progress=True)
    first, *_, last = sys.stderr.getvalue().split("\r")  # type: ignore[attr-defined]
    assert first.startswith("0 of 2 done, 2 tokens generated, ")
    assert last.startswith("2 of 2 done, 6 tokens generated, ")
    assert last.rstrip(" \n").endswith(" tokens/s")
    assert last.endswith("\n")
    plain = engine.generate([[1, 2], [3, 4, 5]], PARAMS)
    assert [each.tokens for each in results] == [each.tokens for each in plain]


def test_a_file_has_a_line_every_ten_seconds(
    engine: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "monotonic", Clock(0.25))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    engine.score([list(range(200))], progress=True)
    lines = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split(",")[0] for line in lines[-1:]] == ["1 of 1 done"]
    assert len(lines) == 1


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [None, Closed()])
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
    assert capsys.readouterr().err.startswith("0 of 0 done")
    for call in (engine.generate, engine.score):
        with pytest.raises(ValueError, match="progress is 1; accepted: "):
            call([[1, 2]], progress=1)  # type: ignore[operator]
