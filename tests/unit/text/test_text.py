"""Text in and out: bytes and special tokens, chat templates, characters that come in parts, and defaults."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.files import ModelFolderError
from mambaslots.text import ByteTokenizer, ChatTemplate, GenerationDefaults, TextCodec
from mambaslots.text.detokenizer import Detokenizer

SPECIALS = {"<|user|>": 256, "<|end|>": 257, "<|end|>!": 258}
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
<|{{ message.role }}|>{{ message.content }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ hint | default('') }}{% endif %}
"""
CHAT = [{"role": "user", "content": "<b>é</b>"}, {"role": "assistant", "content": "fine"}]


def codec() -> TextCodec:
    return TextCodec(ByteTokenizer(SPECIALS), ChatTemplate(TEMPLATE))


# ---- bytes


def test_bytes_are_ids_and_special_tokens_are_found_longest_first() -> None:
    ids = codec().encode("é<|end|>!<|end|>a")
    assert ids == [0xC3, 0xA9, 258, 257, ord("a")]
    assert codec().decode(ids) == "éa"
    assert codec().decode([0xC3, 257, 0xFF, 300]) == "\ufffd\ufffd"
    assert ByteTokenizer({}).encode("") == []


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer({}, byte_ids=range(255, -1, -1))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    saved = ByteTokenizer(SPECIALS, byte_ids=[*range(3, 256), 0, 1, 2])
    saved.save(tmp_path)
    loaded = ByteTokenizer.from_folder(tmp_path)
    text = "a\x00\x7f\xad é<|user|>\U0001f600"
    assert loaded.encode(text) == saved.encode(text)
    assert loaded.special_tokens == SPECIALS


def test_ids_that_stand_for_two_things_are_refused() -> None:
    with pytest.raises(ValueError, match="name an id twice"):
        ByteTokenizer({"<|end|>": 255})
    with pytest.raises(ValueError, match="name an id twice"):
        ByteTokenizer({}, byte_ids=range(255))


@pytest.mark.parametrize(
    ("special_tokens", "byte_ids", "message"),
    [
        (3, range(256), "special_tokens is 3; accepted: a mapping"),
        ({"a": {}}, range(256), r"special_tokens\[0\] is {}"),
        ({"a": [300]}, range(256), r"special_tokens\[0\] is \[300\]"),
        ({3: 300}, range(256), "special_tokens is {3: 300}"),
        ({}, 3, "byte_ids is 3"),
        ({}, [[0]] * 256, r"byte_ids\[0\] is \[0\]"),
    ],
)
def test_what_makes_no_tokenizer_is_named(special_tokens: Any, byte_ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ByteTokenizer(special_tokens, byte_ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("model"), "'model'"),
        (lambda content: content["model"].update(type="WordPiece"), "a BPE without merges"),
        (lambda content: content["model"].update(merges=["a b"]), "a BPE without merges"),
        (lambda content: content["model"]["vocab"].pop("Ġ"), "'Ġ'"),
        (lambda content: content["added_tokens"][0].update(id=3), "name an id twice"),
        (lambda content: content.update(added_tokens=None), "NoneType"),
        (lambda content: content["added_tokens"][0].update(id="x"), "ids of special_tokens.*'x'"),
        (lambda content: content["added_tokens"][0].update(content=""), "special_tokens is {''.*"),
        (lambda content: content["model"]["vocab"].update({"Ġ": -1}), "byte_ids.*-1"),
    ],
)
def test_a_tokenizer_of_something_else_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    ByteTokenizer(SPECIALS).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(
        ModelFolderError, match=rf"tokenizer.json has no tokenizer of bytes: .*{message}.*; acc"
    ):
        ByteTokenizer.from_folder(tmp_path)


# ---- chats


def test_a_chat_is_the_template_s_text() -> None:
    expected = "<|user|><b>é</b><|end|>\n<|assistant|>fine<|end|>\n<|assistant|>"
    assert codec().encode_chat(CHAT) == codec().encode(expected)
    assert codec().encode_chat(CHAT, hint="So") == codec().encode(expected + "So")
    assert codec().encode_chat(CHAT, add_generation_prompt=False) == codec().encode(
        expected[: -len("<|assistant|>")]
    )


