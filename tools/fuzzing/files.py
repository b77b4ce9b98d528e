"""Fuzz targets that are files and command lines: traces, recordings, plan specs, options."""

import argparse
import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import mambaslots as ms
from fuzzing import model_folders
from fuzzing import settings as fuzz_settings
from fuzzing.target import (
    ACCEPTED,
    NUMBERS,
    REFUSED,
    TEXTS,
    Target,
    damaged_bytes,
    damaged_json,
    end_of,
    json_bytes,
)
from mambaslots.cli.main import make_parser
from mambaslots.named_policies import parse_plan, shown_plan
from mambaslots.replay.read_trace import read_trace
from mambaslots.replay.recorder import TraceRecorder

WEIGHTS = {
    "traces": 3.0, "replays": 0.2, "recordings": 0.3,
    "own model folders": 0.7, "transformers model folders": 0.12,
    "transformers tokenizer folders": 0.15, "chat templates": 0.7, "calls of an engine": 0.7,
}  # fmt: skip
"""Shares of the inputs of targets whose inputs take milliseconds."""
REMEMBERING = {"calls of an engine"}
"""Targets with one engine for all inputs, which is not set back behind each."""
_MAX_READ = 4
"""So many requests of an accepted trace are read."""


def targets(folder: Path) -> list[Target]:
    """All targets of files, settings and texts; they write to `folder`."""
    return [
        Traces(folder / "traces.jsonl"),
        Replays(folder / "replayed.jsonl"),
        Recordings(folder),
        PlanSpecs(),
        CommandLines(folder),
        *fuzz_settings.targets(),
        *model_folders.targets(folder),
    ]


# ---- traces


@dataclass
class Traces:
    """Files for `read_trace`: lines with tokens, with hashes, and Mooncake's."""

    path: Path
    name: str = "traces"
    documented: tuple[type[BaseException], ...] = (ValueError,)

    def draw(self, random: Random) -> bytes:
        return trace_file(random)

    def size_of(self, drawn: Any) -> int:
        return len(drawn)

    def feed(self, drawn: Any) -> str:
        self.path.write_bytes(drawn)

        def call() -> None:
            trace = read_trace(self.path)
            arrivals = []
            for index in range(len(trace.requests)):
                if index < _MAX_READ:
                    request = trace.requests[index]
                    for tokens in (request.prompt, request.answer):
                        assert len(tokens), "a prompt or an answer without tokens"
                        assert int(tokens.min()) >= 0, "a token below 0"
                    arrivals.append(request.arrival_s)
            assert arrivals == sorted(arrivals), "requests that are not in the order of their arrival"

        return end_of(call, self.documented)


def trace_file(random: Random) -> bytes:
    """A trace of one of the formats: damaged in a value, in its bytes, in both or not at all."""
    make = random.choice((_line_of_tokens, _line_of_hashes, _line_of_mooncake))
    lines = [make(random) for _ in range(random.choice((1, 2, 3, 8)))]
    if random.random() < 0.1:
        lines.append(_line_of_tokens(random))
    if random.random() < 0.15:
        line = random.choice(lines)
        counts = sorted(
            line.keys() & {"token_count", "answer_count", "hash_tokens", "input_length", "output_length"}
        )
        line |= dict.fromkeys(
            random.sample(counts, k=random.randrange(len(counts) + 1)), random.choice(_LARGE)
        )
    elif random.random() < 0.5:
        for _ in range(random.choice((1, 1, 3))):
            place = random.randrange(len(lines))
            lines[place] = damaged_json(random, lines[place])
    content = b"\n".join(json_bytes(random, line) for line in lines) + b"\n"
    return damaged_bytes(random, content) if random.random() < 0.3 else content


_LARGE = (10**6, 2**22, 2**24, 10**8, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 10**12, 2**63)


def _line_of_tokens(random: Random) -> dict[str, Any]:
    shared = [7] * 64 * random.randrange(3)
    line: dict[str, Any] = {
        "arrival_s": round(random.uniform(0, 9), 3),
        "tokens": shared + [random.randrange(3) for _ in range(random.randrange(1, 80))],
    }
    if random.random() < 0.5:
        line["answer_tokens"] = [random.randrange(9) for _ in range(random.randrange(1, 9))]
    else:
        line["answer_count"] = random.randrange(1, 90)
    if random.random() < 0.3:
        line["session"] = random.choice(("a", 1, None))
    return line


