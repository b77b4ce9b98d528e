"""The align rule: a worked table, and random lives of requests against a model that keeps every state."""

import numpy as np
import pytest
from mambaslots.vllm import advance
from mambaslots.vllm.align_rule import FRESH, PADDING, save_boundary, start_columns
from oracle.align_lives import Lives
from oracle.align_rows import NO_SLOT, AlignRows

B, K = 560, 3
"""Block size and draft tokens of the worked table."""
TABLE = [
    # accepted a step, prompt tokens, [(computed, scheduled, pre-copy, post-copy)]
    (1, 554, [(554, 4, None, None), (557, 4, (0, 1), None), (558, 4, None, None), (559, 4, None, (1, 0)),
              (560, 4, None, None)]),
    (2, 554, [(556, 4, None, None), (558, 4, (1, 1), (2, 0)), (560, 4, None, None)]),
    (2, 555, [(557, 4, (1, 1), None), (559, 4, None, (1, 0))]),
    (3, 553, [(559, 4, (2, 1), (1, 0))]),
    (3, 554, [(557, 4, (2, 1), (3, 0))]),
    (3, 555, [(558, 4, (2, 1), (2, 0))]),
    (4, 553, [(557, 4, (3, 1), (3, 0))]),
    (4, 554, [(558, 4, (3, 1), (2, 0))]),
    (4, 555, [(559, 4, (3, 1), (1, 0))]),
    (4, 556, [(556, 4, None, (3, 0)), (560, 4, (0, 1), None)]),
    (1, 1120, [(0, 560, None, None), (560, 560, (0, 1), None), (1120, 4, (1, 2), None)]),
    (1, 1130, [(0, 560, None, None), (560, 570, (0, 2), None), (1130, 4, None, None)]),
]  # fmt: skip
ROWS = [
    pytest.param(accepted, prompt, row, id=f"{accepted} a step, prompt {prompt}, {row[0]}+{row[1]}")
    for accepted, prompt, rows in TABLE
    for row in rows
]


def whole(*values):
    return np.array(values, dtype=np.int64)


def steps_of(accepted, prompt):
    """(computed, scheduled, drafts, accepted) of a request that accepts equally many tokens every step."""
    computed = 0
    cuts = [560, prompt - 560] if prompt in (1120, 1130) else [prompt]
    for scheduled in cuts:
        yield computed, scheduled, 0, 1
        computed += scheduled
    while computed < prompt + 12:
        yield computed, 1 + K, K, accepted
        computed += accepted


class TestWorkedTable:
    @pytest.mark.parametrize(("accepted", "prompt", "row"), ROWS)
    def test_row(self, accepted, prompt, row):
        """The request goes through all its earlier steps first."""
        state = AlignRows(2, 8, B, K)
        rows = whole(1)
        state.admit(rows, whole(0))
        found = None
        for computed, scheduled, drafts, of_step in steps_of(accepted, prompt):
            numbers = [whole(number) for number in (computed, scheduled)]
            before = state.before_forward(rows, *numbers)
            after = state.after_sampling(
                rows, whole(of_step), whole(computed + scheduled - drafts + of_step - 1)
            )
            if (computed, scheduled) == row[:2]:
                pre = (int(before.sources[0] + before.biases[0]), int(before.columns[0]))
                post = (int(after.sources[0] + after.biases[0]), int(after.destinations[0]))
                found = (pre if before.moves[0] else None, post if after.moves[0] else None)
                if (accepted, prompt, computed) == (4, 556, 556):
                    assert after.sources[0] == after.destinations[0]
                    assert state.accepted[1] == 1
        assert found == row[2:]


class TestRule:
    def test_start_is_the_column_of_the_cached_state(self):
        assert start_columns(whole(0, 1, 560, 561, 1120), B).tolist() == [FRESH, 0, 0, 1, 1]

    def test_fresh_and_padding_are_not_the_same(self):
        step = advance(whole(FRESH, PADDING), whole(1, 1), whole(0, 0), whole(4, 4), B)
        assert step.columns.tolist() == [0, PADDING]
        assert step.sources.tolist() == [FRESH, PADDING]
        assert not step.moves.any()

    def test_nothing_accepted_saves_nothing(self):
        step = save_boundary(whole(0, 0), whole(0, 0), whole(559, -1), B)
        assert not step.reached.any()
        assert step.accepted.tolist() == [0, 0]


class TestSlots:
    def state(self):
        state = AlignRows(3, 4, 4, 1)
        state.admit(whole(2, 0), whole(0, 4))
        state.put_slots(2, 0, [5, 6, 7])
        state.put_slots(0, 0, [9, 3, 4])
        return state

    def test_forward_indices_of_fresh_resumed_and_padding_rows(self):
        state = self.state()
        rows = whole(-1, 0, 2)
        step = state.before_forward(rows, whole(0, 4, 0), whole(4, 3, 2))
        free = state.forward_indices(rows, step, whole(1, 1, 2), copy_free=True)
        assert free.ssm_sources.tolist() == free.conv_sources.tolist() == [NO_SLOT, 9, NO_SLOT]
        assert free.ssm_destinations.tolist() == [[NO_SLOT, NO_SLOT], [3, NO_SLOT], [5, 6]]
        assert free.conv_destinations.tolist() == [NO_SLOT, 3, 5]
        copied = state.forward_indices(rows, step, whole(1, 1, 2), copy_free=False)
        assert copied.ssm_sources.tolist() == [NO_SLOT, 3, NO_SLOT]
        copies = state.copies(rows, step)
        assert (copies.rows.tolist(), copies.ssm_sources.tolist(), copies.destinations.tolist()) == (
            [0],
            [9],
            [3],
        )
        state.check_integrity()


def lives(sequences, record_property, copy_free):
    counted, each = {}, 500
    for batch in range(sequences // each):
        for event, number in Lives(1000 * copy_free + batch, each, copy_free).run().items():
            counted[event] = counted.get(event, 0) + number
    way = "copy-free" if copy_free else "pre-copy"
    record_property("cases", {f"random sequences in align mode, {way}": sequences})
    assert counted["mismatches"] == 0, counted
    assert min(counted[event] for event in counted if event != "mismatches") > sequences / 10, counted


@pytest.mark.parametrize("copy_free", [False, True])
def test_random_sequences_find_the_states_of_a_dense_model(record_property, copy_free):
    lives(2500, record_property, copy_free)


@pytest.mark.long
@pytest.mark.parametrize("copy_free", [False, True])
def test_a_hundred_thousand_sequences_find_the_states_of_a_dense_model(record_property, copy_free):
    lives(100_000, record_property, copy_free)


class Forgetful(AlignRows):
    """Keeps the accepted count when a boundary was reached in place."""

    def after_sampling(self, rows, accepted, *numbers):
        step = super().after_sampling(rows, accepted, *numbers)
        self.accepted[rows[rows >= 0]] = accepted[rows >= 0]
        return step


class Unbiased(AlignRows):
    """Continues from the state after the first token of the last step."""

    def before_forward(self, rows, *numbers):
        step = super().before_forward(rows, *numbers)
        return type(step)(step.columns, step.sources, 0 * step.biases, step.accepted, step.moves)


@pytest.mark.parametrize("wrong", [Forgetful, Unbiased])
def test_the_dense_model_notices(wrong):
    assert sum(Lives(seed, 100, True, wrong).run()["mismatches"] for seed in range(5)) > 0
