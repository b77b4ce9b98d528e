"""A model's steps on padded inputs, and on the GPU's kernels in Triton's interpreter: the same numbers."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.inference.contexts.request_states import StatePool
from mambaslots.inference.contexts.step_inputs import StepInputs, StepShape
from mambaslots.inference.kernels.kernel_set import KernelSet, kernel_set
from mambaslots.models import hybrid_lm
from oracle.budget import is_quick
from oracle.context_driver import make_request
from oracle.fresh_process import run_code
from oracle.model_kinds import KINDS
from oracle.serving import random_tokens, small_config
from oracle.traffic import traffic_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

on_a_quick_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=f"on {kind}", marks=[] if kind == "short convolution" else pytest.mark.long)
        for kind in KINDS
    ],
    indirect=True,
)
"""Whole models in Triton's interpreter: `make test` runs that of the kind which takes 3 s and not 12."""

CPU = torch.device("cpu")


class TestChoice:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_a_cpu_runs_the_reference(self, dtype):
        assert type(kernel_set(CPU, dtype)) is KernelSet

    @pytest.mark.parametrize(
        ("device", "dtype", "name"),
        [("cpu", torch.float32, "device"), (None, torch.float32, "device"), (CPU, "float32", "dtype"),
         (CPU, torch.int32, "dtype"), (CPU, None, "dtype")],
    )  # fmt: skip
    def test_what_is_no_device_or_dtype_is_refused(self, device: Any, dtype: Any, name: str) -> None:
        with pytest.raises(ValueError, match=rf"{name} is .*; accepted: "):
            kernel_set(device, dtype)

    def test_a_gpu_runs_triton_but_for_float64(self):
        from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

        assert type(kernel_set(torch.device("cuda", 0), torch.float64)) is KernelSet
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert type(kernel_set(torch.device("cuda"), dtype)) is GpuKernelSet

    def test_both_have_the_same_names_and_parameters(self):
        from inspect import Parameter, signature

        from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

        functions = {name for name, of in vars(KernelSet).items() if isinstance(of, staticmethod)}
        assert {
            name for name, of in vars(GpuKernelSet).items() if isinstance(of, staticmethod)
        } == functions - {"compute_dtype"}
        for name in functions:
            theirs = list(signature(getattr(KernelSet, name)).parameters.values())
            ours = list(signature(getattr(GpuKernelSet, name)).parameters.values())
            assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs], name
            assert all(p.default is not Parameter.empty for p in ours[len(theirs) :]), name

    @pytest.mark.parametrize(
        ("states", "asks"),
        [
            (ms.mamba2_states(1, 2, 16, 1, 16, 4, torch.float32, torch.float32, 16), False),
            (ms.gated_delta_net_states(1, 1, 16, 2, 16, 4, torch.float32, torch.float32), True),
            (ms.short_conv_states(1, 16, 3, torch.float32), False),
        ],
        ids=["Mamba-2", "gated delta net", "short convolution"],
    )
    def test_a_gpu_asks_only_for_the_packages_of_a_models_layers(self, states, asks, monkeypatch):
        """When the model is served, not in its first step."""
        from mambaslots.inference.kernels import delta
        from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

        spec = ms.HybridStateSpec(states, 1, 1, 16, states[0].dtype, 8, CPU)
        monkeypatch.setattr(delta, "stages", delta.stages.__wrapped__)
        for name in ("megatron", "fla"):
            for known in [known for known in sys.modules if known.split(".")[0] == name]:
                monkeypatch.delitem(sys.modules, known)
            monkeypatch.setitem(sys.modules, name, None)
        KernelSet.check_states(spec)
        if asks:
            with pytest.raises(ImportError, match=r"mambaslots\[fla\]"):
                GpuKernelSet.check_states(spec)
        else:
            GpuKernelSet.check_states(spec)

    @pytest.mark.parametrize(
        ("key_dim", "grid", "named"), [(512, 64, "keys have 512 numbers"), (16, 48, "chunk_size is 48")]
    )
    def test_a_gpu_refuses_sizes_that_its_kernels_do_not_take(self, key_dim, grid, named):
        from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

        states = ms.gated_delta_net_states(1, 1, key_dim, 2, 16, 4, torch.float32, torch.float32, grid)
        spec = ms.HybridStateSpec(states, 1, 1, 16, torch.float32, 8, CPU)
        KernelSet.check_states(spec)
        with pytest.raises(ValueError, match=named):
            GpuKernelSet.check_states(spec)

    def test_asking_for_the_reference_imports_no_triton(self):
        code = (
            "import sys, torch\n"
            "from mambaslots.inference.kernels.kernel_set import kernel_set\n"
            "kernel_set(torch.device('cpu'), torch.float32)\n"
            "sys.exit('triton' in sys.modules)"
        )
        assert run_code(code).returncode == 0


