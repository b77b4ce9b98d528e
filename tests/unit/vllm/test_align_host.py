"""Align mode under vLLM's names, driven by a host whose batch changes its order."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mambaslots.vllm import (
    MambaBuffers,
    MambaCacheConfig,
    cleanup_mamba_state_idx,
    postprocess_mamba_align_gpu,
    preprocess_mamba,
    stage_postprocess_inputs_to_gpu,
)
from mambaslots.vllm.align_host import MambaSpecDecodeGPUContext
from oracle.dense_states import HISTORY, NO_TOKEN, DenseStates, next_state
from oracle.synchronisation import no_synchronisation

BLOCK, DRAFTS, COLUMNS = 5, 3, 16


def get_conv_copy_spec():
    """A state type is known by its function's name only."""


def get_temporal_copy_spec(): ...


FUNCTIONS = (get_conv_copy_spec, get_temporal_copy_spec)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def scheduled(numbers=None, drafts=None, finished=(), preempted=(), resumed=()):
    return SimpleNamespace(
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted) if preempted is not None else None,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
        num_scheduled_tokens=numbers or {},
        scheduled_spec_decode_tokens=drafts or {},
    )


class Host:
    """Three requests with drafts, in batches of changing order, on two layers whose states are integers."""

    def __init__(self, device, conv_dim_first, seed):
        self.device, self.draw = device, np.random.default_rng(seed)
        self.dim_first = conv_dim_first
        self.config = MambaCacheConfig(
            BLOCK, (("first",), ("second",)), DRAFTS, conv_dim_first=conv_dim_first
        )
        self.names = ["a", "b", "c"]
        self.dense = DenseStates(self.draw, len(self.names), COLUMNS * BLOCK)
        self.requests = {name: SimpleNamespace(num_computed_tokens=0) for name in self.names}
        self.columns = {}
        self.bufs = MambaBuffers.create(self.config, device)
        self.slots = len(self.names) * COLUMNS
        self.tables = self.draw.permutation(self.slots).reshape(len(self.names), COLUMNS).astype(np.int32)
        self.allocate()
        self.batch = SimpleNamespace(
            req_ids=[],
            block_tables=[torch.zeros(3, COLUMNS, dtype=torch.int32, device=device) for _ in range(2)],
            num_accepted_tokens_gpu=torch.ones(3, dtype=torch.int32, device=device),
        )
        self.accepted = dict.fromkeys(self.names, 1)
        self.reached = {name: [] for name in self.names}

    def allocate(self):
        window = HISTORY + DRAFTS
        shape = (1, window) if self.dim_first else (window, 1)
        self.context = {
            layer: SimpleNamespace(
                kv_cache=[
                    torch.randint(0, 1 << 60, (self.slots, *shape), device=self.device),
                    torch.randint(0, 1 << 60, (self.slots, 1), device=self.device),
                ]
            )
            for layer in ("first", "second")
        }

    def gather(self, names):
        """Make the batch of these requests: block tables and accepted counts in their order."""
        self.batch.req_ids = names
        for group, table in enumerate(self.batch.block_tables):
            rows = np.stack([self.tables[self.names.index(name)] for name in names])
            table[: len(names)].copy_(torch.from_numpy((rows + group) % self.slots))
        counts = torch.tensor([self.accepted[name] for name in names], dtype=torch.int32)
        self.batch.num_accepted_tokens_gpu[: len(names)].copy_(counts)

    def step(self, names, numbers, drafts, right, watched=nullcontext):
        """Run one step; returns how many of the states that the forward read were wrong."""
        output = scheduled(numbers, {name: [0] * count for name, count in drafts.items()})
        fixed = (self.context, FUNCTIONS)
        self.gather(names)
        with watched():
            preprocess_mamba(
                output, self.config, self.columns, self.batch, self.requests, *fixed, self.bufs.preprocess
            )
            stage_postprocess_inputs_to_gpu(
                self.bufs.postprocess_align, output, names, len(names), self.requests, self.columns
            )
        wrong = sum(
            self.forward(layer, group, row, numbers[name], drafts.get(name, 0), right[name])
            for group, layer in enumerate(self.context.values())
            for row, name in enumerate(names)
        )
        for row, name in enumerate(names):
            self.batch.num_accepted_tokens_gpu[row] = 1 + right[name]
        with watched():
            postprocess_mamba_align_gpu(
                bufs=self.bufs,
                num_reqs=len(names),
                num_accepted_tokens_gpu=self.batch.num_accepted_tokens_gpu,
                input_batch=self.batch,
                kv_cache_config=self.config,
                forward_context=self.context,
                mamba_state_copy_funcs=FUNCTIONS,
            )
        for row, name in enumerate(names):
            self.accepted[name] = int(self.batch.num_accepted_tokens_gpu[row])
            self.requests[name].num_computed_tokens += numbers[name] - drafts.get(name, 0) + right[name]
        return wrong

    def forward(self, layer, group, row, number, drafts, right):
        """Update a request's states as a model does; returns whether the state read was wrong."""
        name = self.batch.req_ids[row]
        request, computed = self.names.index(name), self.requests[name].num_computed_tokens
        table = self.batch.block_tables[group][row].tolist()
        column, bias = self.columns[name], int(self.batch.num_accepted_tokens_gpu[row]) - 1
        conv, ssm = layer.kv_cache
        windows = conv.view(self.slots, -1)
        state, window = np.zeros(1, dtype=np.uint64), [NO_TOKEN] * HISTORY
        if computed:
            state = ssm[table[column + bias]].cpu().numpy().astype(np.uint64)
            window = windows[table[column], bias : bias + HISTORY].tolist()
        wrong = state[0] != self.dense.states[request, computed]
        wrong |= window != self.dense.windows[request, computed].tolist()
        tokens = self.dense.tokens[request, computed : computed + number].copy()
        if drafts:
            tokens[1 + right :] += 1
        for place, token in enumerate(tokens):
            state = next_state(state, np.array([token]))
            if drafts or place == number - 1:
                to = table[column + (place if drafts else 0)]
                ssm[to] = int(state.astype(np.int64)[0])
        inputs = (window + tokens.tolist())[1:] if drafts else (window + tokens.tolist())[-HISTORY:]
        windows[table[column], : len(inputs)] = torch.tensor(inputs, device=self.device)
        return bool(wrong)

    def random_step(self, **watched):
        names = [name for name in self.names if self.draw.random() < 0.8] or ["a"]
        names = [names[place] for place in self.draw.permutation(len(names))]
        numbers, drafts, right = {}, {}, {}
        for name in names:
            if self.requests[name].num_computed_tokens < 7:
                numbers[name], right[name] = int(self.draw.integers(1, 9)), 0
            else:
                drafts[name] = DRAFTS
                numbers[name], right[name] = 1 + DRAFTS, int(self.draw.integers(0, DRAFTS + 1))
        return self.step(names, numbers, drafts, right, **watched)

    def kept_wrong(self):
        """How many states on reached boundaries differ from the dense model's."""
        wrong = 0
        for request, name in enumerate(self.names):
            tokens = self.requests[name].num_computed_tokens
            for boundary in self.reached[name]:
                assert boundary <= tokens
                for group, layer in enumerate(self.context.values()):
                    slot = (int(self.tables[request][boundary // BLOCK - 1]) + group) % self.slots
                    conv, ssm = layer.kv_cache
                    found = np.uint64(int(ssm[slot, 0]) % (1 << 64))
                    window = conv.view(self.slots, -1)[slot, :HISTORY].tolist()
                    wrong += found != self.dense.states[request, boundary]
                    wrong += window != self.dense.windows[request, boundary].tolist()
        return wrong


@pytest.mark.sampled
@pytest.mark.parametrize("conv_dim_first", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_steps_read_and_keep_the_states_of_a_dense_model(device, conv_dim_first, seed):
    host = Host(device, conv_dim_first, seed)
    steps = 0
    while max(request.num_computed_tokens for request in host.requests.values()) < COLUMNS * BLOCK - 30:
        before = {name: host.requests[name].num_computed_tokens for name in host.names}
        assert host.random_step() == 0
        for name, request in host.requests.items():
            tokens = request.num_computed_tokens // BLOCK * BLOCK
            first = request.num_computed_tokens - (0 if before[name] < 7 else DRAFTS)
            if tokens > before[name] and tokens >= first:
                host.reached[name].append(tokens)
        assert host.kept_wrong() == 0
        steps += 1
    assert steps > 5
    assert sum(map(len, host.reached.values())) > 5


def test_states_that_were_allocated_anew_are_bound_anew(device):
    host = Host(device, True, 0)
    host.random_step()
    layout = host.bufs.preprocess._layout
    host.random_step()
    assert host.bufs.preprocess._layout is layout
    old = host.context
    host.allocate()
    for layer, states in host.context.items():
        for new, tensor in zip(states.kv_cache, old[layer].kv_cache, strict=True):
            new.copy_(tensor)
            tensor.fill_(-1)
    for _ in range(6):
        assert host.random_step() == 0


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    host = Host(torch.device("cuda"), True, 1)
    for _ in range(8):  # compiled, and bound, before it is watched
        host.random_step()
    for _ in range(4):
        assert host.random_step(watched=no_synchronisation) == 0


def test_block_tables_are_as_many_as_groups():
    layers = {"layer": SimpleNamespace(kv_cache=[torch.zeros(8, 3)])}
    context = MambaSpecDecodeGPUContext(MambaCacheConfig(BLOCK, (("layer",),), DRAFTS), torch.device("cpu"))
    tables = [torch.zeros(2, 4, dtype=torch.int32)]
    with pytest.raises(ValueError, match="2 block tables; accepted: 1"):
        context.layout(layers, ("ssm",), tables * 2)


class TestBuffers:
    @pytest.mark.parametrize(("drafts", "hybrid"), [(3, True), (0, True), (3, False)])
    def test_postprocessing_is_for_drafts_of_models_with_attention(self, drafts, hybrid):
        config = MambaCacheConfig(BLOCK, (("layer",),), drafts)
        bufs = MambaBuffers.create(config, torch.device("cpu"), is_hybrid=hybrid)
        assert (bufs.postprocess_align is not None) == bool(drafts and hybrid)

    @pytest.mark.parametrize(("name", "sizes"), [("block_size_tokens", (0, 1)), ("num_spec", (1, -1))])
    def test_sizes_out_of_range_are_refused(self, name, sizes):
        with pytest.raises(ValueError, match=name):
            MambaCacheConfig(sizes[0], (("layer",),), sizes[1])

    def test_postprocessing_without_a_context_is_an_error(self):
        with pytest.raises(RuntimeError, match="no postprocessing context"):
            postprocess_mamba_align_gpu(
                bufs=MambaBuffers.create(MambaCacheConfig(1, ()), torch.device("cpu")), num_reqs=0,
                num_accepted_tokens_gpu=torch.ones(1), input_batch=None, kv_cache_config=None,
                forward_context={}, mamba_state_copy_funcs=(),
            )  # fmt: skip


class TestStaging:
    def context(self, device):
        return MambaSpecDecodeGPUContext(MambaCacheConfig(BLOCK, (("layer",),), DRAFTS), device)

    def test_columns_and_token_counts_are_sent(self, device):
        context = self.context(device)
        requests = {"x": SimpleNamespace(num_computed_tokens=8), "y": SimpleNamespace(num_computed_tokens=3)}
        output = scheduled({"x": 4, "y": 2, "z": 9}, {"x": [1, 2, 3]})
        names = ["y", "x", "z"]
        stage_postprocess_inputs_to_gpu(context, output, names, 2, requests, {"x": 5, "y": 6})
        assert [numbers.tolist() for numbers in context.staged] == [[6, 5], [3, 8], [2, 4], [0, 3]]

    def test_a_request_without_a_column_is_an_error_and_nothing_is_sent(self, device):
        context = self.context(device)
        with pytest.raises(ValueError, match=r"\['y'\] have no column"):
            stage_postprocess_inputs_to_gpu(context, scheduled(), ["x", "y"], 2, {}, {"x": 1})
        assert not context.staged


class TestColumns:
    def test_finished_preempted_and_resumed_requests_are_forgotten(self):
        columns = dict.fromkeys("abcde", 3)
        cleanup_mamba_state_idx(scheduled(finished=["a", "x"], preempted=["b"], resumed=["c", "a"]), columns)
        assert list(columns) == ["d", "e"]
        cleanup_mamba_state_idx(scheduled(preempted=None), columns)
        assert list(columns) == ["d", "e"]
