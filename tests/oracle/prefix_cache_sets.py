"""A prefix cache of plain sets of prefixes, served one request after another: an oracle of replays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Prefix = tuple[int, ...]
Plan = Callable[[int, int, int], list[int]]
"""Lengths of the prefixes whose states a prefill stores: of (resumed, cached KV, prompt), in tokens."""


@dataclass
class PrefixSets:
    """KV and states by whole prefixes. States go by last use; of KV leaves, those without a state go first.

    A prompt is prefilled in one step, and then its answer is decoded.
    """

    block: int
    num_kv_blocks: int
    num_slots: int
    plan: Plan
    decode: bool
    kv: dict[Prefix, int] = field(default_factory=dict)
    states: list[Prefix] = field(default_factory=list)
    clock: int = 0

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Serve one request; return the tokens that it resumed."""
        prompt, tokens = tuple(prompt), (*prompt, *answer[:-1])
        cached = 0
        while cached + self.block <= len(prompt) and prompt[: cached + self.block] in self.kv:
            cached += self.block
        resumed = next(
            (
                n
                for n in range(min(cached, len(prompt) - 1), 0, -1)
                if n % self.block == 0 and prompt[:n] in self.states
            ),
            0,
        )
        if -(-len(tokens) // self.block) > self.num_kv_blocks:
            raise ValueError("the oracle wants KV for each request alone")
        self._touch(tokens, cached)
        if resumed:
            self._use(prompt[:resumed])
        held = set(self._prefixes(tokens, cached))
        self._hold(tokens, len(prompt), held)
        for length in self.plan(resumed, cached, len(prompt)):
            self._store(prompt[:length], held)
        for end in range(len(prompt) + 1, len(tokens) + 1):
            self._hold(tokens, end, held)
        end = len(tokens) // self.block * self.block
        if self.decode and end > len(prompt) // self.block * self.block:
            self._store(tokens[:end], held)
        self._touch(tokens, end)
        return resumed

    def _prefixes(self, tokens: Prefix, end: int) -> list[Prefix]:
        return [tokens[:n] for n in range(self.block, end + 1, self.block)]

    def _touch(self, tokens: Prefix, end: int) -> None:
        self.clock += 1
        for prefix in self._prefixes(tokens, end):
            self.kv[prefix] = self.clock

    def _hold(self, tokens: Prefix, end: int, held: set[Prefix]) -> None:
        """Register the blocks up to `end`; a last block that is not whole needs memory, too."""
        needed = -(-end // self.block) - len(held)
        while len(self.kv) + needed > self.num_kv_blocks:
            leaves = [
                prefix
                for prefix in self.kv
                if prefix not in held and not any(one[: -self.block] == prefix for one in self.kv)
            ]
            victim = min(leaves, key=lambda prefix: (prefix in self.states, self.kv[prefix]))
            del self.kv[victim]
            if victim in self.states:
                self.states.remove(victim)
        for prefix in self._prefixes(tokens, end):
            if prefix not in held:
                held.add(prefix)
                self.kv.setdefault(prefix, self.clock)

    def _use(self, prefix: Prefix) -> None:
        self.states.remove(prefix)
        self.states.append(prefix)

    def _store(self, prefix: Prefix, held: set[Prefix]) -> None:
        if prefix in self.states or not self.num_slots:
            return
        if len(self.states) == self.num_slots:
            del self.states[0]
        self.states.append(prefix)
