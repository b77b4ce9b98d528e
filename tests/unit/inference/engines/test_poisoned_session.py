"""What `pytest --poison` sees: planted reads of memory that may not be read, most of them weighed by 0."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts import step_builder
from mambaslots.inference.contexts.step_builder import StepBuffer
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.models import hybrid_lm
from oracle.memory_poison import INVALID, is_poisoned
from oracle.model_kinds import MIX, kind_of_model
from oracle.poisoned_session import EXCEPTIONS, PARTS, left_out, poisoned
from oracle.serving import random_tokens, small_config, small_engine, small_model, tiny_model
from oracle.ssd import DEVICES, kernel_device
from torch import Tensor

Function = Callable[..., Any]
PROMPTS = [random_tokens(length, seed=length) for length in (20, 45, 7)]


def serve(device: torch.device, **overrides: Any) -> list[list[int]]:
    """Tokens of two rounds, of which the second resumes."""
    with kind_of_model(MIX):
        model = small_model() if device.type == "cpu" else tiny_model(torch.bfloat16, device)
    sizes: dict[str, Any] = {"batch_invariant": False}  # a planted read may be in a kernel of decodes
    if device.type == "cuda":
        sizes |= {"block_size_tokens": 32, "max_tokens_per_step": 160}
    engine = small_engine(model=model, **sizes | overrides)
    params = ms.SamplingParams(max_tokens=6)
    tokens = [result.tokens for _ in range(2) for result in engine.generate(PROMPTS, params)]
    assert engine.stats().cache.num_resumed_tokens
    return tokens


def answers_or_failure(device: torch.device) -> list[list[int]] | None:
    """`serve`, or None where logits are NaN."""
    try:
        return serve(device)
    except RuntimeError as error:
        if INVALID not in str(error):
            raise
        return None


def attends_to_the_next_block(attend: Function) -> Function:
    def planted(query: Tensor, kv_cache: Tensor, rows: Any, **options: Any) -> Tensor:
        beyond = (rows.block_table.long().amax() + 1) % kv_cache.shape[1]
        return attend(query, kv_cache, rows, **options) + 0.0 * kv_cache[1, beyond].sum().to(query.dtype)

    return planted


def weighs_the_row_behind(attend: Function) -> Function:
    """By so little that zeros there are nothing."""

    def planted(query: Tensor, kv_cache: Tensor, rows: Any, **options: Any) -> Tensor:
        size, behind = kv_cache.shape[2], rows.kv_lengths.long()
        columns = (behind // size).clamp(max=rows.block_table.shape[1] - 1)
        blocks = rows.block_table.long().gather(1, columns[:, None])[:, 0]
        values = kv_cache[1, blocks, behind % size].sum(dim=(1, 2)).nan_to_num()
        weighed = torch.where(behind % size > 0, values, 0.0).sum() * 1e-30
        return attend(query, kv_cache, rows, **options) + weighed.to(query)

    return planted


def reads_the_slot_beyond(update: Function) -> Function:
    def planted(x: Tensor, *others: Any, **options: Any) -> Tensor:
        states, sources, _ = others[-3:]
        beyond = states[(sources.clamp(min=0).amax() + 1) % len(states)]
        return update(x, *others, **options).add_(0.0 * beyond.sum().to(x.dtype))

    return planted


def looks_at_the_token_behind(prefill: Function) -> Function:
    def planted(x: Tensor, *others: Any, **options: Any) -> Tensor:
        return prefill(x + 0.0 * torch.cat([x[1:], x[:1]]), *others, **options)

    return planted


def leaves_a_row_unwritten(norm: Function) -> Function:
    def planted(x: Tensor, *others: Any) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out[1:] = norm(x, *others)[1:]
        return out

    return planted


PLANTS = {
    "an unwritten row": ("paged_attention", weighs_the_row_behind),
    "a free KV block": ("paged_attention", attends_to_the_next_block),
    "a free state slot": ("selective_state_update", reads_the_slot_beyond),
    "a padding token": ("causal_conv1d_prefill", looks_at_the_token_behind),
    "scratch": ("rms_norm", leaves_a_row_unwritten),
}


def kernels_on(device: torch.device) -> type[KernelSet]:
    if device.type == "cpu":
        return KernelSet
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    return GpuKernelSet


@pytest.mark.sampled(plant=("an unwritten row", "a free state slot", "scratch"))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_read_shows_with_poison(plant: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, (name, planted) = kernel_device(device), PLANTS[plant]
    with poisoned():
        clean = serve(where)
    assert clean == serve(where)
    kernels = kernels_on(where)
    monkeypatch.setattr(kernels, name, staticmethod(planted(getattr(kernels, name))))
    if plant != "scratch":  # what is weighed by 0 shows with poison alone
        assert serve(where) == clean
    with poisoned():
        assert answers_or_failure(where) != clean


TRITON_MODES: dict[str, dict[str, Any]] = {
    "": {},
    "replay": {"decode_by_replay": True},
    "replay of float16": {"decode_by_replay": True},
    "drafts": {"num_speculative_tokens": 3, "make_drafter": lambda: ms.NgramDrafter(1, 1)},
    "encoded": {"durable_state_dtype": "int8"},
    "async": {"async_scheduling": True},
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding, in the interpreter
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.long
@pytest.mark.parametrize("mode", TRITON_MODES)
def test_the_kernels_of_a_gpu_read_nothing_either(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    monkeypatch.setattr(hybrid_lm, "kernel_set", lambda device, dtype: GpuKernelSet)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())  # which fla-core's stages enter
    replays_halves = mode == "replay of float16"  # the interpreter's products of bfloat16 are not numbers
    small = ms.models.HybridLM(small_config(16, torch.float32), seed=3)
    model = tiny_model(torch.float16) if replays_halves else small  # grids of 16 and 32 tokens, or of 16
    settings = {"model": model, "block_size_tokens": 32 if replays_halves else 16}

    def answers() -> list[list[int]]:
        engine = small_engine(**settings | TRITON_MODES[mode])
        params = ms.SamplingParams(max_tokens=3)
        prompts = [PROMPTS[0], PROMPTS[2]]
        return [result.tokens for _ in range(2) for result in engine.generate(prompts, params)]

    plain = answers()
    with poisoned():
        assert answers() == plain


def test_a_field_that_is_not_filled_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = step_builder._PaddedLayout.fill

    def forgetful(self: Any, array: Any, values: Any, field: Any) -> None:
        if field.name != "seq_idx":  # of one prefill row, these are zeros
            fill(self, array, values, field)

    monkeypatch.setattr(step_builder._PaddedLayout, "fill", forgetful)
    with poisoned(), pytest.raises((IndexError, RuntimeError)):
        serve(torch.device("cpu"))


def test_steps_are_padded_and_their_padding_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    lookup = torch.ones(256, 1)
    forward = ms.models.HybridLM.forward

    def watched(self: ms.models.HybridLM, inputs: ms.StepInputs) -> Tensor:
        embedded = lookup[inputs.token_ids]
        real = int(inputs.query_lengths.sum())
        padding = len(inputs.token_ids) - real
        assert (int(embedded.isnan().sum()), int(embedded.nansum())) == (padding, real)
        assert embedded[inputs.logit_tokens[: inputs.num_logits]].isfinite().all()
        seen.append(padding)
        return forward(self, inputs)

    monkeypatch.setattr(ms.models.HybridLM, "forward", watched)
    with poisoned():
        serve(torch.device("cpu"))
    assert min(seen) > 0
    assert len(seen) > 10


def test_scratch_and_buffers_within_alone() -> None:
    before = torch.empty, StepBuffer.arrays
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.zeros(3)).isnan().all()
        assert torch.zeros(3).new_empty(2).isnan().all()
        assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
        assert torch.empty(2, dtype=torch.uint8).tolist() == [255] * 2
        with torch.device("meta"):
            assert torch.empty(2).is_meta
        assert is_poisoned(small_engine())
    assert before == (torch.empty, StepBuffer.arrays)
    assert not is_poisoned(small_engine())


def test_exceptions_name_tests_that_are_there(request: pytest.FixtureRequest) -> None:
    for start, (parts, why) in EXCEPTIONS.items():
        path, _, name = start.partition("::")
        text = (request.config.rootpath / path).read_text()
        assert f"def {name}" in text or f"class {name}" in text if name else text
        assert set(parts) <= set(PARTS)
        assert why
    assert left_out("tests/unit/test_docs.py::test_any") == ()
