"""Random lives of requests in align mode, against a model that keeps the state after every token."""

from dataclasses import dataclass, field

import numpy as np
from mambaslots.vllm.align_rule import FRESH, PADDING
from oracle.align_rows import NO_SLOT, AlignRows
from oracle.dense_states import HISTORY, DenseForward, DenseStates


@dataclass
class Lives:
    """Many requests at once. Each may be scheduled or not, draft, be preempted, run again, and finish.

    A request has up to LIVES lives, one for each time that it starts. Each life has its own slots for all
    columns. A life may start from a boundary's state that an earlier life left: the slot of that state is
    then named in the new life's row of the table, in the boundary's column.
    """

    seed: int
    count: int
    copy_free: bool
    state_type: type = AlignRows
    found: dict[str, int] = field(default_factory=dict)

    LIVES = 3

    def run(self, steps=36):
        self.generator = np.random.default_rng(self.seed)
        draw = self.generator.integers
        self.block, self.drafts = int(draw(1, 9)), int(draw(0, 5))
        self.prompts = draw(1, 5 * self.block + 2, self.count)
        self.lengths = self.prompts + draw(1, 40, self.count)
        most = int(self.lengths.max()) + 1 + self.drafts
        self.dense = DenseStates(self.generator, self.count, most + self.drafts)
        self.width = -(-(most + self.drafts) // self.block) + 1 + self.drafts
        names = self.generator.permutation(self.count * self.LIVES * self.width)
        self.own = names.reshape(self.count, self.LIVES, self.width)
        self.forward = DenseForward(self.generator, names.size, self.drafts)
        self.state = self.state_type(2 * self.count, self.width, self.block, self.drafts)
        self.computed = np.zeros(self.count, dtype=np.int64)
        self.life = np.full(self.count, -1)
        self.row = np.full(self.count, -1)
        self.finished = np.zeros(self.count, dtype=bool)
        self.kept = np.full((self.count, self.width), NO_SLOT)  # the slot of each boundary's state
        for event in ("steps", "drafted", "accepted", "preempted", "resumed", "finished", "mismatches"):
            self.found[event] = 0
        for _ in range(steps):
            self.begin()
            self.step()
            self.leave()
            self.state.check_integrity()
        self.compare_kept()
        return self.found

    def begin(self):
        """Give rows to some of the waiting requests: each starts from a kept boundary, or from nothing."""
        waiting = (self.row < 0) & ~self.finished & (self.generator.random(self.count) < 0.7)
        who = np.flatnonzero(waiting)
        free = np.flatnonzero(self.state.columns == PADDING)
        rows = self.generator.permutation(free)[: len(who)]
        usable = (self.kept[who] >= 0) & (self.generator.random((len(who), self.width)) < 0.8)
        column = np.where(usable.any(1), self.width - 1 - usable[:, ::-1].argmax(1), FRESH)
        again = self.life[who] >= 0
        self.life[who] += 1
        self.row[who], self.computed[who] = rows, (column + 1) * self.block
        self.state.admit(rows, self.computed[who])
        for request, row, of in zip(who, rows, column, strict=True):
            slots = self.own[request, self.life[request]].tolist()
            if of >= 0:
                slots[of] = int(self.kept[request, of])
            self.state.put_slots(int(row), 0, slots)
        self.found["resumed"] += int((again & (column >= 0)).sum())

    def step(self):
        draw = self.generator.integers
        scheduled_now = (self.row >= 0) & (self.generator.random(self.count) < 0.85)
        who = self.generator.permutation(np.flatnonzero(scheduled_now))
        padded = np.concatenate([who, np.full(3, -1)])
        real = padded >= 0
        rows = np.where(real, self.row[padded], -1)
        computed = np.where(real, self.computed[padded], 0)
        prefill = real & (computed < self.prompts[padded])
        drafted = np.where(real & ~prefill, draw(0, self.drafts + 1, len(padded)), 0)
        chunk = np.minimum(draw(1, 3 * self.block + 2, len(padded)), self.prompts[padded] - computed)
        scheduled = np.where(prefill, chunk, np.where(real, 1 + drafted, 0))
        right = draw(0, drafted + 1)  # accepted drafts
        before = self.state.before_forward(rows, computed, scheduled)
        if not self.copy_free:
            self.copy_before(rows, computed, scheduled, before)
        indices = self.state.forward_indices(rows, before, np.where(prefill, 1, scheduled), self.copy_free)
        self.compare_read(padded[real], indices, real)
        self.compute(padded, indices, computed, scheduled, prefill, right)
        accepted = np.where(real, 1 + right, 0)
        after = self.state.after_sampling(rows, accepted, computed + scheduled - drafted + accepted - 1)
        self.copy_after(rows, accepted, computed, scheduled, drafted, after)
        reached = self.crossed(computed, scheduled, drafted, accepted)
        assert not (after.moves & ~reached).any()
        of = padded[reached], after.columns[reached]
        self.kept[of] = self.state.slots(rows[reached], after.columns[reached])
        self.computed[who] += (scheduled - drafted + right)[real]
        self.found["steps"] += len(who)
        self.found["drafted"] += int(drafted.sum())
        self.found["accepted"] += int(right.sum())

    def copy_before(self, rows, computed, scheduled, before):
        """Make the copies before the forward, which `before` lists."""
        self.forward.copy(self.state.copies(rows, before))

    def copy_after(self, rows, accepted, computed, scheduled, drafted, after):
        """Make the copies after sampling, which `after` lists."""
        self.forward.copy(self.state.copies(rows, after))

    def compute(self, padded, indices, computed, scheduled, prefill, right):
        """Run the forward; every draft behind the right drafts is another token than the sequence's."""
        place = np.arange(1 + self.drafts)
        at = np.minimum(computed[:, None] + place, self.dense.tokens.shape[1] - 1)
        tokens = self.dense.tokens[padded[:, None], at] + (place > right[:, None]) * (1 << 31)
        decode = ~prefill
        self.forward.decode(_masked(indices, decode), tokens, scheduled)
        end = computed + scheduled
        self.forward.prefill(
            _masked(indices, prefill), self.dense.states[padded, end], self.dense.windows[padded, end]
        )

    def crossed(self, computed, scheduled, drafted, accepted):
        """Whether a boundary is among the token counts that this step accepted, tried one by one."""
        first = computed + scheduled - drafted
        counts = first[:, None] + np.arange(1 + self.drafts)
        return ((counts % self.block == 0) & (counts < (first + accepted)[:, None]) & (counts > 0)).any(1)

    def compare_read(self, who, indices, real):
        """Count the states read that are not the state after exactly the computed tokens."""
        states, windows = self.forward.read(indices)
        at = who, self.computed[who]
        wrong = (states[real] != self.dense.states[at]) | (windows[real] != self.dense.windows[at]).any(1)
        self.found["mismatches"] += int(wrong.sum())

    def compare_kept(self):
        """Count the kept boundary states that are not the state after exactly the boundary's tokens."""
        who, column = np.nonzero(self.kept >= 0)
        slots, at = self.kept[who, column], (who, (column + 1) * self.block)
        wrong = self.forward.ssm[slots] != self.dense.states[at]
        wrong |= (self.forward.conv[slots, :HISTORY] != self.dense.windows[at]).any(1)
        self.found["mismatches"] += int(wrong.sum())
        self.found["boundaries"] = len(who)

    def leave(self):
        running = self.row >= 0
        done = running & (self.computed >= self.lengths)
        preempted = running & ~done & (self.generator.random(self.count) < 0.08)
        preempted &= self.life < self.LIVES - 1
        self.finished |= done
        self.found["finished"] += int(done.sum())
        self.found["preempted"] += int(preempted.sum())
        gone = done | preempted
        self.state.release(self.row[gone])
        self.row[gone] = -1
        who = np.flatnonzero(gone)
        slots = self.own[who, self.life[who]]
        lost = slots[~np.isin(slots, self.kept[who])]  # other requests may write there
        self.forward.ssm[lost] = self.generator.integers(0, 1 << 62, len(lost)).astype(np.uint64)
        self.forward.conv[lost] = self.generator.integers(0, 1 << 62, (len(lost), self.forward.conv.shape[1]))


def _masked(indices, rows):
    """The indices of a forward in which only these rows write."""
    to = np.where(rows[:, None], indices.ssm_destinations, NO_SLOT)
    conv = np.where(rows, indices.conv_destinations, NO_SLOT)
    return type(indices)(indices.ssm_sources, indices.conv_sources, indices.conv_offsets, to, conv)
