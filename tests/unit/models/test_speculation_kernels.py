"""Steps with drafts: padded and not, on every kernel set, the same logits, states and KV."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.inference.contexts.step_inputs import StepInputs, StepShape
from mambaslots.inference.kernels.kernel_set import KernelSet
from oracle.budget import is_quick

_spec = importlib.util.spec_from_file_location(
    "speculating_kernel_sets", Path(__file__).parent / "test_kernel_sets.py"
)
assert _spec is not None
assert _spec.loader is not None
kernel_sets = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernel_sets)


def padding(shape: StepShape) -> StepShape:
    """Of every kind, by odd amounts; decode rows are as wide as they may be."""
    wider = kernel_sets.padding(shape)
    return wider._replace(
        decode_tokens=4, kv_writes=wider.kv_writes + 4 * wider.decodes, logits=shape.logits + 3
    )


class DraftedScenario(kernel_sets.Scenario):
    """The same three requests; their decodes have 0 to 3 drafts, of which 0 to all stand."""

    drafted_steps = 4

    def __init__(self, dtype: torch.dtype, padded: bool, kernels: ModuleType, device: str = "cpu") -> None:
        super().__init__(dtype, padded, kernels, device)
        self._padding = padding if padded else None
        config = replace(self.context.config, num_speculative_tokens=3)
        self.context = DynamicInferenceContext(self.model.state_spec(), config)
        self._steps = 0

    def run(self) -> list[torch.Tensor]:
        super().run()
        requests = self.context.requests
        for _ in range(self.drafted_steps):
            self._step(*((request, 1) for request in requests))
        return self.logits

    def _step(self, *work: tuple[object, int]) -> None:
        context = self.context
        self._steps += 1
        chunks = []
        for request, budget in work:
            chunk = context.schedule(request, budget)
            wanted = [
                (11 * len(request.tokens) + i) % 256 for i in range((self._steps + request.holding.row) % 4)
            ]
            chunks.append(context.draft(chunk, wanted))
        inputs = context.begin_step(chunks, self._padding).inputs
        if self._padding is None:
            assert inputs.shape.decode_tokens == max(1 + len(chunk.drafts) for chunk in chunks)
        logits = self._forward(inputs)
        self.logits.append(logits[: inputs.num_logits].cpu())
        kept = {}
        for chunk in chunks:
            request = chunk.request
            if chunk.completes:
                accepted = (self._steps // 2 + request.holding.row) % (len(chunk.drafts) + 1)
                kept[request.request_id] = accepted + 1
                request.tokens += [
                    *chunk.drafts[:accepted],
                    (7 * len(request.tokens) + request.holding.row) % 256,
                ]
        context.end_step(kept.get)
        context.check_integrity()


@pytest.mark.usefixtures("kind")
def test_padding_changes_nothing_on_the_reference_kernels():
    ours, theirs = (DraftedScenario(torch.float64, padded, KernelSet()) for padded in (True, False))
    ours.assert_same_as(theirs, 1e-11)


class RowsChecked(DraftedScenario):
    """Compares each step's rows for attention with the step's other fields."""

    steps_with_drafts = 0

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        rows, width = inputs.attention_rows, inputs.shape.decode_tokens
        self.steps_with_drafts += width > 1
        starts, lengths = rows.query_start_loc.tolist(), rows.query_lengths.tolist()
        decodes, first = inputs.num_decodes, inputs.num_decode_tokens
        assert starts == [
            *range(0, first, width),
            *(first + start for start in inputs.chunks.query_start_loc.tolist()),
        ]
        for row, length in enumerate(rows.kv_lengths.tolist()):
            real = inputs.positions[starts[row] : starts[row] + lengths[row]].tolist()
            assert real == list(range(length - lengths[row], length))
            if row >= decodes or length == 0:
                assert lengths[row] == (starts[row + 1] - starts[row] if length else 0)
        assert {tensor.dtype for tensor in rows[:4]} == {torch.int32}
        assert rows[5:] == (decodes, width, inputs.shape.max_query_tokens, False)
        return super()._forward(inputs)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_given_each_rows_place_and_real_tokens(padded):
    scenario = RowsChecked(torch.float64, padded, KernelSet())
    scenario.run()
    assert scenario.steps_with_drafts > 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding, in the interpreter
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.sampled(padded=(True,))
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("padded", [False, True])
def test_the_gpus_kernels_compute_the_same(padded):
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    ours, theirs = (
        DraftedScenario(torch.float32, padded, GpuKernelSet()),
        DraftedScenario(torch.float32, False, KernelSet()),
    )
    if is_quick():
        for scenario in (ours, theirs):
            scenario.plain_decodes, scenario.drafted_steps = 1, 2
    ours.assert_same_as(theirs, 2e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.parametrize("padded", [False, True])
def test_they_do_on_a_gpu(padded):
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    ours = DraftedScenario(torch.float32, padded, GpuKernelSet(), "cuda")
    ours.assert_same_as(DraftedScenario(torch.float32, False, KernelSet()), 5e-4)
