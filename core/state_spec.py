"""What a context must know of a model to allocate its pools."""

import math
from dataclasses import dataclass, field

import torch

from .model_shard import ModelShard
from .parallel_groups import ParallelGroups
from .tensor_validation import device, float_dtype
from .validation import INT32_MAX, boolean, instance, integer, integers, set_field


@dataclass(frozen=True)
class HybridStateSpec:
    """What one sequence of a hybrid model needs in the cache: shapes, dtypes and device.

    Attributes:
        num_mamba_layers: layers with a recurrent state.
        conv_states_shape, ssm_states_shape: shapes of one sequence's state in one layer.
        conv_states_dtype, ssm_states_dtype: dtypes of the stored states.
        num_attention_layers, num_kv_heads, head_dim: the KV of one token is
            `num_attention_layers x 2 x num_kv_heads x head_dim` numbers of `kv_dtype`.
        ssd_chunk_size: tokens of one SSD chunk; states inside a prefill exist at its multiples only.
        vocab_size: token ids are 0 .. vocab_size - 1.
        device: where states, KV and the step's index tensors live.
        separate_states: whether the model's kernels read a state at one pool index and write the new state at
            others. Other kernels update a state in place: the context copies the state to a live slot before
            the step, and copies boundary states to their slots after the step.
        shard: which part of a split model this rank holds; the fields above describe this part. Needed to
            move states between processes. None where the model does not say.
        groups: the ranks that hold the other parts. All ranks take the same decisions.
        model: a name for the model's shape and weights; debug mode compares the names of the ranks.
    """

    num_mamba_layers: int
    conv_states_shape: tuple[int, ...]
    ssm_states_shape: tuple[int, ...]
    conv_states_dtype: torch.dtype
    ssm_states_dtype: torch.dtype
    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    ssd_chunk_size: int
    vocab_size: int
    device: torch.device
    separate_states: bool = True
    shard: ModelShard | None = None
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    model: str = ""

    def __post_init__(self) -> None:
        for name in ("num_mamba_layers", "num_attention_layers"):
            set_field(self, name, integer(name, getattr(self, name), 0, INT32_MAX))
        for name in ("num_kv_heads", "head_dim", "ssd_chunk_size", "vocab_size"):
            set_field(self, name, integer(name, getattr(self, name), 1, INT32_MAX))
        for name in ("conv_states_dtype", "ssm_states_dtype", "kv_dtype"):
            float_dtype(name, getattr(self, name))
        for name in ("conv_states_shape", "ssm_states_shape"):
            set_field(self, name, tuple(integers(name, getattr(self, name), 1, INT32_MAX)))
        set_field(self, "device", device("device", self.device))
        boolean("separate_states", self.separate_states)
        if self.shard is not None:
            instance("shard", self.shard, ModelShard)
        instance("groups", self.groups, ParallelGroups)
        instance("model", self.model, str)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state, all layers."""
        conv = math.prod(self.conv_states_shape) * self.conv_states_dtype.itemsize
        ssm = math.prod(self.ssm_states_shape) * self.ssm_states_dtype.itemsize
        return self.num_mamba_layers * (conv + ssm)

    def kv_block_bytes(self, block_size_tokens: int) -> int:
        """Bytes of one KV block of `block_size_tokens` tokens, all layers."""
        numbers = self.num_attention_layers * 2 * self.num_kv_heads * self.head_dim
        return numbers * integer("block_size_tokens", block_size_tokens, 1) * self.kv_dtype.itemsize
