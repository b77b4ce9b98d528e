"""Strings that end an answer, found while its text comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Cuts the text of one answer before the first stop string.

    The first is the one that is complete at the earliest character; of those complete at the same character,
    the longest. How the text is cut into pieces changes nothing. Text that may be the beginning of a stop
    string is kept until a later character decides.

    Each character costs a step of the automaton of Knuth, Morris and Pratt (1977) for each stop string.

    Args:
        stops: strings that are not empty.

    Attributes:
        found: whether a stop string was found.
        num_returned: how many characters were returned so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self.num_returned = 0
        self._stops = list(stops)
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._matched = [0] * len(self._stops)
        """For each stop string: how long a beginning of it the text ends with."""
        self._kept = ""

    def push(self, piece: str) -> str:
        """Add text; return what is now known to stand before the first stop string."""
        if self.found:
            return ""
        if not self._stops:
            self.num_returned += len(piece)
            return piece
        text = self._kept + piece
        for end in range(len(self._kept), len(text)):
            longest = self._advance(text[end])
            if longest:
                self.found, self._kept = True, ""
                return self._returned(text[: end + 1 - longest])
        num_kept = max(self._matched)
        self._kept = text[len(text) - num_kept :]
        return self._returned(text[: len(text) - num_kept])

    def finish(self) -> str:
        """The rest of a text that has ended without a stop string."""
        rest, self._kept = self._kept, ""
        return self._returned(rest)

    def _returned(self, text: str) -> str:
        self.num_returned += len(text)
        return text

    def _advance(self, character: str) -> int:
        """Read a character. Returns the length of the longest stop string that it completes, or 0."""
        longest = 0
        for i, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = fallbacks[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                longest = max(longest, matched)
            else:
                self._matched[i] = matched
        return longest


def _fallbacks(stop: str) -> list[int]:
    """For each beginning of `stop`: its longest end that is a shorter beginning of `stop`."""
    lengths = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = lengths[length - 1]
        length += stop[i] == stop[length]
        lengths[i] = length
    return lengths
