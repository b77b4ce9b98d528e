"""Streams and events without a GPU: work runs late, in any order that is allowed, and every access is judged.

`Simulator` stands in for `torch.cuda`. Device memory is CPU memory that a test names. An operation of torch
that touches it is put on the current stream, and runs at some later call, chosen by a seed, once what its
stream and its events wait for has run. Each operation is noted with the bytes that it reads and writes, and
with a vector clock: what has happened before it for certain. Two accesses to the same bytes, at least one of
them a write, neither of which happens before the other, are a race, whatever order they ran in.

Host threads and streams are the actors that have clocks. Host memory that the device copies from or to is
named, too; other host memory is not watched. Memory that an operation makes is never used again, so a reuse
by torch's caching allocator is a race only where a test names it: see `Simulator.reuse`.

A call of an event or a stream can be left out, by the file and line that makes it: `left_out`.
"""

import ast
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import mambaslots as ms
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CORE = Path(ms.__file__).parent
CUDA = torch.device("cuda", 0)
ORDERING = ("wait_event", "wait_stream", "synchronize", "record", "record_event", "query")
MAIN = "host"

Clock = dict[str, int]


class RaceError(AssertionError):
    """Two accesses to the same bytes that nothing orders, or memory that is read before it is written."""


class Site(NamedTuple):
    """A call in the package that orders streams."""

    file: str
    function: str
    line: int
    call: str


def ordering_calls() -> list[Site]:
    """All calls in the package that order streams, by file and line."""
    sites = set()
    for path in sorted(CORE.rglob("*.py")):
        if "torch.cuda" in (source := path.read_text()):
            tree = ast.walk(ast.parse(source))
            for function in (node for node in tree if isinstance(node, ast.FunctionDef)):
                for node in ast.walk(function):
                    called = node.func if isinstance(node, ast.Call) else None
                    if isinstance(called, ast.Attribute) and called.attr in ORDERING:
                        name = str(path.relative_to(CORE))
                        sites.add(Site(name, function.name, node.lineno, called.attr))
    inner: dict[tuple[str, int, str], Site] = {}
    for site in sorted(sites, key=lambda site: len(site.function)):
        inner.setdefault((site.file, site.line, site.call), site)
    return sorted(inner.values())


class Access(NamedTuple):
    """What an actor does to some bytes of one memory: ranges of them, in order."""

    actor: str
    bytes: tuple[tuple[int, int], ...]
    writes: bool
    what: str

    def meets(self, other: "Access") -> bool:
        return (self.writes or other.writes) and any(
            start < other_stop and other_start < stop
            for start, stop in self.bytes
            for other_start, other_stop in other.bytes
        )


class Work:
    """What a stream does next."""

    def __init__(self, run: Callable[[], object], needs: set["Work"]) -> None:
        self.run = run
        self.needs = needs
        self.is_done = False


class SimulatedEvent:
    """As `torch.cuda.Event`."""

    def __init__(self, simulator: "Simulator") -> None:
        self._simulator = simulator
        self._clock: Clock = {}
        self._work: set[Work] = set()

    def record(self, stream: "SimulatedStream | None" = None) -> None:
        if not self._simulator.leaves_out(sys._getframe(1)):
            self.note(stream or self._simulator.current)

    def note(self, stream: "SimulatedStream") -> None:
        self._clock, self._work = dict(stream.clock), set(stream.last)

    def synchronize(self) -> None:
        if not self._simulator.leaves_out(sys._getframe(1)):
            self.finish()

    def finish(self) -> None:
        self._simulator.run_until(self._work)
        _join(self._simulator.host_clock, self._clock)

    def query(self) -> bool:
        """What is found done has happened before what the host does next."""
        if self._simulator.leaves_out(sys._getframe(1)):
            return True
        self._simulator.run_some()
        if all(work.is_done for work in self._work):
            _join(self._simulator.host_clock, self._clock)
            return True
        return False


class SimulatedStream:
    """As `torch.cuda.Stream`."""

    def __init__(self, simulator: "Simulator", name: str) -> None:
        self.name = name
        self.clock: Clock = {}
        self.last: set[Work] = set()
        self._simulator = simulator
        self.cuda_stream = self

    def wait_event(self, event: SimulatedEvent) -> None:
        if not self._simulator.leaves_out(sys._getframe(1)):
            _join(self.clock, event._clock)
            self.last |= event._work

    def wait_stream(self, stream: "SimulatedStream") -> None:
        if not self._simulator.leaves_out(sys._getframe(1)):
            _join(self.clock, stream.clock)
            self.last |= stream.last

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self._simulator)
        if not self._simulator.leaves_out(sys._getframe(1)):
            event.note(self)
        return event

    def synchronize(self) -> None:
        if not self._simulator.leaves_out(sys._getframe(1)):
            self.finish()

    def finish(self) -> None:
        event = SimulatedEvent(self._simulator)
        event.note(self)
        event.finish()

    def query(self) -> bool:
        event = SimulatedEvent(self._simulator)
        event.note(self)
        return self._simulator.leaves_out(sys._getframe(1)) or event.query()


