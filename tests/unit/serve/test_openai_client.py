"""The official client against the demo's model over loopback: answers are those of the engine itself."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import mambaslots as ms
import openai
import pytest
import torch
from oracle.fleet import Replicas
from oracle.served import TINY_CODE, Served, serving, serving_replicas, small_config

MODEL = "tiny-code"
CHAT: Any = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Write the function `close(self)`."},
]
PROMPT = "def close(self):\n    "
LENGTH = 16


@pytest.fixture(scope="module", params=["engine", pytest.param("replica", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server over one engine, or over a replica that is lost in the middle of every other answer."""
    loaded, config = ms.load(TINY_CODE, dtype=torch.float64), small_config()
    if request.param == "engine":
        with serving(loaded, config, model_name=MODEL) as served:
            yield served
    else:
        replicas = Replicas(
            [ms.DynamicInferenceEngine(loaded.model, config)],
            loss_of=lambda request, number: None if request.lost else number % 11,
        )
        with serving_replicas(replicas, loaded, config, model_name=MODEL) as served:
            yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def expected(served: Served, prompts: list[list[int]], **sampling: Any) -> list[ms.RequestResult]:
    """What the engine itself answers."""
    params = served.loaded.sampling_params(**({"max_tokens": LENGTH} | sampling))
    return served.reference.generate(prompts, params)


def test_a_chat(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=LENGTH, seed=5, logprobs=True
    )
    prompt = served.loaded.codec.encode_chat(CHAT)
    (result,) = expected(served, [prompt], seed=5, return_log_probs=True)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == served.loaded.codec.decode(result.tokens)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert [token.logprob for token in tokens] == pytest.approx(result.log_probs, abs=1e-9)
    assert "".join(token.token for token in tokens) == choice.message.content
    assert [bytes(token.bytes or []).decode() for token in tokens] == [token.token for token in tokens]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == LENGTH
    assert answer.usage.total_tokens == len(prompt) + LENGTH
    assert (answer.object, answer.model) == ("chat.completion", MODEL)


def test_a_chat_that_is_streamed_and_resumed(served: Served, client: openai.OpenAI) -> None:
    prompt = served.loaded.codec.encode_chat(CHAT)
    (result,) = expected(served, [prompt], temperature=0)
    for turn in range(2):
        stream = client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            max_tokens=LENGTH,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        assert "".join(deltas) == served.loaded.codec.decode(result.tokens)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert reasons == [None] * (len(chunks) - 2) + ["length"]
        assert all(chunk.usage is None for chunk in chunks[:-1])
        last = chunks[-1]
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == LENGTH
        assert last.usage.prompt_tokens_details is not None
        cached = last.usage.prompt_tokens_details.cached_tokens
        assert turn == 0 or cached == (len(prompt) - 1) // 32 * 32


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_likeliest_tokens(served: Served, client: openai.OpenAI, streams: bool) -> None:
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, seed=2, logprobs=True, top_logprobs=3, stream=streams
    )
    choices = [chunk.choices[0] for chunk in answer] if streams else answer.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    prompt = served.loaded.codec.encode_chat(CHAT)
    sampling = {"max_tokens": 8, "return_log_probs": True, "num_top_log_probs": 3}
    (result,) = expected(served, [prompt], seed=2, **sampling)
    assert result.top_log_probs is not None
    assert [token.logprob for token in tokens] == pytest.approx(result.log_probs, abs=1e-9)
    for token, tops in zip(tokens, result.top_log_probs, strict=True):
        assert [top.token for top in token.top_logprobs] == [
            served.loaded.codec.decode([top]) for top, _ in tops
        ]
        assert [top.logprob for top in token.top_logprobs] == pytest.approx([p for _, p in tops], abs=1e-9)
    legacy = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, seed=2, logprobs=3)
    assert legacy.choices[0].logprobs is not None
    (by_text,) = legacy.choices[0].logprobs.top_logprobs or []
    assert by_text == pytest.approx({top.token: top.logprob for top in tokens[0].top_logprobs}, abs=1e-9)


