"""How many prompts a prefill engine has under way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PromptRoom:
    """Lets prompts begin in the order of their arrival, each once its KV blocks fit beside the others'.

    A prompt is under way until its prefix is handed over. Until then its blocks and its state are held, so
    prompts that do not fit together must not begin together. Blocks that prompts share are counted for each.
    """

    def __init__(self, num_blocks: int, num_prompts: int) -> None:
        """
        Args:
            num_blocks: KV blocks for all prompts together.
            num_prompts: the most prompts under way.
        """
        self.num_blocks = num_blocks
        self._free_blocks = num_blocks
        self._free_prompts = num_prompts
        self._head = asyncio.Lock()  # is given in the order in which it was asked for
        self._left = asyncio.Event()

    @asynccontextmanager
    async def prompt(self, num_blocks: int) -> AsyncIterator[None]:
        """Inside, a prompt of so many blocks, at most `num_blocks` of the room, is under way."""
        async with self._head:
            while self._free_blocks < num_blocks or not self._free_prompts:
                self._left.clear()
                await self._left.wait()
            self._free_blocks -= num_blocks
            self._free_prompts -= 1
        try:
            yield
        finally:
            self._free_blocks += num_blocks
            self._free_prompts += 1
            self._left.set()