class Simulator:
    """The device, the host, and what they have done to which bytes.

    Attributes:
        current: the current stream.
        num_launched: operations that were put on streams.
        races: all that were found; code that is tested may catch a `RaceError`.
        guessing: host threads that find out by themselves whether what they have read was changed meanwhile:
            what they read must be written before, and may be written later.
    """

    def __init__(self, seed: int, left_out: Site | None = None) -> None:
        """
        Args:
            seed: of the order in which work runs.
            left_out: a call that does nothing.
        """
        self.random = Random(seed)
        self._left_out = left_out
        self.num_launched = 0
        self._num_streams = 0
        self.current = self.new_stream("step")
        self._clocks: dict[str, Clock] = {MAIN: {}}
        self._thread = MAIN
        self._queues: dict[str, deque[Work]] = {}
        self._device: dict[int, Tensor] = {}  # memory -> a tensor of it, which keeps it alive
        self._pinned: dict[int, Tensor] = {}
        # memory -> access -> its last tick: who is behind an actor's last access is behind those before.
        self._accesses: dict[int, dict[Access, int]] = {}
        self.is_running = False
        self.races: list[str] = []
        self.guessing: set[str] = set()

    # ---- what stands in for torch.cuda

    def new_stream(self, name: str = "") -> SimulatedStream:
        self._num_streams += 1
        return SimulatedStream(self, name or f"stream {self._num_streams}")

    @contextmanager
    def on(self, stream: SimulatedStream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: object = None) -> None:
        if not self.leaves_out(sys._getframe(1)):
            self.finish()

    def finish(self) -> None:
        """Run everything, and let the host know it."""
        self.run_until({work for queue in self._queues.values() for work in queue})
        for clock in list(self._clocks.values()):
            _join(self.host_clock, clock)

    @contextmanager
    def instead_of_cuda(self) -> Iterator["Simulator"]:
        """Within it `torch.cuda` is simulated, and tensors that are made on a GPU are simulated ones."""
        with (
            patch.object(torch.cuda, "Stream", lambda device=None: self.new_stream()),
            patch.object(torch.cuda, "Event", lambda enable_timing=False: SimulatedEvent(self)),
            patch.object(torch.cuda, "current_stream", lambda device=None: self.current),
            patch.object(torch.cuda, "stream", self.on),
            patch.object(torch.cuda, "synchronize", self.synchronize),
            patch.object(torch.cuda, "device", lambda device: nullcontext()),
            _Factories(self),
            _Operations(self),
        ):
            yield self

    def leaves_out(self, frame: Any) -> bool:
        """Whether the call that this frame makes is the one that is left out."""
        site = self._left_out
        return (
            site is not None
            and frame.f_lineno == site.line
            and frame.f_code.co_filename == str(CORE / site.file)
            and sys._getframe(1).f_code.co_name == site.call
        )

    # ---- memory

    def device_memory(self, tensor: Tensor) -> Tensor:
        """Let the memory of a tensor be on the device."""
        self._device[_memory(tensor)] = tensor
        return tensor

    def host_memory(self, tensor: Tensor) -> Tensor:
        """Watch host memory, which the device copies from or to."""
        self._pinned[_memory(tensor)] = tensor
        return tensor

    def is_device(self, tensor: Tensor) -> bool:
        return _memory(tensor) in self._device

    # ---- who does what

    @property
    def host_clock(self) -> Clock:
        return self._clocks[self._thread]

    @contextmanager
    def thread(self, name: str, clock: Clock) -> Iterator[None]:
        """Another host thread works, which knows what had happened by `clock`."""
        before, self._thread = self._thread, name
        _join(self._clocks.setdefault(name, {}), clock)
        try:
            yield
        finally:
            self._thread = before

    def host(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), what: str = "host") -> None:
        """The host reads and writes memory now."""
        clock = self.host_clock
        clock[self._thread] = clock.get(self._thread, 0) + 1
        self._note(self._thread, clock, reads, writes, what)
        self.run_some()

    def launch(
        self, run: Callable[[], object], reads: Sequence[Tensor], writes: Sequence[Tensor], what: str
    ) -> None:
        """Put work on the current stream, which reads and writes memory."""
        stream = self.current
        _join(stream.clock, self.host_clock)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        self._note(stream.name, stream.clock, reads, writes, what)
        self._clocks[stream.name] = stream.clock
        work = Work(run, {one for one in stream.last if not one.is_done})
        stream.last = {work}
        self._queues.setdefault(stream.name, deque()).append(work)
        self.num_launched += 1
        self.run_some()

    def reuse(self, tensor: Tensor, what: str) -> None:
        """Memory that was given back is written by later work of the current stream."""
        self.launch(lambda: None, (), [tensor], what)

    def _note(
        self, actor: str, clock: Clock, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str
    ) -> None:
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                memory = _memory(tensor)
                if memory not in self._device and memory not in self._pinned:
                    continue
                access = Access(actor, _bytes_of(tensor), is_write, what)
                known = self._accesses.setdefault(memory, {})
                for other, tick in known.items():
                    if other.actor != actor and clock.get(other.actor, 0) < tick and access.meets(other):
                        race = f"{other.actor} does {other.what!r} while {actor} does {what!r}"
                        self.races.append(race)
                        raise RaceError(race)
                if actor not in self.guessing:
                    known[access] = clock[actor]

    # ---- when it runs

    def run_some(self) -> None:
        """Run some of the work that may run."""
        while not self.is_running and self.random.random() < 0.4 and (ready := self._ready()):
            self._run(self.random.choice(ready))

    def run_until(self, wanted: set[Work]) -> None:
        """Run work until all of these are done, and perhaps other work between."""
        needed = _needed(wanted)
        while any(not work.is_done for work in wanted):
            ready = self._ready()
            prompt = [queue for queue in ready if queue[0] in needed]
            self._run(self.random.choice(ready if self.random.random() < 0.3 else prompt))

    def _ready(self) -> list[deque[Work]]:
        """The queues whose first work may run."""
        return [queue for queue in self._queues.values() if queue and all(w.is_done for w in queue[0].needs)]

    def _run(self, queue: deque[Work]) -> None:
        work = queue.popleft()
        work.is_done = self.is_running = True
        try:
            with torch.inference_mode():
                work.run()
        finally:
            self.is_running = False


