"""Fuzz targets that are checkpoints: folders of ours and of transformers, tokenizers, templates, text."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import mambaslots as ms
import torch
from fuzzing.settings import tiny_model
from fuzzing.target import (
    ACCEPTED,
    HUGE,
    NUMBERS,
    REFUSED,
    TEXTS,
    Target,
    any_json,
    any_value,
    damaged_bytes,
    damaged_json,
    end_of,
    json_bytes,
)
from mambaslots.models import HybridLM
from mambaslots.text import ByteTokenizer, ChatTemplate, TextCodec

TINY_CODE = Path(__file__).parents[2] / "models/tiny-code"
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "é"}]
Files = dict[str, bytes | str]
"""The files of a folder by their names; a str is the target of a symbolic link, or says that it is a pipe."""
_PIPE = "a pipe"
_LINKS = ("/dev/zero", "/dev/stdin", "/etc/passwd", "missing", "/", "/proc/self/mem", _PIPE)


def targets(folder: Path) -> list[Target]:
    """Folders of models, and text."""
    return [
        Folders("own model folders", folder / "own", _own_files, _load_own),
        Folders("transformers model folders", folder / "hf", _transformers_files, _load_transformers),
        Folders("transformers tokenizer folders", folder / "text", _tokenizer_files, _load_text),
        Templates(),
        Texts(),
    ]


@dataclass
class Folders:
    """Folders for `mambaslots.load`, with damaged files."""

    name: str
    folder: Path
    good: Callable[[Path], list[Files]]
    load: Callable[[Path], None]
    documented: tuple[type[BaseException], ...] = (ValueError,)
    _known: list[Files] = field(default_factory=list, repr=False)

    def draw(self, random: Random) -> Files:
        if not self._known:
            self._known = self.good(self.folder.with_name(f"{self.folder.name}-good"))
            for good in self._known:  # also imports what the first folder imports, before the watch
                assert self.feed(good) == ACCEPTED, "a good folder was refused"
        files = dict(random.choice(self._known))
        for _ in range(random.choice((0, 1, 1, 1, 2))):
            name = "config.json" if "config.json" in files and random.random() < 0.3 else ""
            name = name or random.choice(sorted(files))
            content, kind = files[name], random.random()
            if kind < 0.06:
                files[name] = random.choice((*_LINKS, name))
            elif kind < 0.1:
                del files[name]
            elif isinstance(content, bytes):
                files |= _damaged_file(random, name, content)
        return files

    def size_of(self, drawn: Any) -> int:
        return sum(map(len, drawn.values()))

    def feed(self, drawn: Any) -> str:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name, content in drawn.items():
            if content == _PIPE:
                os.mkfifo(self.folder / name)
            elif isinstance(content, str):
                os.symlink(content, self.folder / name)
            else:
                (self.folder / name).write_bytes(content)
        return end_of(lambda: self.load(self.folder), self.documented)


_SIZES = (10**6, 2**24, 2**31 - 2, 2**31 - 2, 2**31 - 1, *HUGE, -1, 0)


def _damaged_file(random: Random, name: str, content: bytes) -> Files:
    """The file `name`, damaged by its kind where it still is of that kind."""
    try:
        return _damaged_by_kind(random, name, content)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error, RecursionError):
        return {name: damaged_bytes(random, content)}


def _damaged_by_kind(random: Random, name: str, content: bytes) -> Files:
    if name.endswith(".safetensors") and random.random() < 0.8:
        return {name: _damaged_safetensors(random, content)}
    if name.endswith(".json") and random.random() < 0.8:
        value = json.loads(content)
        if "weight_map" in value and random.random() < 0.5:
            tensor = random.choice(sorted(value["weight_map"]))
            value["weight_map"][tensor] = random.choice(
                ("../../etc/passwd", "/etc/passwd", "..", "x.safetensors", "./model.safetensors", "", None, 1)
            )
            return {name: json_bytes(random, value)}
        if name == "config.json" and random.random() < 0.5:
            field_name = random.choice(
                sorted(name for name in value if isinstance(value[name], (int, float)))
            )
            return {name: json_bytes(random, value | {field_name: random.choice(_SIZES)})}
        if name == "config.json" and random.random() < 0.2:
            quantised = {
                "quant_method": "fp8",
                "weight_block_size": [any_json(random), random.choice(NUMBERS)],
            }
            return {name: json_bytes(random, value | {"quantization_config": quantised})}
        return {name: json_bytes(random, damaged_json(random, value))}
    return {name: damaged_bytes(random, content)}


def _damaged_safetensors(random: Random, content: bytes) -> bytes:
    """A safetensors file whose header is wrong: lengths, offsets, shapes, dtypes, names."""
    length = struct.unpack("<Q", content[:8])[0]
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    kind = random.randrange(10)
    names = sorted(name for name in header if name != "__metadata__")
    tensor = header[random.choice(names)]
    other = header[random.choice(names)]
    if kind == 0:
        huge = random.choice((0, 1, length - 1, length + 1, 2**31, 2**63 - 1, 2**64 - 1, 100_000_001))
        return struct.pack("<Q", huge) + content[8:]
    if kind == 1:
        tensor["data_offsets"] = random.choice(
            ([0, 2**60], [-1, 4], [8, 4], [2**63, 2**64], other["data_offsets"], [0], [0.5, 1], None)
        )
    elif kind == 2:
        tensor["shape"] = random.choice(
            (
                [2**60],
                [2**31, 2**31, 2**31],
                [0],
                [],
                [-1],
                [1, *tensor["shape"]],
                tensor["shape"][::-1],
                "8",
                [2**64],
            )
        )
    elif kind == 3:
        tensor["dtype"] = random.choice(
            ("F64", "F16", "BF16", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X", 1, "")
        )
    elif kind == 4:
        del header[random.choice(names)]
    elif kind == 5:
        header[random.choice((*TEXTS, "extra.weight", "__metadata__"))] = random.choice(
            (tensor, {}, {"a": 1}, None)
        )
    elif kind == 6:  # a header that says a huge tensor, consistent in itself
        tensor |= {"dtype": "U8", "shape": [2**60], "data_offsets": [0, 2**60]}
    elif kind == 7:
        rest = random.choice((rest[:-1], rest + b"\0", b"", rest[: len(rest) // 2]))
    elif kind == 8:
        header = damaged_json(random, header)
    else:
        return damaged_bytes(random, content)
    written = json_bytes(random, header)
    return struct.pack("<Q", len(written)) + written + rest


# ---- our own models


def _own_files(folder: Path) -> list[Files]:
    tiny_model().save_pretrained(folder)
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    copied = {name: (TINY_CODE / name).read_bytes() for name in names}
    other = folder.with_name(
        "of-transformers"
    )  # a damaged config is given to transformers, which is imported
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "mamba2"}')
    assert end_of(lambda: _load_own(other), (ValueError,)) == REFUSED
    return [_read(folder) | copied]


def _load_own(folder: Path) -> None:
    loaded = ms.load(folder)
    assert isinstance(loaded.model, HybridLM)
    _use_text(loaded.text)
    loaded.sampling_params()
    logits_are_computed(loaded.model)


def logits_are_computed(model: Any) -> None:
    """An engine on `model` answers: what was loaded is a whole model. NaN in weights may fail a step."""
    spec = model.state_spec()
    if spec.vocab_size < 4 or sum(state.state_bytes for state in spec.states) > 1 << 20:
        return
    size = -(-8 // spec.grid) * spec.grid
    if size > 64:
        return
    config = ms.InferenceConfig(
        block_size_tokens=size, max_requests=1, max_tokens_per_step=max(16, size),
        max_sequence_length=2 * size + 16,
        num_kv_blocks=8, num_mamba_slots=2,
    )  # fmt: skip
    try:
        result = ms.DynamicInferenceEngine(model, config).generate(
            [[1, 2, 3]], ms.SamplingParams(max_tokens=1)
        )[0]
    except RuntimeError as error:
        if "NaN" in str(error) or "nan" in str(error):
            return
        raise
    assert all(0 <= token < spec.vocab_size for token in result.tokens)


# ---- checkpoints of transformers


_COMMON = {"vocab_size": 97, "hidden_size": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def _transformers_files(folder: Path) -> list[Files]:
    """Two models in one file each, one in shards, and one in block-scaled FP8."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, Lfm2Config, Mamba2Config

    mamba = Mamba2Config(
        num_heads=2, head_dim=16, state_size=8, n_groups=1, expand=2, conv_kernel=4, chunk_size=8,
        num_hidden_layers=1, **_COMMON,
    )  # fmt: skip
    conv = Lfm2Config(
        num_hidden_layers=2, layer_types=["conv", "full_attention"], conv_L_cache=3, intermediate_size=16,
        num_attention_heads=2, num_key_value_heads=1, block_auto_adjust_ff_dim=False, **_COMMON,
    )  # fmt: skip
    found = []
    for number, (config, shard) in enumerate(((mamba, "1GB"), (conv, "1GB"), (conv, "8KB"))):
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / str(number), max_shard_size=shard)
        found.append(_read(folder / str(number)))
    whole, stored = folder / "1/model.safetensors", {}
    for name, tensor in load_file(whole).items():
        is_product = tensor.dim() == 2 and name.endswith("proj.weight")
        stored[name] = tensor.to(torch.float8_e4m3fn) if is_product else tensor
        if is_product:
            rows, columns = tensor.shape
            stored[f"{name}_scale_inv"] = torch.ones(-(-rows // 8), -(-columns // 8))
    assert len(stored) > len(load_file(whole)), "no weight is in FP8"
    save_file(stored, whole, metadata={"format": "pt"})
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    config = json.loads(found[1]["config.json"]) | quantised
    found.append(_read(folder / "1") | {"config.json": json.dumps(config).encode()})
    return found


def _load_transformers(folder: Path) -> None:
    loaded = ms.load(folder)
    loaded.sampling_params()
    logits_are_computed(loaded.model)


def _tokenizer_files(folder: Path) -> list[Files]:
    """The files of a tokenizer that transformers reads."""
    from transformers import Lfm2Config

    folder.mkdir(parents=True)
    Lfm2Config(**_COMMON).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(TINY_CODE / name, folder)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|end_of_turn|>"}')
    return [_read(folder)]


def _load_text(folder: Path) -> None:
    from mambaslots.loaded_model import load_text

    loaded = load_text(folder)
    loaded.sampling_params()
    _use_text(loaded.text)


def _read(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---- text


def _use_text(text: TextCodec | None) -> None:
    """Encode, decode and render: a ValueError where the template refuses, nothing else."""
    if text is None:
        return
    ids = text.encode("a é \U0001f600")
    text.decode([*ids, 0, 1, 300, 10**6])
    detokenizer = text.detokenizer()
    detokenizer.push(*ids)
    detokenizer.finish()
    if text.chat_template is not None:
        end_of(lambda: text.encode_chat_marked(MESSAGES), (ValueError,))


@dataclass
class Templates:
    """Sources for `ChatTemplate`, and messages for good ones."""

    name: str = "chat templates"
    documented: tuple[type[BaseException], ...] = (ValueError,)

    def draw(self, random: Random) -> tuple[str, Any, dict[str, Any]]:
        good = (TINY_CODE / "chat_template.jinja").read_text()
        messages: Any = MESSAGES
        source, variables = good, {}
        kind = random.randrange(4)
        if kind == 0:
            source = damaged_bytes(random, good.encode()).decode("utf-8", "replace")
        elif kind == 1:
            source = random.choice((*_HOSTILE, *_HUNGRY))
        elif kind == 2:
            messages = damaged_json(random, MESSAGES)
        else:
            messages = random.choice((MESSAGES, [any_value(random)], any_value(random)))
            names = (
                "messages",
                "add_generation_prompt",
                "tools",
                "self",
                "raise_exception",
                "range",
                *TEXTS[1:4],
            )
            variables = {random.choice(names): any_value(random)}
            variables.pop("messages", None)
            variables.pop("add_generation_prompt", None)
            variables.pop("self", None)
        return source, messages, variables

    def size_of(self, drawn: Any) -> int:
        return len(drawn[0]) + 1000

    def feed(self, drawn: Any) -> str:
        source, messages, variables = drawn

        def call() -> None:
            template = ChatTemplate(source)
            if source in _HUNGRY:
                return
            text = template.render(messages, **variables)
            assert not any(sign in text for sign in ("root:", "<module", "__main__")), "the sandbox leaks"

        return end_of(call, self.documented)


_HUNGRY = (
    "{% for i in range(99998) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a' * 99999999 }}",
    "{{ [0] * 10**9 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 2 ** 99999999 }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ ('a' * 9999).replace('a', 'a' * 9999).replace('a', 'a' * 9999) }}",
    "{{ lipsum(n=99999) }}",
    "{{ strftime_now('%Y' * 99999) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'a' | replace('', 'b' * 99999) | length }}",
    "{{ range(99999) | list | sum(start=[]) }}",
    "{{ messages | batch(10**9, 0) | list }}",
    "{{ 'a' | indent(10**10, true) }}",
)  # fmt: skip
"""Templates that take time or memory when rendered, which is the model's. Reading them must not."""
_HOSTILE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ ('{0.__globals__}' | format(raise_exception)) }}",
    "{{ messages.append(1) }}",
    "{{ strftime_now('\\x00') }}",
    "{{ strftime_now(1) }}",
    "{{ messages | tojson(separators=1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ 'ab' | urlize }}{{ '(' * 9999 }}",
    "{" * 50_000,
    "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "{% if 1 %}" * 3_000 + "{% endif %}" * 3_000,
    "{{ " + "-" * 20_000 + "1 }}",
    "{{ " + "1+" * 20_000 + "1 }}",
    "{{ undefined_name.attribute }}",
    "{{ 1 / 0 }}",
    "\ud800{{ messages[0]['content'] }}",
)  # fmt: skip
"""Templates that leave the sandbox, or are nested deeply."""


