"""install and uninstall: what is replaced, what is refused, and what the table of known sources says."""

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mambaslots as ms
import mambaslots.mcore
import megatron.core
import pytest
import torch
from mambaslots.inference.contexts.cache.eviction import LRUEviction
from mambaslots.mcore import UnknownHostError, versions
from mambaslots.mcore.__main__ import main
from mambaslots.mcore.built_contexts import built_contexts
from mambaslots.mcore.installation import describe_outlook
from mambaslots.mcore.overrides import NOT_SELF_TESTED, REGISTRY, Override, overrides_for, owner_class
from mambaslots.mcore.recurrence import BLOCK, MODES, SERIES, RecurrenceDriver, make_context, tokens
from mambaslots.mcore.reproductions import REPRODUCTIONS
from mambaslots.mcore.slot_allocator import HostSlotAllocator
from mcore_rig import cpu_as_gpu
from megatron.core.inference.contexts import dynamic_context, mamba_slot_allocator

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    with cpu_as_gpu():
        yield


def replaced() -> list[Override]:
    return overrides_for(versions.series_of(vars(owner_class(versions.KV_ALLOCATOR))))


def host_methods() -> dict[str, Any]:
    names = {each.name: owner_class(each.owner).__dict__.get(each.method) for each in replaced()}
    return names | {
        "here": mamba_slot_allocator.MambaSlotAllocator,
        "there": dynamic_context.MambaSlotAllocator,
    }


def test_uninstall_gives_everything_back() -> None:
    before = host_methods()
    mambaslots.mcore.install()
    try:
        during = host_methods()
        assert during["here"] is during["there"] is HostSlotAllocator
        assert all(during[name] is not before[name] for name in before)
        assert isinstance(make_context().mamba_slot_allocator, ms.MambaSlotAllocator)
    finally:
        mambaslots.mcore.uninstall()
    assert host_methods() == before


def test_installing_again_with_the_same_settings_changes_nothing() -> None:
    before = host_methods()
    plan = ms.CheckpointPlan(prefill_interval=4 * BLOCK)
    with mambaslots.mcore.installed(plan=plan, eviction="lru") as outer:
        context, during = make_context(), host_methods()
        with mambaslots.mcore.installed(plan, "lru") as inner:
            assert inner == outer
        assert mambaslots.mcore.install(plan, "lru") == outer
        assert host_methods() == during
        assert [built.context for built in built_contexts] == [context]
        host = RecurrenceDriver(context)
        assert [host.serve(tokens(BLOCK + 1, seed=1))[0] for _ in range(2)] == [0, BLOCK]
    assert host_methods() == before
    with pytest.raises(RuntimeError, match="not installed"):
        mambaslots.mcore.uninstall()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"plan": ms.CheckpointPlan(decode="off")},
            r"^plan is CheckpointPlan\(decode='off', .*; accepted: plan=CheckpointPlan\("
            r"decode='rolling', [^;]*, "
            r"with which mambaslots.mcore was installed first, or uninstall\(\) before this call$",
        ),
        (
            {"eviction": "lru", "cache_answers": False},
            "^eviction is 'lru', cache_answers is False; accepted: eviction=None, cache_answers=True, with",
        ),
    ],
)
def test_installing_again_with_other_settings_names_them_and_changes_nothing(
    arguments: dict[str, Any], message: str
) -> None:
    with mambaslots.mcore.installed():
        during, settings = host_methods(), HostSlotAllocator.settings
        with pytest.raises(RuntimeError, match=message):
            mambaslots.mcore.install(**arguments)
        with pytest.raises(RuntimeError, match=message), mambaslots.mcore.installed(**arguments):
            pass
        assert (host_methods(), HostSlotAllocator.settings) == (during, settings)


def test_leaving_the_block_uninstalls_also_after_an_error() -> None:
    before = host_methods()
    with pytest.raises(ZeroDivisionError), mambaslots.mcore.installed():
        1 / 0  # noqa: B018
    assert host_methods() == before


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("plan", "rolling"),
        ("eviction", "fifo"),
        ("eviction", "ref_zero"),
        ("eviction", LRUEviction()),
        ("cache_answers", 1),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_installed(argument: str, value: Any) -> None:
    before = host_methods()
    with pytest.raises(ValueError, match=argument):
        mambaslots.mcore.install(**{argument: value})
    assert host_methods() == before


