"""Where a text ends at its stop strings, by a search that looks at every beginning of the text."""


def cut_by_force(text: str, stops: list[str]) -> tuple[str, bool]:
    """`text` before its first stop string, and whether there is one."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def num_undecided(text: str, stops: list[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string."""
    ends = (n for n in range(1, len(text) + 1) if any(stop.startswith(text[-n:]) for stop in stops))
    return max(ends, default=0)
