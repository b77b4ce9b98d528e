"""Engines that fuzzed bytes go into: what their caches are before and after, and whether answers are right.

Answers are judged by the recurrence token by token, in numpy (`tests/oracle/recurrent_lm.py`).
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mambaslots as ms
import torch

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from mambaslots.net import export_prefixes, import_prefixes
from mambaslots.net.transfer.exports import CacheAccess
from mambaslots.net.transfer.shard import encode_prefixes
from oracle.serving import random_tokens, serve_checked
from oracle.transfers import engine_of, maps_of

HEAD = random_tokens(16, 7)
SENT = [HEAD + random_tokens(17, 1), HEAD + random_tokens(9, 2), random_tokens(26, 3)]
"""Prompts whose prefixes are exported."""
OWN = [HEAD + random_tokens(18, 4), random_tokens(20, 5)]
"""Prompts whose prefixes the importing engine has before; the first begins as some of `SENT` do."""
UNSEEN = random_tokens(21, 6)


@contextmanager
def quiet(name: str = "mambaslots") -> Iterator[None]:
    """Inside, no warning is logged by this logger and those below it: refusals are many."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class WarmEngine:
    """An engine with cached prefixes, whose cache must be the same behind what was refused."""

    def __init__(self, prompts: list[list[int]], **settings: Any) -> None:
        self.engine: ms.DynamicInferenceEngine = engine_of(**settings)
        serve_checked(self.engine, prompts)
        self._own = encode_prefixes(export_prefixes(self.engine))
        self.renew()

    def renew(self) -> None:
        """Forget all that came in, and hold what was held at first."""
        self.engine.reset_prefix_cache()
        import_prefixes(self.engine, self._own)
        self._before = self._picture()

    def exported(self) -> bytes:
        """The prefixes that the engine holds."""
        return encode_prefixes(export_prefixes(self.engine))

    def check_unchanged(self) -> None:
        """AssertionError where the cache, its memory or its counts differ from what `renew` has left."""
        self.engine.check_integrity()
        for name, now in self._picture().items():
            before = self._before[name]
            same = torch.equal(now, before) if isinstance(now, torch.Tensor) else now == before
            assert same, f"{name} changed though the input was refused"

    def check_sane(self) -> None:
        """AssertionError where what was accepted contradicts itself, or keeps others from their answers."""
        self.engine.check_integrity()
        serve_checked(self.engine, [UNSEEN], length=2)
        assert not self.engine.has_unfinished_requests()

    def check_answers(self, prompts: list[list[int]]) -> None:
        """AssertionError where a prompt that was imported gets a wrong answer, or resumes nothing."""
        for result in serve_checked(self.engine, prompts, length=3):
            assert result.num_resumed_tokens > 0, "nothing was resumed behind an import"

    def _picture(self) -> dict[str, Any]:
        """The maps, and the bytes of all that is cached."""
        access, maps = CacheAccess(self.engine, "fuzz"), maps_of(self.engine)
        blocks = sorted(maps["blocks"].values())
        slots = sorted(maps["states"].values())
        pictured = maps | {"pins of users": len(self.engine.pins())}
        for name, pool in access.pools.items():
            rows = torch.tensor(blocks if name == "kv" else slots, dtype=torch.int64)
            pictured[f"bytes of {name}"] = pool.index_select(1, rows).contiguous().view(torch.uint8)
        return pictured
