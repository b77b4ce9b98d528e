"""Which boundaries are stored, in what order of worth, and plans as one word of a command line."""

import re
from dataclasses import replace
from itertools import pairwise

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.checkpoint_plan import Boundary, CheckpointPlan
from mambaslots.named_policies import parse_plan, shown_plan
from oracle.plans import SwitchedPlan

WORTH = ["mark", "tail", "branch", "step_end", "interval", "decode"]
NOTHING = SwitchedPlan(tail=False, branch=False, step_ends=False, decode="off")


def boundaries(plan, start, stop, prompt, block=4, seen=0):
    return plan.boundaries(
        start=start, stop=stop, prompt_tokens=prompt, block_size_tokens=block, branch_tokens=seen
    )


def positions(*arguments, **keywords):
    return {b.position: b.kind for b in boundaries(*arguments, **keywords)}


# ---- each part of a plan


def test_the_tail_is_the_deepest_boundary_a_repeat_can_resume_from():
    assert positions(CheckpointPlan(), 0, 11, 11) == {8: "tail"}
    assert positions(CheckpointPlan(), 0, 9, 9) == {8: "tail"}


def test_a_prompt_that_ends_on_a_boundary_keeps_the_boundary_before_and_its_end():
    assert boundaries(CheckpointPlan(), 0, 8, 8) == (Boundary(4, "tail"), Boundary(8, "tail"))


def test_a_prompt_within_one_block_keeps_nothing():
    assert boundaries(CheckpointPlan(), 0, 3, 3) == ()


def test_the_branch_is_where_the_prompt_leaves_what_was_seen():
    assert positions(CheckpointPlan(), 4, 23, 23, seen=12) == {20: "tail", 12: "branch"}
    assert positions(CheckpointPlan(), 12, 23, 23, seen=12) == {20: "tail"}


def test_branch_and_tail_are_taken_in_one_prefill():
    plan = SwitchedPlan(step_ends=False)
    assert boundaries(plan, 0, 23, 23, seen=8) == (Boundary(20, "tail"), Boundary(8, "branch"))


def test_a_chunk_end_on_a_boundary_is_taken():
    assert positions(CheckpointPlan(), 0, 8, 23) == {8: "step_end"}
    assert positions(CheckpointPlan(), 0, 9, 23) == {}
    assert positions(SwitchedPlan(step_ends=False), 0, 8, 23) == {}


def test_an_interval_counts_from_the_start_of_the_prompt():
    plan = SwitchedPlan(tail=False, step_ends=False, prefill_interval=8)
    assert positions(plan, 4, 23, 23) == {8: "interval", 16: "interval"}
    assert positions(plan, 8, 24, 30) == {16: "interval", 24: "interval"}


def test_marks_are_rounded_down_and_those_beyond_the_prompt_are_nowhere():
    plan = SwitchedPlan(tail=False, marks=(13, 99, 0))
    assert positions(plan, 0, 23, 23) == {12: "mark"}


def test_a_position_wanted_twice_appears_once_for_its_best_reason():
    plan = CheckpointPlan(marks=(20,), prefill_interval=4)
    assert positions(plan, 16, 23, 23, seen=20) == {20: "mark"}


def test_while_decoding_each_crossed_boundary_is_taken():
    assert positions(CheckpointPlan(), 11, 12, 10) == {12: "decode"}
    assert positions(CheckpointPlan(), 12, 13, 10) == {}
    assert positions(CheckpointPlan(), 11, 20, 10) == {12: "decode", 16: "decode", 20: "decode"}
    assert positions(CheckpointPlan(decode="off"), 11, 12, 10) == {}


def test_parts_for_prompts_say_nothing_of_decoding():
    plan = CheckpointPlan(decode="off", marks=(12,), prefill_interval=4)
    assert positions(plan, 11, 16, 10) == {}


def test_every_block_takes_every_boundary():
    plan = CheckpointPlan.every_block(4)
    assert sorted(positions(plan, 0, 19, 19)) == [4, 8, 12, 16]


def test_only_multiples_of_decode_outlive_the_next_state():
    def kept(decode):
        return [b.position for b in boundaries(CheckpointPlan(decode=decode), 0, 16, 0) if b.is_kept]

    assert (kept(8), kept("rolling"), kept("off")) == ([8, 16], [], [])


# ---- against the plan's description, position by position

plans = st.builds(
    SwitchedPlan,
    tail=st.booleans(),
    branch=st.booleans(),
    step_ends=st.booleans(),
    decode=st.sampled_from(["rolling", "off", 8]),
    prefill_interval=st.sampled_from([None, 4, 8, 12]),
    marks=st.lists(st.integers(0, 60), max_size=2).map(tuple),
)


