"""Which part of a model one rank holds."""

from dataclasses import dataclass

from .validation import instance, integer


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
        """The part of rank `rank` where `size` ranks split `total` units equally.

        `total` must be a multiple of `size`, or `size` a multiple of `total`. In the second case several
        ranks hold the same unit.
        """
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
    """The attention layers and KV heads whose KV one rank of a split model holds.

    Where there are more ranks than KV heads, several ranks hold the same KV head.
    """

    attention_layers: Part
    kv_heads: Part

    def __post_init__(self) -> None:
        instance("attention_layers", self.attention_layers, Part)
        instance("kv_heads", self.kv_heads, Part)
