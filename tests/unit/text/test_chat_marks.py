"""Marks of a chat: where the conversations that clients send next leave it, whatever its template does."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.text import (
    ByteTokenizer,
    ChatTemplate,
    GenerationDefaults,
    TextCodec,
)
from mambaslots.text.chat_template import MAX_MARKED_MESSAGES, ChatBranches
from mambaslots.text.codec import MarkedPrompt

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
try:
    import chat_marks
    from crowd import chat_histories as chat_histories
    from crowd.chat_templates import TEMPLATES
finally:
    sys.path.pop(0)

FOLDER = os.environ.get("MAMBASLOTS_TEMPLATES", "")
REAL = {path.stem: path.read_text("utf-8") for path in sorted(Path(FOLDER).glob("*.jinja"))} if FOLDER else {}
CODECS = {name: chat_marks.make_codec(template) for name, template in TEMPLATES.items()}
CHATML, NEMOTRON, LLAMA, MISTRAL, GEMMA, VICUNA = CODECS.values()
TOOLS = chat_histories.TOOLS
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    SYSTEM,
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
]
Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def left(codec: TextCodec, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[str]:
    """The text up to each mark, without special tokens, in the order of the positions."""
    prompt = codec.encode_chat_marked(messages, **options)
    assert prompt.tokens == codec.encode_chat(
        messages, **{name: value for name, value in options.items() if name != "marked_messages"}
    )
    return [codec.decode(prompt.tokens[:mark]) for mark in sorted(prompt.marks)]


# ---- where the marks are


def test_marks_of_a_chat_with_thinking_and_tools() -> None:
    whole = "system\nBe brief.\n\n\nuser\nOne?\nassistant\nFirst.\nuser\nTwo?\nassistant\n"
    places = [
        whole.index(text)
        for text in ("One?", "First.", "Two?", "assistant\n", "")  # the last: the whole
    ]
    found = left(CHATML, CHAT)
    assert found[0] == "system\nBe brief.\n\n\nuser\n"  # before the first question
    assert found[-1] == whole
    assert whole[: places[2]] in found  # before the last question
    assert whole[: -len("assistant\n")] in found  # before the generation prompt
    assert found[1] == whole[: places[1] - 1]  # before the last token of an answer that is made anew
    with_tools = left(CHATML, CHAT, tools=TOOLS)
    assert with_tools[0].endswith("}\n\nuser\n")
    assert '"find_book"' in with_tools[0]


def test_a_next_turn_drops_the_thinking_of_this_one() -> None:
    call = {"type": "function", "function": {"name": "find_book", "arguments": {"title": "It"}}}
    steps = [{**assistant(""), "reasoning_content": "Hm.", "tool_calls": [call]}]
    result = {"role": "tool", "content": "floor 2"}
    found = left(CHATML, [SYSTEM, user("Where?"), *steps, result])
    assert "system\nBe brief.\n\n\nuser\nWhere?\nassistant\n" in found
    assert not any(text.endswith("Where?\nassistant\n<think>\nHm.") for text in found)
    # the generation prompt begins thinking, and a later turn has empty thinking there
    prompt = NEMOTRON.encode_chat_marked([user("Why?")])
    opened = NEMOTRON.encode("<think>")[0]
    assert prompt.tokens[-2] == opened
    assert len(prompt.tokens) - 1 in prompt.marks
    assert prompt.tokens[: sorted(prompt.marks)[1]] == NEMOTRON.encode("<|im_start|>user\nWhy?<|im_end|>\n")


def test_tools_in_the_first_turn_belong_to_the_system_prompt() -> None:
    found = left(LLAMA, CHAT, tools=TOOLS)
    assert any(text.endswith("}\n\n") and "Be brief" in text and "One?" not in text for text in found)


def test_the_system_prompt_in_the_last_turn_is_left_by_the_next_turn() -> None:
    assert left(MISTRAL, [SYSTEM, user("One?")])[-2:] == ["Be brief.\n\n", "Be brief.\n\nOne?"]
    prompt = MISTRAL.encode_chat_marked(CHAT)
    instruction = [mark for mark in prompt.marks if MISTRAL.decode(prompt.tokens[:mark]) == "One? First."]
    assert instruction  # behind the answer, where the next turn has no system prompt


def test_the_date_of_today_is_left_tomorrow() -> None:
    requests = [each for each in chat_histories.histories(True, False) if each.name == "new system date"]
    for name, codec in CODECS.items():
        before, after = (codec.encode_chat_marked(each.messages) for each in requests[0].requests)
        common = chat_marks.shared(before.tokens, after.tokens)
        assert any(common - 3 <= mark <= common for mark in before.marks), name
    found = left(LLAMA, [SYSTEM, user("One?")])
    assert found[0] == "system\n\nToday Date: "


def test_marked_messages() -> None:
    # the message after the marked one has another text
    assert CHATML.encode_chat_marked(CHAT, marked_messages=[2]).marks[0] in [
        mark
        for mark in CHATML.encode_chat_marked(CHAT).marks
        if CHATML.decode(CHATML.encode_chat(CHAT)[:mark]).endswith("First.\nuser\n")
    ]
    long = [SYSTEM, *[user("q"), assistant("a")] * 10, user("q")]
    first = CHATML.encode_chat_marked(long, marked_messages={1, 3}).marks[:2]
    texts = [CHATML.decode(CHATML.encode_chat(long)[:mark]) for mark in first]
    assert [text.count("\nq\n") for text in texts] == [1, 2]
    assert all(text.endswith("assistant\n") for text in texts)
    whole = CHATML.encode_chat_marked(CHAT, marked_messages=(3,))
    assert whole.marks[0] == len(whole.tokens)
    everything = CHATML.encode_chat_marked(long, marked_messages=range(len(long)))
    assert len(everything.marks) <= MAX_MARKED_MESSAGES + 10
    for wrong in ([4], [-1], [True], "ab", None, 3, [1.0]):
        with pytest.raises(ValueError, match=r"marked_messages.*; accepted"):
            CHATML.encode_chat_marked(CHAT, marked_messages=wrong)  # type: ignore[arg-type]


def test_a_tokenizer_without_cuts_gives_the_same_marks() -> None:
    class Plain:
        def __init__(self, tokenizer: Any) -> None:
            self.encode, self.decode = tokenizer.encode, tokenizer.decode

        def encode_with_cuts(self, text: str) -> tuple[list[int], list[Any]]:
            return self.encode(text, add_special_tokens=False), []

    for codec in CODECS.values():
        expected = codec.encode_chat_marked(CHAT, marked_messages=[0])
        assert expected.marks
        plain = replace(codec, tokenizer=Plain(codec.tokenizer))
        assert plain.encode_chat_marked(CHAT, marked_messages=[0]) == expected


# ---- what a template refuses, and what marks cost


class CountingTemplate:
    """Counts renderings, and refuses the later ones where it is set to."""

    def __init__(self, template: ChatTemplate, error: type[Exception] | None = None) -> None:
        self.template, self.error, self.calls = template, error, 0

    def render(self, messages: Any, add_generation_prompt: bool = True, **variables: Any) -> str:
        self.calls += 1
        if self.error and self.calls > 1:
            raise self.error("not this one")
        return self.template.render(messages, add_generation_prompt, **variables)


@pytest.mark.parametrize("error", [ValueError, TypeError, ZeroDivisionError, RecursionError])
def test_a_template_that_refuses_all_other_chats_gives_the_tokens(error: type[Exception]) -> None:
    template = CountingTemplate(ChatTemplate(TEMPLATES["Gemma, no system role, roles alternate"]), error)
    prompt = TextCodec(GEMMA.tokenizer, template).encode_chat_marked(CHAT, marked_messages=[0, 1])
    assert prompt == MarkedPrompt(GEMMA.encode_chat(CHAT), ())


class CountingText(str):
    """Counts the searches of the whole text."""

    num_searches = 0

    def __contains__(self, part: object) -> bool:
        self.num_searches += 1
        return super().__contains__(part)  # type: ignore[arg-type]


def test_a_text_with_all_private_characters_is_searched_once() -> None:
    text = CountingText("".join(map(chr, range(0xE000, 0xF900))))
    ChatBranches(text, [user(text)], render=lambda messages, generation: text, has_tools=False)
    assert text.num_searches <= 1
    content = str(text) + "Why?"
    assert CHATML.encode_chat_marked([SYSTEM, user(content)]).tokens == CHATML.encode_chat(
        [SYSTEM, user(content)]
    )


def test_a_chat_that_the_template_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="roles must alternate"):
        MISTRAL.encode_chat_marked([*CHAT, user("Three?")])
    with pytest.raises(ValueError, match="messages is of type str; accepted"):
        CHATML.encode_chat_marked("Hello")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no chat template"):
        TextCodec(ByteTokenizer({})).encode_chat_marked(CHAT)
    with pytest.raises(ValueError, match="add_generation_prompt is 1"):
        CHATML.encode_chat_marked(CHAT, 1)  # type: ignore[arg-type]


def test_odd_chats_have_marks_or_none() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    codec = TextCodec(ByteTokenizer({}), template)
    for messages in (
        [], [{}], [user("")], [assistant("a")], [user("a"), user("b")], [{"role": ["user"]}], [SYSTEM],
        [user("\ue000\ue001")], [user("".join(map(chr, range(0xE000, 0xF900))))], [assistant("a"), user("b")],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"role": "user", "content": None}],
        [user("a"), {"role": "tool", "content": "b"}, {"role": "tool", "content": "c"}, user("d")],
    ):  # fmt: skip
        for add in (True, False):
            prompt = codec.encode_chat_marked(messages, add, marked_messages=range(len(messages)))
            assert prompt.tokens == codec.encode_chat(messages, add)
            assert all(0 < mark <= len(prompt.tokens) for mark in prompt.marks)
            assert len(set(prompt.marks)) == len(prompt.marks)


def test_renderings_do_not_grow_with_the_chat() -> None:
    for num_turns, expected in ((1, 4), (2, 6), (3, 8), (50, 9)):
        template = CountingTemplate(ChatTemplate(TEMPLATES["ChatML, earlier thinking dropped"]))
        codec = TextCodec(CHATML.tokenizer, template)
        messages = [SYSTEM, *[user("q"), assistant("a")] * (num_turns - 1), user("q")]
        assert len(codec.encode_chat_marked(messages).marks) <= 9
        assert template.calls == expected
        codec.encode_chat_marked(messages, tools=TOOLS, marked_messages=[0])
        assert template.calls == 2 * expected + 2


def test_thousands_of_messages_are_not_rendered_again_and_again() -> None:
    class Counting(CountingTemplate):
        num_messages = 0

        def render(self, messages: Any, *arguments: Any, **variables: Any) -> str:
            self.num_messages += len(messages)
            return super().render(messages, *arguments, **variables)

    template = Counting(ChatTemplate(TEMPLATES["ChatML, earlier thinking dropped"]))
    messages = [SYSTEM, *[user("q"), assistant("a")] * 4500, user("q")]
    prompt = TextCodec(CHATML.tokenizer, template).encode_chat_marked(
        messages, marked_messages=[0, *range(9000)]
    )
    assert 2 * len(messages) < template.num_messages < 30_000
    system = CHATML.encode_chat([SYSTEM], add_generation_prompt=False)
    assert any(abs(mark - len(system)) < 20 for mark in prompt.marks)


# ---- the promise


texts = st.text(alphabet="ab \né<", max_size=12)


@st.composite
def chats(draw: st.DrawFn) -> list[Message]:
    """A chat that ends with a question; roles alternate."""
    turns = draw(st.lists(st.tuples(texts, texts, st.booleans()), max_size=4))
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for question, answer, thinks in turns:
        said = {**assistant(answer), "reasoning_content": "Hm."} if thinks else assistant(answer)
        messages += [user(question), said]
    return [*messages, user(draw(texts))]


def reached(prompt: MarkedPrompt, length: int, block: int) -> int:
    """The deepest boundary up to `length` whose state the prompt's request took; the tail is always taken."""
    taken = {*prompt.marks, len(prompt.tokens) - 1, len(prompt.tokens)}
    return max((mark - mark % block for mark in taken if mark - mark % block <= length), default=0)


