"""`torch.cuda` with one device that is the CPU: what megatron-core's inference touches of it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

CPU = torch.device("cpu")


class _Done:
    """A stream or an event of a device that has always finished."""

    device = CPU

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def nothing(self, *args: object, **kwargs: object) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _pageable(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same factory, deaf to `pin_memory`, which needs a CUDA runtime."""

    @functools.wraps(make)
    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return make(*args, **kwargs)

    return pageable


@contextmanager
def replaced(*owners_and_names: tuple[Any, dict[str, Any]]) -> Iterator[None]:
    """Within it, each owner has the attributes given; those that it lacked are taken off again."""
    with ExitStack() as stack:
        for owner, names in owners_and_names:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


@contextmanager
def cpu_as_gpu() -> Iterator[None]:
    """`torch.cuda` has one device, which is the CPU, and pinned memory is ordinary memory."""
    factories = ("full", "empty", "zeros", "ones", "empty_like", "tensor", "arange")
    with replaced(
        (
            torch.cuda,
            {
                "current_device": lambda: CPU,
                "device_count": lambda: 1,
                "set_device": lambda device: None,
                "synchronize": lambda device=None: None,
                "current_stream": lambda device=None: _Done(),
                "Event": _Done,
                "Stream": _Done,
            },
        ),
        (torch, {name: _pageable(getattr(torch, name)) for name in factories}),
        (Tensor, {"pin_memory": lambda tensor, *args: tensor}),
    ):
        yield


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Beyond `cpu_as_gpu`, what launching (interpreted) kernels and running an engine asks for.

    Every tensor says that it is on a GPU, as the kernels' wrappers insist; `cpu()` therefore copies, as it
    would from a GPU: an alias would let the host see what the device writes later.
    """
    nothing_allocated = {
        f"{what}_bytes.all.{when}": 0 for what in ("allocated", "reserved") for when in ("current", "peak")
    }
    to_cpu = Tensor.cpu
    with (
        cpu_as_gpu(),
        replaced(
            (
                torch.cuda,
                {
                    "device": lambda device: nullcontext(),
                    "stream": lambda stream: nullcontext(),
                    "get_device_capability": lambda device=None: (9, 0),
                    "memory_stats": lambda device=None: dict(nothing_allocated),
                    "empty_cache": lambda: None,
                },
            ),
            (
                Tensor,
                {
                    "is_cuda": property(lambda tensor: True),
                    "cpu": lambda tensor, *args, **kwargs: to_cpu(tensor, *args, **kwargs).clone(),
                    "cuda": lambda tensor, *args, **kwargs: tensor,
                    "record_stream": lambda tensor, stream: None,
                },
            ),
        ),
    ):
        yield
