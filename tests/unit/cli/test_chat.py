"""The chat with a checkpoint, as a user starts it, with lines in place of a terminal."""

import io
import json
import re
from itertools import pairwise
from pathlib import Path

import mambaslots as ms
import pytest
from mambaslots.cli.main import main

pytest.importorskip("transformers")

from oracle.hf_models import tiny_config, without_kernel_packages

TEMPLATE = """\
{% for message in messages %}<{{ message.role }}>{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def save(folder: Path) -> None:
    """A hybrid with random weights whose tokens are bytes, and the end of an answer."""
    from transformers import AutoModelForCausalLM

    with without_kernel_packages():
        AutoModelForCausalLM.from_config(tiny_config("bamba", vocab_size=257)).save_pretrained(folder)
    ms.text.ByteTokenizer({"<|end|>": 256}).save(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}')


def chat(folder: Path, *arguments: str) -> int:
    """Runs the command in this process, which has imported transformers already."""
    return main(["chat", str(folder), "--max-tokens", "40", *arguments])


def test_later_turns_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path)
    long = "What a long question this is, so that it fills a block of tokens and more."
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{long}\nAnd then?\nÄh.\n"))
    assert chat(tmp_path) == 0
    found = re.findall(
        r"\n\[resumed (\d+) of (\d+) prompt tokens; states stored: (\d+); generated \d+, end: \w+\]\nyou> ",
        capsys.readouterr().out,
    )
    turns = [tuple(map(int, turn)) for turn in found]
    assert len(turns) == 3
    assert turns[0][0] == 0 < turns[0][2]
    for (_, num_prompt_tokens, _), (num_resumed_tokens, _, _) in pairwise(turns):
        assert num_resumed_tokens >= (num_prompt_tokens - 1) // 64 * 64 > 0


def test_the_terminal_ends_a_conversation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nnever asked\n"))
    assert chat(tmp_path, "--dtype", "float64") == 0
    assert capsys.readouterr().out.count("model> ") == 1


def test_what_cannot_be_loaded_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(tmp_path) == 2
    said = f"mambaslots chat: {tmp_path} has no config.json; accepted: a folder with config.json\n"
    assert capsys.readouterr().err == said
