"""megatron-core's own context with, in place of a model, a recurrence that can be checked by hand.

The first Mamba layer's state is the sum of all token ids and its convolution window the last 4 of them; the
first attention layer's key is the token id. Whatever the cache did, after every step each request's live
state must be that of its own tokens, and each of its KV positions must hold its own token.
"""

import warnings
from dataclasses import dataclass, field
from importlib import import_module
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from ..validation import ceil_div
from .overrides import owner_class
from .versions import DYNAMIC_CONTEXT, INFERENCE_REQUEST, KV_ALLOCATOR, series_of

with warnings.catch_warnings():  # of optional packages that are not here
    warnings.simplefilter("ignore")
    _config: Any = import_module("megatron.core.inference.config")
    _request: Any = import_module(INFERENCE_REQUEST)
    _sampling: Any = import_module("megatron.core.inference.sampling_params")
    _transformer: Any = import_module("megatron.core.transformer.transformer_config")
    import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")  # as a config does

SERIES = series_of(vars(owner_class(KV_ALLOCATOR)))  # of the megatron-core that is imported
BLOCK = 8
CHUNK = WIDTH = 4
STATE_BYTES = 4 * (WIDTH + 1)
KV_BLOCK_BYTES = 4 * 2 * BLOCK
MODES = _config.KVCacheManagementMode


def make_context(
    slots: int = 16,
    blocks: int = 64,
    max_requests: int = 4,
    max_tokens: int = 64,
    policy: str = "lru",
    layers: str = "M*",
    stages: int = 1,
    **options: Any,
) -> Any:
    """A context with `blocks` and `slots` besides the host's dummy block and scratch."""
    scratch = min(ceil_div(max_tokens, BLOCK), 3 * max_requests)
    budget = (blocks + 1.5) * KV_BLOCK_BYTES + max_requests * STATE_BYTES
    model = _transformer.TransformerConfig(
        num_layers=len(layers) * stages, hidden_size=1, num_attention_heads=1, params_dtype=torch.float32,
        is_hybrid_model=True, use_cpu_initialization=True,
        pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32,
    )  # fmt: skip
    mixers = [SimpleNamespace(mixer=SimpleNamespace(chunk_size=CHUNK)) for _ in layers]
    decoder = SimpleNamespace(
        layer_type_list=list(layers),
        layers=mixers,
        mamba_state_shapes_per_request=lambda: ((1, WIDTH), (1, 1, 1)),
    )
    settings = {
        "block_size_tokens": BLOCK,
        "max_requests": None if "mamba_memory_ratio" in options else max_requests,
        "max_tokens": max_tokens,
        "max_sequence_length": 32 * BLOCK,
        "buffer_size_gb": budget / 2**30,
        "prefix_caching_mamba_gb": (slots + scratch + 0.5) * STATE_BYTES / 2**30,
        "mamba_inference_state_config": _config.MambaInferenceStateConfig.from_model(
            SimpleNamespace(decoder=decoder, config=model)
        ),
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "prefix_caching_eviction_policy": _config.PrefixCachingEvictionPolicy(policy),
        "use_cuda_graphs_for_non_decode_steps": False,
    }
    if stages == 1:  # whatever the process has split its own model into
        settings["pg_collection"] = SimpleNamespace(tp=None, pp=None, ep=None)
    return owner_class(DYNAMIC_CONTEXT)(model, _config.InferenceConfig(**(settings | options)))


def tokens(length: int, seed: int) -> list[int]:
    return Random(seed).choices(range(1, 1000), k=length)


def expect(name: str, value: object, expected: object) -> None:
    """AssertionError unless `value` equals `expected`."""
    if value != expected:
        raise AssertionError(f"{name}: {value}; expected: {expected}")


@dataclass
class RunningRequest:
    """A request in the context, and all its tokens; the last may not be computed yet."""

    request: Any
    sequence: list[int]
    is_prefilled: bool = False
    num_resumed: int = 0


