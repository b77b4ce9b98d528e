"""Torch's settings: set while an engine needs them, and given back."""

import gc
from collections.abc import Iterator

import pytest
import torch
from mambaslots.inference.engines.invariance import mode
from mambaslots.inference.engines.invariance.mode import BatchInvariance
from mambaslots.inference.engines.invariance.products import BatchVarianceError
from mambaslots.inference.engines.invariance.switches import (
    SWITCHES,
    check_switches,
    read_switch,
    write_switches,
)
from oracle.checked_model import CONFIG, model_of, on


class TestSwitches:
    @pytest.fixture(autouse=True)
    def as_before(self) -> Iterator[None]:
        before = {name: read_switch(name) for name in SWITCHES}
        yield
        write_switches(before)

    def test_a_change_is_named(self):
        model = model_of("M")
        _needs_them = BatchInvariance(model, model.state_spec(), CONFIG)
        assert {name: read_switch(name) for name in SWITCHES} == SWITCHES
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k is False
        check_switches()
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        with pytest.raises(RuntimeError, match=r"matmul\.allow_bf16_reduced_precision_reduction is"):
            check_switches()

    def test_the_last_engine_that_needs_them_gives_them_back(self):
        before = {name: read_switch(name) for name in SWITCHES}
        model = model_of("M")
        alive = [BatchInvariance(model, model.state_spec(), CONFIG) for _ in range(2)]
        for _ in range(2):
            assert {name: read_switch(name) for name in SWITCHES} == SWITCHES != before
            alive.pop()
            gc.collect()
        assert {name: read_switch(name) for name in SWITCHES} == before
        alive.append(BatchInvariance(model, model.state_spec(), CONFIG))
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        alive.pop()
        gc.collect()
        changed = "matmul.allow_fp16_accumulation"
        assert {name: read_switch(name) for name in SWITCHES} == before | {changed: True}

    def test_a_refusal_leaves_them_as_they_were(self, monkeypatch):
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        before = {name: read_switch(name) for name in SWITCHES}
        model = model_of("M-")
        spec = on("cuda", model)

        def fails(*_: object) -> None:
            assert {name: read_switch(name) for name in SWITCHES} == SWITCHES
            raise BatchVarianceError("aten.mm of something")

        monkeypatch.setattr(BatchInvariance, "_check_once", fails)
        monkeypatch.setattr(mode, "on_device_of", lambda _: torch.cuda.device(-1))
        with pytest.raises(ValueError, match="of something"):
            BatchInvariance(model, spec, CONFIG)
        assert {name: read_switch(name) for name in SWITCHES} == before
