"""What the setting costs: prefills and decodes with it and without it, in turns; and decodes by replay."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mambaslots.inference.contexts.input_blocks import input_bytes, input_shapes
from serving.decode import DecodeBench, measure_decodes
from serving.models import ServingModel
from serving.prefill import PrefillBench, free

MOST = 1.05
MAX_AT_32768 = 1.15
TURNS = ("off", "on", "on", "off")
NUM_PREFILLS = 5
REPLAY_CONTEXT = 640


@dataclass(frozen=True)
class Work:
    """Something that takes milliseconds.

    Attributes:
        name: in the table.
        most: the largest ratio of its times with the setting and without it.
        measure: returns milliseconds.
    """

    name: str
    most: float
    measure: Callable[[ServingModel], float]


def works_of(served: ServingModel) -> list[Work]:
    """What is measured: at full size, or at a size that a CPU takes."""
    lengths = served.lengths
    full = lengths.context > 1000
    contexts = (512, 4096, 32768) if full else (40, 100, 300)
    rows = 32 if full else 2
    works = [
        Work(f"prefill of {lengths.compared:,}", MOST, lambda served: _prefill_ms(served)),
        Work(
            f"decode of {rows} at {lengths.context:,}",
            MOST,
            lambda served: _decode_ms(served, rows, lengths.context),
        ),
    ]
    return works + [_decode_of_one(context) for context in contexts]


def _decode_of_one(context: int) -> Work:
    most = MAX_AT_32768 if context > 30000 else MOST
    return Work(f"decode of 1 at {context:,}", most, lambda served: _decode_ms(served, 1, context))


def _prefill_ms(served: ServingModel) -> float:
    """From a prompt's arrival to its token, by the clock."""
    bench = PrefillBench(served, served.lengths.compared)
    return statistics.median([bench.run()[1] for _ in range(NUM_PREFILLS + 2)][2:])


def _decode_ms(served: ServingModel, rows: int, context: int) -> float:
    """Mean over the steps, which go through whole chunks: a replay costs more at the end of its chunk."""
    bench = DecodeBench(replace(served, lengths=replace(served.lengths, context=context)), rows)
    bench.add(rows)
    return statistics.fmean(bench.time_steps(served.lengths.steps))


def measure_costs(served: ServingModel, settings: dict[str, Any], steps: int) -> Iterator[dict[str, Any]]:
    """For each work: milliseconds without the setting and with it, in turns, and their ratio.

    An engine lives only while it is measured, because the setting also changes switches of the process.

    Args:
        served: the model.
        settings: what switches the setting on.
        steps: decode steps of a turn; a multiple of the chunk.
    """
    lengths = replace(served.lengths, steps=steps)
    for work in works_of(served):
        times: dict[str, list[float]] = {"off": [], "on": []}
        for turn in TURNS:
            now = replace(served, lengths=lengths, settings=settings if turn == "on" else {})
            times[turn].append(work.measure(now))
            free(served.device)
        off, on = statistics.median(times["off"]), statistics.median(times["on"])
        yield {
            "what": work.name, "off_ms": off, "on_ms": on, "ratio": on / off, "most": work.most,
            "all_off_ms": times["off"], "all_on_ms": times["on"],
        }  # fmt: skip


def measure_replay(
    served: ServingModel, bandwidth: float, rows: tuple[int, ...], steps: int
) -> list[dict[str, Any]]:
    """Decodes that replay beside decodes that update the state: milliseconds of a step, bytes of a token."""
    context = min(REPLAY_CONTEXT, served.lengths.context)
    lengths = replace(served.lengths, context=context, steps=steps)
    figures: dict[str, list[dict[str, Any]]] = {}
    for name, replays in (("recurrent", False), ("replay", True)):
        now = replace(served, lengths=lengths, settings={"decode_by_replay": replays})
        figures[name] = list(measure_decodes(now, bandwidth, rows, 0))
    moved = bytes_of_a_token(served)
    return [
        {
            "requests": recurrent["requests"], "context": context, "recurrent_ms": recurrent["mean_ms"],
            "replay_ms": replay["mean_ms"], "ratio": replay["mean_ms"] / recurrent["mean_ms"], **moved,
        }
        for recurrent, replay in zip(figures["recurrent"], figures["replay"], strict=True)
    ]  # fmt: skip


def bytes_of_a_token(served: ServingModel) -> dict[str, float]:
    """Bytes of states and inputs that one decoded token of one request reads and writes, on average.

    An update reads and writes the state. A replay reads the state and, on average, half a chunk of inputs,
    writes one token's inputs, and writes the state once in a chunk.
    """
    spec = served.model.state_spec()
    chunk = spec.chunk_size or 1
    engine = replace(served, settings={"decode_by_replay": True}).engine(
        rows=1, length=1024, tokens_per_step=1024, slots=1
    )
    inputs = input_bytes(input_shapes(engine.config, spec))
    return {
        "state_bytes": spec.state_bytes,
        "input_bytes": inputs,
        "recurrent_bytes": 2 * spec.state_bytes,
        "replay_bytes": spec.state_bytes * (1 + 1 / chunk) + inputs * (1 / 2 + 1 / chunk),
    }


def cost_line(row: dict[str, Any]) -> str:
    """A row of `measure_costs` as a line."""
    verdict = "within" if row["ratio"] <= row["most"] else "OVER"
    times = f"off {row['off_ms']:9.3f} ms, on {row['on_ms']:9.3f} ms"
    return f"  {row['what']:24} {times}: {row['ratio'] - 1:+7.2%}, {verdict} {row['most'] - 1:.0%}"


def replay_line(row: dict[str, Any]) -> str:
    """A row of `measure_replay` as a line."""
    times = f"recurrent {row['recurrent_ms']:8.3f} ms, replay {row['replay_ms']:8.3f} ms"
    moved = f"{row['recurrent_bytes'] / 1e6:,.1f} and {row['replay_bytes'] / 1e6:,.1f} MB a token"
    return (
        f"  decode of {row['requests']:4} at {row['context']:,}: {times}: {row['ratio'] - 1:+7.2%}; {moved}"
    )
