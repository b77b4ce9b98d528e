"""Logits whose bits depend on a step are found, and the step is named."""

from dataclasses import replace
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.engines.cuda_graphs import with_few_rows
from mambaslots.inference.engines.invariance.dummy_steps import DummySteps
from mambaslots.inference.engines.invariance.forwards import checked_length, forward_difference
from mambaslots.inference.kernels import few_rows
from oracle.checked_model import CONFIG, model_of
from torch import Tensor, nn


class Reading(nn.Module):
    """A model whose logits depend on the number of tokens of the step, in the last bit."""

    def __init__(self, model: ms.models.HybridLM, depends: Any) -> None:
        super().__init__()
        self._model, self._depends = model, depends
        self.state_spec = model.state_spec

    def forward(self, inputs: Any) -> Tensor:
        logits = self._model(inputs)
        return logits.nextafter(logits + 1) if self._depends(inputs.shape) else logits


class TestForwardCheck:
    @pytest.mark.parametrize(
        ("depends", "case"),
        [
            (lambda shape: False, None),
            (lambda shape: shape.tokens != 64, "in the first chunk of a prefill in parts"),
            (lambda shape: shape.prefills == 2, "in the last part of a prefill, beside another"),
            (lambda shape: shape.tokens == 256, "in the last part of a prefill, beside another"),
            (lambda shape: shape.prefill_tokens == 32, "in the first chunk of a prefill in parts"),
            (lambda shape: shape.prefills == 0, "in a decode at position 30, alone"),
            (lambda shape: shape.prefills and shape.decodes, "in a decode at position 34, beside a prefill"),
            (lambda shape: shape.decode_tokens > 1, "in a decode at position 35, with drafts"),
            (lambda shape: shape.tokens == 8, None),
        ],
    )
    def test_where_bits_differ(self, depends, case):
        model = Reading(model_of("M-*"), depends)
        config = replace(CONFIG, max_sequence_length=512, num_speculative_tokens=3)
        steps = DummySteps(model, model.state_spec(), config, checked_length(16), 256)
        assert forward_difference(steps, 16, 256) == case

    @pytest.mark.parametrize(
        ("depends", "case"),
        [
            (lambda shape: shape.tokens == 8, "in a decode at position 30, alone"),
            (lambda shape: shape.logits == 8, "in a decode at position 30, alone"),
            (
                lambda shape: shape.tokens == 8 and shape.decode_tokens == 4,
                "in a decode at position 35, with drafts",
            ),
        ],
    )
    def test_where_bits_of_few_rows_differ(self, depends, case):
        model = Reading(model_of("M-*"), depends)
        config = replace(CONFIG, max_sequence_length=512, num_speculative_tokens=3)
        steps = DummySteps(model, model.state_spec(), config, checked_length(16), 256)
        assert forward_difference(steps, 16, 256, min_decode_tokens=8) == case

    def test_products_of_few_rows_are_those_of_small_steps_alone(self, monkeypatch):
        sizes = list[int]()

        def product(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
            sizes.append(len(rows))
            return torch.mm(rows, weight) * 1.25

        monkeypatch.setattr(few_rows, "is_taken", lambda rows, weight: True)
        monkeypatch.setattr(few_rows, "product", product)
        model, longest = model_of("M-*"), checked_length(16)
        steps = DummySteps(with_few_rows(model), model.state_spec(), CONFIG, longest, 256)
        differs = forward_difference(steps, 16, 256, min_decode_tokens=8)
        assert differs == "in a decode at position 30, alone"
        assert set(sizes) == {8}

    def test_it_releases_what_it_held(self):
        model = model_of("M*")
        steps = DummySteps(model, model.state_spec(), CONFIG, checked_length(16), 256)
        for _ in range(3):
            assert forward_difference(steps, 16, 256) is None
        assert steps._context.requests == []