@dataclass
class RecurrenceDriver:
    """Drives a context step by step, computing states and keys, and checks both after every step."""

    context: Any
    running: dict[int, RunningRequest] = field(default_factory=dict)
    next_id: int = 0

    def add(self, prompt: list[int], chunk: int | None = None, hashed: bool = True, **sampling: Any) -> int:
        """Add a request's first chunk; returns its id."""
        number = self.next_id
        self.next_id += 1
        request = _request.DynamicInferenceRequest(
            request_id=number,
            prompt_tokens=torch.tensor(prompt),
            sampling_params=_sampling.SamplingParams(
                num_tokens_to_generate=10**6, termination_id=-1, **sampling
            ),
            block_size_tokens=BLOCK,
            enable_prefix_caching=hashed,
        )
        self.running[number] = RunningRequest(request, list(prompt))
        try:
            self.add_chunk(number, chunk)
        except BaseException:
            del self.running[number]
            raise
        return number

    def add_chunk(self, number: int, chunk: int | None = None) -> None:
        """Add the next chunk, as the engine's scheduler does: of all that remains, or of `chunk` tokens."""
        context = self.context
        running = self.running[number]
        request = running.request
        num_tokens = context.active_token_count
        length = request.remaining_prompt_length if chunk is None else chunk
        context.add_request(request, length)
        running.num_resumed += length - (context.active_token_count - num_tokens)
        request.remaining_prompt_tokens = request.remaining_prompt_tokens[length:]
        running.is_prefilled = not request.remaining_prompt_length
        context.chunked_prefill_request_id = -1
        if not running.is_prefilled:
            context.chunked_prefill_request_id = number
            request.finished_chunk_token_count += length

    def step(self, finish: tuple[int, ...] = (), sample: dict[int, int] | None = None) -> Any:
        """One legacy step; `sample` gives the sampled tokens, else they follow from the sequence."""
        context = self.context
        context.initialize_attention_state()
        self._forward(context.token_to_input_ids)
        if context.mamba_slot_allocator:
            context.mamba_slot_allocator.commit_intermediate_states()
        self.check()
        ids = self._active()
        sampled_tokens = [self._sample(number, sample) for number in ids]
        mask = torch.tensor([number not in finish for number in ids], dtype=torch.uint8)
        result = context.update_requests(mask, torch.tensor(sampled_tokens)) or {}
        for number, token in zip(ids, sampled_tokens, strict=True):
            if self.running[number].is_prefilled:
                self.running[number].sequence.append(token)
        self._forget(finish, result)
        return result

    def _forget(self, finished_ids: tuple[int, ...], update: Any) -> None:
        evicted_ids = update.get("evict_request_ids") if update else None
        for number in (*finished_ids, *([] if evicted_ids is None else evicted_ids.tolist())):
            del self.running[number]

    def serve(
        self, prompt: list[int], new_tokens: int = 1, chunk: int | None = None
    ) -> tuple[int, list[int]]:
        """Run one request to its end; (resumed tokens, all its tokens)."""
        number = self.add(prompt, chunk)
        running = self.running[number]
        while not running.is_prefilled:
            self.step()
            num_remaining = running.request.remaining_prompt_length
            self.add_chunk(number, None if chunk is None or num_remaining <= chunk else chunk)
        for _ in range(new_tokens - 1):
            self.step()
        self.step(finish=(number,))
        return running.num_resumed, running.sequence

    def _active(self) -> list[int]:
        context = self.context
        ids = context.request_ids[context.paused_request_count : context.total_request_count]
        return [int(number) for number in ids]

    def _sample(self, number: int, sample: dict[int, int] | None) -> int:
        return (sample or {}).get(number, 1 + sum(self.running[number].sequence) % 997)

    def _forward(self, inputs: torch.Tensor) -> None:
        context: Any = self.context
        metadata: Any = getattr(context, "mamba_metadata", None)
        count = context.active_token_count
        ids = inputs[:count].float()
        blocks = context.gpu_view.token_to_block_idx[:count].long()
        offsets = context.gpu_view.token_to_local_position_within_kv_block[:count].long()
        context.memory_buffer[0, 0, blocks, offsets, 0, 0] = ids
        if not context.num_mamba_layers:
            return
        dims = context.batch_dimensions
        for i in range(dims.decode_req_count):
            self._advance(int(metadata.batch_indices_decode[i]), ids[i : i + 1])
        prefill_ids = ids[dims.decode_req_count :]
        if not dims.prefill_req_count:
            return
        starts = metadata.cu_seqlens.tolist()
        positions = metadata.intermediate_abs_positions[: metadata.intermediate_count].tolist()
        chunks = metadata.intermediate_chunk_indices[: metadata.intermediate_count].tolist()
        ends = metadata.cu_chunk_seqlens.tolist()
        row = 0
        for i in range(dims.prefill_req_count):
            slot = int(metadata.batch_indices_prefill[i])
            start = starts[i]
            state = context.mamba_ssm_states[0, slot].clone()
            window = context.mamba_conv_states[0, slot].clone()
            for _ in range(metadata.per_request_intermediate_counts[i] if row < len(positions) else 0):
                expect("the end of a checkpoint's chunk", ends[chunks[row] + 1], positions[row])
                prefix = prefill_ids[start : positions[row]]
                allocator = context.mamba_slot_allocator
                allocator.intermediate_ssm_out[0, row] = state + prefix.sum()
                allocator.intermediate_conv_out[0, row] = torch.cat([window[0], prefix])[-WIDTH:]
                row += 1
            self._advance(slot, prefill_ids[start : starts[i + 1]])
        expect("checkpoints of the step", row, len(positions))

    def _advance(self, slot: int, inputs: torch.Tensor) -> None:
        context = self.context
        context.mamba_ssm_states[0, slot] += inputs.sum()
        window = context.mamba_conv_states[0, slot]
        window[0] = torch.cat([window[0], inputs])[-WIDTH:]

    def check(self) -> None:
        """Live states and KV of all active rows, durable states, and the bookkeeping's integrity."""
        context = self.context
        ends = context.request_kv_length_offsets + context.request_query_lengths
        for row in range(context.paused_request_count, context.total_request_count):
            sequence = self.running[int(context.request_ids[row])].sequence[: int(ends[row])]
            expect(f"tokens of row {row}", len(sequence), int(ends[row]))
            if context.num_mamba_layers:
                slot = int(context.mamba_metadata.request_to_mamba_state_idx[row])
                window = context.mamba_conv_states[0, slot, 0].tolist()
                expect(f"the state of row {row}", float(context.mamba_ssm_states[0, slot]), sum(sequence))
                expect(f"the window of row {row}", window, ([0.0] * WIDTH + sequence)[-WIDTH:])
            blocks = context.request_to_kv_block_ids[row].tolist()
            for position, token in enumerate(sequence):
                key = context.memory_buffer[0, 0, blocks[position // BLOCK], position % BLOCK, 0, 0]
                expect(f"the key of row {row} at position {position}", float(key), token)
        self.check_cache()

    def check_cache(self) -> None:
        kv = self.context.kv_block_allocator
        slots = self.context.mamba_slot_allocator
        for key, block in kv.kv_hash_to_block_id.items():
            expect(f"the hash of block {block}", int(kv.block_hashes[block]), key)
        if hasattr(slots, "check_integrity"):
            slots.check_integrity()
            without_kv = slots.hash_to_block_id.items() - kv.kv_hash_to_block_id.items()
            expect("states without KV", without_kv, set())

    def check_idle(self) -> None:
        """Nothing is held once every request is gone."""
        context = self.context
        slots = context.mamba_slot_allocator.slots
        num_free = context.mamba_metadata.mamba_state_free_slot_count
        expect("requests", context.total_request_count, 0)
        expect("references to blocks", int(context.kv_block_allocator.block_ref_counts.sum()), 0)
        expect("free live slots", num_free, context.max_requests)
        expect("pinned and reserved slots", (slots.pins, slots.reserved), ({}, {}))
        self.check_cache()
