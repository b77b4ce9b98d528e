"""How many KV blocks and durable slots a configuration buys, on one rank and on all ranks of a model."""

from dataclasses import dataclass

from .config import InferenceConfig
from .state_spec import HybridStateSpec
from .validation import INT32_MAX

GIGABYTE = 1 << 30
_UNLIMITED = INT32_MAX + 2
"""What a rank affords where a unit has no bytes. The minimum over the ranks counts."""

_MOST_NAMES = 1 << 20
"""KV blocks without bytes that a context makes by itself for cached prefixes, at most."""


@dataclass(frozen=True)
class PoolSizes:
    """Units of the two pools, equal on all ranks of a model."""

    num_kv_blocks: int
    num_mamba_slots: int

    @classmethod
    def of(cls, config: InferenceConfig, spec: HybridStateSpec) -> "PoolSizes":
        """The largest pools that every rank of the model can afford.

        A collective: all ranks of `spec.groups` make this call. Synchronises the ranks.

        Raises:
            ValueError: a budget buys no unit on some rank, or more units than int32 can number, or the ranks
                differ in `enable_prefix_caching`. All ranks raise the same error.
        """
        kv, slots = _kv_budget(config, spec), _slot_budget(config, spec)
        caching = config.enable_prefix_caching
        ranks = spec.groups.gather((kv.affordable, slots.affordable, caching), spec.device)
        switches = [switch for *_, switch in ranks]
        if len(set(switches)) > 1:
            raise ValueError(
                f"enable_prefix_caching is {switches} on the ranks of the model; accepted: the same on all"
            )
        num_slots = slots.checked(min(rank[1] for rank in ranks)) if caching else 0
        num_kv_blocks = min(blocks for blocks, _, _ in ranks)
        if num_kv_blocks == _UNLIMITED:
            return cls(_blocks_without_bytes(config, num_slots), num_slots)
        return cls(kv.checked(num_kv_blocks), num_slots)


def _blocks_without_bytes(config: InferenceConfig, num_slots: int) -> int:
    """KV blocks of a model without attention where no number is given: they are names of prefixes only.

    Running requests have room in any case. Beside them there are four times the blocks of the longest
    prefixes that the slots can name, so that a state is lost for want of a slot and not for want of a name;
    but at most `_MOST_NAMES`, because the host's books of a block take some hundred bytes.
    """
    blocks_per_sequence = -(-config.max_sequence_length // config.block_size_tokens)
    names = min(4 * num_slots * blocks_per_sequence, _MOST_NAMES)
    return min(config.max_requests * blocks_per_sequence + names, INT32_MAX)


def _kv_budget(config: InferenceConfig, spec: HybridStateSpec) -> "_Budget":
    return _Budget(
        "num_kv_blocks", config.num_kv_blocks, "buffer_size_gb", config.buffer_size_gb,
        spec.kv_block_bytes(config.block_size_tokens),
    )  # fmt: skip


def _slot_budget(config: InferenceConfig, spec: HybridStateSpec) -> "_Budget":
    return _Budget(
        "num_mamba_slots", config.num_mamba_slots, "prefix_caching_mamba_gb", config.prefix_caching_mamba_gb,
        spec.durable_slot_bytes(config.durable_state_dtype),
    )  # fmt: skip


@dataclass(frozen=True)
class _Budget:
    """The size of one pool on this rank: a count of units, or GB; a unit has `unit_bytes` bytes."""

    count_name: str
    count: int | None
    gb_name: str
    gb: float | None
    unit_bytes: int

    @property
    def affordable(self) -> int:
        """Units that this rank can pay for, at most INT32_MAX + 1; _UNLIMITED where a unit has no bytes."""
        if self.gb is None:
            return self.count or 0
        if self.unit_bytes == 0:
            return _UNLIMITED
        return int(min(self.gb * GIGABYTE, (INT32_MAX + 1) * self.unit_bytes)) // self.unit_bytes

    def checked(self, count: int) -> int:
        """`count`, the minimum over the ranks; a ValueError where a pool cannot have this size."""
        if self.gb is None:
            if count < 1:
                raise ValueError(
                    f"{self.count_name} is {self.count}, but another rank's {self.gb_name} buys none; "
                    "accepted: what buys one unit on every rank of the model"
                )
            return count
        if count == _UNLIMITED:
            accepted = f"{self.count_name} instead, for a model whose units are empty"
        elif count > INT32_MAX:
            accepted = f"what buys at most {INT32_MAX} units"
        elif count < 1 and self.affordable < 1:
            accepted = f"at least {self.unit_bytes / GIGABYTE:.3g}, one unit"
        elif count < 1:
            accepted = "what buys one unit on every rank of the model"
        else:
            return count
        raise ValueError(f"{self.gb_name} is {self.gb}; accepted: {accepted}")
