"""Numbers for hashes: small integers that stand for the hashes of a file."""

import zlib


class HashNumbers:
    """Each hash gets the next number when it is seen first.

    Attributes:
        routes: for each number an integer that depends on the hash alone, whatever else the file has.
    """

    def __init__(self) -> None:
        self.routes: list[int] = []
        self._numbers: dict[int | str, int] = {}

    def __len__(self) -> int:
        return len(self.routes)

    def number(self, known: int | str) -> int:
        """The number of a hash; a new one for a new hash."""
        number = self._numbers.get(known)
        if number is None:
            number = self._numbers[known] = len(self.routes)
            text = known if isinstance(known, int) else zlib.crc32(known.encode("utf-8", "surrogatepass"))
            self.routes.append(text)
        return number
