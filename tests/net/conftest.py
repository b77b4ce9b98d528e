"""Tests that run as several ranks: `torchrun --nproc-per-node 2 -m pytest tests/net`.

Every rank runs the same tests in the same order. A setup, test or teardown that fails on one rank fails on
all of them, and ends the run: after it, the ranks' collectives would no longer meet. Rank 0 shows what failed
where. A collective fails after TIMEOUT; a test that hangs otherwise prints all stacks.
Each rank has a temporary folder of its own. On 4 ranks, what 2 ranks show as well is marked `long`. Without
torchrun these tests are not collected. On a machine with a GPU for each rank the same tests are marked
`gpu`, and run on those, over nccl.
"""

import faulthandler
import gc
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mambaslots.inference.engines.cuda_graphs import GraphRunner
from oracle.distributed_world import TIMEOUT, World
from oracle.model_kinds import KINDS, OF_TRANSFORMERS, PLAIN, SHAPES, kind_of_model

RANKS = int(os.environ.get("WORLD_SIZE", "0"))
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ON_GPUS = 0 < RANKS <= GPUS
if RANKS:
    SHAPES[PLAIN] = KINDS["Mamba-2"]  # a layer for each of four stages
_STORE = pytest.StashKey[dist.Store]()  # outlives the process group, which ends with the last teardown
# The kernels of a GPU do not take the chunks of eight tokens that these models have.
_ARE_SERVED = find_spec("transformers") is not None and not ON_GPUS


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*numbers): how many ranks the test is for")


def pytest_runtestloop(session: pytest.Session) -> None:
    """A folder for each rank: in a shared one, who lists old ones while others remove them gets a warning."""
    if rank := os.environ.get("RANK"):
        folder = tempfile.mkdtemp(prefix=f"mambaslots-rank{rank}-")
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        session.config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_ignore_collect() -> bool | None:
    """Without torchrun nothing here runs, and thousands of products need not be made."""
    return None if RANKS else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folder = f"{Path(__file__).parent}/"
    here = [item for item in items if str(item.path).startswith(folder)]
    others = [item for item in here if not RANKS or not _is_for(item, RANKS)]
    config.hook.pytest_deselected(items=others)
    deselected = set(others)
    items[:] = [item for item in items if item not in deselected]
    for item in here:
        if ON_GPUS:
            item.add_marker("gpu")
        elif RANKS == 4 and _is_like_on_2_ranks(item):
            item.add_marker("long")


# Of the tests of a leading engine, which all run on 2 ranks, those where a pipeline matters.
_LED_ON_4_RANKS = {
    "test_any_calls_of_rank_0_leave_equal_caches_on_all_ranks",
    "test_functions_run_on_all_ranks",
    "test_a_step_that_fails_on_some_ranks_breaks_the_engine_until_reset",
}

# Of the engine's scenarios, which run on 2 ranks by tensors or by stages, those on 4, by both.
_SPLIT_ON_4_RANKS = {
    "test_the_next_turn_resumes_from_the_state_taken_while_decoding",
    "test_a_fork_is_paid_by_the_first_sibling_stored_by_it_and_used_by_the_next",
    "test_prompt_log_probs_turn_resuming_off_for_that_request",
}

# Of these tests, which run on 2 ranks as well, cases with one of these values do not on 4.
_DEAR_ON_4_RANKS = {
    "test_a_busy_cache_decides_alike_on_all_ranks": {"in place", "tp 4"},
    "test_random_traffic": {"in place", "lru", "wide", "tp 4"},
    "test_scores_are_those_of_the_whole_model": {"tp 2, pp 2"},
    "test_a_step_that_fails_on_some_ranks_breaks_the_engine_until_reset": {"3", "ranks2"},
    "test_each_rank_holds_its_slice_of_the_whole_model_s_states_and_kv": {"None", "tp 4"},
    "test_logits_are_those_of_the_whole_model": {"lfm2", "qwen3_5_moe"},
    "test_a_rank_reads_its_part_of_a_checkpoint": {"lfm2"},
    "test_hand_over": {"(2, 1) to (2, 1)", "(1, 1) to (2, 1)", "(2, 1) to (1, 2)"},
    "test_a_source_that_never_comes": {"(2, 1) to (2, 1)"},
    "test_a_destination_that_never_comes": {"(2, 1) to (2, 1)"},
    "test_a_source_that_is_lost_half_way": {"hangs"},
    "test_other_weights": {"(2, 1) to (2, 1)"},
}