@dataclass
class Texts:
    """Texts, ids and pieces for `TextCodec`, and files for `ByteTokenizer`."""

    name: str = "texts"
    documented: tuple[type[BaseException], ...] = (ValueError,)
    codec: TextCodec = field(default_factory=lambda: TextCodec(ByteTokenizer.from_folder(TINY_CODE)))

    def draw(self, random: Random) -> tuple[str, Any]:
        kind = random.randrange(4)
        if kind == 0:
            return "encode", random.choice((random.choice(TEXTS) + "<|user|>", any_value(random), "<|" * 999))
        if kind == 1:
            return "make", (
                {random.choice(TEXTS): any_value(random)},
                random.choice((range(256), any_value(random))),
            )
        ids = [
            random.choice((random.randrange(300), 195, 169, 240, 255)) for _ in range(random.randrange(40))
        ]
        if random.random() < 0.4 and ids:
            ids[random.randrange(len(ids))] = any_value(random)
        return random.choice(("decode", "push")), random.choice((ids, ids, any_value(random)))

    def size_of(self, drawn: Any) -> int:
        return 10_000

    def feed(self, drawn: Any) -> str:
        what, value = drawn

        def call() -> None:
            if what == "encode":
                ids = self.codec.encode(value)
                assert all(0 <= token < 264 for token in ids)
            elif what == "make":
                ByteTokenizer(*value)
            elif what == "decode":
                self.codec.decode(value).encode("utf-8")
            elif isinstance(value, list):
                self._push(value)

        return end_of(call, self.documented)

    def _push(self, ids: Sequence[Any]) -> None:
        good = [token for token in ids if type(token) is int]
        detokenizer = self.codec.detokenizer()
        pieces = [detokenizer.push(token) for token in good] + [detokenizer.finish()]
        assert "".join(pieces) == self.codec.tokenizer.decode(good), "pieces are not the text"
