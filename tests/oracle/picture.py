"""Everything an object holds, as plain values: equal before and after a call that changes nothing."""

from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

UNTOLD = ("model", "new_ids")  # weights, and numbers that are only ever handed out once
PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


def picture(thing: Any, _seen: dict[int, int] | None = None) -> Any:
    """Tensors to the bit, containers in their order (sets sorted), our own objects by all their attributes.

    What comes twice is described once, and then by its number: who shares what is part of the picture.
    """
    if type(thing) in PLAIN or isinstance(thing, (int, float, str, bytes)):
        return thing
    if isinstance(thing, np.generic):
        return thing.item()
    if isinstance(thing, np.ndarray):
        return (thing.shape, thing.tobytes())
    seen = {} if _seen is None else _seen
    if isinstance(thing, Tensor):
        view = (str(thing.dtype), str(thing.device), thing.shape, thing.stride(), thing.storage_offset())
        storage = thing.untyped_storage()
        if -storage.data_ptr() in seen:  # several views of one memory; ids are positive
            return (*view, seen[-storage.data_ptr()])
        seen[-storage.data_ptr()] = len(seen)
        return (*view, torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes())
    if id(thing) in seen:
        return ("number", seen[id(thing)])
    seen[id(thing)] = len(seen)
    if isinstance(thing, Mapping):
        if PLAIN.issuperset(map(type, thing)) and PLAIN.issuperset(map(type, thing.values())):
            return list(thing.items())
        return [(picture(key, seen), picture(value, seen)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, deque)):
        if PLAIN.issuperset(map(type, thing)):
            return list(thing)
        return [picture(value, seen) for value in thing]
    if isinstance(thing, (set, frozenset)):
        return sorted(thing)
    if type(thing).__module__.startswith("mambaslots") and not isinstance(thing, nn.Module):
        return [(name, picture(value, seen)) for name, value in _attributes(thing) if name not in UNTOLD]
    return (type(thing).__qualname__, id(thing))


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    slots = [(name, getattr(thing, name)) for name in _slots(type(thing)) if hasattr(thing, name)]
    return [*slots, *getattr(thing, "__dict__", {}).items()]


@cache
def _slots(kind: type) -> list[str]:
    return [name for cls in kind.__mro__ for name in getattr(cls, "__slots__", ())]