def test_a_completion_of_text(served: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=LENGTH, temperature=0, logprobs=0, stop=None, user="a user"
    )
    (result,) = expected(served, [served.loaded.codec.encode(PROMPT)], temperature=0, return_log_probs=True)
    choice = answer.choices[0]
    assert choice.text == served.loaded.codec.decode(result.tokens)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(result.log_probs, abs=1e-9)
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert "".join(tokens) == choice.text
    assert all(choice.text[at:].startswith(token) for token, at in zip(tokens, offsets, strict=True))


@pytest.mark.parametrize("as_tokens", [pytest.param(False, marks=pytest.mark.long), True])
def test_several_prompts_and_several_answers(served: Served, client: openai.OpenAI, as_tokens: bool) -> None:
    texts = [PROMPT, "import os\n"]
    prompts = [served.loaded.codec.encode(text) for text in texts]
    answer = client.completions.create(
        model=MODEL, prompt=prompts if as_tokens else texts, max_tokens=8, n=2, seed=11
    )
    results = [
        expected(served, [prompt], max_tokens=8, seed=seed)[0] for prompt in prompts for seed in (11, 12)
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [
        served.loaded.codec.decode(r.tokens) for r in results
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == sum(len(result.tokens) for result in results)


def test_several_answers_in_one_stream(served: Served, client: openai.OpenAI) -> None:
    prompt = served.loaded.codec.encode(PROMPT)
    texts: dict[int, str] = {0: "", 1: ""}
    reasons = {}
    for chunk in client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, n=2, seed=3, stream=True
    ):
        choice = chunk.choices[0]
        assert choice.index not in reasons
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    for number, text in texts.items():
        (result,) = expected(served, [prompt], max_tokens=8, seed=3 + number)
        assert text == served.loaded.codec.decode(result.tokens)
    assert set(reasons) == {0, 1}


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_stop_string(served: Served, client: openai.OpenAI, streams: bool) -> None:
    (result,) = expected(served, [served.loaded.codec.encode(PROMPT)], temperature=0)
    whole = served.loaded.codec.decode(result.tokens)
    stop = whole[6:9]
    before = whole[: whole.index(stop)]
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=LENGTH, temperature=0, logprobs=0, stop=[stop, "\0"],
        stream=streams, extra_body={"return_token_ids": True},
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in answer] if streams else answer.choices
    assert "".join(choice.text for choice in choices) == before
    assert choices[-1].finish_reason == "stop"
    ids = [token for choice in choices for token in choice.model_extra["token_ids"]]
    assert ids == list(before.encode())  # of the stop string neither text nor tokens
    names = [name for choice in choices if choice.logprobs is not None for name in choice.logprobs.tokens]
    assert "".join(names) == before


TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {}}}
SETTINGS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "min_p": {"temperature": 1.5, "min_p": 0.2, "seed": 3},
    "bias": {"logit_bias": {"32": -100, "65": 5}},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [32, 10]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_model_cards_recommend_are_those_of_the_engine(
    served: Served, client: openai.OpenAI, name: str
) -> None:
    settings = {"temperature": 0} | SETTINGS[name]
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=LENGTH, extra_body=settings)
    biases = {int(token): bias for token, bias in settings.get("logit_bias", {}).items()}
    sampling = settings | {"logit_bias": biases}
    stops = served.loaded.generation.params.stop_token_ids
    sampling["stop_token_ids"] = (*stops, *settings.get("stop_token_ids", ()))
    prompts = [served.loaded.codec.encode(PROMPT)]
    (result,) = expected(served, prompts, **sampling)
    (plain,) = expected(served, prompts, temperature=0)
    assert answer.choices[0].text == served.loaded.codec.decode(result.tokens)
    assert result.tokens != plain.tokens, "the settings change something here"


