"""What a hand-over of a cached prefix costs, beside computing the prefix again and beside the bare link.

Two processes each have the whole model (two GPUs, or the CPU). The first computes a prefix, with states at
its half and at its end, and sends the prefix to the second one, whose cache is empty, in three ways:

    nccl      over a `TransferChannel`: what the receiver lacks, with the deepest state, from GPU to GPU
    messages  the same channel through host memory
    bytes     all states, exported, encoded with SHA-256, sent, decoded and imported

    python benchmarks/hand_over.py --json out.json                          (two GPUs; bfloat16)
    python benchmarks/hand_over.py --shape tiny --device cpu                (does it run?)

All figures are medians. "computed" is one `warm` of the prefix on an empty cache. "received" is the whole
call of the receiver, with the sender's work. "on the way" is the part, by the sender's clock, from the
receiver's request to the receiver's word that all pieces have arrived, were checked and are in its pools.
"pieces alone" is the part of it that the GPUs take, by their events: at the sender from the first gather to
the end of the last piece's send, and at the receiver from there to the end of the last checksum and scatter.
The link is what NCCL sends and receives of one buffer, and what one process copies from GPU to GPU: of 1 GiB,
and "at this size" of as many bytes as the prefix has. It is timed by the host, from two processes that have
just met. Connecting a channel is a cost of its own.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import torch
import torch.distributed as dist
from mambaslots.inference.contexts.row_checksum import RowChecksum
from mambaslots.net.message_sockets import Address, Link, Listener
from mambaslots.net.transfer import hand_over, hand_over_messages, pieces, pipe, session
from mambaslots.net.transfer.pipe import NcclPipe, new_nccl_id
from mambaslots.net.transfer.placement import Placement
from serving.models import HYBRID_SHAPES, PATTERN, add_hybrid_shape
from support.command_line import add_count, add_device, make_parser

LENGTHS = {"8b": (1024, 4096, 16384), "tiny": (128, 512)}
BLOCKS = {"8b": 256, "tiny": 32}
TRANSPORTS = ("nccl", "messages", "bytes")
TIMEOUT = timedelta(seconds=300)


class Side:
    """One of the two processes."""

    def __init__(self, number: int, port: int, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        self.number, self.num_meetings = number, 0
        device = torch.device("cuda", number) if args.device == "cuda" else torch.device("cpu")
        if args.device == "cuda":
            torch.cuda.set_device(device)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        config = ms.models.HybridConfig(
            pattern=PATTERN[: args.layers], dtype=dtype, **HYBRID_SHAPES[args.shape]
        )
        self.block, longest = BLOCKS[args.shape], max(LENGTHS[args.shape])
        settings = ms.InferenceConfig(
            block_size_tokens=self.block,
            max_requests=1,
            max_tokens_per_step=min(4096, longest),
            max_sequence_length=longest + self.block,
            num_kv_blocks=longest // self.block + 2,
            num_mamba_slots=8,
        )
        model = ms.models.HybridLM(config, seed=0, device=device)
        self.engine = ms.DynamicInferenceEngine(model, settings)
        self.engine.set_weights_version("seed 0")
        self.shape = args.shape
        self.vocabulary, self.on_gpu = config.vocab_size, args.device == "cuda"

    def meet(self) -> None:
        """Returns when the other side has come here too."""
        self.num_meetings += 1
        self.store.set(f"meeting {self.num_meetings}, {self.number}", "")
        self.store.wait([f"meeting {self.num_meetings}, {1 - self.number}"], TIMEOUT)

    def time_ms(self, call: Callable[[], Any]) -> tuple[Any, float]:
        started = time.perf_counter()
        result = call()
        if self.on_gpu:
            torch.cuda.synchronize()
        return result, 1e3 * (time.perf_counter() - started)

    def tokens(self, length: int) -> list[int]:
        draw = random.Random(length)
        return [draw.randrange(self.vocabulary) for _ in range(length)]

    def fill(self, length: int) -> float:
        """Have the prefix cached, with states at its half and at its end; what computing it at once costs."""
        engine, tokens = self.engine, self.tokens(length)
        engine.reset_prefix_cache()
        _, computed = self.time_ms(lambda: engine.warm(tokens))
        engine.reset_prefix_cache()
        engine.warm(tokens[: length // 2])
        engine.warm(tokens)
        return computed

    def check(self, length: int) -> None:
        """The second process resumes where the prefix ends."""
        (result,) = self.engine.generate([[*self.tokens(length), 1]])
        assert result.num_resumed_tokens == length, result.num_resumed_tokens

    def over_channel(self, channel: Any, length: int) -> dict[str, float]:
        if self.number == 0:
            computed = self.fill(length)
            prefix = self.tokens(length), None
            self.meet()
            PARTS.clear()
            report, sent = self.time_ms(lambda: channel.send([prefix]))
            assert not report.failure, report.failure
            return {
                "computed": computed, "sent": sent, "on the way": 1e3 * report.seconds,
                "MiB": report.bytes / 2**20, **SPANS.sent_ms(),
                **{f"s:{name}": value for name, value in PARTS.items()},
            }  # fmt: skip
        self.engine.reset_prefix_cache()
        self.meet()
        PARTS.clear()
        report, received = self.time_ms(channel.receive)
        assert not report.failure, report.failure
        parts = {f"d:{name}": value for name, value in PARTS.items()}
        unpacked = SPANS.unpacked_ms()
        self.check(length)
        return {"received": received, **unpacked, **parts}

    def as_bytes(self, link: Any, length: int) -> dict[str, float]:
        if self.number == 0:
            computed = self.fill(length)
            self.meet()

            def send() -> int:
                data = msd.encode_prefixes(msd.export_prefixes(self.engine))
                link.send(hand_over_messages.Piece(), data)
                return len(data)

            size, sent = self.time_ms(send)
            return {"computed": computed, "sent": sent, "MiB": size / 2**20}
        self.engine.reset_prefix_cache()
        self.meet()
        _, received = self.time_ms(lambda: msd.import_prefixes(self.engine, bytes(link.receive(300.0)[-1])))
        self.check(length)
        return {"received": received}

    def measure(self, transport: str, repeats: int) -> dict[str, Any]:
        """Of each length the medians of this process's figures, and what connecting took."""
        rows: dict[str, Any] = {}
        if transport == "bytes":
            ends, connecting = self.time_ms(self.ends)
            call = partial(self.as_bytes, ends)
        else:
            side = "destination" if self.number else "source"
            channel = msd.TransferChannel(self.engine, self.store, transport, side, transport=transport)
            failure, connecting = self.time_ms(channel.connect)
            assert not failure, failure
            assert channel.transport == transport, channel.transport
            call = partial(self.over_channel, channel)
        for length in LENGTHS[self.shape]:
            if self.number == 0:
                print(f"{transport}: {repeats} hand-overs of {length} tokens", flush=True)
            figures = [call(length) for _ in range(repeats + 1)][1:]
            if self.number == 0 and transport == "nccl":
                self.store.set(f"bytes {length}", str(int(figures[0]["MiB"] * 2**20)))
            rows[str(length)] = {name: statistics.median(row[name] for row in figures) for name in figures[0]}
        if transport != "bytes":
            channel.close()
        return {"connecting": connecting, "rows": rows}

    def ends(self) -> Any:
        """A link from the first process to a listener of the second."""
        if self.number:
            listener = Listener(hand_over_messages.Message)
            self.store.set("listener", listener.address.to_bytes())
            return listener
        return Link(Address.from_bytes(self.store.get("listener")), hand_over_messages.Message, 60.0)

    def link_gb_s(self, sizes: Sequence[int], repeats: int = 7) -> list[float]:
        """What NCCL sends from one GPU to the other of buffers of these bytes, in 1e9 bytes a second."""
        device = torch.device("cuda", self.number)
        store = dist.PrefixStore("bare link", self.store)
        if self.number == 0:
            store.set("id", new_nccl_id())
        pipe = NcclPipe(device, self.number, store.get("id"), lambda: 300.0)
        speeds = [self._speed(pipe, device, num_bytes, repeats) for num_bytes in sizes]
        pipe.close()
        return speeds

    def _speed(self, pipe: NcclPipe, device: torch.device, num_bytes: int, repeats: int) -> float:
        buffer, times = torch.zeros(num_bytes, dtype=torch.uint8, device=device), []
        for _ in range(repeats):
            torch.cuda.synchronize()
            self.meet()
            started = time.perf_counter()
            passage = (pipe.receive if self.number else pipe.send)(buffer, None)
            while not passage.poll_done():
                pass
            times.append(time.perf_counter() - started)
        self.meet()
        return num_bytes / statistics.median(times[2:]) / 1e9

    def copy_gb_s(self, num_bytes: int = 1 << 30, repeats: int = 7) -> float:
        """What this process copies from its GPU to the other one."""
        here = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
        there, times = torch.empty_like(here, device="cuda:1"), []
        for _ in range(repeats):
            _, took = self.time_ms(lambda: there.copy_(here))
            times.append(took)
        return num_bytes / statistics.median(times[2:]) / 1e6


