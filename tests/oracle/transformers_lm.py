"""Tiny float64 models of transformers in the place of `small_model`, with blocks of eight tokens."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import mambaslots as ms
import torch
from mambaslots import ParallelGroups
from mambaslots.hf.served_model import ServedModel
from oracle.float64_casts import Float64Casts
from oracle.hf_models import reference_logits, reference_model
from torch import Tensor

VOCABULARY = 256
LETTERS = {"ssm": "M", "delta": "G", "short_conv": "C"}
"""Mixers as `HybridConfig.pattern` names them, by the last tensor of their states."""


@dataclass(frozen=True)
class Shape:
    """What tests read of a `HybridConfig`; `pattern` is without the MLPs."""

    pattern: str
    num_attention_heads: int


class TransformersLM:
    """A served model of transformers, in float64 throughout.

    Args:
        case: of `oracle.hf_models.CONFIGS`.
        groups: the ranks that the model is split over; None for one rank.
    """

    def __init__(self, case: str, groups: ParallelGroups | None = None) -> None:
        self.case = case
        whole = reference_model(case, torch.float64, VOCABULARY)
        self._served = ServedModel(copy.deepcopy(whole), groups)
        self.groups, config = self._served.groups, self._served.config
        letter = LETTERS[self._served.state_spec().states[-1].name]
        pattern = "".join("*" if name == "full_attention" else letter for name in config.layer_types)
        self.config = Shape(pattern, config.num_attention_heads)

    def state_spec(self) -> ms.HybridStateSpec:
        """The model's own, but for grids that blocks of eight tokens fit; the kernels of a CPU take any."""
        spec = self._served.state_spec()
        states = tuple(replace(state, grid=min(state.grid, 8)) for state in spec.states)
        return replace(spec, states=states)

    def __call__(self, inputs: ms.StepInputs) -> Tensor:
        with Float64Casts():
            return self._served(inputs)


class TransformersOracle:
    """transformers' own computation of whole texts, without any cache."""

    def __init__(self, case: str) -> None:
        self._case = case

    def logits(self, tokens: Iterable[int]) -> Tensor:
        """[n, vocab_size] float64: after each token."""
        with Float64Casts():
            return reference_logits(self._case, list(tokens), torch.float64, VOCABULARY)

    def generate_greedy(self, prompt: Iterable[int], n: int) -> tuple[list[int], list[float]]:
        """n tokens after the prompt, and their log-probs."""
        text = list(map(int, prompt))
        begin, log_probs = len(text), []
        for _ in range(n):
            last = self.logits(text)[-1].log_softmax(-1)
            text.append(int(last.argmax()))
            log_probs.append(float(last[text[-1]]))
        return text[begin:], log_probs


@cache
def whole_model(case: str) -> TransformersLM:
    return TransformersLM(case)
