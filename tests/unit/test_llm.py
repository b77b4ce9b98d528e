"""`LLM`: text in and text out over an engine whose sizes fit the memory."""

from pathlib import Path

import mambaslots as ms
import pytest
import torch

MODEL = Path(__file__).parents[2] / "models" / "tiny-code"


@pytest.fixture(scope="module")
def llm() -> ms.LLM:
    return ms.LLM(MODEL, total_gb=0.1, max_sequence_length=1024)


def test_text_and_token_ids_and_lists_of_them(llm: ms.LLM) -> None:
    ids = llm.loaded.codec.encode("class Stack:")
    params = llm.loaded.sampling_params(max_tokens=12, temperature=0.0)
    (wanted,) = llm.engine.generate([ids], params)
    one = llm.generate("class Stack:", params)
    assert one.text == llm.loaded.codec.decode(wanted.tokens)
    assert llm.generate(ids, max_tokens=12, temperature=0.0).text == one.text
    assert [each.text for each in llm.generate(["class Stack:", ids], params)] == [one.text] * 2
    assert llm.generate([]) == []
    assert "".join(llm.stream("class Stack:", params)) == one.text
    assert llm.generate(torch.tensor(ids), params).text == one.text


def test_a_second_turn_resumes(llm: ms.LLM) -> None:
    messages = [{"role": "user", "content": "Write a class for a stack with push, pop and peek."}]
    first = llm.chat(messages, max_tokens=40, temperature=0.0)
    assert "".join(llm.stream(messages, max_tokens=40, temperature=0.0)) == first.text
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And a queue."}]
    second = llm.chat(messages, max_tokens=4)
    assert second.result.num_resumed_tokens > 0


def test_a_dropped_stream_ends_its_request(llm: ms.LLM) -> None:
    pieces = llm.stream("class Stack:", max_tokens=500)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert llm.engine.stats().num_running == 0
    llm.engine.check_integrity()


@pytest.mark.parametrize("prompts", [7, [[]], [3.5], {"a": 1}, [None]])
def test_what_is_no_prompt_is_refused(llm: ms.LLM, prompts: object) -> None:
    with pytest.raises(ValueError, match="accepted"):
        llm.generate(prompts)


@pytest.mark.parametrize("prompt", [7, [], None, [None], [{}]])
def test_what_is_no_prompt_is_not_streamed(llm: ms.LLM, prompt: object) -> None:
    with pytest.raises(ValueError, match=r"accepted|chat template"):
        list(llm.stream(prompt))  # type: ignore[arg-type]


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"total_gb is 1.0 and num_kv_blocks is 64; accepted"):
        ms.LLM(MODEL, total_gb=1.0, num_kv_blocks=64, num_mamba_slots=4)
    with pytest.raises(ValueError, match=r"^num_kv_blocks is None; accepted: an integer"):
        ms.LLM(MODEL, num_mamba_slots=4)


def test_an_unknown_setting_is_refused_before_the_model_is_loaded() -> None:
    said = (
        r"^LLM has no setting 'bogus'; accepted: device, dtype, block_size_tokens, max_requests, .*total_gb"
    )
    with pytest.raises(TypeError, match=said):
        ms.LLM("no such folder", bogus=1)


def test_no_messages_are_refused(llm: ms.LLM) -> None:
    with pytest.raises(ValueError, match="messages is empty; accepted: one message or more"):
        llm.chat([])


def test_parameters_are_given_in_one_way(llm: ms.LLM) -> None:
    with pytest.raises(ValueError, match=r"sampling_params and .*accepted: one of the two"):
        llm.generate("a", ms.SamplingParams(), temperature=1.0)
