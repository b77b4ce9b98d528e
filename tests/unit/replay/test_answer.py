"""How much memory to give: the sentence, and the table around it."""

import pytest
from mambaslots.replay.compared_caches import DEFAULT_CACHE, UNLIMITED, OwnCache
from mambaslots.replay.report import (
    BudgetPoint,
    Cell,
    CellResult,
    TraceSource,
    sizing_sentence,
    sizing_sentences,
    table,
)
from mambaslots.replay.setting import ReplayResult, ReplaySetting, model_shape

SHAPE = model_shape("nemotron-h-8b")


@pytest.mark.parametrize(
    ("shares", "unlimited", "said"),
    [
        (
            {2: 0.5, 8: 0.941, 32: 0.945},
            0.948,
            "give it 8 GB in all: it then resumes 94.1 % of the prompt tokens, within a point of the 94.8 % "
            "that an unlimited pool resumes; 2 GB bring 50.0 %.",
        ),
        (
            {2: 0.94, 8: 0.941},
            0.948,
            "give it 2 GB in all: it then resumes 94.0 % of the prompt tokens, within a point of the 94.8 % "
            "that an unlimited pool resumes.",
        ),
        (
            {2: 0.2, 8: 0.5},
            0.9,
            "give it more than 8 GB in all: with that it resumes 50.0 % of the prompt tokens, and an "
            "unlimited pool 90.0 %.",
        ),
        (
            {2: 0.0},
            0.004,
            "give it no memory for this traffic, in which too little repeats: even an unlimited pool resumes "
            "0.4 % of the prompt tokens.",
        ),
    ],
)
def test_the_smallest_budget_that_is_enough(shares: dict[int, float], unlimited: float, said: str) -> None:
    points = [BudgetPoint(budget, share) for budget, share in shares.items()]
    assert sizing_sentence(points, unlimited, "in all") == said


def test_each_trace_and_kind_of_budget_has_its_sentence() -> None:
    settings = [
        ReplaySetting(SHAPE, 2.0, 20.0), ReplaySetting(SHAPE, 8.0, 20.0), ReplaySetting(SHAPE, total_gb=22.0)
    ]  # fmt: skip
    cells = [
        cell("a", "ours", settings[0], 50),
        cell("a", "other", settings[0], 60),
        cell("a", "ours", settings[1], 90),
        cell("a", "ours", settings[2], 60),
        cell("b", "ours", settings[0], 0),
        cell("a", "unlimited", settings[0], 90),
        cell("b", "unlimited", settings[0], 0),
    ]
    first, second, third = sizing_sentences(cells, {"a": 0.9, "b": 0.0}, "ours")
    assert first.startswith("a: give it 8 GB for states, with 20 GB for KV: it then resumes 90.0 %")
    assert second.startswith(
        "a: give it more than 22 GB for states and KV together: with that it resumes 60.0 %"
    )
    assert third.startswith("b: give it no memory")
    title, *lines, computed = table([one for one in cells if one.trace == "a"]).splitlines()
    assert title == "a: 7 requests, 100 prompt tokens. % of the prompt tokens resumed"
    assert [" ".join(line.split()) for line in lines] == [
        "row 2+20 GB 8+20 GB 22 GB in all",
        "ours 50.0 90.0 60.0",
        "ours-other 60.0 - -",
        "unlimited pool 90.0",
    ]
    assert computed == "ours computed, % of the prompt tokens: never_seen 50.0 / 10.0 / 40.0"


def cell(trace: str, row: str, setting: ReplaySetting, resumed: int) -> CellResult:
    result = ReplayResult(7, 100, resumed, {"never_seen": 100 - resumed} if row == "ours" else {})
    rows = {"ours": DEFAULT_CACHE, "unlimited": UNLIMITED}
    return CellResult(Cell(TraceSource(trace), rows.get(row, OwnCache(row)), setting), trace, 7, result)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({"kv_evicted": 300, "state_evicted": 100}, "give KV more: with 8 GB for states, with 1 GB for KV"),
        ({"too_long": 300, "capacity": 100}, "give KV more: with 8 GB for states, with 1 GB for KV"),
        ({"kv_evicted": 100, "state_evicted": 300}, "give it more than 8 GB for states"),
    ],
)
def test_the_pool_that_lacks_memory_is_named(lost: dict[str, int], said: str) -> None:
    setting = ReplaySetting(SHAPE, state_gb=8.0, kv_gb=1.0)
    result = ReplayResult(10, 1000, 600, lost_by_reason=lost)
    one = CellResult(Cell(TraceSource("chat"), DEFAULT_CACHE, setting), "chat", 10, result)
    (sentence,) = sizing_sentences([one], {"chat": 0.9}, "ours")
    assert sentence.startswith(f"chat: {said}")