def test_what_a_template_can_use() -> None:
    source = (
        "{%- for n in [1, 2, 3] %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}"
        "{{ messages[0] | tojson }}{{ strftime_now('%Y') | length }}{{ bos_token }}"
    )
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "<é>"}])
    assert rendered == '13{"role": "user", "content": "<é>"}4<s>'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ (1).__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.__len__.__self__.append(1) }}",
        "{% for _ in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('refused') }}",
    ],
)
def test_a_template_runs_in_a_sandbox(source: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        ChatTemplate(source).render(CHAT)


def test_nothing_of_a_template_is_computed_when_it_is_read() -> None:
    """Jinja folds constants: a template of 20 characters took gigabytes when its model was loaded."""
    for source in (
        "{{ 1 / 0 }}",
        "{{ raise_exception('now') }}",
        "{{ 'a' | center('now') }}",
        "{% set x = 1 % 0 %}",
    ):
        template = ChatTemplate(source)
        with pytest.raises(ValueError, match="refuses the messages"):
            template.render(CHAT)
    for source in ("{{ 9 ** 9 ** 9 }}", "{{ 'a' * 10 ** 15 }}", "{{ 'a' | center(1000000000000000) }}"):
        ChatTemplate(source)


def test_bad_templates_and_messages() -> None:
    with pytest.raises(ValueError, match="is no Jinja template"):
        ChatTemplate("{% if %}")
    for depth in (40, 150, 3000):  # more than Python nests, in three ways
        with pytest.raises(ValueError, match=r"is no Jinja template: (too many|maximum recursion)"):
            ChatTemplate("{% for i in x %}" * depth + "{% endfor %}" * depth)
    nested: Any = []
    for _ in range(1_000_000):
        nested = [nested]
    with pytest.raises(ValueError, match="cannot be given to a template"):
        ChatTemplate("").render([{"role": "user", "content": nested}])
    with pytest.raises(ValueError, match="refuses the messages: no role tool"):
        codec().encode_chat([{"role": "tool", "content": ""}])
    for messages in ("Hello", {"role": "user"}, 3, None):
        with pytest.raises(ValueError, match=r"messages is of type \w+; accepted: a list of"):
            codec().encode_chat(messages)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"messages\[1\] is of type str; accepted: a list of") as caught:
        codec().encode_chat([*CHAT[:1], "a secret"])  # type: ignore[list-item]
    assert "secret" not in str(caught.value)
    assert str(CHAT[0]["content"]) not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be given to a template"):
        codec().encode_chat([{"role": "user", "content": object()}])
    with pytest.raises(ValueError, match="no chat template; accepted: `encode` with a text"):
        TextCodec(ByteTokenizer({})).encode_chat(CHAT)
    with pytest.raises(ValueError, match="add_generation_prompt is 1"):
        codec().encode_chat(CHAT, add_generation_prompt=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="text is 3"):
        codec().encode(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token_ids is 'ab'"):
        codec().decode("ab")  # type: ignore[arg-type]


# ---- pieces


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@given(st.text())
def test_pieces_are_whole_characters_as_soon_as_they_can_be(text: str) -> None:
    detokenizer = codec().detokenizer()
    text = text.replace("\ufffd", "")
    got = pieces(detokenizer, ByteTokenizer({}).encode(text))
    assert [piece for piece in got if piece] == list(text)


@given(st.binary())
def test_pieces_of_any_bytes_are_the_text_of_all(data: bytes) -> None:
    detokenizer = codec().detokenizer()
    assert "".join(pieces(detokenizer, list(data))) == data.decode(errors="replace")


@given(
    st.lists(
        st.one_of(
            st.integers(0, 258),
            st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 256, 257]),
            st.sampled_from([b"\xe2\x82", b"\xac\xe2\x82", b"\x9f\x98", b"\x80\xf0"]),
        ),
        max_size=20,
    ),
    st.integers(1, 30),
)
def test_pieces_of_many_tokens_without_text_are_the_text_of_all(
    parts: list[int | bytes], repeats: int
) -> None:
    """Tokens are bytes, parts of several characters, and special tokens."""
    table = {300 + i: part for i, part in enumerate(part for part in parts if isinstance(part, bytes))}
    named = {part: token for token, part in table.items()}
    ids = [part if isinstance(part, int) else named[part] for part in parts] * repeats
    num_longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_longest
        num_longest = max(num_longest, len(token_ids))
        parts = [table.get(token, bytes([token]) if token < 256 else b"") for token in token_ids]
        return b"".join(parts).decode(errors="replace")

    got = "".join(pieces(Detokenizer(decode), ids))
    assert num_longest <= 48
    assert got == decode(ids)


