"""An import that is interrupted is made, or not made, or costs the cache; no hit is wrong."""

import logging
from collections.abc import Callable, Iterator

import mambaslots as ms
import pytest
from mambaslots import distributed as msd
from oracle.places import Lines, monitored
from oracle.serving import random_tokens, serve_checked, small_engine
from oracle.workload import assert_idle

NewLines = Callable[[], Lines]
TEXT, OTHER = random_tokens(40, 1), random_tokens(40, 2)


def exported() -> msd.PrefixShard:
    engine = small_engine(num_kv_blocks=24, num_mamba_slots=4)
    engine.set_weights_version("one")
    serve_checked(engine, [TEXT, OTHER, TEXT[:17] + OTHER[:9]])
    return msd.export_prefixes(engine)


@pytest.fixture
def lines() -> Iterator[NewLines]:
    with monitored() as monitor:
        logging.disable(logging.WARNING)
        yield monitor.lines
        logging.disable(logging.NOTSET)


def interrupted(shard: msd.PrefixShard, place: int, new: NewLines) -> int:
    """Interrupt an import at a place; returns how many places the import has."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    engine = small_engine(num_kv_blocks=24, num_mamba_slots=4)
    engine.set_weights_version("one")
    serve_checked(engine, [TEXT[:20]])
    engine.add_request(OTHER[:20], ms.SamplingParams(num_tokens_to_generate=1))
    places = new()
    places.actions = {place: interrupt}
    try:
        with places.watched():
            msd.import_prefixes(engine, shard)
    except KeyboardInterrupt:
        pass
    else:
        assert place > places.num_passed
    engine.check_integrity()
    if place % 2:
        msd.import_prefixes(engine, shard)
    serve_checked(engine, [TEXT, OTHER, TEXT[:17] + OTHER[:9], [*TEXT, 1]])
    assert not engine.has_unfinished_requests()
    assert_idle(engine)
    return places.num_passed


@pytest.mark.parametrize(
    "count",
    [pytest.param(6, id="some places"), pytest.param(10**6, id="every place", marks=pytest.mark.long)],
)
def test_an_interrupted_import_leaves_nothing_wrong(count: int, lines: NewLines) -> None:
    shard = exported()
    num_places = interrupted(shard, 10**9, lines)
    for place in range(1, num_places + 1, max(1, num_places // count)):
        interrupted(shard, place, lines)
