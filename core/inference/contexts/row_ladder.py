"""The numbers of rows that products are made with where bits must not depend on the number of rows."""

FEWEST_ROWS = 32
"""With fewer rows cuBLAS pads by itself, or takes kernels that are up to eight times as slow."""
_BLOCK = 256  # rungs above it are its multiples
MOST_PADDING = _BLOCK - 1
"""No number of rows is further from its rung."""
FEW_ROWS = 64
"""For so many rows at most `kernels.sequential_product` has tiles of their own."""


def rung(rows: int) -> int:
    """The smallest rung that is at least `rows`: 32, 64, 128, 256, then multiples of 256. 0 stays 0."""
    if rows > _BLOCK:
        return -(-rows // _BLOCK) * _BLOCK
    return max(FEWEST_ROWS, power_of_two(rows)) if rows else 0


def rungs(rows: int) -> list[int]:
    """All rungs up to `rung(rows)`, in order; none for 0."""
    last = rung(rows)
    halves = [size for size in (32, 64, 128) if size < min(last, _BLOCK)]
    return [*halves, *range(_BLOCK, last, _BLOCK), last] if last else []


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
