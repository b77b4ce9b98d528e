"""Checkpoint plans as one word of a command line."""

import re
from dataclasses import replace

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.checkpoint_plan import parse_plan, shown_plan

positions = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple)
numbers = st.integers(1, 2**31 - 1)
plans = st.builds(
    ms.CheckpointPlan,
    tail=st.booleans(),
    branch=st.booleans(),
    chunk_ends=st.booleans(),
    decode=st.sampled_from(["rolling", "off"]) | numbers,
    prefill_interval=st.none() | numbers,
    marks=positions,
)


@given(plans)
def test_a_plan_is_read_as_it_was_shown(plan: ms.CheckpointPlan) -> None:
    assert parse_plan(shown_plan(plan)) == plan


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        ("", {}),
        ("tail", {}),
        ("no-tail, no-chunk_ends", {"tail": False, "chunk_ends": False}),
        ("decode=off,prefill_interval=1024", {"decode": "off", "prefill_interval": 1024}),
        ("every=256", {"decode": 256, "prefill_interval": 256}),
        ("marks=128+4096", {"marks": (128, 4096)}),
    ],
)
def test_a_spec_changes_the_defaults(spec: str, changes: dict[str, object]) -> None:
    assert parse_plan(spec) == replace(ms.CheckpointPlan(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec",
    ["rolling", "no-decode", "decode", "decode=-1", "decode=1.5", "marks=", "marks=a", "tail=1", "=", "x=1"],
)
def test_a_part_that_is_no_part_is_refused_by_name(spec: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"plan has {spec!r}; accepted: parts of CheckpointPlan")):
        parse_plan(spec)


def test_a_part_that_comes_twice_or_is_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted: decode once"):
        parse_plan("every=8,decode=off")
    with pytest.raises(ValueError, match="prefill_interval is 0; accepted: an integer from 1"):
        parse_plan("prefill_interval=0")