class Spans:
    """Events on the streams of the last hand-over over NCCL.

    Attributes:
        begin: at the source, before the first gather.
        passages: the pieces, in order.
        end: at the destination, after the last scatter.
    """

    def __init__(self) -> None:
        self.begin: Any = None
        self.passages: list[Any] = []
        self.end: Any = None

    def watch(self) -> None:
        """Have each hand-over over NCCL leave its events here."""
        send_pieces, receive_pieces, mark = (
            session.send_pieces,
            session.receive_pieces,
            pieces.Staging.mark,
        )
        send, receive = NcclPipe.send, NcclPipe.receive

        def sending(pipe: Any, layout: Any, copies: Any, buffers: Any, *others: Any) -> Any:
            self.begin, self.passages = buffers.mark(), []
            return send_pieces(pipe, layout, copies, buffers, *others)

        def receiving(*arguments: Any) -> Any:
            self.passages = []
            return receive_pieces(*arguments)

        def kept(call: Callable[..., Any]) -> Callable[..., Any]:
            def passing(*arguments: Any) -> Any:
                self.passages.append(call(*arguments))
                return self.passages[-1]

            return passing

        def marked(buffers: Any) -> Any:
            self.end = mark(buffers)
            return self.end

        session.send_pieces, session.receive_pieces = sending, receiving
        pieces.Staging.mark = marked  # type: ignore[method-assign]
        NcclPipe.send, NcclPipe.receive = kept(send), kept(receive)  # type: ignore[method-assign]

    def sent_ms(self) -> dict[str, float]:
        """From the first gather to the end of the last piece's kernel, at the source."""
        event = self.passages[-1].event if self.passages else None
        return {} if event is None else {"gathered and sent": self.begin.elapsed_time(event)}

    def unpacked_ms(self) -> dict[str, float]:
        """From the end of the last piece's kernel to the end of its scatter, at the destination."""
        event = self.passages[-1].event if self.passages else None
        return {} if event is None else {"unpacked": event.elapsed_time(self.end)}


