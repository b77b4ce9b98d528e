"""Which part of a model one rank holds."""

from dataclasses import dataclass

from .validation import integer


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
        """Rank `rank`'s of `size` equal parts; where there are more ranks than units, several hold one.

        `total` is a multiple of `size`, or `size` one of `total`.
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
    """The layers and heads whose states and KV one rank of a split model holds.

    A rank's Mamba heads lie within its groups: where there are more ranks than groups (of heads that share B
    and C) or KV heads, several ranks hold the same ones.
    """

    mamba_layers: Part
    mamba_heads: Part
    mamba_groups: Part
    attention_layers: Part
    kv_heads: Part
