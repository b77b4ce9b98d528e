"""What becomes of a hand-over whose peer is absent, killed, frozen or lies, and of the engine at this end.

One engine stays alive, with one channel as a source and one as a destination. In each try another process is
its peer: it never comes, or is killed (SIGKILL) or frozen (SIGSTOP) at some moment, or sends
something wrong. Each try must reach its fault, and must be a miss within its timeout. Then the engine serves
prompts, and its answers must be those of before. In the end a good peer takes part in both hand-overs, which
must succeed.

    python benchmarks/hand_over_faults.py --device cpu --tries 12
    python benchmarks/hand_over_faults.py --tries 100                       (two GPUs)

The answers are those of a tiny model in float32. Exits with 1 if a try was no miss, took too long, or an
answer was wrong.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import msgspec
import torch
import torch.distributed as dist
from mambaslots.net.message_sockets import Link, Listener
from mambaslots.net.transfer import hand_over, pieces, session
from mambaslots.net.transfer.pipe import MessagePipe, NcclPipe
from serving.models import HYBRID_SHAPES
from support.command_line import add_count, add_device, make_parser

PIECE_BYTES = 1 << 16  # many pieces, so that a peer can be lost between two of them
GRACE_S = 2.5  # what a miss may take beyond its timeout
STARTING = timedelta(seconds=120)
MOMENTS = ("arriving", "connecting", "first piece", "third piece", "all pieces")
LIES = {
    "source": ("piece", "order", "short piece", "checksums", "offer", "huge", "garbage"),
    "destination": ("blocks", "states", "huge", "garbage", "short piece"),
}
KINDS = ("killed", "frozen", "lies", "absent")
GREEDY = ms.SamplingParams(max_tokens=8)


def tokens(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


PROMPTS = [tokens(400, 1), tokens(300, 2)]


def engine_on(device: torch.device) -> ms.DynamicInferenceEngine:
    config = ms.models.HybridConfig(pattern="M*M-M*M-", dtype=torch.float32, **HYBRID_SHAPES["tiny"])
    settings = ms.InferenceConfig(
        block_size_tokens=32, max_requests=2, max_tokens_per_step=256, max_sequence_length=512,
        num_kv_blocks=64,
        num_mamba_slots=16,
    )  # fmt: skip
    engine = ms.DynamicInferenceEngine(ms.models.HybridLM(config, seed=0, device=device), settings)
    engine.set_weights_version("seed 0")
    return engine


def device_of(args: argparse.Namespace, number: int) -> torch.device:
    if args.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def client(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=STARTING)


# ---- the peer


def die(how: str, reached: Callable[[], None]) -> None:
    reached()
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    threading.Event().wait()  # the signal may come to another thread, and this one go on before it stops


def before(owner: Any, method: str, act: Callable[[], None], calls: int = 1) -> None:
    """Call `act` before the n-th call of a method."""
    real, count = getattr(owner, method), [0]

    def called(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] == calls:
            act()
        return real(*arguments, **named)

    setattr(owner, method, called)


def lose(order: dict[str, Any], pipe: Any, reached: Callable[[], None]) -> None:
    """Be killed or frozen at a moment."""
    moment, moves = order["moment"], "send" if order["side"] == "source" else "receive"

    def act() -> None:
        die(order["kind"], reached)

    if moment == "arriving":
        before(hand_over.TransferChannel, "_begin", act)
    elif moment == "connecting":
        before(session, "Link" if order["side"] == "source" else "Listener", act)
    elif moment == "all pieces":
        before(session.messages, "Checksums" if order["side"] == "source" else "Received", act)
    else:
        before(pipe, moves, act, 3 if moment == "third piece" else 1)


def lie(lie_of: str, pipe: Any, reached: Callable[[], None]) -> None:
    """Send something wrong."""
    real_send, real_receive = pipe.send, pipe.receive
    link, listener = Link.send, Listener.send
    wrong: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "checksums": ("values", lambda sums: [value ^ 1 for value in sums]),
        "blocks": ("blocks", lambda nodes: [*nodes, 1 << 40]),
        "states": ("states", lambda nodes: nodes * 1000),
        "garbage": ("over_nccl", lambda _: 3),
        "huge": ("blocks", lambda nodes: [1 << 63]),
        "offer": ("prefixes", lambda prefixes: os.urandom(5000)),
    }

    def altered(message: Any) -> Any:
        field, change = wrong[lie_of]
        if field not in message.__struct_fields__:
            return message
        reached()
        return msgspec.structs.replace(message, **{field: change(getattr(message, field))})

    def send(self: Any, piece: torch.Tensor, packed: Any) -> Any:
        reached()
        if packed is not None:
            packed.synchronize()
        if lie_of == "short piece":
            return real_send(self, piece[: len(piece) // 2], packed)
        piece[8:] = piece[:-8].clone() if lie_of == "order" else piece[8:] ^ 1
        if piece.is_cuda:
            torch.cuda.synchronize()
        return real_send(self, piece, packed)

    def short(self: Any, piece: torch.Tensor, free: Any) -> Any:
        reached()
        return real_receive(self, piece[: len(piece) // 2], free)

    if lie_of in ("piece", "order", "short piece"):
        pipe.send, pipe.receive = send, short
        return
    Link.send = lambda self, one, payload=None: link(self, altered(one), payload)  # type: ignore[method-assign]
    Listener.send = (  # type: ignore[method-assign]
        lambda self, peer, one, payload=None: listener(self, peer, altered(one), payload)
    )


def be_peer(args: argparse.Namespace) -> None:
    pieces.PIECE_BYTES = PIECE_BYTES
    device = device_of(args, 1)
    store, engine = client(args.port), engine_on(device)
    engine.generate(PROMPTS, GREEDY)
    store.set(f"ready {args.peer}", "")
    order = json.loads(store.get(f"order {args.peer}"))
    if order["side"] == "destination":
        engine.reset_prefix_cache()
    pipe = NcclPipe if order["nccl"] else MessagePipe
    own = client(args.port)  # a thread uses it while another one waits with `store`

    def reached() -> None:
        own.set(f"reached {args.peer}", "")

    if order["kind"] == "lies":
        lie(order["lie"], pipe, reached)
    elif order["kind"] != "good":
        lose(order, pipe, reached)
    channel = msd.TransferChannel(engine, client(args.port), order["name"], order["side"])
    with channel:
        report: Any = channel.send() if order["side"] == "source" else channel.receive()
        store.set(f"report {args.peer}", json.dumps([report.failure]))
        if order["kind"] == "good":
            store.get("end")


# ---- the engine that stays alive


class Peers:
    """Processes that wait for orders; as many start ahead as the machine has room for."""

    def __init__(self, args: argparse.Namespace, port: int, store: Any, count: int) -> None:
        self.args, self.port, self.store = args, port, store
        self.ahead = max(2, min(8, (os.cpu_count() or 2) // 2))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.count, self.taken = count, 0

    def take(self) -> int:
        """The number of a peer that is ready."""
        while len(self.processes) < min(self.count, self.taken + self.ahead):
            number = len(self.processes)
            command = [sys.executable, __file__, "--peer", str(number), "--port", str(self.port)]
            self.processes.append(subprocess.Popen([*command, "--device", self.args.device]))
        number, self.taken = self.taken, self.taken + 1
        self.store.wait([f"ready {number}"], STARTING)
        return number

    def end(self, number: int | None = None) -> None:
        """Kill one peer, or all."""
        for process in self.processes if number is None else [self.processes[number]]:
            process.kill()
            process.wait()


class Survivor:
    """The engine under test, and its two channels."""

    def __init__(self, args: argparse.Namespace, port: int, store: Any) -> None:
        self.args, self.store = args, store
        self.engine = engine_on(device_of(args, 0))
        self.answers = [result.tokens for result in self.engine.generate(PROMPTS, GREEDY)]
        self.channels = {
            side: msd.TransferChannel(self.engine, client(port), f"alive as {side}", side)
            for side in ("source", "destination")
        }

    def hand_over(self, side: str, timeout_s: float) -> tuple[Any, float]:
        if side == "destination":
            self.engine.reset_prefix_cache()
        channel, began = self.channels[side], time.monotonic()
        report: Any = (channel.send if side == "source" else channel.receive)(timeout_s=timeout_s)
        return report, time.monotonic() - began

    def wrong(self) -> str:
        """What is wrong with the engine now; empty if nothing is."""
        try:
            self.engine.context.check_integrity()
            found = [result.tokens for result in self.engine.generate(PROMPTS, GREEDY)]
        except Exception as error:
            return f"the engine raised {error!r}"
        return "" if found == self.answers else "an answer is another than before"

    def order(self, number: int, side: str, **order: Any) -> None:
        """Send a peer its order; `side` is that of this engine."""
        other = "destination" if side == "source" else "source"
        nccl = self.args.device == "cuda" and self.channels[side].transport == "nccl"
        text = json.dumps({"side": other, "name": f"alive as {side}", "nccl": nccl, **order})
        self.store.set(f"order {number}", text)


def plan(tries: int) -> list[tuple[str, str, str]]:
    """(Side of the engine that stays, what its peer is, at which moment or with which lie) of each try."""
    tried = []
    for number in range(tries):
        side, kind = ("destination", "source")[number % 2], KINDS[(number // 2) % len(KINDS)]
        nth = number // 2 // len(KINDS)
        lies = LIES["source" if side == "destination" else "destination"]
        detail = {"lies": lies[nth % len(lies)], "absent": ""}.get(kind, MOMENTS[nth % len(MOMENTS)])
        tried.append((side, kind, detail))
    return tried


def survive(args: argparse.Namespace) -> dict[str, Any]:
    pieces.PIECE_BYTES = PIECE_BYTES
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STARTING)
    tried = plan(args.tries)
    peers = Peers(args, host.port, host, sum(kind != "absent" for _, kind, _ in tried) + 2)
    counts: Counter[str] = Counter()
    faults: list[str] = []
    slowest: dict[str, float] = {}
    try:
        survivor = Survivor(args, host.port, host)
        for number, (side, kind, detail) in enumerate(tried):
            peer = None if kind == "absent" else peers.take()
            if peer is not None:
                survivor.order(peer, side, kind=kind, moment=detail, lie=detail)
            report, took = survivor.hand_over(side, args.timeout_s)
            what = f"try {number}, {side}, peer {kind} {detail}"
            said = [] if report.failure else ["it was no miss"]
            reached = peer is None or host.check([f"reached {peer}"])
            said += [] if reached else [f"the fault was not reached: {report.failure}"]
            said += [f"it took {took:.1f} s"] if took > args.timeout_s + GRACE_S else []
            said += [survivor.wrong()]
            faults += [f"{what}: {text}" for text in said if text]
            counts[f"{kind}, {side}"] += not any(said)
            slowest[kind] = max(slowest.get(kind, 0.0), took)
            if args.verbose:
                print(f"{what}: {took:.2f} s: {report.failure}", flush=True)
            if peer is not None:
                peers.end(peer)
        for side in ("source", "destination"):
            survivor.order(peers.take(), side, kind="good")
            report, _ = survivor.hand_over(side, 60.0)
            said = [report.failure, survivor.wrong()]
            faults += [f"a good peer, {side}: {text}" for text in said if text]
            counts[f"good, {side}"] += not any(said)
        transport = survivor.channels["source"].transport
        host.set("end", "")
    finally:
        peers.end()
    misses = dict(Counter(f"{kind}, {side}" for side, kind, _ in tried))
    return {"transport": transport, "tries": misses, "as expected": dict(counts), "slowest": slowest,
            "faults": faults}  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    add_device(parser, "cuda")
    add_count(parser, "--tries", 100, "hand-overs with a peer that fails")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="of each try (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="a line for each try")
    parser.add_argument("--peer", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        print("nothing tried: this needs two GPUs (or --device cpu)")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.peer is not None:
        be_peer(args)
        return
    found = survive(args)
    print(f"pieces went over {found['transport']}; the timeout of each try was {args.timeout_s:g} s")
    for what, count in sorted(found["tries"].items()):
        kind = what.split(",")[0]
        met = found["as expected"].get(what, 0)
        print(
            f"  peer {what:22}: {met} of {count} reached, and a miss in time with right answers afterwards; "
            f"slowest {kind}: {found['slowest'][kind]:.2f} s"
        )
    for side in ("source", "destination"):
        print(f"  good peer, {side}: {found['as expected'].get(f'good, {side}', 0)} of 1")
    for fault in found["faults"]:
        print(f"FAULT {fault}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bool(found["faults"]))


if __name__ == "__main__":
    main()
