"""All rows of the table, by name."""

from collections.abc import Iterable

from .ceiling import CEILING
from .ours import OURS, UNLIMITED
from .peers import PEERS
from .setting import ReplayRow

ROWS: dict[str, ReplayRow] = {row.name: row for row in (*OURS, *PEERS, *CEILING, UNLIMITED)}
"""In the order of the table: ours, the peers, those that know the trace, and the one with all memory."""
GROUPS = {
    "all": tuple(ROWS),
    "peers": tuple(row.name for row in PEERS),
    "ceiling": tuple(row.name for row in CEILING),
}
"""Names for several rows."""


def row_named(name: str) -> ReplayRow:
    """The row with this name; ValueError for others."""
    if name not in ROWS:
        raise ValueError(f"row is {name!r}; accepted: {', '.join((*GROUPS, *ROWS))}")
    return ROWS[name]


def rows_named(names: Iterable[str]) -> list[str]:
    """The names of rows and groups as names of rows, each once, in the order of the table; checked."""
    chosen = {row for name in names for row in GROUPS.get(name) or (row_named(name).name,)}
    return [name for name in ROWS if name in chosen]