def padding(shape: StepShape) -> StepShape:
    """Of every kind, by odd amounts."""
    decodes = shape.decodes + 2
    prefills = shape.prefills + (3 if shape.prefills else 0)
    tokens = shape.prefill_tokens + (7 if shape.prefills else 0)
    return StepShape(
        decodes=decodes,
        prefills=prefills,
        prefill_tokens=tokens,
        max_query_tokens=tokens,
        block_columns=shape.block_columns + 1,
        kv_writes=decodes + tokens,
        chunks=shape.chunks + (4 if shape.prefills else 0),
        checkpoints=shape.checkpoints + (2 if shape.prefills else 0),
        logits=shape.logits + 3,
    )


class Scenario:
    """Three requests: prefilled in chunks with states inside, then mixed steps, then decoding."""

    plain_decodes = 3

    def __init__(self, dtype: torch.dtype, padded: bool, kernels: ModuleType, device: str = "cpu") -> None:
        self._padding = padding if padded else None
        self._kernels = kernels
        self.model = ms.models.HybridLM(small_config(16, dtype), seed=3).to(device)
        settings = ms.InferenceConfig(
            block_size_tokens=16, max_requests=6, max_tokens_per_step=128, max_sequence_length=160,
            num_kv_blocks=60, num_mamba_slots=20,
        )  # fmt: skip
        self.context = DynamicInferenceContext(self.model.state_spec(), settings)
        self.logits: list[Tensor] = []

    def run(self) -> list[Tensor]:
        plan = ms.CheckpointPlan(prefill_interval=16)
        long, short, other = (
            make_request(random_tokens(n, seed), plan) for n, seed in ((78, 1), (5, 2), (37, 3))
        )
        for request in (long, short, other):  # the blocks of requests are hashed in tens of tokens
            request.chain = type(request.chain)(16)
        self._step((long, 40), (short, 64))
        self._step((short, 1), (long, 64), (other, 20))
        self._step((long, 1), (short, 1), (other, 64))
        for _ in range(self.plain_decodes):
            self._step((long, 1), (short, 1), (other, 1))
        return self.logits

    def _step(self, *work: tuple[object, int]) -> None:
        chunks = [self.context.admission.schedule_request(request, budget) for request, budget in work]
        inputs = self.context.begin_step(chunks, self._padding)
        logits = self._forward(inputs)
        assert logits.shape[0] == len(inputs.logit_tokens)
        assert logits.shape[0] > inputs.num_logits or self._padding is None
        self.context.end_step()
        self.context.check_integrity()
        self.logits.append(logits[: inputs.num_logits].cpu())
        for (request, _), chunk in zip(work, chunks, strict=True):
            if chunk.samples_token:
                request.tokens.append((7 * len(request.tokens) + request.allocation.row) % 256)

    def _forward(self, inputs: StepInputs) -> Tensor:
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(hybrid_lm, "kernel_set", lambda device, dtype: self._kernels)
            if not torch.cuda.is_available():  # fla-core's stages enter the device of their inputs
                patch.setattr(torch.cuda, "device", lambda index: nullcontext())
            return self.model(inputs)

    def assert_same_as(self, other: "Scenario", tolerance: float) -> None:
        close = {"rtol": tolerance, "atol": tolerance}
        for ours, theirs in zip(self.run(), other.run(), strict=True):
            torch.testing.assert_close(ours, theirs, **close)
        memories = self.context.memory, other.context.memory
        for ours, theirs in zip(
            *((*memory.state_pool.tensors, memory.kv_cache) for memory in memories), strict=True
        ):
            torch.testing.assert_close(ours.cpu(), theirs.cpu(), **close)
            assert torch.equal(ours.cpu() == 0, theirs.cpu() == 0), "a slot that was not named was written"
        assert self.context.cache_stats() == other.context.cache_stats()
        assert self.context.cache_stats().num_states_committed > 6


@pytest.mark.usefixtures("kind")
def test_padding_changes_nothing_on_the_reference_kernels():
    Scenario(torch.float64, True, KernelSet()).assert_same_as(
        Scenario(torch.float64, False, KernelSet()), 1e-11
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding, in the interpreter
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.long  # the same steps with drafts after them are below
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("padded", [False, True])
def test_the_gpus_kernels_compute_the_same(padded):
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    ours, theirs = (
        Scenario(torch.float32, padded, GpuKernelSet()),
        Scenario(torch.float32, False, KernelSet()),
    )
    ours.assert_same_as(theirs, 2e-4)


class Touched(TorchDispatchMode):
    """The names of torch's own operations on a pool's memory."""

    def __init__(self, pool: StatePool) -> None:
        super().__init__()
        self._memory = {pool.memory.untyped_storage().data_ptr()}
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)]
        name = func.overloadpacket.__name__
        interpreter = name == "copy_" and tensors[0].data_ptr() == tensors[1].data_ptr()  # of what it is
        if not interpreter and any(t.untyped_storage().data_ptr() in self._memory for t in tensors):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