BODIES: dict[str, dict[str, Any]] = {
    "guidellm 0.8": {
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 9, "ignore_eos": True, "stop": None,
    },
    "aiperf": {
        "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 9,
        "min_tokens": 9, "ignore_eos": True,
    },
    "vllm bench serve": {
        "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 9,
        "temperature": 0.0, "repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True,
    },
    "LangChain": {
        "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9, "store": False, "n": 1,
        "parallel_tool_calls": False, "user": "u", "metadata": {"a": "b"}, "service_tier": "auto",
        "tools": [TOOL], "tool_choice": "auto", "presence_penalty": 0, "ignore_eos": True,
    },
}  # fmt: skip


def posted(url: str, body: dict[str, Any]) -> Request:
    return Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_benchmarks_and_agents_are_answered(served: Served, name: str) -> None:
    body = {"model": MODEL, "messages": CHAT, **BODIES[name]}
    with urlopen(posted(f"{served.url}/chat/completions", body), timeout=60) as answer:
        lines = [line[6:].strip().decode() for line in answer if line.strip()]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert chunks[-1]["usage"]["prompt_tokens_details"] is not None
    if "continuous_usage_stats" in BODIES[name]["stream_options"]:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
        assert counts == sorted(counts)
        assert counts[0] < 9
    else:
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_path_that_is_not_there_names_those_that_are(served: Served) -> None:
    with pytest.raises(HTTPError) as refused:
        urlopen(posted(f"{served.url}/responses", {}), timeout=60)
    with refused.value as answer:
        message = json.load(answer)["error"]["message"]
    assert answer.code == 404
    assert message.startswith("there is no such path; accepted: /v1/completions, /v1/chat/completions")
    assert "/v1/models/{name}" in message
    assert ":path" not in message


def test_an_argument_that_only_the_engine_refuses_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="min_tokens is 20; accepted") as refused:
        client.completions.create(model=MODEL, prompt="def f", max_tokens=5, extra_body={"min_tokens": 20})
    assert refused.value.param == "min_tokens"


def test_ignore_eos_keeps_the_stop_tokens_of_the_request(client: openai.OpenAI) -> None:
    """As in vLLM."""

    def tokens(**more: object) -> list[int]:
        answer = client.completions.create(
            model=MODEL, prompt="def f", max_tokens=12, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True, **more},
        )  # fmt: skip
        return answer.choices[0].token_ids  # type: ignore[attr-defined,no-any-return]

    free = tokens()
    assert len(free) == 12
    assert tokens(stop_token_ids=[free[3]]) == free[: free.index(free[3]) + 1]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "mambaslots"
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"presence_penalty": 3}, "presence_penalty is 3; accepted: less than or equal to 2"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"logit_bias": {"a": 1}}, "logit_bias is .*; accepted: token ids up to"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias is .*; accepted: token ids up to"),
        ({"tool_choice": "required", "tools": [TOOL]}, "a call cannot be forced; accepted: tool_choice"),
        ({"extra_body": {"temprature": 1}}, "the field 'temprature' is unknown; accepted: cache_salt"),
        ({"temperature": -1}, "temperature is -1; accepted: greater than or equal to 0"),
        ({"max_tokens": 5000}, r"max_sequence_length \(2048\) and the KV pool \(16384\)"),
        ({"extra_body": {"n": 1000}}, "n is 1000; accepted: less than or equal to 128"),
        ({"top_logprobs": 2}, "top_logprobs is set and logprobs is not true"),
    ],
)
def test_what_is_refused_is_named(client: openai.OpenAI, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        client.chat.completions.create(model=MODEL, messages=CHAT, **fields)
    assert raised.value.type == "invalid_request_error"
    assert raised.value.param in {*fields, *fields.get("extra_body", {})}


def test_another_model_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="accepted: 'tiny-code'") as raised:
        client.chat.completions.create(model="gpt-4o", messages=CHAT)
    assert raised.value.code == "model_not_found"
