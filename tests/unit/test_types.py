"""What editors and type checkers see of the package."""

import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest

ROOT = Path(__file__).parents[2]
SPECIAL = ("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__next__")

SCRIPT = '''\
"""A script of a user."""

from collections.abc import Sequence
from typing import assert_type

import mambaslots as ms
from mambaslots.params_and_results import GeneratedToken
from mambaslots.text import ByteTokenizer, ChatTemplate


class Repeat:
    def draft(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        return [tokens[-1]] * max_drafts


model = ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0)
config = ms.InferenceConfig(num_kv_blocks=8, num_mamba_slots=4, num_speculative_tokens=2)
engine = ms.DynamicInferenceEngine(model, config, drafter=Repeat())
codec = ms.TextCodec(ByteTokenizer({}), ChatTemplate("{{ messages }}"))
prompt = codec.encode_chat_marked([{"role": "user", "content": "Hello"}], tools=None)
plan = ms.CheckpointPlan(marks=prompt.marks)
results = engine.generate([prompt.tokens], checkpoint_plan=plan, progress=True)
assert_type(results, list[ms.RequestResult])
assert_type(results[0].tokens, list[int])
assert_type(results[0].log_probs, list[float] | None)
with engine.stream([1, 2], ms.SamplingParams(temperature=0.5)) as stream:
    for generated in stream:
        assert_type(generated.token, int)
assert_type(engine.stats().cache.computed_by_reason.get("never_seen"), int | None)
assert_type(engine.step().tokens, dict[int, tuple[GeneratedToken, ...]])
assert_type(ms.load("folder").codec.encode("text"), list[int])
assert_type(engine.score([[1, 2]])[0].log_probs, list[float])
engine.generate("text")  # type: ignore[arg-type]
engine.generate([1, 2])  # type: ignore[list-item]
engine.add_request([1], cache_salt=3)  # type: ignore[arg-type]
ms.DynamicEngine  # type: ignore[attr-defined]
'''


def functions_of(path: str, owner: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(owner).items():
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        function = getattr(function, "func", function)  # of a cached property
        if (not name.startswith("_") or name in SPECIAL) and inspect.isfunction(function):
            function = inspect.unwrap(function)
            if function.__module__.startswith("mambaslots"):
                yield f"{path}.{name}", function


def public_functions() -> Iterator[tuple[str, Any]]:
    for name in ms.__all__:
        public = getattr(ms, name)
        members = [(name, public)]
        if inspect.ismodule(public):
            members = [(f"{name}.{each}", getattr(public, each)) for each in public.__all__]
        for path, member in members:
            if inspect.isclass(member):
                yield from functions_of(path, member)
            elif inspect.isfunction(member):
                yield path, member


def test_every_public_function_is_annotated() -> None:
    found = dict(public_functions())
    assert len(found) > 150
    for path, function in found.items():
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        bare = [each.name for each in parameters if each.annotation is each.empty]
        assert bare in ([], ["self"], ["cls"]), (path, bare)
        assert signature.return_annotation is not signature.empty, path


def test_the_wheel_has_every_file_and_says_that_it_is_typed(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "core").symlink_to(ROOT / "core")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    assert "mambaslots/py.typed" in names
    sources = {path for path in (ROOT / "core").rglob("*.*") if "__pycache__" not in path.parts}
    assert {f"mambaslots/{path.relative_to(ROOT / 'core').as_posix()}" for path in sources} <= names


@pytest.mark.long
def test_a_users_script_is_checked_against_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/mambaslots").symlink_to(ROOT / "core")
    (tmp_path / "user.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout == "Success: no issues found in 1 source file\n"