class Counted(Scenario):
    """Counts the bytes of both pools that each step's kernels move, and the fewest that could do."""

    def __init__(self, padded: bool) -> None:
        from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

        super().__init__(torch.float32, padded, GpuKernelSet())
        self.moved: list[tuple[int, int]] = []
        self.least: list[tuple[int, int]] = []

    def _forward(self, inputs: StepInputs) -> Tensor:
        pool = inputs.state_pool
        with traffic_of(pool.memory) as slots:
            logits = super()._forward(inputs)
        self.moved.append((slots.loaded, slots.stored))
        state = self.model.state_spec().state_bytes
        read = int((inputs.state_sources >= 0).sum())
        written = int((inputs.state_destinations >= 0).sum() + (inputs.checkpoints.destinations >= 0).sum())
        self.least.append((read * state, written * state))
        return logits


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding, in the interpreter
@on_a_quick_kind
@pytest.mark.usefixtures("kind", "one_fla_configuration")
def test_whole_steps_move_each_state_once():
    """Of resumed rows, of chunks with states inside, and of decodes: no copy before, between or after."""
    counted = Counted(padded=True)
    plan = ms.CheckpointPlan(prefill_interval=16)
    first, again = (make_request(random_tokens(78, 1), plan) for _ in range(2))
    for request in (first, again):
        request.chain = type(request.chain)(16)
    with Touched(counted.context.memory.state_pool) as touched:
        counted._step((first, 40))
        counted._step((first, 64))
        counted._step((first, 1), (again, 64))
    assert counted.context.cache_stats().num_resumed_tokens == 64
    assert touched.names <= {"select", "slice", "new_empty", "set_"}, "more than views"
    for moved, least in zip(counted.moved, counted.least, strict=True):
        for ours, fewest in zip(moved, least, strict=True):
            assert fewest <= ours <= 1.05 * fewest
    assert [read > 0 for read, _ in counted.least] == [False, True, True]


@pytest.mark.gpu
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.parametrize("padded", [False, True])
def test_they_do_on_a_gpu(padded):
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    ours = Scenario(torch.float32, padded, GpuKernelSet(), "cuda")
    ours.assert_same_as(Scenario(torch.float32, False, KernelSet()), 5e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("kind")
def test_float64_on_a_gpu_is_exact():
    ours = Scenario(torch.float64, True, KernelSet(), "cuda")
    ours.assert_same_as(Scenario(torch.float64, False, KernelSet()), 1e-9)


def drafted_padding(shape: StepShape) -> StepShape:
    """Of every kind, by odd amounts; decode rows are as wide as they may be."""
    wider = padding(shape)
    return wider._replace(
        decode_tokens=4, kv_writes=wider.kv_writes + 4 * wider.decodes, logits=shape.logits + 3
    )


class DraftedScenario(Scenario):
    """The same three requests; their decodes have 0 to 3 drafts, of which 0 to all stand."""

    drafted_steps = 4

    def __init__(self, dtype: torch.dtype, padded: bool, kernels: ModuleType, device: str = "cpu") -> None:
        super().__init__(dtype, padded, kernels, device)
        self._padding = drafted_padding if padded else None
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
            chunk = context.admission.schedule_request(request, budget)
            wanted = [
                (11 * len(request.tokens) + i) % 256
                for i in range((self._steps + request.allocation.row) % 4)
            ]
            wanted = wanted[: chunk.max_drafts(context.config.num_speculative_tokens)]
            chunks.append(context.admission.add_drafts(chunk, wanted))
        inputs = context.begin_step(chunks, self._padding)
        if self._padding is None:
            assert inputs.shape.decode_tokens == max(1 + len(chunk.drafts) for chunk in chunks)
        logits = self._forward(inputs)
        self.logits.append(logits[: inputs.num_logits].cpu())
        kept = {}
        for chunk in chunks:
            request = chunk.request
            if chunk.samples_token:
                accepted = (self._steps // 2 + request.allocation.row) % (len(chunk.drafts) + 1)
                kept[request.request_id] = accepted + 1
                request.tokens += [
                    *chunk.drafts[:accepted],
                    (7 * len(request.tokens) + request.allocation.row) % 256,
                ]
        context.end_step(kept)
        context.check_integrity()


@pytest.mark.usefixtures("kind")
def test_padding_changes_nothing_on_the_reference_kernels_with_drafts():
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
@on_a_quick_kind
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.sampled(padded=(True,))
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("padded", [False, True])
def test_the_gpus_kernels_compute_the_same_with_drafts(padded):
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    ours, theirs = (
        DraftedScenario(torch.float32, padded, GpuKernelSet()),
        DraftedScenario(torch.float32, False, KernelSet()),
    )
    if is_quick():
        for scenario in (ours, theirs):
            scenario.plain_decodes, scenario.drafted_steps = 0, 1
    ours.assert_same_as(theirs, 2e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.parametrize("padded", [False, True])
def test_they_do_on_a_gpu_with_drafts(padded):
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    ours = DraftedScenario(torch.float32, padded, GpuKernelSet(), "cuda")
    ours.assert_same_as(DraftedScenario(torch.float32, False, KernelSet()), 5e-4)
