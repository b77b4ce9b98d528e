"""A kernel was given a column or slot that does not exist, and read or wrote there."""

from collections.abc import Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any, NamedTuple, get_args

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.step_inputs import StepInputs
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.mixer_inputs import DeltaInputs, DeltaNet, RawTokens, SsdInputs
from mambaslots.inference.kernels.step_rows import ConvRows, ReplayRows, ScanRows, TailRows
from mambaslots.models import hybrid_lm
from oracle.budget import costly
from oracle.drafters import MODES, speculating
from oracle.model_kinds import kind_of_model, kinds
from oracle.serving import random_tokens, small_config, small_engine
from oracle.ssd import kernel_device
from oracle.workload import Asked, Client, engine_settings, requests
from torch import Tensor


class Indices(NamedTuple):
    """Arguments of a kernel: pools by what their slots are named by, and the indices that name them.

    `axis` is the dimension of slots and rings.
    """

    pools: tuple[str, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    rings: tuple[str, ...] = ()
    axis: int = 0


SCAN = Indices(("states",), ("rows.sources",), ("rows.destinations", "rows.chunk_destinations"))
UPDATE = Indices(("states",), ("sources",), ("destinations",))
REPLAY = Indices((), ("rows.sources",), ("rows.destinations",), ("rows.input_rows",))
SSD_INPUTS = "inputs.x", "inputs.B", "inputs.dt"
DELTA_INPUTS = "inputs.k", "inputs.v", "inputs.g", "inputs.beta"
TABLE = {
    "causal_conv1d_prefill": Indices(
        ("conv_states",), ("rows.sources",), ("rows.destinations", "rows.checkpoint_destinations")
    ),
    "causal_conv1d_update": Indices(("conv_states",), ("sources",), ("destinations",)),
    "causal_conv1d_replay": REPLAY._replace(pools=("conv_states",), rings=("conv_inputs",)),
    "keep_conv_inputs": Indices(("conv_states",), ("sources",), (), ("input_rows",), ("conv_inputs",)),
    "ssd_chunk_scan": SCAN._replace(pools=("ssm_states",)),
    "selective_state_update": UPDATE._replace(pools=("ssm_states",)),
    "ssd_replay": REPLAY._replace(pools=("ssm_states",), rings=SSD_INPUTS),
    "keep_ssd_inputs": Indices((), (), (), ("rows.input_rows",), SSD_INPUTS),
    "gated_delta_rule_scan": SCAN,
    "gated_delta_rule_update": UPDATE,
    "gated_delta_rule_replay": REPLAY._replace(
        pools=("states", "raw.conv_states"), writes=("rows.destinations", "raw.destinations"),
        rings=(*DELTA_INPUTS, "raw.conv_inputs"),
    ),
    "keep_delta_inputs": Indices((), (), (), ("rows.input_rows",), DELTA_INPUTS),
    "complete_delta_chunks": REPLAY._replace(
        pools=("states",), rings=(*DELTA_INPUTS, "inputs.inverses"), axis=1
    ),
    "write_kv": Indices(("kv_cache",), (), ("positions",), axis=1),
}  # fmt: skip
"""Every kernel that is given indices of slots, of rings of inputs, or of KV rows."""
INDEX_NAMES = {"sources", "destinations", "input_rows", "chunk_destinations", "checkpoint_destinations"}
GROUPS = ConvRows, ScanRows, ReplayRows, TailRows, SsdInputs, DeltaInputs, RawTokens
"""Arguments that group others, which are named as "rows.sources"."""
GUARD = 2
"""Slots before and behind a pool; -1 names one of them where it is taken for a number."""


def groups_of(function: Any) -> dict[str, Any]:
    """The type of each argument of a function that groups others."""
    annotations = {name: each.annotation for name, each in signature(function).parameters.items()}
    return {
        name: group
        for name, annotation in annotations.items()
        for group in GROUPS
        if group in (annotation, *get_args(annotation))
    }


def test_every_kernel_with_indices_is_in_the_table() -> None:
    for name in vars(KernelSet):
        if name.startswith("_"):
            continue
        names = set(signature(getattr(KernelSet, name)).parameters)
        for argument, group in groups_of(getattr(KernelSet, name)).items():
            names |= {f"{argument}.{part}" for part in group._fields}
        indices = {of for of in names if of.rpartition(".")[2] in INDEX_NAMES}
        if indices or ("kv_cache" in names and name != "paged_attention"):
            known = TABLE[name]
            assert {*known.pools, *known.reads, *known.writes, *known.slots, *known.rings} <= names
            assert indices <= {*known.reads, *known.writes, *known.slots}


class Recording:
    """The reference's kernels; notes the arguments of the calls that name most slots."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self.noted = set(TABLE)

    def __getattr__(self, name: str) -> Any:
        function = getattr(KernelSet, name)
        if name not in self.noted:
            return function

        def noting(*args: Any, **named: Any) -> Any:
            bound = signature(function).bind(*args, **named).arguments
            bound.pop("out", None)
            for argument in groups_of(function):
                if (group := bound.pop(argument, None)) is not None:
                    bound |= {f"{argument}.{part}": value for part, value in group._asdict().items()}
            known = TABLE[name]
            index = [bound[of] for of in (*known.reads, *known.writes, *known.slots)]
            named_slots = [int((tensor >= 0).sum()) for tensor in index]
            score = (sum(map(bool, named_slots)), sum(named_slots))
            if score > self.calls.get(name, {}).get("score", (0, 0)):
                copies = {of: v.clone() if isinstance(v, Tensor) else v for of, v in bound.items()}
                self.calls[name] = {"score": score, "arguments": copies}
            return function(*args, **named)

        return noting


class SameAgain:
    """Drafts the last token again."""

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        return [tokens[-1]] * max_drafts


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, Any]]:
    """The arguments of one call of each kernel, from engines that serve."""
    recording = Recording()
    model, half = (
        ms.models.HybridLM(small_config(16, dtype, "GM*C"), seed=3)
        for dtype in (torch.float32, torch.bfloat16)
    )
    plan = ms.CheckpointPlan.every_block(16)
    drafting = {"num_speculative_tokens": 2, "make_drafter": SameAgain}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_lm, "kernel_set", lambda device, dtype: recording)
        for settings in (drafting, {"decode_by_replay": True}, {"decode_by_replay": True, "model": half}):
            recording.noted = {"complete_delta_chunks"} if "model" in settings else set(TABLE)
            settings = {"model": model} | settings
            engine = small_engine(block_size_tokens=16, checkpoint_plan=plan, **settings)
            stem, params = random_tokens(35, seed=170), ms.SamplingParams(max_tokens=13)
            for _ in range(2):
                engine.generate([[*stem, *random_tokens(n, seed=n)] for n in (3, 20)], params)
        _plain_write_kv(recording)
    return {name: call["arguments"] for name, call in recording.calls.items()}


def _plain_write_kv(recording: Recording) -> None:
    """Models without rotation write keys and values by themselves."""
    keys = torch.randn(5, 2, 16)
    recording.write_kv(
        torch.randn(2, 4, 16, 2, 16), keys, keys + 1, torch.tensor([0, 2, 4]), torch.tensor([3, 17, 40])
    )


class Guarded:
    """A call whose pools lie between guards of NaN."""

    def __init__(self, arguments: dict[str, Any], known: Indices, device: torch.device) -> None:
        self.known, self._around, self.before = known, {}, {}
        self.arguments = {
            of: value.to(device) if isinstance(value, Tensor) else value for of, value in arguments.items()
        }
        if "raw.net" in arguments:
            net = (x.to(device) if isinstance(x, Tensor) else x for x in arguments["raw.net"])
            self.arguments["raw.net"] = DeltaNet(*net)
        for of in (*known.pools, *known.rings):
            axis = known.axis
            pool = self.arguments[of]
            shape = list(pool.shape)
            shape[axis] += 2 * GUARD
            around = torch.full(shape, float("nan"), dtype=pool.dtype, device=device)
            inside = around.narrow(axis, GUARD, pool.shape[axis])
            inside.copy_(pool)
            self._around[of] = around, axis
            self.arguments[of] = inside
            self.before[of] = pool.clone()

    def unname(self, *names: str) -> None:
        for of in names:
            self.arguments[of] = torch.full_like(self.arguments[of], -1)

    def empty(self) -> None:
        """No slot of a state holds a number."""
        for of in self.known.pools:
            self.arguments[of].fill_(float("nan"))
            self.before[of].fill_(float("nan"))

    def call(self, function: Any) -> list[Tensor]:
        given = dict(self.arguments)
        for argument, group in groups_of(function).items():
            given[argument] = group(**{part: given.pop(f"{argument}.{part}") for part in group._fields})
        found = function(**given)
        return [found] if isinstance(found, Tensor) else list(found or ())

    def changed(self, of: str) -> set[int]:
        """The slots, or blocks, of a pool whose bits differ."""
        axis = self._around[of][1]
        after, before = (t.movedim(axis, 0).flatten(1) for t in (self.arguments[of], self.before[of]))
        same = (after == before) | (after.isnan() & before.isnan())
        return set((~same.all(1)).nonzero().flatten().tolist())

    def check_guards(self) -> None:
        for of, (around, axis) in self._around.items():
            size = self.arguments[of].shape[axis]
            for first in (0, GUARD + size):
                assert around.narrow(axis, first, GUARD).isnan().all(), f"a write outside of {of}"

    def named(self, names: Sequence[str]) -> set[int]:
        return {slot for of in names for slot in self.arguments[of].flatten().tolist() if slot >= 0}


def function_of(which: str, name: str) -> Any:
    if which == "reference":
        return getattr(KernelSet, name)
    from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet

    return getattr(GpuKernelSet, name)


WHERE = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("triton", "cpu", id="interpreted", marks=pytest.mark.long),
    pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
]


@pytest.mark.disaster(number=12)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding, in the interpreter
@pytest.mark.parametrize("name", list(TABLE))
@pytest.mark.parametrize(("which", "on"), WHERE)
def test_indices_of_minus_one_are_passed_over_by_every_kernel(
    which: str,
    on: str,
    name: str,
    recorded: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Each index alone, and all: nothing beside a pool is read or written, and no slot that is not named."""
    device = kernel_device(on) if which == "triton" else torch.device(on)
    if which == "triton":
        request.getfixturevalue("one_fla_configuration")  # imports fla-core
    if device.type == "cpu":  # kernels of others enter the device of their tensors
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    known, function = TABLE[name], function_of(which, name)
    plain = Guarded(recorded[name], known, device)
    plain.call(function)
    plain.check_guards()
    written = [of for of in (*known.pools, *known.rings) if plain.changed(of)]
    assert written, "the call writes nothing, and so shows nothing"

    for of in known.writes:
        guarded = Guarded(recorded[name], known, device)
        guarded.unname(of)
        guarded.call(function)
        guarded.check_guards()
        for pool in known.pools:
            if pool == "kv_cache":
                assert guarded.changed(pool) == set()
            else:
                assert guarded.changed(pool) <= guarded.named(known.writes), f"{pool} without {of}"

    for of in known.reads:
        guarded = Guarded(recorded[name], known, device)
        guarded.empty()
        guarded.unname(of)
        for result in guarded.call(function):
            assert result.isfinite().all(), f"a state is read that {of} does not name"
        guarded.check_guards()

    guarded = Guarded(recorded[name], known, device)
    guarded.unname(*known.reads, *known.writes, *known.slots)
    guarded.call(function)
    guarded.check_guards()
    for of in (*known.pools, *known.rings):
        assert guarded.changed(of) == set(), f"{of} is written where nothing is named"


class IndicesChecked:
    """Observes a context: each index of a step names something that exists, and no slot is written twice."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self._context = engine.context
        self.num_steps = 0
        self._context.observers.append(self)

    def step_begun(self, steps: Sequence[object], inputs: StepInputs) -> None:
        self.num_steps += 1
        slots, shape = inputs.state_pool.num_slots, inputs.shape
        rows = max(1, shape.prefills)
        blocks, size = inputs.kv_cache.shape[2], inputs.kv_cache.shape[3]
        most = {
            "state_sources": slots, "state_destinations": slots, "chunks.destinations": slots,
            "checkpoints.destinations": slots, "block_table": blocks, "kv_write_positions": blocks * size,
            "kv_write_tokens": shape.tokens, "logit_tokens": shape.tokens, "checkpoints.rows": rows,
            "chunks.seq_idx": rows, "chunks.token_rows": rows, "token_ids": self._context.spec.vocab_size,
        }  # fmt: skip
        if inputs.replay is not None:
            most |= {
                "replay.input_rows": self._context.config.max_requests,
                "replay.input_blocks": blocks,
                "replay.destinations": slots,
            }
        for name, size in most.items():
            owner, _, attribute = name.rpartition(".")
            index = getattr(getattr(inputs, owner) if owner else inputs, attribute)
            if index.numel():
                lowest = 0 if name in ("block_table", "token_ids", "logit_tokens", "kv_write_tokens") else -1
                assert lowest <= int(index.min()), name
                assert int(index.max()) < size, name
        ends = [int(i) for i in inputs.state_destinations if i >= 0]
        written = ends + [int(i) for i in inputs.chunks.destinations if i >= 0 and int(i) not in ends]
        assert len(set(written)) == len(written), "two states are written to one slot"
        lengths, table = inputs.kv_lengths.tolist(), inputs.block_table.shape[1]
        assert all(0 <= length <= table * inputs.kv_cache.shape[3] for length in lengths)

    def step_ended(self, steps: Sequence[object]) -> None:
        """Nothing is to be done."""


@pytest.mark.disaster(number=12)
@costly()
@given(
    mode=st.sampled_from(list(MODES)),
    kind=kinds,
    sizes=engine_settings,
    asked=st.lists(requests, min_size=1, max_size=4),
)
def test_no_step_names_a_slot_a_block_or_a_token_that_does_not_exist(
    mode: str, kind: str, sizes: dict[str, Any], asked: list[Asked]
) -> None:
    """Indices come from the cache alone: over any settings and requests each is in its range."""
    with kind_of_model(kind):
        with speculating(mode):
            client = Client(small_engine(**sizes))
        checked = IndicesChecked(client.engine)
        for one in asked:
            client.ask(one)
        client.finish()
        assert checked.num_steps > 0