def test_missing_megatron_core_is_said_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_methods()
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ImportError, match=r"mambaslots\[megatron\]"):
        mambaslots.mcore.install()
    monkeypatch.undo()
    assert host_methods() == before


class EveryBlock(ms.CheckpointPlan):
    """A plan of one's own."""

    def boundaries(self, *, start: int, stop: int, block_size_tokens: int, **_: int) -> Any:
        first = start - start % block_size_tokens + block_size_tokens
        return [(position, "interval") for position in range(first, stop + 1, block_size_tokens)]


def test_a_plan_of_ones_own_says_which_states_are_stored() -> None:
    prompt = tokens(3 * BLOCK + 2, seed=1)
    with mambaslots.mcore.installed(plan=EveryBlock()):
        host = RecurrenceDriver(make_context())
        host.serve(prompt)
        assert host.context.mamba_slot_allocator.slots.counts.committed == 3
        assert host.serve(prompt[: BLOCK + 1])[0] == BLOCK
        host.check_idle()


class Newest(LRUEviction):
    """A policy of one's own: evicts the state that was used last."""

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return [slot for slot in reversed(self._order) if evictable(slot)][:count]


def test_a_policy_of_ones_own_chooses_the_victims() -> None:
    with mambaslots.mcore.installed(eviction=Newest) as installation:
        slots = make_context(slots=2).mamba_slot_allocator
        first, _ = slots.allocate_slots_batch([3, 4])
        slots.record_use(first)
        slots.allocate_slots_batch([5])
        assert (slots.has_state(3), slots.has_state(4)) == (False, True)
        assert installation.as_dict()["eviction"] == "Newest"


@pytest.mark.parametrize("policy", ["lru", "ref_zero"])
def test_the_hosts_policy_is_followed_and_ref_zero_frees_states_with_their_blocks(policy: str) -> None:
    """Among states of blocks in use, both evict the one whose last use is longest ago."""
    with mambaslots.mcore.installed():
        slots = make_context(slots=2, policy=policy).mamba_slot_allocator
        first, _ = slots.allocate_slots_batch([3, 4])
        slots.record_use(first)
        slots.allocate_slots_batch([5])
        assert (slots.has_state(3), slots.has_state(4)) == (True, False)


@pytest.mark.parametrize("interval", ["decode", "prefill_interval"])
def test_a_plan_that_does_not_fit_the_block_is_refused(interval: str) -> None:
    plan = ms.CheckpointPlan(**{interval: BLOCK + 1})  # type: ignore[arg-type]
    with mambaslots.mcore.installed(plan=plan), pytest.raises(ValueError, match=f"{interval} is {BLOCK + 1}"):
        make_context()


@pytest.mark.parametrize("mode", [MODES.PERSIST, MODES.OFFLOAD, MODES.RECOMPUTE])
def test_a_context_that_exists_stays_on_stock_until_it_is_built_anew(mode: Any) -> None:
    prompt = tokens(3 * BLOCK + 2, seed=1)
    host = RecurrenceDriver(make_context(kv_cache_management_mode=mode))
    number = host.add(prompt)
    host.step()
    with mambaslots.mcore.installed():
        for _ in range(BLOCK):
            host.step()
        host.step(finish=(number,))
        resumed = host.serve(prompt)[0]
        assert type(host.context.mamba_slot_allocator).__module__.startswith("megatron.")
        host.context.deallocate_inference_state_buffers()
        host.context.reinitialize_inference_state_buffers()
        rebuilt = mode is MODES.RECOMPUTE
        assert isinstance(host.context.mamba_slot_allocator, HostSlotAllocator) == rebuilt
        assert host.serve(prompt)[0] == (0 if rebuilt else resumed)
        assert host.serve(prompt)[0] == (3 * BLOCK if rebuilt else resumed)


def interface(slots: Any) -> dict[str, Any]:
    """Name -> shape, dtype and device of a tensor, parameters of a method, else the type."""
    members = {name: getattr(slots, name) for name in dir(slots) if not name.startswith("__")}
    return {
        name: (member.shape, member.dtype, member.device)
        if isinstance(member, torch.Tensor)
        else [(each.name, each.default) for each in inspect.signature(member).parameters.values()]
        if callable(member)
        else type(member)
        for name, member in members.items()
    }