@settings(max_examples=30)
@given(messages=chats(), block=st.sampled_from([4, 8, 16]), with_tools=st.booleans())
@pytest.mark.parametrize("name", CODECS)
def test_what_a_client_sends_next_resumes_as_deep_as_it_can(
    name: str, messages: list[Message], block: int, with_tools: bool
) -> None:
    codec, variables = CODECS[name], {"tools": TOOLS} if with_tools else {}
    prompt = codec.encode_chat_marked(messages, **variables)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    others = [
        messages,
        [*messages, assistant("Zero."), user("Zero?")],
        [*messages[: users[0]], user("Zero?")],
    ]
    others += [[*messages[:i], user("Zero?")] for i in users[-3:]]
    if with_tools and "tools" in TEMPLATES[name]:
        call = {"id": "callcall1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        calling = {**assistant(""), "reasoning_content": "So.", "tool_calls": [call]}
        others += [[*messages, calling, {"role": "tool", "content": "2", "tool_call_id": "callcall1"}]]
    others += [messages[: i + 1] for i in users[-3:]]
    for other in others:
        tokens = codec.encode_chat(other, **variables)
        common = min(chat_marks.shared(prompt.tokens, tokens), len(tokens) - 1)
        assert reached(prompt, common, block) == common - common % block, other


def check_histories(name: str, template: str) -> int:
    """Each history's last request can resume as deep as possible from what the others took, or decoded."""
    codec, num_histories = chat_marks.make_codec(template), 0
    for with_system in (True, False):
        for history in chat_histories.histories(with_system, "tools" in template):
            served = chat_marks.encoded(codec, history)
            if served is None or history.name == "new system date":
                continue
            num_histories += 1
            tokens = served[-1][0].tokens
            for prompt, _ in served[:-1]:
                common = min(chat_marks.shared(prompt.tokens, tokens), len(tokens) - 1)
                assert reached(prompt, common, 8) == common - common % 8, (name, history.name)
    return num_histories


@pytest.mark.parametrize("name", TEMPLATES)
def test_histories_under_our_templates(name: str) -> None:
    assert check_histories(name, TEMPLATES[name]) >= 17


@pytest.mark.skipif(not REAL, reason="MAMBASLOTS_TEMPLATES names no folder of *.jinja files")
@pytest.mark.parametrize("name", REAL or ["none"])
def test_histories_under_real_templates(name: str) -> None:
    check_histories(name, REAL[name])


def test_a_real_model_answers_the_same_and_resumes() -> None:
    codec = TextCodec(ByteTokenizer({}), ChatTemplate(TEMPLATES["ChatML, earlier thinking dropped"]))
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0)
    config = ms.InferenceConfig(
        block_size_tokens=32, max_tokens_per_step=512, num_kv_blocks=256, num_mamba_slots=32
    )
    history = chat_histories.turns(2, chat_histories.SYSTEM)
    params = ms.SamplingParams(max_tokens=8)
    requests = [*history, chat_histories.edited(history[1], 3), chat_histories.edited(history[1], 1)]
    prompts = [codec.encode_chat_marked(request.messages) for request in requests]
    cached = ms.DynamicInferenceEngine(model, config)
    plain = ms.DynamicInferenceEngine(model, replace(config, enable_prefix_caching=False))
    for before, prompt in zip([None, *prompts], prompts, strict=False):
        plan = ms.CheckpointPlan(marks=prompt.marks)
        (result,) = cached.generate([prompt.tokens], params, checkpoint_plan=plan)
        cached.check_integrity()
        assert result.tokens == plain.generate([prompt.tokens], params)[0].tokens
        if before is not None:
            common = max(
                chat_marks.shared(other.tokens, prompt.tokens) for other in prompts[: prompts.index(prompt)]
            )
            assert result.num_resumed_tokens == common - common % 32 > 0


def test_a_loaded_model_has_marks() -> None:
    loaded = ms.LoadedModel(CHATML, GenerationDefaults(), Path("folder"), None)  # type: ignore[arg-type]
    assert loaded.codec.encode_chat_marked(CHAT, False, marked_messages=[0], tools=TOOLS) == (
        CHATML.encode_chat_marked(CHAT, False, marked_messages=[0], tools=TOOLS)
    )
    with pytest.raises(ValueError, match="folder has no tokenizer"):
        _ = replace(loaded, text=None).codec