SPANS = Spans()
PARTS: dict[str, float] = {}
"""Milliseconds of parts of the last hand-over; they overlap, and contain one another."""


def time_parts() -> None:
    """Have the functions that make up a hand-over add their time to `PARTS`."""
    for owner, name in (
        (hand_over, "forest_of"), (session, "decode"),
        (session, "send_pieces"), (session, "receive_pieces"), (pieces.PartCopies, "__init__"),
        (pieces.PartCopies, "between"), (pieces.PartCopies, "gather"),
        (pieces.PartCopies, "scatter"), (RowChecksum, "__call__"),
        (NcclPipe, "send"), (NcclPipe, "receive"), (Link, "send"), (Listener, "send"),
        (Placement, "place"), (Placement, "commit"), (pieces, "_read_sums"),
    ):  # fmt: skip
        _time_part(owner, name)


def _time_part(owner: Any, name: str) -> None:
    real, label = getattr(owner, name), name if name != "__init__" and name != "__call__" else owner.__name__

    def timed(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return real(*arguments, **named)
        finally:
            PARTS[label] = PARTS.get(label, 0.0) + 1e3 * (time.perf_counter() - begin)

    setattr(owner, name, timed)


def run_side(number: int, port: int, args: argparse.Namespace) -> None:
    side = Side(number, port, args)
    if args.parts:
        time_parts()
    SPANS.watch()
    found: dict[str, Any] = {}
    for transport in args.transport:
        SPANS.passages = []
        found[transport] = side.measure(transport, args.repeats)
    if "nccl" in args.transport:
        sizes = [int(side.store.get(f"bytes {length}")) for length in LENGTHS[args.shape]]
        one_gib, *speeds = side.link_gb_s([1 << 30, *sizes])
        found["link"] = {"NCCL": one_gib}
        for length, speed in zip(LENGTHS[args.shape], speeds, strict=True):
            found["nccl"]["rows"][str(length)]["bare"] = speed
        if number == 0:
            found["link"]["copy"] = side.copy_gb_s()
    side.store.set(f"figures {number}", json.dumps(found))
    side.meet()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of both processes, by transport."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    spawn = multiprocessing.get_context("spawn")
    sides = [spawn.Process(target=run_side, args=(number, store.port, args)) for number in range(2)]
    for side in sides:
        side.start()
    for side in sides:
        side.join()
    if any(side.exitcode for side in sides):
        raise SystemExit("a side failed")
    source, target = (json.loads(store.get(f"figures {number}")) for number in range(2))
    found: dict[str, Any] = {"link": source.get("link", {})}
    for transport in args.transport:
        rows = source[transport]["rows"]
        for length, row in rows.items():
            for name, value in target[transport]["rows"][length].items():
                row.setdefault(name, value)
        found[transport] = {"connecting": target[transport]["connecting"], "rows": rows}
    return found


def show(found: dict[str, Any], transports: Sequence[str]) -> None:
    link = found["link"].get("NCCL")
    for name, speed in found["link"].items():
        print(f"1 GiB from GPU to GPU, {name}: {speed:.0f} GB/s")
    print(f"\n{'':5} {'tokens':>7} {'MiB':>7} {'computed':>11} {'received':>11} {'times':>6}  on the way")
    for transport in transports:
        for length, row in found[transport]["rows"].items():
            way = ""
            if "on the way" in row:
                speed = row["MiB"] * 2**20 / row["on the way"] / 1e6
                share = ""
                if link and transport == "nccl":
                    share = f", {speed / link:.0%} of the link, {speed / row['bare']:.0%} of it at this size"
                way = f"{row['on the way']:.2f} ms, {speed:.1f} GB/s{share}"
            if "unpacked" in row and link:
                took = row["gathered and sent"] + row["unpacked"]
                speed = row["MiB"] * 2**20 / took / 1e6
                way += f"; pieces alone {took:.2f} ms, {speed:.1f} GB/s, {speed / row['bare']:.0%}"
            print(
                f"{transport:5} {int(length):7,} {row['MiB']:7.1f} {row['computed']:8.1f} ms "
                f"{row['received']:8.1f} ms {row['computed'] / row['received']:5.1f}x  {way}"
            )
    for transport in transports:
        for length, row in found[transport]["rows"].items():
            parts = ", ".join(f"{name} {row[name]:.2f}" for name in row if name.startswith(("s:", "d:")))
            print(f"{transport} {length}: {parts}" if parts else "", end="\n" if parts else "")
        print(f"connecting once, {transport}: {found[transport]['connecting']:.0f} ms")


def main() -> None:
    parser = make_parser(__doc__)
    add_device(parser, "cuda")
    add_hybrid_shape(parser)
    add_count(parser, "--repeats", 5, "timed hand-overs of each length")
    parser.add_argument(
        "--transport", nargs="+", choices=TRANSPORTS, default=None,
        help="the ways to measure (default: all that the device has)",
    )  # fmt: skip
    parser.add_argument(
        "--parts", action="store_true", help="show the time of parts, of source and destination"
    )
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        print("nothing measured: this needs two GPUs (or --shape tiny --device cpu)")
        return
    has_nccl = args.device == "cuda" and pipe.nccl_facts(torch.device("cuda", 0)) is not None
    if not has_nccl and "nccl" in (args.transport or ()):
        parser.error(
            "argument --transport: 'nccl' needs two GPUs and nccl4py: pip install 'mambaslots[nccl]'"
        )
    if not has_nccl and args.device == "cuda":
        print("nccl is not measured: nccl4py is not installed (the extra nccl)", flush=True)
    args.transport = args.transport or TRANSPORTS[not has_nccl :]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = measured(args)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    print(f"{gpu or platform.processor() or platform.machine()}, torch {torch.__version__}, {args.shape}\n")
    show(found, args.transport)
    if args.json:
        figures = {
            "date": datetime.date.today().isoformat(),
            "gpu": gpu,
            "torch": torch.__version__,
            "shape": args.shape,
            "layers": args.layers,
            **found,
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