def test_our_allocator_has_all_that_the_hosts_classes_and_tests_read_of_its_own() -> None:
    """But what only the stock allocator itself calls: evictions, its lists of slots, copies to the GPU."""
    stock = interface(make_context().mamba_slot_allocator)
    own = {
        "_evict_lru_slots_batch", "_intermediate_counts_gpu", "_intermediate_offsets_gpu",
        "_invalidate_blocks_batch", "free_slots", "transfer_intermediate_to_gpu",
    } | ({"_evictable_block_ids"} if SERIES == "0.20" else set())  # fmt: skip
    with mambaslots.mcore.installed():
        ours = interface(make_context().mamba_slot_allocator)
    assert stock.keys() >= own
    assert {name: ours.get(name) for name in stock.keys() - own} == {
        name: stock[name] for name in stock.keys() - own
    }


# ---- methods we do not know


def stranger(self: Any, req: Any, prefill_chunk_length: int) -> None:
    raise AssertionError("not to be called")


def test_an_unknown_method_is_refused_by_name_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_context.DynamicInferenceContext, "add_request", stranger)
    before = host_methods()
    with pytest.raises(UnknownHostError, match=r"DynamicInferenceContext\.add_request") as refusal:
        mambaslots.mcore.install()
    assert megatron.core.__version__ in str(refusal.value)
    assert host_methods() == before


def test_a_missing_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dynamic_context.DynamicInferenceContext, "update_requests")
    with pytest.raises(UnknownHostError, match="update_requests does not exist"):
        mambaslots.mcore.install()


def test_the_outlook_is_what_install_does(monkeypatch: pytest.MonkeyPatch) -> None:
    version, number = megatron.core.__version__.partition("+")[0], len(replaced())
    known_sources = f"the sources of all {number} replaced methods are known"
    assert describe_outlook() == f"install on megatron-core {version} (tested): {known_sources}"
    monkeypatch.setattr(sys.modules[describe_outlook.__module__], "TESTED_VERSIONS", ("0.18.0",))
    assert f"{version} (not tested; tested are 0.18.0): " in describe_outlook()
    known = {name: hashes for name, hashes in versions.KNOWN_SOURCES.items() if "add_request" not in name}
    monkeypatch.setattr("mambaslots.mcore.overrides.KNOWN_SOURCES", known)
    said, reasons = describe_outlook().split(": ", 1)
    assert said == f"install on megatron-core {version} if its self-test passes"
    assert re.fullmatch(r"DynamicInferenceContext\.add_request is not one we know \(source \w{12}\)", reasons)


def test_sources_that_are_not_known_are_accepted_where_the_faults_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = {name: versions.KNOWN_SOURCES[name] for name in NOT_SELF_TESTED}
    monkeypatch.setattr("mambaslots.mcore.overrides.KNOWN_SOURCES", known)
    plan = ms.CheckpointPlan(prefill_interval=3 * 7 * BLOCK)
    with mambaslots.mcore.installed(plan):
        assert HostSlotAllocator.settings.plan == plan
        assert built_contexts == []
        host = RecurrenceDriver(make_context())
        assert [host.serve(tokens(BLOCK + 1, seed=1))[0] for _ in range(2)] == [0, BLOCK]
    (record,) = caplog.records
    assert record.getMessage().endswith("its self-test passes with what replaces them")
    kept = (*NOT_SELF_TESTED, "GatedDeltaNet.forward", "GatedDeltaNet.ssm_prefill")  # as the host has them
    unknown = [each for each in replaced() if each.name not in kept]
    assert record.getMessage().count("is not one we know") == len(unknown)


def interrupted() -> list[str]:
    raise KeyboardInterrupt


def test_a_self_test_that_is_interrupted_leaves_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: hashes for name, hashes in versions.KNOWN_SOURCES.items() if "add_request" not in name}
    monkeypatch.setattr("mambaslots.mcore.overrides.KNOWN_SOURCES", known)
    monkeypatch.setattr("mambaslots.mcore.reproductions.failures", interrupted)
    before = host_methods()
    with pytest.raises(KeyboardInterrupt):
        mambaslots.mcore.install()
    assert host_methods() == before
    assert not built_contexts
    with pytest.raises(KeyboardInterrupt):  # asked again, and not taken for installed
        mambaslots.mcore.install()


