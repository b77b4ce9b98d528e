"""Tools for a chat template that does not read them."""

import logging
from threading import Lock

from ..text import TextCodec
from .messages import Chat

logger = logging.getLogger(__package__)


class ToolsCheck:
    """Warns once where the model's template writes the same text with and without tools.

    Args:
        text: has the template; None for a model without text.
    """

    def __init__(self, text: TextCodec | None) -> None:
        self._template = text.chat_template if text is not None else None
        self._first = Lock()  # taken once, by the first chat with tools

    def note(self, chat: Chat) -> None:
        """Look at a chat that the template accepts; only the first one with tools costs time. Any thread."""
        template = self._template
        if template is None or "tools" not in chat.variables or not self._first.acquire(blocking=False):
            return
        without = {name: value for name, value in chat.variables.items() if name != "tools"}
        try:
            reads_tools = template.render(chat.messages, **chat.variables) != template.render(
                chat.messages, **without
            )
        except ValueError:  # it wants tools
            return
        if not reads_tools:
            logger.warning(
                "a client sends tools, and the chat template ignores them: the model never sees a tool"
            )
