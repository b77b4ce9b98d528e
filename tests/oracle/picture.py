"""Everything an object holds, as plain values: equal before and after a call that changes nothing."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

UNTOLD = ("model", "new_ids")  # weights, and numbers that are only ever handed out once


def picture(thing: Any, _seen: dict[int, int] | None = None) -> Any:
    """Tensors to the bit, containers in their order (sets sorted), our own objects by all their attributes.

    What comes twice is described once, and then by its number: who shares what is part of the picture.
    """
    if isinstance(thing, (int, float, str, bytes, type(None))):
        return thing
    if isinstance(thing, np.generic):
        return thing.item()
    if isinstance(thing, Tensor):
        return (str(thing.dtype), str(thing.device), thing.shape, thing.detach().numpy().tobytes())
    if isinstance(thing, np.ndarray):
        return (thing.shape, thing.tobytes())
    seen = {} if _seen is None else _seen
    if id(thing) in seen:
        return ("number", seen[id(thing)])
    seen[id(thing)] = len(seen)
    if isinstance(thing, Mapping):
        return [(picture(key, seen), picture(value, seen)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, deque)):
        return [picture(value, seen) for value in thing]
    if isinstance(thing, (set, frozenset)):
        return sorted(thing)
    if type(thing).__module__.startswith("mambaslots") and not isinstance(thing, nn.Module):
        return [(name, picture(value, seen)) for name, value in _attributes(thing) if name not in UNTOLD]
    return (type(thing).__qualname__, id(thing))


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    named = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return sorted((named | getattr(thing, "__dict__", {})).items(), key=lambda item: item[0])