def test_a_host_without_a_name_that_is_replaced_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_methods()
    with monkeypatch.context() as patch:
        patch.delattr(dynamic_context, "MambaSlotAllocator")
        with pytest.raises(AttributeError, match="MambaSlotAllocator"):
            mambaslots.mcore.install()
    assert host_methods() == before
    with pytest.raises(RuntimeError, match="not installed"):
        mambaslots.mcore.uninstall()


def test_unknown_methods_that_the_self_test_does_not_call_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mambaslots.mcore.overrides.KNOWN_SOURCES", {})
    with pytest.raises(UnknownHostError, match=r"commit_sampled_tokens is not one we know") as refusal:
        mambaslots.mcore.install()
    assert ("MambaMixer._ssm_prefill is not one we know" in str(refusal.value)) == (SERIES == "0.19")


@pytest.mark.parametrize("reproduction", REPRODUCTIONS, ids=lambda each: each.__name__)
def test_the_self_test_finds_each_fault_in_stock(reproduction: Callable[[], None]) -> None:
    with pytest.raises((AssertionError, AttributeError)):
        reproduction()
    with mambaslots.mcore.installed():
        reproduction()


def test_the_outlook_names_methods_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "megatron")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert describe_outlook().count(" does not exist") == len(overrides_for("0.19"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert describe_outlook() == "nothing: megatron-core is not installed"


# ---- the table


def test_every_override_says_what_it_changes_and_is_known_for_the_installed_version() -> None:
    assert {each.name for each in REGISTRY} == versions.KNOWN_SOURCES.keys()
    assert len(REGISTRY) == len(versions.KNOWN_SOURCES)
    for each in REGISTRY:
        assert each.replacement.__doc__, each.name
        assert each.faults or each.owner == versions.GATED_DELTA_NET, each.name


def test_the_faults_of_context_and_mixer_are_all_corrected() -> None:
    corrected = {fault for each in REGISTRY for fault in each.faults}
    assert corrected >= {1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 18, 22, 24}


def trees() -> list[Path]:
    """Unpacked wheels at hand: the Makefile's, and those in a folder named by MCORE_WHEELS."""
    others = Path(os.environ.get("MCORE_WHEELS", "/none")).glob("*")
    folders = [*(ROOT / ".venv").glob("megatron-0.19*"), *others]
    return [folder for folder in folders if (folder / "megatron").is_dir()]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of docstrings there
@pytest.mark.parametrize(
    "root", [Path(megatron.core.__file__).parents[2], *trees()], ids=lambda root: root.name
)
def test_the_table_is_what_the_sources_say(root: Path) -> None:
    from recompute_sources import sources

    found = sources([root])
    series = "0.20" if versions.version_of_tree(root) >= "0.20" else "0.19"
    assert found.keys() == {entry.name for entry in overrides_for(series)}
    for name, (digest,) in found.items():
        assert digest in versions.KNOWN_SOURCES[name], name


def test_a_hash_ignores_comments_docstrings_and_layout_and_nothing_else() -> None:
    plain = "def f(a):\n    return a + 1\n"
    dressed = (
        '@decorated\ndef f(\n    a,\n):\n    """A docstring."""\n    # a comment\n    return (a +\n 1)\n'
    )
    other = plain.replace("1", "2")
    hashes = [versions.hash_of(ast.parse(source).body[0]) for source in (plain, dressed, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert versions.source_hash(len) == "unreadable"


# ---- the runner and stats


def test_the_runner_says_how_it_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [str(tmp_path / "none.py")]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
        assert "usage: python -m mambaslots.mcore" in capsys.readouterr().err


def test_stats_are_of_our_contexts_only() -> None:
    with pytest.raises(ValueError, match="accepted: a DynamicInferenceContext"):
        mambaslots.mcore.stats(object)
    stock = make_context()
    with pytest.raises(ValueError, match="accepted: one built after install"):
        mambaslots.mcore.stats(stock)
