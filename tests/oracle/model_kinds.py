"""The models that suites are run on: one of each kind of state, mixes of them, some without attention.

A test that asks for the fixture `kind` runs once with each: `oracle.serving.small_model()` is a model of this
kind while it runs. `make test` runs each of its cases on one kind, a third of them on the mix; see
`oracle.budget`. State machines draw a kind.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass(frozen=True)
class ModelKind:
    """Layers, and the tokens of a chunk of each scan. A block of eight tokens suits all."""

    pattern: str
    ssd_chunk_size: int = 4
    delta_chunk_size: int = 8


KINDS = {
    "mix of all": ModelKind("GM*C"),
    "Mamba-2": ModelKind("M*-M"),
    "delta net": ModelKind("G*-G"),
    "short convolution": ModelKind("C*-C"),
    "no attention": ModelKind("MG-", ssd_chunk_size=8, delta_chunk_size=4),
    "windows alone": ModelKind("C-C"),
}
"""Of short convolutions alone, a prefill's chunks are its KV blocks. Without attention, KV has no bytes."""
OF_TRANSFORMERS = {
    "transformers, Mamba-2": "granitemoehybrid MoE",
    "transformers, delta net": "qwen3_next",
    "transformers, short convolution": "lfm2",
}
"""Kinds of models of transformers, by the names of their cases in `oracle.hf_models`. Tests on ranks have
them beside `KINDS`."""
WITH_ATTENTION = [name for name, kind in KINDS.items() if "*" in kind.pattern]
MIX = "mix of all"
PLAIN = "plain"
"""What runs where no kind is asked for: a layer of states and one of KV."""
SHAPES = {**KINDS, PLAIN: ModelKind("M*")}

kinds = st.sampled_from(list(KINDS))
_present = [PLAIN]


def present_kind() -> str:
    return _present[-1]


@contextmanager
def kind_of_model(name: str) -> Iterator[None]:
    """Models and answers of `oracle.serving` are of this kind within it."""
    _present.append(name)
    try:
        yield
    finally:
        _present.pop()