@pytest.mark.parametrize("token", [0xFF, 0x80, 0xE2, 257, 258, ord("a")])
def test_an_answer_of_one_token_takes_a_bounded_time_each(token: int) -> None:
    decoded = []

    def decode(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return codec_of_bytes.decode(token_ids)

    codec_of_bytes = codec()
    got = "".join(pieces(Detokenizer(decode), [token] * 3000))
    assert sum(decoded) <= 100 * 3000
    assert got == codec_of_bytes.decode([token] * 3000)


def test_the_replacement_character_itself_is_text() -> None:
    detokenizer = codec().detokenizer()
    assert pieces(detokenizer, list("\ufffd!".encode())) == ["", "", "", "\ufffd!", ""]
    assert pieces(detokenizer, [0xE2, 0x82]) == ["", "", "\ufffd"]
    assert detokenizer.push(0xE2, 0x82, 0xAC, 257) == "€"


# ---- defaults


def defaults(folder: Path, config: dict[str, Any] | None = None, **said: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(said))
    return GenerationDefaults.read(folder, config or {})


def test_defaults_of_a_model_that_draws(tmp_path: Path) -> None:
    found = defaults(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=[7, 9])
    assert found.sampling_params() == ms.SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, stop_token_ids=(7, 9)
    )
    changed = found.sampling_params(temperature=0, max_tokens=5, stop_token_ids=())
    assert changed.greedy
    assert (changed.max_tokens, changed.stop_token_ids) == (5, ())


def test_defaults_of_a_model_that_does_not_draw(tmp_path: Path) -> None:
    for said in ({"do_sample": False}, {}):
        found = defaults(tmp_path, temperature=0.6, top_k=20, top_p=0.9, max_new_tokens=64, **said)
        assert found.sampling_params() == ms.SamplingParams(max_tokens=64)
        assert found.sampling_params().greedy
    assert defaults(tmp_path, do_sample=True).sampling_params() == ms.SamplingParams(temperature=1.0)


def test_what_a_model_says_and_is_not_applied_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mambaslots.text"):
        defaults(tmp_path, typical_p=1.0, min_length=None, suppress_tokens=[], num_beams=1)
        assert not caplog.records
        defaults(tmp_path, typical_p=0.5, min_length=2, suppress_tokens=[3])
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "generation_config.json: not applied: typical_p, suppress_tokens, min_length"
    )


def test_penalties_of_a_model_are_defaults(tmp_path: Path) -> None:
    said = {"repetition_penalty": 1.5, "min_p": 0.15, "min_new_tokens": 7, "presence_penalty": 0.5}
    params = defaults(tmp_path, do_sample=True, **said).sampling_params(max_tokens=20)
    assert (params.repetition_penalty, params.min_p, params.min_tokens) == (1.5, 0.15, 7)
    assert params.presence_penalty == 0.5
    greedy = defaults(tmp_path, **said).sampling_params(max_tokens=3)
    assert (greedy.repetition_penalty, greedy.min_p, greedy.min_tokens) == (1.5, 0.0, 3)


def test_stop_tokens_may_stand_in_the_config(tmp_path: Path) -> None:
    config = {"eos_token_id": 3, "text_config": {"eos_token_id": 4}}
    assert defaults(tmp_path, config, eos_token_id=5).params.stop_token_ids == (5,)
    assert defaults(tmp_path, config).params.stop_token_ids == (4,)
    assert defaults(tmp_path, {"eos_token_id": 3}).params.stop_token_ids == (3,)
    (tmp_path / "generation_config.json").unlink()
    assert GenerationDefaults.read(tmp_path, config).params.stop_token_ids == (4,)
    assert GenerationDefaults.read(tmp_path, {}) == GenerationDefaults()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "temperature": "hot"}, "temperature is 'hot'"),
        ({"eos_token_id": "</s>"}, "stop_token_ids"),
        ({"eos_token_id": [-1]}, "stop_token_ids"),
        ({"max_new_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_defaults_that_no_model_accepts_are_refused_at_once(
    said: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFolderError, match=f"generation_config.json: {message}"):
        defaults(tmp_path, **said)


def test_any_mapping_is_a_message_and_nothing_else_is() -> None:
    template = ChatTemplate("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [MappingProxyType({"role": "user", "content": "Hi"})]
    tools = [MappingProxyType({"function": MappingProxyType({"name": "weather"})})]
    assert template.render(messages, tools=tools) == '[{"function": {"name": "weather"}}]Hi'
    text = TextCodec(ByteTokenizer({}), template)
    assert text.decode(text.encode_chat(messages, tools=tools)) == template.render(messages, tools=tools)
    with pytest.raises(ValueError, match=r"the messages cannot be given to a template: .*set"):
        template.render([{"role": "user", "content": {("a", "b")}}])
