"""`ms.load` chooses the kind of model, and brings its text and its defaults along."""

import subprocess
import sys
from pathlib import Path

import mambaslots as ms
import pytest
from mambaslots.checkpoint_files import CheckpointError

TEMPLATE = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"


def test_a_checkpoint_of_transformers_without_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lfm2"}')
    code = (
        "import sys, mambaslots as ms\n"
        "sys.modules['transformers'] = None\n"
        f"try: ms.load({str(tmp_path)!r})\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "mambaslots.hf needs transformers: pip install 'mambaslots[hf]'\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "config.json is no JSON"),
        ("3", "config.json holds a JSON int; accepted: an object"),
    ],
)
def test_a_folder_that_is_no_checkpoint(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        ms.load(tmp_path)
