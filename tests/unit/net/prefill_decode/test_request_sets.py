"""Any set of requests: the answers are the recurrence's, whatever the two engines have room for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.budget import dear
from oracle.disaggregated import Place, answers, run
from oracle.model_kinds import kind_of_model, kinds
from oracle.serving import random_tokens
from oracle.transfers import engine_of

TEXTS = [random_tokens(120, seed) for seed in range(2)]
PROMPTS = [tuple(text[:length]) for text in TEXTS for length in (1, 9, 24, 33, 64, 100)]
FORKS = [tuple(TEXTS[0][:length] + random_tokens(30, seed=length)) for length in (16, 40, 41)]

asked = st.tuples(st.sampled_from(PROMPTS + FORKS), st.sampled_from([None, None, b"a", "b"]))
batches = st.lists(st.lists(asked, min_size=1, max_size=5), min_size=1, max_size=3)
sizes = st.fixed_dictionaries(
    {
        "num_kv_blocks": st.sampled_from([16, 20, 100]),
        "num_mamba_slots": st.sampled_from([1, 2, 40]),
        "max_requests": st.sampled_from([1, 3]),
        "max_tokens_per_step": st.sampled_from([8, 32, 100]),
        "eviction_policy": st.sampled_from(["value", "lru"]),
    }
)


@pytest.fixture(scope="module")
def place() -> Place:
    return Place()


@dear()
@given(kind=kinds, batches=batches, prefill=sizes, decode=sizes, minimum=st.sampled_from([1, 8, 40]))
def test_answers_do_not_depend_on_who_computes(
    place: Place,
    kind: str,
    batches: list[Any],
    prefill: dict[str, Any],
    decode: dict[str, Any],
    minimum: int,
) -> None:
    async def body() -> None:
        prefill_engine, decode_engine = engine_of(**prefill), engine_of(**decode)
        async with (
            place.worker(prefill_engine),
            place.server(decode_engine, min_prefill_tokens=minimum) as server,
        ):
            num_asked = 0
            for batch in batches:
                prompts, salts = zip(*batch, strict=True)
                results = await answers(server, prompts, salts)
                num_asked += len(results)
                await server.call(lambda engine: engine.check_integrity())  # the worker's: as it ends
            counts = server.prefills
            assert counts.short + counts.remote + counts.missed == num_asked

    with kind_of_model(kind):
        run(body())
