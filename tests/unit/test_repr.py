"""What objects print as: one short line, without the user's tokens and without secrets."""

from pathlib import Path

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.cache.pool_stats import ComputeReason
from mambaslots.params_and_results import GeneratedToken
from mambaslots.text import ByteTokenizer, ChatTemplate, GenerationDefaults
from mambaslots.text.codec import MarkedPrompt

SALT = "the salt of a tenant"
PROMPT = [77] * 2000


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Names to what was printed while one request ran, one waited, and two had ended."""
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0)
    config = ms.InferenceConfig(
        block_size_tokens=32, max_requests=1, max_tokens_per_step=2048, num_kv_blocks=256, num_mamba_slots=8,
        salt_key="a key that must not be read",
    )  # fmt: skip
    engine = ms.DynamicInferenceEngine(model, config)
    params = ms.SamplingParams(max_tokens=20, return_log_probs=True)
    (result,) = engine.generate([PROMPT], params)
    (scored,) = engine.score([PROMPT])
    engine.add_request(PROMPT, params, cache_salt=SALT)
    engine.add_request(PROMPT, params)
    report = engine.step()
    values = {
        "engine": engine, "context": engine.context, "stats": engine.stats(), "cache": engine.stats().cache,
        "result": result, "score": scored, "request": engine.context.requests[0], "report": report,
        "stream": engine.stream(PROMPT), "salt key": engine.salt_key, "marked": MarkedPrompt(PROMPT, (7,)),
        "config": config,
    }  # fmt: skip
    return {name: repr(value) for name, value in values.items()}


def test_one_short_line(printed: dict[str, str]) -> None:
    for name, text in printed.items():
        assert "\n" not in text
        assert len(text) <= (1000 if name == "config" else 320), name
        assert " object at 0x" not in text, name


def test_no_token_of_a_prompt_and_no_secret(printed: dict[str, str]) -> None:
    for name, text in printed.items():
        assert "77, 77" not in text, name
        assert SALT not in text
        assert "must not be" not in text


def test_no_token_of_a_short_answer() -> None:
    found = GeneratedToken(7731, -0.5)
    reasons: dict[ComputeReason, int] = {"never_seen": 5}
    result = ms.RequestResult(3, [7731] * 2, [-0.5] * 2, None, None, 5, 0, reasons, 0, None, "length")
    report = ms.StepReport((3,), (result,), {3: (found, found)})
    assert repr(result) == (
        "RequestResult(request_id=3, tokens=<2 items>, log_probs=<2 items>, num_prompt_tokens=5, "
        "num_resumed_tokens=0, computed_by_reason={'never_seen': 5}, num_recomputed_tokens=0, "
        "finish_reason='length')"
    )
    assert repr(report) == f"StepReport(admitted=(3,), finished=({result!r},), tokens=<1 entry>)"
    assert repr(MarkedPrompt([7731], (1,))) == "MarkedPrompt(tokens=<1 item>, marks=(1,))"


def test_what_a_line_says(printed: dict[str, str]) -> None:
    assert printed["engine"] == (
        "<DynamicInferenceEngine: HybridLM on cpu; 1 running, 2 waiting; "
        f"{printed['cache'].rpartition('; ')[2].removesuffix('>')}>"
    )
    assert printed["context"].startswith("<DynamicInferenceContext: on cpu; 1 of 1 rows; ")
    assert printed["stats"].startswith("<EngineStats: 1 running (0 paused), 1 waiting; <CacheStats: ")
    assert printed["cache"].startswith("<CacheStats: 3 requests, 0 of 5999 prompt tokens resumed, computed: ")
    assert "of 9 slots hold a state and 1 are live, of 256 KV blocks" in printed["cache"]
    assert printed["request"] == ("<DynamicInferenceRequest 1: 2000 prompt tokens, 1 generated, running>")
    assert printed["result"].startswith(
        "RequestResult(request_id=0, tokens=<20 items>, log_probs=<20 items>, "
    )
    assert printed["result"].endswith("finish_reason='length')")
    assert printed["score"].startswith("ScoreResult(log_probs=<1999 items>, start=1, num_tokens=2000, ")
    assert printed["marked"] == "MarkedPrompt(tokens=<2000 items>, marks=(7,))"


def test_a_new_and_a_suspended_engine() -> None:
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0)
    config = ms.InferenceConfig(block_size_tokens=32, num_kv_blocks=256, num_mamba_slots=8, max_requests=4)
    engine = ms.DynamicInferenceEngine(model, config)
    pools = "0 of 12 slots hold a state, of 256 KV blocks 0 held and 0 cached"
    expected = f"<DynamicInferenceEngine: HybridLM on cpu; 0 running, 0 waiting; {pools}>"
    assert repr(engine) == expected
    assert repr(engine.stats().cache) == (
        f"<CacheStats: 0 requests, 0 of 0 prompt tokens resumed, computed: none; {pools}>"
    )
    engine.suspend()
    assert repr(engine) == expected


def test_a_loaded_model() -> None:
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0)
    for text, said in (
        (None, "no tokenizer"),
        (ms.TextCodec(ByteTokenizer({})), "tokenizer, no chat template"),
        (ms.TextCodec(ByteTokenizer({}), ChatTemplate("")), "tokenizer, chat template"),
    ):
        loaded = ms.LoadedModel(text, GenerationDefaults(), Path("a/folder"), model)
        assert repr(loaded) == f"<LoadedModel: HybridLM from a/folder, {said}>"
