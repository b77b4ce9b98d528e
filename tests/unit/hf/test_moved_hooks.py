"""A version of transformers whose private parts moved is refused by name."""

import copy
import importlib.metadata
import sys
from importlib import import_module

import pytest

pytest.importorskip("transformers")

import transformers
from mambaslots import hf
from mambaslots.hf.moved_hooks import moved_hook
from mambaslots.version import NEWEST_TESTED
from oracle.hf_models import reference_model
from transformers import core_model_loading

HERE = importlib.metadata.version("transformers")


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEWEST_TESTED, "transformers", "5.1")


def refused(what: str) -> str:
    return rf"^transformers {HERE} {what}, on which mambaslots\.hf relies; newest tested: transformers 5\.1$"


@pytest.mark.usefixtures("untested")
def test_a_name_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core_model_loading, "rename_source_key")
    for name in [name for name in sys.modules if name.startswith("mambaslots.hf")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ImportError, match=refused(r"has no transformers\.core_model_loading\.rename_source_key")
    ):
        import_module("mambaslots.hf")


@pytest.mark.usefixtures("untested")
def test_a_module_that_has_another_name() -> None:
    model = copy.deepcopy(reference_model("bamba"))
    del model.model.layers[0].input_layernorm
    with pytest.raises(ImportError, match=refused("has no 'input_layernorm' in BambaDecoderLayer")):
        hf.ServedModel(model)


@pytest.mark.usefixtures("untested")
def test_a_call_that_takes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AttentionInterface, "register", lambda: None)
    with pytest.raises(
        ImportError, match=refused(r"differs \(TypeError: .* takes 0 positional arguments .*\)")
    ):
        hf.ServedModel(copy.deepcopy(reference_model("bamba")))


@pytest.mark.parametrize("tested", [".".join(HERE.split(".")[:2]), "99.0"])
def test_tested_versions_and_other_packages_are_not_blamed(
    tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEWEST_TESTED, "transformers", tested)
    assert moved_hook(ImportError("gone", name="transformers.core_model_loading")) is None
    model = copy.deepcopy(reference_model("bamba"))
    del model.model.layers[0].input_layernorm
    with pytest.raises(AttributeError):
        hf.ServedModel(model)
    monkeypatch.setitem(NEWEST_TESTED, "transformers", "5.1")
    assert moved_hook(ImportError("gone", name="tokenizers")) is None
    with pytest.raises(ValueError, match="accepted"):
        hf.ServedModel(copy.deepcopy(reference_model("bamba")), groups=2)  # type: ignore[arg-type]