def reasons(plan, p, stop, prompt, seen, decoding):
    """Why position p, a boundary of blocks of 4 in this step, is wanted."""
    if decoding:
        return ["decode"] if plan.decode != "off" else []
    in_block = range(p, p + 4)
    deepest_of_a_repeat = max(q for q in range(prompt) if q % 4 == 0)
    wanted = {
        "mark": any(mark in in_block for mark in plan.marks),
        "tail": plan.tail and p in (deepest_of_a_repeat, prompt),
        "branch": plan.branch and seen in in_block,
        "step_end": plan.step_ends and p == stop,
        "interval": plan.prefill_interval is not None and p % plan.prefill_interval == 0,
    }
    return [kind for kind in WORTH if wanted.get(kind)]


@given(plan=plans, prompt=st.integers(1, 50), data=st.data())
def test_a_step_takes_each_wanted_boundary_once_in_order_of_worth(plan, prompt, data):
    decoding = data.draw(st.booleans())
    start = data.draw(st.integers(prompt, prompt + 20) if decoding else st.integers(0, prompt - 1))
    stop = data.draw(st.integers(start, start + 20) if decoding else st.integers(start, prompt))
    seen = data.draw(st.integers(0, prompt))
    got = boundaries(plan, start, stop, prompt, seen=seen)
    expected = {
        p: reasons(plan, p, stop, prompt, seen, decoding)[0]
        for p in range(start + 1, stop + 1)
        if p % 4 == 0 and reasons(plan, p, stop, prompt, seen, decoding)
    }
    assert len({b.position for b in got}) == len(got)
    assert {b.position: b.kind for b in got} == expected
    worth = [WORTH.index(b.kind) for b in got]
    assert worth == sorted(worth)


@given(plan=plans, prompt=st.integers(1, 50), data=st.data())
def test_cutting_a_prompt_into_chunks_loses_no_boundary(plan, prompt, data):
    cuts = sorted({0, prompt, *data.draw(st.lists(st.integers(1, prompt), max_size=4))})
    seen = data.draw(st.integers(0, prompt))
    whole = set(positions(plan, 0, prompt, prompt, seen=seen))
    parts = [set(positions(plan, a, b, prompt, seen=seen)) for a, b in pairwise(cuts)]
    extra = {cut for cut in cuts if cut % 4 == 0} if plan.step_ends else set()
    assert whole <= set().union(*parts) <= whole | extra


# ---- bad settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decode", "on"),
        ("decode", 0),
        ("decode", True),
        ("decode", 2.0),
        ("decode", None),
        ("prefill_interval", 0),
        ("prefill_interval", 4.0),
        ("marks", (-1,)),
        ("marks", 4),
        ("marks", ("4",)),
    ],
)
def test_a_bad_part_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"{name}.* is .*accepted"):
        CheckpointPlan(**{name: value})


def test_lists_of_positions_become_tuples():
    plan = CheckpointPlan(marks=[4, 8])
    assert plan.marks == (4, 8)
    assert hash(plan) == hash(CheckpointPlan(marks=(4, 8)))


@pytest.mark.parametrize("plan", [CheckpointPlan(decode=6), CheckpointPlan(prefill_interval=6)])
def test_intervals_are_multiples_of_the_block(plan):
    with pytest.raises(ValueError, match=r"is 6; accepted: a multiple of block_size_tokens \(4\)"):
        plan.check_block_size(4)
    plan.check_block_size(3)
    CheckpointPlan().check_block_size(4)


drawn_marks = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
numbers = st.integers(1, 2**31 - 1)
drawn_plans = st.builds(
    ms.CheckpointPlan,
    decode=st.sampled_from(["rolling", "off"]) | numbers,
    prefill_interval=st.none() | numbers,
    marks=drawn_marks,
)


@given(drawn_plans)
def test_a_plan_is_read_as_it_was_shown(plan: ms.CheckpointPlan) -> None:
    assert parse_plan(shown_plan(plan)) == plan


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        ("", {}),
        ("decode=off, prefill_interval=1024", {"decode": "off", "prefill_interval": 1024}),
        ("every=256", {"decode": 256, "prefill_interval": 256}),
        ("marks=128+4096", {"marks": (128, 4096)}),
    ],
)
def test_a_spec_changes_the_defaults(spec: str, changes: dict[str, object]) -> None:
    assert parse_plan(spec) == replace(ms.CheckpointPlan(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec",
    ["rolling", "tail", "decode", "decode=-1", "decode=1.5", "marks=", "marks=a", "tail=1", "=", "x=1"],
)
def test_a_part_that_is_no_part_is_refused_by_name(spec: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"plan has {spec!r}; accepted: fields of CheckpointPlan")):
        parse_plan(spec)


def test_a_part_that_comes_twice_or_is_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted: decode once"):
        parse_plan("every=8,decode=off")
    with pytest.raises(ValueError, match="prefill_interval is 0; accepted: an integer from 1"):
        parse_plan("prefill_interval=0")
