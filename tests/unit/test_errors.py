"""The library's errors go to other processes and back."""

import copy
import pickle
from collections.abc import Callable

import mambaslots as ms
import pytest
from mambaslots.errors import LiveSlotCapacityError

ERRORS = [
    ms.KVBlockCapacityError(3, 2),
    ms.KVBlockCapacityError(3, 2, request_id=5),
    ms.MambaSlotCapacityError(4, 0),
    LiveSlotCapacityError(2, 1, request_id=5),
    ms.QueueFullError(3, 2),
    ms.EngineDeadError("the engine's thread has given up: KeyError('a')"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_copies_equal_the_error(error: Exception, copied: Callable[[Exception], Exception]) -> None:
    error.add_note("a note")
    other = copied(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)
