"""A recorder of an engine's own traffic: hashes and counts, no token."""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from functools import partial
from os import PathLike
from pathlib import Path
from typing import BinaryIO, Self

from ..inference.contexts.dynamic_request import Batch, DynamicInferenceRequest, ScheduledRequest
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..inference.engines.engine_observer import NewTokens
from ..params_and_results import RequestResult
from ..validation import instance

logger = logging.getLogger(__name__)

_HASH_BYTES = 8
_BUFFER_BYTES = 1 << 16
_FLUSH_EVERY_S = 5.0


class TraceRecorder:
    """Writes the requests of an engine as a trace, which `read_trace` reads.

    An `EngineObserver` that attaches itself. Each request that ends with an answer becomes a line: arrival,
    counts of tokens, and for each whole KV block a keyed hash of all tokens up to the block's end. The key is
    drawn for each recording and never written: a file shows which prompts began alike, but no token, and two
    files cannot be compared. Lines wait in memory, at most 64 KiB and one line. A file that cannot be written
    ends the recording with a warning in the log; the engine goes on.

    Attributes:
        path: of the file, readable by its owner alone.
        num_requests: recorded requests.
        failed: whether the recording has ended because the file could not be written.

    Raises:
        ValueError: `engine` is of another kind, or the file exists.
        OSError: the file cannot be made.

    Example:
        `with TraceRecorder(engine, "traffic.jsonl"): engine.generate(prompts, params)`: a line a prompt.
    """

    def __init__(self, engine: DynamicInferenceEngine, path: str | PathLike[str]) -> None:
        self._engine = instance("engine", engine, DynamicInferenceEngine)
        self.path = Path(path)
        self.num_requests = 0
        self.failed = False
        self._key = secrets.token_bytes(32)
        self._block_size = engine.config.block_size_tokens
        self._begun_s = self._flushed_s = time.perf_counter()
        self._last: tuple[int, float] | None = None
        try:
            file = open(path, "xb", buffering=_BUFFER_BYTES, opener=partial(os.open, mode=0o600))  # noqa: SIM115
        except FileExistsError:
            raise ValueError(f"path is {str(path)!r}, which exists; accepted: a new file") from None
        self._file: BinaryIO | None = file
        engine.observe(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the recording, without running requests. No other thread may call the engine meanwhile."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            self.failed = True
            logger.warning("the recording %s may lack its end: %s", self.path, error)
        with contextlib.suppress(ValueError):  # the engine may have dropped the recorder
            self._engine.unobserve(self)

    def flush(self) -> None:
        """Write the requests that have ended, as happens every 5 s while requests end."""
        self._write(b"", flushes=True)

    # ---- EngineObserver: a request is recorded when it ends

    def request_added(self, request: DynamicInferenceRequest) -> None: ...

    def request_resumed(self, scheduled: ScheduledRequest) -> None: ...

    def step_made(self, batch: Batch, tokens: NewTokens, duration_s: float) -> None: ...

    def request_ended(self, request: DynamicInferenceRequest, result: RequestResult) -> None:
        end = (request.request_id, request.arrival_s)
        if self._file is None or end == self._last or not request.answer_length:
            return
        line = self._line(request)
        self._last = end  # an interrupted observer receives the same end again
        self.num_requests += 1
        self._write(line, flushes=time.perf_counter() - self._flushed_s >= _FLUSH_EVERY_S)

    # ---- the file

    def _line(self, request: DynamicInferenceRequest) -> bytes:
        num_prompt = len(request.prompt_tokens)
        chain = request.chain.fork()
        chain.extend_to(request.tokens)
        hashes = [
            hashlib.blake2b(each.to_bytes(8, "big"), key=self._key, digest_size=_HASH_BYTES).hexdigest()
            for each in chain.hashes
        ]
        whole = num_prompt // self._block_size
        line = {
            "arrival_s": round(max(0.0, request.arrival_s - self._begun_s), 4),
            "token_count": num_prompt,
            "prefix_hashes": hashes[:whole],
            "answer_count": request.answer_length,
            "answer_hashes": hashes[whole:],
            "hash_tokens": self._block_size,
        }
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _write(self, content: bytes, flushes: bool) -> None:
        if self._file is None:
            return
        try:
            self._file.write(content)
            if flushes:
                self._file.flush()
                self._flushed_s = time.perf_counter()
        except OSError as error:
            self.failed = True
            logger.warning("the recording %s has ended, because it cannot be written: %s", self.path, error)
            self.close()