def _needed(wanted: set[Work]) -> set[Work]:
    needed, new = set[Work](), {work for work in wanted if not work.is_done}
    while new:
        needed |= new
        new = {need for work in new for need in work.needs if not need.is_done} - needed
    return needed


class _Factories(TorchFunctionMode):
    """Tensors that are made on a GPU, and moved there; pinned memory."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self._simulator = simulator

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        simulator, name = self._simulator, getattr(function, "__name__", "")
        if name == "__get__" and getattr(function, "__self__", None) is Tensor.device:
            return CUDA if simulator.is_device(args[0]) else torch.device("cpu")
        if name == "__get__" and getattr(function, "__self__", None) is Tensor.is_cuda:
            return simulator.is_device(args[0])
        if name == "pin_memory":
            return simulator.host_memory(args[0].clone())
        if name == "to" and any(isinstance(one, torch.device) and one.type == "cuda" for one in args[1:]):
            there = simulator.device_memory(torch.empty_like(args[0], device="cpu"))
            return there.copy_(args[0], non_blocking=kwargs.get("non_blocking", False))
        if name == "tolist" and simulator.is_device(args[0]):
            simulator.current.finish()
            simulator.host([args[0]], (), name)
        is_pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        on_gpu = device is not None and torch.device(device).type == "cuda"
        if on_gpu:
            kwargs["device"] = "cpu"
        made = function(*args, **kwargs)
        if on_gpu:
            simulator.device_memory(made)
        elif is_pinned:
            simulator.host_memory(made)
        return made


class _Operations(TorchDispatchMode):
    """Operations on device memory, which become work of the current stream."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self._simulator = simulator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, simulator = kwargs or {}, self._simulator
        tensors = [one for one in _flat((args, kwargs)) if isinstance(one, Tensor)]
        schema = function._schema
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if simulator.is_running or is_view or not tensors:
            return function(*args, **kwargs)
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
        given |= kwargs
        written = [
            given[one.name]
            for one in schema.arguments
            if one.alias_info is not None and one.alias_info.is_write and one.name in given
        ]
        read = [one for one in tensors if not any(one is other for other in written)]
        name = schema.name.removeprefix("aten::")
        if name not in ("copy_", "fill_", "zero_") and kwargs.get("out") is None:
            read += written
        if not any(map(simulator.is_device, tensors)):
            simulator.host(read, written, name)
            return function(*args, **kwargs)
        if name == "_local_scalar_dense":
            simulator.current.finish()
            simulator.host(read, (), name)
            return function(*args, **kwargs)
        if written:
            simulator.launch(lambda: function(*args, **kwargs), read, written, name)
            crosses = not all(map(simulator.is_device, tensors))
            if name == "copy_" and crosses and not given.get("non_blocking"):
                simulator.current.finish()
            return written[0]
        made = function(*args, **kwargs)  # for its shape; its numbers are made in time
        results = [simulator.device_memory(one) for one in _flat(made) if isinstance(one, Tensor)]

        def compute() -> None:
            for result, value in zip(results, _flat(function(*args, **kwargs)), strict=True):
                result.copy_(value)

        simulator.launch(compute, read, results, name)
        return made


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    else:
        yield values


def _join(clock: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        clock[actor] = max(clock.get(actor, 0), tick)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes_of(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """The bytes of a small tensor within its memory, as ranges."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return ((first, first + tensor.numel() * size),)
    starts = [first]
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        starts = [start + i * stride * size for start in starts for i in range(length)]
    return tuple((start, start + size) for start in sorted(starts))
