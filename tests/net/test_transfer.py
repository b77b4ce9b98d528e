"""Prefixes between replicas of one model that are split in different ways: by files, and by hand-over."""

import time
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
import torch
import torch.distributed as dist
from mambaslots.net import (
    decode_prefixes,
    encode_prefixes,
    export_prefixes,
    import_prefixes,
    load_prefixes,
    save_prefixes,
)
from mambaslots.net.transfer import placement, prefix_files
from mambaslots.net.transfer.format import TransferError, shard_of
from mambaslots.net.transfer.hand_over import SendReport
from mambaslots.net.transfer.imports import CopyError
from mambaslots.net.transfer.pieces import PartCopies
from mambaslots.net.transfer.pipe import MessagePipe, NcclPipe
from mambaslots.net.transfer.placement import ImportReport, Placement
from mambaslots.net.transfer.shard import PrefixShard, join
from oracle.distributed_world import World
from oracle.model_kinds import MIX, OF_TRANSFORMERS, kind_of_model, present_kind
from oracle.serving import TOLERANCE, expected_answer, random_tokens, small_model, small_model_over
from oracle.transfers import dense, engine_of, maps_of, receive_once, send_once

Split = tuple[int, int]
"""The sizes of the tensor group and of the pipeline group."""

SYSTEM = random_tokens(21, 0)
PROMPTS = [SYSTEM + random_tokens(30, 1), SYSTEM + random_tokens(17, 2), random_tokens(40, 3)]
ANSWER = 5


def engine_at(world: World, split: Split, **overrides: Any) -> ms.DynamicInferenceEngine:
    """All ranks as replicas of this split; the first ones are the first replica."""
    return engine_of(small_model_over(world.groups(*split), world.device), **overrides)


def serve(engine: ms.DynamicInferenceEngine) -> tuple[list[int], float]:
    """Resumed tokens of each prompt, and the largest log-prob error against the recurrence."""
    params = ms.SamplingParams(max_tokens=ANSWER, return_log_probs=True)
    resumed, error = [], 0.0
    for prompt in PROMPTS:
        result = engine.generate([prompt], params)[0]
        tokens, log_probs = expected_answer(tuple(prompt), ANSWER)
        assert result.tokens == tokens
        error = max(error, *(abs(a - b) for a, b in zip(result.log_probs or [], log_probs, strict=True)))
        assert error < TOLERANCE
        resumed.append(result.num_resumed_tokens)
        engine.context.check_integrity()
    return resumed, error