def _line_of_hashes(random: Random) -> dict[str, Any]:
    size, count, answer = 16, random.randrange(1, 80), random.randrange(1, 40)
    whole = count // size + (random.random() < 0.3 and count % size > 0)
    line: dict[str, Any] = {
        "arrival_s": round(random.uniform(0, 9), 3),
        "token_count": count,
        "prefix_hashes": [f"{i}{random.randrange(2)}" for i in range(whole)],
        "hash_tokens": size,
        "answer_count": answer,
    }
    if random.random() < 0.5:
        line["answer_hashes"] = [
            f"a{random.randrange(3)}" for _ in range((count + answer) // size - count // size)
        ]
    return line


def _line_of_mooncake(random: Random) -> dict[str, Any]:
    count = random.choice((1, 511, 512, 513, 1500))
    return {
        "timestamp": random.randrange(9000),
        "input_length": count,
        "output_length": random.randrange(1, 600),
        "hash_ids": [
            random.choice((10 * i, 10 * i, 10 * i, 10 * i + 1) if 512 * i + 512 <= count else (9, 10 * i))
            for i in range(-(-count // 512))
        ],
    }


@dataclass
class Replays:
    """The same files, through the whole of `mambaslots replay --trace FILE`."""

    path: Path
    name: str = "replays"
    documented: tuple[type[BaseException], ...] = (ValueError,)
    _read: int = 0

    def draw(self, random: Random) -> bytes:
        return trace_file(random)

    def size_of(self, drawn: Any) -> int:
        """A replay makes the tokens of a request, of which a line may name 4 Mi: 256 MiB more for them."""
        return len(drawn) + (1 << 20)

    def feed(self, drawn: Any) -> str:
        self._read += 1  # a command that reads a path twice keeps what it has read
        path = self.path.with_name(f"{self._read}-{self.path.name}")
        path.write_bytes(drawn)
        try:
            return self._replayed(path)
        finally:
            path.unlink()

    def _replayed(self, path: Path) -> str:
        words = ["replay", "--trace", str(path), "--budget-gb", "1", "--kv-gb", "0.1", "--requests", "4"]
        return command_end(words)


def command_end(words: list[str]) -> str:
    """How a command ends: with exit code 0, or with 1 or 2 and one line on stderr."""
    from mambaslots.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    if code == 0:
        return ACCEPTED
    message = said.getvalue().splitlines()[-1]
    assert (code in (1, 2), message[:11]) == (True, "mambaslots "), f"exit code {code}, {message!r:.200}"
    if "memory" in message and "allocate" in message:
        raise MemoryError(message)
    return REFUSED


@dataclass
class Recordings:
    """A recording of an engine that was cut, at any byte: what is before the cut is read, or refused."""

    folder: Path
    name: str = "recordings"
    documented: tuple[type[BaseException], ...] = (ValueError,)
    content: bytes = b""
    whole: list[Any] = field(default_factory=list)

    def draw(self, random: Random) -> bytes:
        if not self.content:
            self._record()
        if random.random() < 0.7:
            return self.content[: random.randrange(len(self.content) + 1)]
        return damaged_bytes(random, self.content)

    def size_of(self, drawn: Any) -> int:
        return len(drawn)

    def feed(self, drawn: Any) -> str:
        path = self.folder / "cut.jsonl"
        path.write_bytes(drawn)
        is_cut = self.content.startswith(drawn)
        whole = drawn.count(b"\n") + (is_cut and drawn + b"\n" in self.content[: len(drawn) + 1])

        def call() -> None:
            trace = read_trace(path)
            assert not is_cut or len(trace.requests) == whole, f"{len(trace.requests)} requests of {whole}"

        end = end_of(call, self.documented)
        if is_cut and drawn.endswith(b"\n"):
            assert end == ACCEPTED, "a recording that ends with a whole line was refused"
        return end

    def _record(self) -> None:
        engine, random, path = fuzz_settings.small_engine(), Random(0), self.folder / "recorded.jsonl"
        with TraceRecorder(engine, path):
            for length in (3, 17, 40, 64, 33):
                prompt = [random.randrange(2) for _ in range(length)]
                engine.generate([prompt], ms.SamplingParams(max_tokens=length % 9 + 1))
        self.content = path.read_bytes()
        assert len(read_trace(path).requests) == 5


# ---- little languages


@dataclass
class PlanSpecs:
    """Words for `parse_plan`."""

    name: str = "plan specs"
    documented: tuple[type[BaseException], ...] = (ValueError,)

    def draw(self, random: Random) -> str:
        numbers = (
            "8",
            "16",
            "1024",
            "0",
            "-1",
            "9" * 5000,
            "٣",
            "²",
            " 8",
            "1_0",
            "0x8",
            "1e3",
            "",
            "8+16",
            "+",
        )
        names = (
            "tail", "decode=rolling",
            "decode=off",
            *(f"{name}={random.choice(numbers)}" for name in (
                "decode", "every", "prefill_interval", "marks", "tail",
            )),
            random.choice(TEXTS),
        )  # fmt: skip
        words = [random.choice(names) for _ in range(random.randrange(6))]
        spec = random.choice((",", ", ", ",,")).join(words)
        if random.random() < 0.3 and spec:
            place = random.randrange(len(spec))
            spec = spec[:place] + random.choice(("=", ",", "+", "\x00", "\ud800", "no-")) + spec[place:]
        return spec

    def size_of(self, drawn: Any) -> int:
        return len(drawn)

    def feed(self, drawn: Any) -> str:
        def call() -> None:
            plan = parse_plan(drawn)
            assert parse_plan(shown_plan(plan)) == plan, f"{plan} is written as another plan"

        return end_of(call, self.documented)


@dataclass
class CommandLines:
    """Words for `mambaslots`: parsed, and turned into settings; nothing is served or loaded."""

    folder: Path
    name: str = "command lines"
    documented: tuple[type[BaseException], ...] = (ValueError, OSError)
    parser: Any = field(default_factory=make_parser)

    def draw(self, random: Random) -> list[str]:
        command = random.choice(("serve", "chat", "replay", "doctor"))
        parser = self._parser_of(command)
        words = [command]
        if command in ("serve", "chat"):
            words.append(random.choice(("model", str(self.folder), *TEXTS)))
        options = [one for one in parser._actions if one.option_strings and one.dest != "help"]
        for _ in range(random.randrange(5)):
            option = random.choice(options)
            words.append(option.option_strings[0])
            if option.nargs != 0:
                words.append(self._value(random, option))
        if random.random() < 0.1:
            words.insert(random.randrange(len(words) + 1), random.choice(TEXTS))
        return [word.replace("--print-completion", "--version") for word in words]

    def _value(self, random: Random, option: argparse.Action) -> str:
        values = [str(number) for number in NUMBERS if abs(number) < 1e300] + list(TEXTS)
        values += [
            "1",
            "2:3",
            "3:2",
            "0.5",
            "8,16",
            ",",
            "chat",
            "all",
            "ours",
            *map(str, option.choices or ()),
        ]
        return random.choice((random.choice(values), f"{random.choice(values)},{random.choice(values)}"))

    def _parser_of(self, command: str) -> argparse.ArgumentParser:
        for action in self.parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parser: argparse.ArgumentParser = action.choices[command]
                return parser
        raise AssertionError("the parser has no commands")

    def size_of(self, drawn: Any) -> int:
        return sum(map(len, drawn))

    def feed(self, drawn: Any) -> str:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code, options = None, None
            try:
                options = self.parser.parse_args(drawn)
            except SystemExit as error:
                code = error.code
        if options is None:
            message = said.getvalue()
            assert code == 0 or (code, message[:10]) == (2, "mambaslots"), (
                f"exit code {code}, {message!r:.200}"
            )
            return REFUSED
        return end_of(lambda: _settings_of(options), self.documented)


def _settings_of(options: argparse.Namespace) -> None:
    """What a command makes of its options before it loads anything."""
    checks: dict[str, Callable[[argparse.Namespace], object]] = {
        "serve": _serve_settings, "chat": _engine_settings, "replay": _replay_cells,
    }  # fmt: skip
    check = checks.get(options.command)
    if check is not None:
        check(options)


def _serve_settings(options: argparse.Namespace) -> None:
    from mambaslots.cli.serve import server_settings

    _engine_settings(options)
    repr(server_settings(options))


def _engine_settings(options: argparse.Namespace) -> None:
    from mambaslots.cli.engine_setup import inference_config
    from mambaslots.cli.options import naming_options
    from mambaslots.named_policies import cache_changes

    spec = fuzz_settings.small_engine().context.spec
    with naming_options():
        changes = cache_changes(options.eviction, options.plan)
    repr(inference_config(spec, options, None, changes))


def _replay_cells(options: argparse.Namespace) -> None:
    from mambaslots.cli import replay

    assert replay.settings_of(options)
    assert replay.sources_of(options)
