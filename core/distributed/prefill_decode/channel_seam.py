"""The transfer channel in its simplest form: a hand-over of its own for each call."""

from collections.abc import Iterable
from itertools import count
from typing import Literal

from torch.distributed import Store  # type: ignore[attr-defined]

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ..transfer.export import PrefixName
from ..transfer.hand_over import SendReport, receive_prefixes, send_prefixes
from ..transfer.placement import ImportReport


class TransferChannel:
    def __init__(
        self,
        engine: DynamicInferenceEngine,
        store: Store,
        name: str,
        side: Literal["source", "destination"],
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self._engine, self._store, self._name, self._timeout_s = engine, store, name, timeout_s
        self._numbers = count()

    def connect(self, *, timeout_s: float | None = None) -> str:
        return ""

    def close(self) -> None:
        pass

    def send(
        self, prefixes: Iterable[PrefixName], *, states: str = "deepest", timeout_s: float | None = None
    ) -> SendReport:
        return send_prefixes(self._engine, self._store, self._next(), prefixes, timeout_s=self._timeout_s)

    def receive(self, *, timeout_s: float | None = None) -> ImportReport:
        return receive_prefixes(self._engine, self._store, self._next(), timeout_s=self._timeout_s)

    def _next(self) -> str:
        return f"{self._name}/{next(self._numbers)}"
