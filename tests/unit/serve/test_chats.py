"""What of a chat reaches the template, and where its states are taken."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mambaslots as ms
import pytest
from oracle.plans import SwitchedPlan
from oracle.served import Served, serving, small_config, tiny_loaded

USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a town", "parameters": {"type": "object"}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
NO_STATES = SwitchedPlan(tail=False, branch=False, step_ends=False, decode="off", prefill_interval=2048)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_loaded(), small_config(checkpoint_plan=NO_STATES)) as served:
        yield served


def ask(served: Served, messages: Any, **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "return_token_ids": True} | fields
    reply = served.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = reply.json
    return answer


def cached(answer: dict[str, Any]) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def refusal(served: Served, messages: Any, **fields: Any) -> str:
    reply = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 6} | fields)
    assert reply.status == 400
    message: str = reply.error["message"]
    return message


@pytest.mark.parametrize(
    ("messages", "fields", "text"),
    [
        ([USER], {}, "user:Hi<|end|>"),
        ([{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}], {}, "user:a\nb<|end|>"),
        ([USER], {"chat_template_kwargs": {"style": "brief"}}, "style briefuser:Hi<|end|>"),
        ([USER], {"tools": [TOOL]}, f"<|tools|>{json.dumps([TOOL])}<|end|>user:Hi<|end|>"),
        ([USER], {"tool_choice": "none"}, 'choice "none"user:Hi<|end|>'),
        (
            [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
            {},
            'user:Hi<|end|>assistant:weather{"town": "Ulm"}<|end|>tool:rain#c1<|end|>',
        ),
    ],
)
def test_the_template_gets_the_chat(served: Served, messages: Any, fields: Any, text: str) -> None:
    answer = ask(served, messages, **fields)
    prompt = served.loaded.codec.encode("<|begin|>" + text + "assistant:")
    params = ms.SamplingParams(max_tokens=6)
    (result,) = served.reference.generate([prompt], params)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["token_ids"] == result.tokens


def test_arguments_that_are_no_json_stay_what_the_model_wrote(served: Served) -> None:
    broken = {**CALL, "function": {"name": "weather", "arguments": '{"town": '}}
    answer = ask(served, [USER, {"role": "assistant", "tool_calls": [broken]}, USER])
    text = 'user:Hi<|end|>assistant:weather"{\\"town\\": "<|end|>user:Hi<|end|>assistant:'
    assert answer["usage"]["prompt_tokens"] == len(served.loaded.codec.encode("<|begin|>" + text))


@pytest.mark.parametrize(
    ("messages", "fields", "message"),
    [
        (None, {}, "messages is missing"),
        ([], {}, "messages is []; accepted: at least 1 item"),
        ("Hi", {}, "messages is 'Hi'; accepted: a valid list"),
        (["Hi"], {}, r"messages[0] is 'Hi'; accepted: an object"),
        ([{"role": "robot", "content": ""}], {}, "messages[0].role is 'robot'; accepted: 'system', 'dev"),
        ([USER, {"role": "user"}], {}, "messages[1].content is null; accepted: a string, or a list"),
        ([{"role": "user", "content": 3}], {}, "messages[0].content is 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content[0].type is 'image"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content[0].text is missing"),
        ([{"role": "developer", "content": ""}], {}, "refuses the messages: no role developer here"),
        (
            [{**USER, "cache_control": {"type": "x"}}],
            {},
            "messages[0].cache_control.type is 'x'",
        ),
        ([{**USER, "tool_calls": [{}]}], {}, "messages[0].tool_calls[0].function is missing"),
        ([USER], {"tools": [{}]}, "tools[0].type is missing"),
        ([USER], {"tool_choice": "required"}, "a call cannot be forced; accepted: tool_choice"),
        (
            [USER],
            {"tool_choice": {"function": {"name": "w"}}},
            "a call cannot be forced; accepted: tool_choice",
        ),
        ([USER], {"chat_template_kwargs": []}, "chat_template_kwargs is []; accepted: an object"),
        ([USER], {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs has the name 'messages'"),
        ([USER], {"chat_template_kwargs": {"chat_template": ""}}, "has the name 'chat_template'"),
        ([USER], {"max_completion_tokens": 5}, "max_tokens and max_completion_tokens differ"),
    ],
)
def test_a_wrong_chat_is_refused_in_a_sentence(
    served: Served, messages: Any, fields: Any, message: str
) -> None:
    assert message in refusal(served, messages, **fields)


@pytest.mark.parametrize("where", ["message", "part"])
def test_a_message_with_cache_control_is_where_others_resume(served: Served, where: str) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    marked: Any = {"role": "user", "content": [{"type": "text", "text": where[0] * 60}]}
    holder = marked if where == "message" else marked["content"][0]
    later = [{"role": "user", "content": letter * 40} for letter in "abcdefgh"]
    cold = ask(served, [marked, *later])
    assert cached(cold) == 0
    assert cached(ask(served, [marked, *reversed(later)])) == 0
    holder.update(mark)
    ask(served, [marked, *later], cache_salt="own")
    length = len(served.loaded.codec.encode(f"<|begin|>user:{where[0] * 60}<|end|>"))
    assert cached(ask(served, [marked, *reversed(later)], cache_salt="own")) == length // 32 * 32


def test_a_regenerated_answer_resumes_at_the_end_of_the_chat(served: Served) -> None:
    messages = [{"role": "system", "content": "s" * 50}, {"role": "user", "content": "u" * 70}]
    ask(served, messages)
    prompt = served.loaded.codec.encode_chat(messages)
    assert cached(ask(served, messages, seed=1)) == (len(prompt) - 1) // 32 * 32
    edited = [messages[0], {"role": "user", "content": "v" * 70}]
    assert cached(ask(served, edited)) == len("<begin>system:" + "s" * 50) // 32 * 32


def test_checkpoints_of_a_completion(served: Served) -> None:
    prompt = [7 + i % 90 for i in range(200)]
    body = {"prompt": prompt, "max_tokens": 2, "checkpoints": [70, 130]}
    assert cached(served.post("/v1/completions", body).json) == 0
    other = {"prompt": [*prompt[:120], *range(50)], "max_tokens": 2}
    assert cached(served.post("/v1/completions", other).json) == 64
    for wrong, message in (
        ([201], "checkpoints holds 201; accepted: positions up to 200"),
        ([-1], "[0] is -1"),
    ):
        assert message in served.post("/v1/completions", {**body, "checkpoints": wrong}).error["message"]


def test_models_without_text_or_template() -> None:
    loaded = tiny_loaded(has_text=False)
    with serving(loaded, small_config(num_kv_blocks=64)) as bare:
        assert "no tokenizer" in refusal(bare, [USER])
        text = bare.post("/v1/completions", {"prompt": "Hi"})
        assert "no tokenizer; accepted: /v1/completions with token ids" in text.error["message"]
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
        choice = bare.post("/v1/completions", body).json["choices"][0]
        (result,) = bare.reference.generate([[1, 2, 3]], ms.SamplingParams(max_tokens=5))
        assert (choice["text"], choice["token_ids"]) == ("", result.tokens)
        stops = bare.post("/v1/completions", {"prompt": [1], "stop": "a"})
        assert stops.error["param"] == "stop"
    with serving(replace(tiny_loaded(template=None)), small_config(num_kv_blocks=64)) as bare:
        assert "no chat template" in refusal(bare, [USER])
