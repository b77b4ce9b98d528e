"""Tokenizers and chat templates of models, as transformers reads them, and our own beside them."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from mambaslots import hf
from mambaslots.hf.tokenizer import TransformersTokenizer, load_text
from mambaslots.serve.requests import NOT_VARIABLES
from mambaslots.text import ByteTokenizer, ChatTemplate, TextCodec
from mambaslots.text.detokenizer import Detokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SPECIALS = {"<|im_start|>": 256, "<|im_end|>": 257}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où est <b>l'été</b>?"},
    {"role": "assistant", "content": "In \U0001f1eb\U0001f1f7.", "tool_calls": [{"name": "f", "é": 1}]},
    {"role": "user", "content": "Why?"},
]  # fmt: skip
TEMPLATE = """\
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(last=none) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.last = message.content %}{% continue %}{% endif %}
    {{- bos_token }}<|im_start|>{{ message.role + '\\n' + message['content'] | trim }}
    {%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}
{{- ns.last }}"""
PLAIN = """\
{%- for message in messages %}
    {{- message.role | capitalize + ': ' + message.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""
TEXTS = [
    "",
    "plain",
    "Größe 日本語 \U0001f468‍\U0001f469‍\U0001f467 e\u0301",
    "a  b\n\n\tc ",
    "\x00\x7f\xad",
    "can 't <|im_end|>",
]


def save_tokenizer(folder: Path, tokenizer: Tokenizer, **settings: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def byte_level_bpe() -> Tokenizer:
    """A vocabulary that was trained, whose tokens cut characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(name, special=True) for name in SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def byte_fallback_bpe() -> Tokenizer:
    """As those of sentencepiece: few characters, a space before words, other characters as bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "b": 258, "é": 259}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return tokenizer


TOKENIZERS = {"byte-level": byte_level_bpe(), "byte fallback": byte_fallback_bpe()}


@given(text=st.one_of(st.text(), st.text(alphabet="ab é日\U0001f600", min_size=5)))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_the_text_and_hold_no_part_of_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text.replace("\ufffd", "")).ids
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [*(detokenizer.push(token) for token in ids), detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 255)))
def test_pieces_of_any_tokens_are_the_text_of_all(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [*(detokenizer.push(token) for token in ids), detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_long_runs_that_are_no_text_are_bounded(kind: str) -> None:
    """A tokenizer with byte fallback writes no character of a run that holds a wrong byte."""
    tokenizer = TOKENIZERS[kind]
    word = tokenizer.encode("ba").ids
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = level.pre_tokenize_str("€")[0][0] if kind == "byte-level" else ["<0xE2>", "<0x82>", "<0xAC>"]
    euro = [tokenizer.token_to_id(name) for name in names]
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return str(tokenizer.decode(list(ids)))

    for run in (euro[:1], euro[1:2], euro[:2], euro[1:] + euro[:2]):
        longest = 0
        ids = word + run * 100 + word
        detokenizer = Detokenizer(decode)
        pieces = [*(detokenizer.push(token) for token in ids), detokenizer.finish()]
        assert longest <= 40
        assert "".join(pieces) == tokenizer.decode(ids)


def test_clients_set_no_argument_of_transformers() -> None:
    """What `apply_chat_template` takes as an argument is no variable of a template."""
    names = set(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) - {"kwargs"}
    assert names <= NOT_VARIABLES


def test_the_tokenizer_of_a_model(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_level_bpe(), bos_token="<|im_start|>", eos_token="<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    text, theirs = load_text(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert text is not None
    for sample in TEXTS:
        ids = theirs.encode(sample)
        assert text.encode(sample) == ids
        assert text.decode(ids) == sample.replace("<|im_end|>", "")
    for options in (
        {},
        {"enable_thinking": False},
        {"add_generation_prompt": False},
        {"tools": [{"é": "<"}]},
    ):
        settings = {"add_generation_prompt": True} | options
        expected = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False, **settings)
        assert text.encode_chat(CHAT, **options) == expected
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        text.encode_chat([{"role": 3, "content": "Hello"}])


@pytest.mark.parametrize(
    "options", [{}, {"enable_thinking": False}, {"tools": [{"é": "<"}]}, {"bos_token": "<s>"}]
)
def test_our_template_renders_as_theirs(options: dict[str, Any]) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe())
    expected = theirs.apply_chat_template(
        CHAT, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True, **options
    )
    assert ChatTemplate(TEMPLATE).render(CHAT, **options) == expected


@pytest.mark.parametrize(
    "byte_ids", [range(256), [*range(10, 256), *range(300, 310)]], ids=["bytes", "others"]
)
def test_transformers_reads_our_tokenizer_of_bytes(byte_ids: list[int], tmp_path: Path) -> None:
    ours = ByteTokenizer({name: token + 100 for name, token in SPECIALS.items()}, byte_ids)
    ours.save(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for sample in TEXTS:
        ids = theirs.encode(sample)
        assert ours.encode(sample) == ids
        for cut in range(len(ids) + 1):
            part = ids[cut // 2 : cut]
            assert ours.decode(part) == theirs.decode(part, skip_special_tokens=True)


class WithoutCuts:
    """The same tokenizer, which says nothing of its cuts."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode, self.decode = tokenizer.encode, tokenizer.decode

    def encode_with_cuts(self, text: str) -> tuple[list[int], list[Any]]:
        return self.encode(text, add_special_tokens=False), []


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("template", ["with special tokens", "User: "])
@given(texts=st.lists(st.text(alphabet="ab \né<|:日", max_size=8), min_size=5, max_size=5))
def test_marks_are_where_the_tokens_of_other_chats_leave(kind: str, template: str, texts: list[str]) -> None:
    both = TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[kind]))
    source = TEMPLATE if template == "with special tokens" else PLAIN
    codec = TextCodec(both, ChatTemplate(source, {"bos_token": ""}))
    roles = ("system", "user", "assistant", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    prompt = codec.encode_chat_marked(chat, marked_messages=[1])
    assert prompt.tokens == codec.encode_chat(chat)
    assert replace(codec, tokenizer=WithoutCuts(both)).encode_chat_marked(chat, marked_messages=[1]) == prompt
    for before, other in ((3, "\ue000"), (1, "\ue000"), (3, "Z")):
        edited = codec.encode_chat([*chat[:before], {"role": "user", "content": other}])
        common = next(i for i, pair in enumerate(zip_longest(prompt.tokens, edited)) if pair[0] != pair[1])
        assert common == 0 or min(abs(mark - common) for mark in prompt.marks) <= (other == "Z") * 3


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lfm2"}')
    assert load_text(tmp_path) is None


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_level_bpe())
    text = load_text(tmp_path)
    assert text is not None
    with pytest.raises(ValueError, match="the model has no chat template"):
        text.encode_chat(CHAT)


def test_a_spoilt_tokenizer_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_level_bpe())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(hf.ModelFolderError, match=f"the tokenizer in {tmp_path} cannot be read"):
        load_text(tmp_path)