def rank_in(world: World, split: Split) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rank, size) of the tensor and of the pipeline group."""
    tensor, pipeline = split
    place = world.rank % (tensor * pipeline)
    return (place % tensor, tensor), (place // tensor, pipeline)


LETTERS = {"conv": "M", "ssm": "M", "gdn_conv": "G", "delta": "G", "short_conv": "C", "kv": "*"}
HEADS = {"conv": "ssm.0", "ssm": "ssm.0", "gdn_conv": "delta.0", "delta": "delta.0"}
"""State tensor -> what counts the heads of its layers, which share other units."""


def sliced(whole: PrefixShard, tensor: tuple[int, int], pipeline: tuple[int, int]) -> dict[str, torch.Tensor]:
    """What a rank holds of the whole, by what it computes: its layers and heads, and what those use."""
    config, (rank, size), (stage, stages) = small_model().config, tensor, pipeline
    length = len(config.pattern)
    here = range(length * stage // stages, length * (stage + 1) // stages)
    result = {}
    for name, numbers in whole.tensors.items():
        state, _, _ = name.partition(".")
        letter, units = LETTERS[state], numbers.shape[2]
        layers = [config.pattern[:i].count(letter) for i in here if config.pattern[i] == letter]
        heads = (
            config.num_attention_heads if state == "kv" else len(whole.tensors[HEADS.get(state, name)][0, 0])
        )
        used = sorted({head * units // heads for head in range(heads) if head * size // heads == rank})
        result[name] = numbers[layers][:, :, used]
    return densely(replace(whole, tensors=result))


def densely(shard: PrefixShard) -> dict[str, torch.Tensor]:
    """The numbers of an export as pools hold them."""
    return {name: dense(shard, name) for name in dict.fromkeys(key.split(".")[0] for key in shard.tensors)}


def pooled(engine: ms.DynamicInferenceEngine, whole: PrefixShard) -> dict[str, torch.Tensor]:
    """The same straight from an engine's pools, in the order of the whole's forest."""
    memory, forest = engine.context.memory, whole.forest
    kv, slots = engine.context.prefix_cache.kv_blocks, engine.context.prefix_cache.slots.cached_states
    blocks = [kv.tree.block_of_hash[key] for key in forest.hashes]
    held = [slots.slot_of(blocks[node]) for node in forest.states]
    pool = memory.state_pool
    states = {state.name: pool.durable(state.name)[:, held].cpu() for state in pool.states}
    return {"kv": memory.kv_cache[:, :, blocks].cpu()} | states


def whole_of(world: World, export: PrefixShard, ranks: int) -> PrefixShard:
    """The parts of the first replica, put together."""
    pieces = [decode_prefixes(data) for data in world.gathered(encode_prefixes(export))[:ranks]]
    return join(pieces, shard_of(small_model().state_spec()))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


SPLITS: list[Split] = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]
"""With 4 stages, the third one has neither Mamba nor attention layers."""


QUICKLY: list[tuple[Split, Split]] = [((1, 1), (2, 1)), ((2, 1), (1, 2)), ((1, 4), (2, 2))]
"""What `make test` runs of the plain kind. The mix, which has its states too, goes between other splits."""


def resplits() -> list[Any]:
    """Every pair, for as few ranks as hold both; the smallest also for more."""
    pairs = []
    for source, target in product(SPLITS, SPLITS):
        ranks = [size for size in (2, 4) if size >= max(prod(source), prod(target))]
        if target != (1, 1):
            ranks = ranks[:1]
        name = "tp {} pp {} to tp {} pp {}".format(*source, *target)
        marks = [pytest.mark.ranks(*ranks), *([] if (source, target) in QUICKLY else [pytest.mark.long])]
        pairs.append(pytest.param(source, target, marks=marks, id=name))
    return pairs


@pytest.mark.parametrize(("source", "target"), resplits())
def test_files_from_any_split_to_any_other(world: World, folder: Path, source: Split, target: Split) -> None:
    check_files(world, folder, source, target)


@pytest.mark.parametrize(
    ("of_kind", "source", "target"),
    [
        pytest.param("delta net", (2, 1), (1, 1), marks=[pytest.mark.ranks(2), pytest.mark.long]),
        pytest.param("delta net", (2, 1), (4, 1), marks=[pytest.mark.ranks(4), pytest.mark.long]),
        pytest.param("short convolution", (1, 2), (2, 1), marks=[pytest.mark.ranks(2), pytest.mark.long]),
        pytest.param(MIX, (1, 2), (2, 1), marks=pytest.mark.ranks(2)),
        pytest.param(MIX, (4, 1), (1, 4), marks=pytest.mark.ranks(4)),
        pytest.param(MIX, (2, 2), (4, 1), marks=[pytest.mark.ranks(4), pytest.mark.long]),
        *(
            pytest.param(
                kind,
                (2, 1),
                (1, 1),
                marks=[pytest.mark.ranks(2), *[pytest.mark.long] * ("conv" not in kind)],
            )
            for kind in OF_TRANSFORMERS
        ),
        *(
            pytest.param(kind, (2, 1), (4, 1), marks=[pytest.mark.ranks(4), pytest.mark.long])
            for kind in OF_TRANSFORMERS
        ),
        *(
            pytest.param(kind, (4, 1), (1, 1), marks=[pytest.mark.ranks(4), pytest.mark.long])
            for kind in OF_TRANSFORMERS
        ),
    ],
)
def test_files_of_other_kinds_of_state(
    world: World, folder: Path, of_kind: str, source: Split, target: Split
) -> None:
    with kind_of_model(of_kind):
        check_files(world, folder, source, target)


def check_files(world: World, folder: Path, source: Split, target: Split) -> None:
    """What one split has saved, another loads to the bit, and both serve the answers of the recurrence."""
    sizes = [prod(source), prod(target)]
    giver = engine_at(world, source)
    serve(giver)
    again, _ = serve(giver)
    export = export_prefixes(giver)
    whole = whole_of(world, export, sizes[0])
    assert same(pooled(giver, whole), sliced(whole, *rank_in(world, source)))

    saved = save_prefixes(giver, folder / str(world.rank // sizes[0]))
    assert len(saved.files) == sizes[0]
    world.gathered(None)
    taker = engine_at(world, target)
    report = load_prefixes(taker, folder / "0")
    assert (report.imported.blocks, report.imported.states) == (saved.blocks, saved.states)
    assert (report.known.blocks, report.left_out.blocks) == (0, 0)
    taker.context.check_integrity()
    mine = pooled(taker, whole)
    assert same(mine, sliced(whole, *rank_in(world, target)))
    resumed, error = serve(taker)
    assert resumed == again
    assert min(resumed) > 0
    parts = "; ".join(
        f"{name} {_part(part.layers)} x {_part(part.units)}"
        for name, part in shard_of(taker.context.spec).items()
    )
    numbers = {name: tensor.numel() for name, tensor in mine.items()}
    line = f"rank {world.rank}: {parts}: equal to the bit: {numbers}; resumed {resumed}; error {error:.0e}"
    lines = world.gathered(line)
    print(
        f"{present_kind()}, export at tp {source[0]} pp {source[1]}, import at tp {target[0]} pp "
        f"{target[1]}: {report.imported.blocks} blocks, {report.imported.states} states"
    )
    print("\n".join(lines[: sizes[1]]))


def _part(part: Any) -> str:
    return f"{part.start}:{part.stop}/{part.total}"


def test_where_there_is_room_for_some_the_ranks_choose_alike(world: World, folder: Path) -> None:
    split = whole_replica(world)
    giver = engine_at(world, split)
    serve(giver)
    saved = save_prefixes(giver, folder)
    taker = engine_at(world, split, num_kv_blocks=9, num_mamba_slots=3)
    taker.generate([random_tokens(33, 9)], ms.SamplingParams(max_tokens=2))
    report = load_prefixes(taker, folder)
    taker.context.check_integrity()
    assert 0 < report.imported.blocks < saved.blocks
    assert report.imported.blocks + report.left_out.blocks == saved.blocks
    gathered_reports = world.gathered((report, maps_of(taker)))
    assert all(other == gathered_reports[0] for other in gathered_reports)
    serve(taker)


# ---- one rank fails: none imports


def refused_on_all(world: World, engine: ms.DynamicInferenceEngine, call: Any, error: type[Exception]) -> str:
    before = maps_of(engine)
    with pytest.raises(error) as raised:
        call()
    assert maps_of(engine) == before
    engine.context.check_integrity()
    texts = world.gathered(str(raised.value))
    assert len(set(texts)) == 1
    resumed, _ = serve(engine)  # the ranks still agree
    assert resumed[0] == 0
    return texts[0]


def whole_replica(world: World) -> Split:
    return (2, world.size // 2)


def test_a_file_damaged_for_one_rank_is_refused_on_all(world: World, folder: Path) -> None:
    split = whole_replica(world)
    giver, taker = engine_at(world, split), engine_at(world, split)
    serve(giver)
    saved = save_prefixes(giver, folder)
    if world.rank == 0:
        path = folder / saved.files[1]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    world.gathered(None)
    text = refused_on_all(world, taker, lambda: load_prefixes(taker, folder), TransferError)
    assert text.startswith(f"rank 1 of the replica: {saved.files[1]}: sha256 is ")
    assert "rank 0" not in text
    print(text)


def test_a_piece_of_another_model_on_one_rank_is_refused_on_all(world: World) -> None:
    split = whole_replica(world)
    giver, taker = engine_at(world, split), engine_at(world, split)
    serve(giver)
    if world.rank == world.size - 1:
        giver.core.weights_version = "weights 2"
    export = export_prefixes(giver)
    text = refused_on_all(world, taker, lambda: import_prefixes(taker, export), TransferError)
    assert text.startswith(
        f"rank {world.size - 1} of the replica: the export does not fit: weights_version is "
    )
    print(text)


def test_ranks_with_different_prefixes_are_refused(world: World) -> None:
    split = whole_replica(world)
    giver, taker = engine_at(world, split), engine_at(world, split)
    serve(giver)
    export = export_prefixes(giver, [(PROMPTS[0 if world.rank else 2], None)])
    text = refused_on_all(world, taker, lambda: import_prefixes(taker, export), TransferError)
    assert "have other prefixes than rank 0" in text


def test_a_copy_that_fails_on_one_rank_is_undone_on_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = whole_replica(world)
    giver, taker = engine_at(world, split), engine_at(world, split)
    serve(giver)
    export = export_prefixes(giver)

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    if world.rank == 1:
        monkeypatch.setattr(placement, "write_entries", broken)
    text = refused_on_all(world, taker, lambda: import_prefixes(taker, export), CopyError)
    assert text == "prefixes could not be imported: rank 1 of the replica: no room"


def test_ranks_that_placed_differently_are_distinguished_from_a_copy_that_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = whole_replica(world)
    giver, taker = engine_at(world, split), engine_at(world, split)
    serve(giver)
    export = export_prefixes(giver)

    def broken(_: object) -> None:
        raise ValueError("broken")

    if world.rank == 1:
        monkeypatch.setattr(Placement, "place", broken)
    with pytest.raises(RuntimeError) as raised:
        import_prefixes(taker, export)
    assert not isinstance(raised.value, CopyError)
    assert str(raised.value) == (
        "prefixes could not be imported: rank 1 of the replica: broken; and ranks "
        "[1] of the replica have other caches than rank 0; accepted: the same on all"
    )
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        serve(taker)
    taker.reset()
    taker.context.check_integrity()
    serve(taker)


def test_a_save_that_fails_on_one_rank_fails_on_all(world: World, folder: Path) -> None:
    split = whole_replica(world)
    giver = engine_at(world, split)
    serve(giver)
    before = save_prefixes(giver, folder)
    (folder / "a file").touch()
    world.gathered(None)
    place = folder if world.rank else folder / "a file" / "no folder"
    with pytest.raises(OSError, match=r"rank 0 of the replica: .*Not a directory"):
        save_prefixes(giver, place)
    world.gathered(None)
    assert {path.name for path in folder.iterdir()} == {*before.files, "prefixes.json", "a file"}
    world.gathered(None)


def test_ranks_with_different_prefixes_save_no_set(world: World, folder: Path) -> None:
    split = whole_replica(world)
    giver = engine_at(world, split)
    serve(giver)
    before = save_prefixes(giver, folder)
    for refused in ("other prefixes", "other weights"):
        if refused == "other weights" and world.rank:
            giver.core.weights_version = "weights 2"
        names = [(PROMPTS[0 if world.rank and refused == "other prefixes" else 2], None)]
        with pytest.raises(OSError, match=r"have other prefixes or weights than rank 0; accepted: the same"):
            save_prefixes(giver, folder, names)
        world.gathered(None)
        assert {path.name for path in folder.iterdir()} == {*before.files, "prefixes.json"}
        world.gathered(None)
    taker = engine_at(world, split)
    assert load_prefixes(taker, folder).imported.blocks == before.blocks


def test_ranks_that_see_different_directories_save_no_set(world: World, folder: Path) -> None:
    split = whole_replica(world)
    giver = engine_at(world, split)
    serve(giver)
    before = save_prefixes(giver, folder)
    with pytest.raises(
        OSError, match=r"which rank 1 wrote, is not here; accepted: one directory for all ranks"
    ):
        save_prefixes(giver, folder if world.rank == 0 else folder / "of another node")
    world.gathered(None)
    assert {path.name for path in folder.glob("*.*")} == {*before.files, "prefixes.json"}
    assert load_prefixes(engine_at(world, split), folder).imported.blocks == before.blocks


def test_a_manifest_that_cannot_be_made_fails_on_all(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = whole_replica(world)
    giver = engine_at(world, split)
    serve(giver)

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    if world.rank == 0:
        monkeypatch.setattr(prefix_files, "Manifest", broken)
    with pytest.raises(OSError, match=r"rank 0 of the replica: no room"):
        save_prefixes(giver, folder)
    world.gathered(None)
    assert list(folder.iterdir()) == []
    world.gathered(None)


def test_ranks_that_read_different_sets_are_refused(world: World, folder: Path) -> None:
    """The same prefixes; their numbers may be others."""
    split = whole_replica(world)
    giver, taker = engine_at(world, split), engine_at(world, split)
    serve(giver)
    for name in ("one", "other"):
        save_prefixes(giver, folder / name)
    place = folder / ("one" if world.rank else "other")
    text = refused_on_all(world, taker, lambda: load_prefixes(taker, place), TransferError)
    assert text.endswith("of the replica have other exports than rank 0; accepted: the same on all")


def test_bytes_damaged_on_one_rank_are_refused_on_all(world: World) -> None:
    split = whole_replica(world)
    giver, taker = engine_at(world, split), engine_at(world, split)
    serve(giver)
    data = encode_prefixes(export_prefixes(giver))
    damaged = data[:-1] if world.rank == 1 else data
    text = refused_on_all(world, taker, lambda: import_prefixes(taker, damaged), TransferError)
    assert text.startswith("rank 1 of the replica: ")
    taker.reset()
    assert import_prefixes(taker, data).imported.blocks > 0
    assert serve(taker)[0][0] > 0


@pytest.mark.parametrize("wrong", ["piece", "weights", "folder", "folder to save in", "timeout_s"])
def test_an_argument_that_is_wrong_on_one_rank_is_refused_on_all(
    world: World, folder: Path, wrong: str
) -> None:
    split = whole_replica(world)
    giver, taker = engine_at(world, split), engine_at(world, split)
    serve(giver)
    export, here, before = export_prefixes(giver), world.rank == 1, maps_of(taker)
    store = dist.distributed_c10d._get_default_store()
    if wrong == "weights" and here:
        taker.core.weights_version = None
    timeout_s = 1e5 if wrong == "timeout_s" and here else 0.5
    calls: dict[str, Any] = {
        "piece": lambda: import_prefixes(taker, None if here else export),  # type: ignore[arg-type]
        "weights": lambda: import_prefixes(taker, export),
        "folder": lambda: load_prefixes(taker, 5 if here else folder),  # type: ignore[arg-type]
        "folder to save in": lambda: save_prefixes(giver, 5 if here else folder),  # type: ignore[arg-type]
    }
    call = calls.get(wrong, lambda: receive_once(taker, store, wrong, timeout_s=timeout_s))
    with pytest.raises((ValueError, OSError)) as raised:
        call()
    texts = world.gathered(str(raised.value))
    assert maps_of(taker) == before
    assert texts[1] in texts[0]
    assert "rank 1 of the replica: " in texts[0]
    assert "accepted: " in texts[1]
    if wrong == "timeout_s":
        assert "the tensor group, in which the replica's ranks wait for each other, has a timeout" in texts[1]
    taker.core.weights_version = giver.weights_version
    serve(taker)
    assert list(folder.iterdir()) == []
    world.gathered(None)


# ---- hand-over: the first ranks to the last ones


HANDOVERS: list[tuple[int, Split, Split]] = [
    (2, (1, 1), (1, 1)), (4, (2, 1), (2, 1)), (4, (1, 1), (2, 1)), (4, (2, 1), (1, 1)),
    (4, (1, 2), (2, 1)), (4, (2, 1), (1, 2)),
]  # fmt: skip


class Parties:
    """The first replica of one split gives, the last one of another takes; ranks of neither watch."""

    def __init__(self, world: World, source: Split, target: Split) -> None:
        self.world = world
        self.engines = [engine_at(world, source), engine_at(world, target)]
        self.givers, self.takers = source[0] * source[1], target[0] * target[1]
        self.gives = world.rank < self.givers
        self.takes = world.rank >= world.size - self.takers
        self.whole = whole_of(world, self._warm(), self.givers)

    def _warm(self) -> PrefixShard:
        serve(self.engines[0])
        return export_prefixes(self.engines[0])

    @property
    def taker(self) -> ms.DynamicInferenceEngine:
        return self.engines[1]

    def hand_over(self, name: str, timeout_s: float = 20.0) -> tuple[Any, float]:
        store, begin = dist.distributed_c10d._get_default_store(), time.monotonic()
        report: SendReport | ImportReport | None = None
        if self.gives:
            report = send_once(self.engines[0], store, name, timeout_s=timeout_s)
        if self.takes:
            report = receive_once(self.taker, store, name, timeout_s=timeout_s)
        took = time.monotonic() - begin
        self.world.gathered(None)
        return report, took

    def missed(self, name: str, timeout_s: float) -> list[str]:
        """The failures of all ranks, in order; takers have nothing new, and serve on, as givers do."""
        before = maps_of(self.taker)
        report, took = self.hand_over(name, timeout_s)
        assert took < timeout_s + 2.0
        if self.takes:
            assert report == ImportReport(failure=report.failure)
            assert report.failure
        assert maps_of(self.taker) == before
        failures: list[str] = self.world.gathered("" if report is None else report.failure)
        assert len(set(failures[-self.takers :])) == 1
        for engine in self.engines:
            engine.context.check_integrity()
            serve(engine)
        return failures


def has_nccl(parties: Parties) -> bool:
    """Whether pieces go from GPU to GPU: this suite runs on a GPU for each rank, or on none."""
    return parties.world.device.type == "cuda"


def handovers(*sizes: int) -> list[Any]:
    return [
        pytest.param(source, target, marks=pytest.mark.ranks(ranks), id=f"{source} to {target}")
        for ranks, source, target in HANDOVERS
        if ranks in (sizes or (2, 4))
    ]


@pytest.mark.parametrize(("source", "target"), handovers())
def test_hand_over(world: World, source: Split, target: Split) -> None:
    check_hand_over(world, source, target)


@pytest.mark.ranks(4)
def test_hand_over_of_a_mix(world: World) -> None:
    with kind_of_model(MIX):
        check_hand_over(world, (2, 1), (1, 2))


def check_hand_over(world: World, source: Split, target: Split) -> None:
    parties = Parties(world, source, target)
    report, took = parties.hand_over(f"to {target} from {source}")
    if parties.takes:
        assert report.failure == ""
        assert report.imported.blocks == len(parties.whole.forest)
        assert report.imported.states == len(parties.whole.forest.states)
        place = (world.rank - (world.size - parties.takers)) % (target[0] * target[1])
        shard = (place % target[0], target[0]), (place // target[0], target[1])
        assert same(pooled(parties.taker, parties.whole), sliced(parties.whole, *shard))
        parties.taker.context.check_integrity()
    sent = world.gathered(report.bytes if parties.gives else 0)
    world.gathered(None)
    if not parties.takes:
        parties.taker.reset()
    resumed = world.gathered(serve(parties.taker)[0])
    assert min(resumed[-1]) > 0
    if world.rank == 0:
        print(f"{source} to {target}: {sum(sent)} bytes in {took:.3f} s; resumed {resumed[-1]}; {report}")
    store = dist.distributed_c10d._get_default_store()
    assert not [key for key in store.list_keys() if "handover" in key]
    world.gathered(None)


@pytest.mark.parametrize(("source", "target"), handovers()[:2])
def test_a_source_that_never_comes(world: World, source: Split, target: Split) -> None:
    parties = Parties(world, source, target)
    parties.gives = False
    failures = parties.missed(f"nothing {source}", 1.0)
    assert "rank 0 of the source did not come in 1 s" in failures[-1]


@pytest.mark.parametrize(("source", "target"), handovers()[:2])
def test_a_destination_that_never_comes(world: World, source: Split, target: Split) -> None:
    parties = Parties(world, source, target)
    parties.takes = False
    report, took = parties.hand_over(f"nothing to {target}", 1.0)
    assert took < 3.0
    assert not parties.gives or "rank 0 of the destination did not come in 1 s" in report.failure


@pytest.mark.parametrize(("source", "target"), handovers()[:2])
@pytest.mark.parametrize("how", ["stops", "hangs"])
def test_a_source_that_is_lost_half_way(
    world: World, monkeypatch: pytest.MonkeyPatch, source: Split, target: Split, how: str
) -> None:
    """Its last rank; what the others send arrives, and is of no use."""
    parties = Parties(world, source, target)

    def send(*_: object) -> None:
        if how == "hangs":
            time.sleep(4.0)
        raise RuntimeError("killed")

    if world.rank == parties.givers - 1:
        monkeypatch.setattr(NcclPipe if has_nccl(parties) else MessagePipe, "send", send)
    failures = parties.missed(f"half {how} {source}", 3.0)
    assert f"rank {parties.givers - 1} of the source" in failures[-1]
    assert "killed" in failures[-1] or "was lost" in failures[-1]


@pytest.mark.parametrize(("source", "target"), handovers()[:2])
def test_bytes_of_one_rank_altered_on_the_way(
    world: World, monkeypatch: pytest.MonkeyPatch, source: Split, target: Split
) -> None:
    parties = Parties(world, source, target)

    pipe: Any = NcclPipe if has_nccl(parties) else MessagePipe
    real = pipe.send

    def altered(self: Any, piece: torch.Tensor, packed: Any) -> Any:
        if packed is not None:
            packed.synchronize()
        piece[-7] ^= 1
        torch.cuda.synchronize() if piece.is_cuda else None
        return real(self, piece, packed)

    if world.rank == parties.givers - 1:
        monkeypatch.setattr(pipe, "send", altered)
    failures = parties.missed(f"altered {source}", 5.0)
    assert "they were altered on their way" in failures[-1]


@pytest.mark.parametrize(("source", "target"), handovers()[:2])
def test_a_copy_that_fails_at_one_receiver(
    world: World, monkeypatch: pytest.MonkeyPatch, source: Split, target: Split
) -> None:
    parties = Parties(world, source, target)

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    if world.rank == world.size - 1:
        monkeypatch.setattr(PartCopies, "scatter", broken)
    failures = parties.missed(f"no room {target}", 5.0)
    assert "no room" in failures[-1]
    assert any("no room" in text for text in failures[: parties.givers])


@pytest.mark.parametrize(("source", "target"), handovers()[:2])
def test_other_weights(world: World, source: Split, target: Split) -> None:
    parties = Parties(world, source, target)
    parties.taker.set_weights_version("weights 2")
    failures = parties.missed(f"weights {source}", 5.0)
    assert all("weights_version is 'weights 1'; accepted: 'weights 2'" in text for text in failures if text)
    assert failures[0]