def _is_like_on_2_ranks(item: pytest.Item) -> bool:
    """Whether a test runs on 2 ranks as well, or splits a model by tensors alone, as on 2 ranks."""
    marked = item.get_closest_marker("ranks")
    if marked is None or 2 in marked.args:
        return True
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if item.path.name == "test_leading_engine.py" and item.originalname not in _LED_ON_4_RANKS:
        return True
    if item.path.name == "test_split_scenarios.py" and item.originalname not in _SPLIT_ON_4_RANKS:
        return True
    if item.originalname in _DEAR_ON_4_RANKS:
        return not _DEAR_ON_4_RANKS[item.originalname].isdisjoint(item.callspec._idlist)
    return "tp 4" in values and item.path.name != "test_split_transformers.py"


def _is_for(item: pytest.Item, ranks: int) -> bool:
    wanted = item.get_closest_marker("ranks")
    on_cpu = item.path.name == "test_docs_example.py"  # its code says so
    return (wanted is None or ranks in wanted.args) and not (_is_refused(item) or (on_cpu and ON_GPUS))


def _is_refused(item: pytest.Item) -> bool:
    """Whether a test would split a model of transformers into stages, or run one that is not served here."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [value for value in values if isinstance(value, str)]
    is_of_transformers = any(name in OF_TRANSFORMERS for name in names)
    return is_of_transformers and (not _ARE_SERVED or any("pp" in name.split() for name in names))


@pytest.fixture(params=[*KINDS, *OF_TRANSFORMERS])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """As the fixture of all tests; also models of transformers."""
    with kind_of_model(request.param):
        yield request.param


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The default process group, and the groups that tests split it into."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPUS else torch.device("cpu")
    if ON_GPUS:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if ON_GPUS else "gloo", timeout=TIMEOUT)
    yield World(device)
    gc.unfreeze()  # an engine that a module's end froze is not collected, nor found
    gc.collect()
    for runner in [one for one in gc.get_objects() if type(one) is GraphRunner]:
        runner.clear_graphs()  # nccl ends no communicator that a graph has captured
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        faulthandler.dump_traceback_later(60, exit=True)
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def folder(world: World) -> Iterator[Path]:
    """One directory for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(world.gathered(own)[0])
        world.gathered(None)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """The ranks exchange how setup, call and teardown went, over the default group's store."""
    outcome = yield
    report = outcome.get_result()
    if dist.is_initialized() and _STORE not in item.config.stash:
        item.config.stash[_STORE] = dist.distributed_c10d._get_default_store()
    store = item.config.stash.get(_STORE, None)
    if store is None:
        return
    keys = {rank: f"{call.when} of {item.nodeid} on {rank}" for rank in range(RANKS)}
    store.set(keys[int(os.environ["RANK"])], json.dumps(str(report.longrepr) if report.failed else ""))
    try:
        store.wait(list(keys.values()), TIMEOUT)
    except RuntimeError:
        missing = [rank for rank, name in keys.items() if not store.check([name])]
        failures = dict.fromkeys(missing, f"did not end the {call.when} of this test")
    else:
        found = {rank: json.loads(store.get(name)) for rank, name in keys.items()}
        failures = {rank: text for rank, text in found.items() if text}
    if failures:
        item.session.shouldstop = "a test failed on one rank; the others cannot go on without it"
        if not report.failed:
            report.outcome = "failed"
            report.longrepr = "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
