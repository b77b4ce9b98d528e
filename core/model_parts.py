"""The part of a split model that one rank holds: of layers, of KV heads, and of states."""

from collections.abc import Sequence
from dataclasses import dataclass

from .validation import INT32_MAX, check_fields, instance, integer, refused, set_field


@dataclass(frozen=True)
class Part:
    """[start, stop) of `total` heads, groups or layers."""

    start: int
    stop: int
    total: int

    def __post_init__(self) -> None:
        integer("total", self.total, 0)
        integer("stop", self.stop, 0, self.total)
        integer("start", self.start, 0, self.stop)

    @classmethod
    def of_rank(cls, total: int, rank: int, size: int) -> "Part":
        """The part of a rank of `size`, which divides `total`; or is a multiple of it, and ranks share."""
        start = total * rank // size
        return cls(start, start + max(1, total // size), total)

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def indices(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True, kw_only=True)
class ModelShard:
    """The attention layers and KV heads whose KV one rank of a split model holds; ranks may share a head."""

    attention_layers: Part
    kv_heads: Part

    def __post_init__(self) -> None:
        instance("attention_layers", self.attention_layers, Part)
        instance("kv_heads", self.kv_heads, Part)


@dataclass(frozen=True)
class StateSegment:
    """Entries of a tensor's first dimension: this rank's units, heads for example, of `width` entries."""

    part: Part
    width: int = 1

    def __post_init__(self) -> None:
        check_fields(self, instance, part=(Part,))
        check_fields(self, integer, width=(1, INT32_MAX))

    @property
    def size(self) -> int:
        """Entries on this rank."""
        return self.part.count * self.width


@dataclass(frozen=True)
class StateSplit:
    """Which part of the whole model's tensor this rank holds: layers, and segments of the first dimension."""

    layers: Part
    segments: tuple[StateSegment, ...]

    def __post_init__(self) -> None:
        instance("layers", self.layers, Part)
        if not isinstance(self.segments, Sequence) or not self.segments:
            raise refused("segments", self.segments, "one or more StateSegments")
        set_field(self, "segments", tuple(self.segments))
        for index, segment in enumerate(self.segments):
            instance(f"segments[{index}]", segment, StateSegment)
