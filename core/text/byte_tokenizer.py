"""The tokenizer of a model whose tokens are bytes."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import ModelFolderError, read_object
from ..validation import integers, refused
from .chat_template import Cut

_FILE = "tokenizer.json"


class ByteTokenizer:
    """256 bytes and special tokens.

    Its file is a `tokenizer.json` that other libraries can read, too: byte-level BPE without merges.

    Args:
        special_tokens: name to id of tokens that are no bytes, for example {"<|end|>": 256}.
        byte_ids: the id of each byte; by default the byte itself.

    Raises:
        ValueError: an id stands for two things, or an argument is something else.
    """

    def __init__(self, special_tokens: Mapping[str, int], byte_ids: Sequence[int] = range(256)) -> None:
        if not isinstance(special_tokens, Mapping):
            raise refused("special_tokens", special_tokens, "a mapping of name to id")
        if not all(isinstance(name, str) and name for name in special_tokens):
            raise refused("special_tokens", special_tokens, "names that are not empty")
        byte_ids = integers("byte_ids", byte_ids, 0)
        special_ids = integers("ids of special_tokens", [*special_tokens.values()], 0)
        if len(byte_ids) != 256 or len({*byte_ids, *special_ids}) != 256 + len(special_tokens):
            raise ValueError("byte_ids and special_tokens name an id twice; accepted: 256 ids and others")
        self.special_tokens = {name: int(token) for name, token in special_tokens.items()}
        self._byte_ids = tuple(byte_ids)
        self._bytes = {token: bytes([byte]) for byte, token in enumerate(byte_ids)}
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    @classmethod
    def from_folder(cls, folder: Path) -> "ByteTokenizer":
        """The tokenizer in `tokenizer.json` of `folder`.

        Raises:
            ModelFolderError: the file is missing, or holds a tokenizer whose tokens are not bytes.
        """
        path = folder / _FILE
        content = read_object(path)
        try:
            model = content["model"]
            if model["type"] != "BPE" or model["merges"]:
                raise KeyError("a BPE without merges")
            byte_ids = [model["vocab"][character] for character in _BYTE_CHARACTERS]
            special_tokens = {token["content"]: token["id"] for token in content["added_tokens"]}
            return cls(special_tokens, byte_ids)
        except (KeyError, TypeError, ValueError) as error:
            message = f"{path} has no tokenizer of bytes: {error}; accepted: byte-level BPE without merges"
            raise ModelFolderError(message) from error

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into `folder`."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        ids_and_names = sorted((token, name) for name, token in self.special_tokens.items())
        content: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [{"id": token, "content": name, **flags} for token, name in ids_and_names],
            "pre_tokenizer": _BYTE_LEVEL,
            "decoder": _BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "vocab": dict(zip(_BYTE_CHARACTERS, self._byte_ids, strict=True)) | self.special_tokens,
                "merges": [],
            },
        }
        (folder / _FILE).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Names of special tokens within `text` become these tokens; nothing else is added."""
        return self.encode_with_cuts(text)[0]

    def encode_with_cuts(self, text: str) -> tuple[list[int], list[Cut]]:
        """Token ids as of `encode`, and a cut for each special token, in order."""
        ids: list[int] = []
        cuts: list[Cut] = []
        character = 0
        parts = self._split.split(text) if self._split else [text]
        for part in parts:
            if part in self.special_tokens:
                cuts.append(Cut(character, character + len(part), len(ids)))
                ids.append(self.special_tokens[part])
            else:
                ids += (self._byte_ids[byte] for byte in part.encode())
            character += len(part)
        return ids, cuts

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the bytes, without other tokens. Bytes that are no character become U+FFFD."""
        return b"".join(self._bytes.get(token, b"") for token in token_ids).decode(errors="replace")


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _byte_characters() -> str:
    """The characters that stand for the bytes in a byte-level vocabulary, in the order of the bytes."""
    visible_bytes = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in visible_bytes else next(substitutes)) for byte in range(256))


_BYTE_CHARACTERS = _byte_characters()
