"""The tokens behind the 256 bytes, and the text of a conversation."""

from collections.abc import Sequence

DOCUMENT = 256  # begins each document
SYSTEM, USER, ASSISTANT, END_OF_TURN = 257, 258, 259, 260
VOCAB_SIZE = 264  # the rest is reserved
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


def conversation_tokens(messages: Sequence[tuple[str, bytes]]) -> list[int]:
    """What the chat template writes for messages of (role, text)."""
    tokens = [DOCUMENT]
    for role, text in messages:
        tokens += [ROLES[role], *text, END_OF_TURN]
    return tokens
