"""Which device is current while work is launched."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from mambaslots.devices import on_device_of


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta")])
def test_other_devices_change_nothing_and_need_no_gpu(device: torch.device | None) -> None:
    before = torch.cuda.is_initialized()
    with on_device_of(device):
        pass
    assert torch.cuda.is_initialized() == before


@pytest.mark.parametrize(("device", "index"), [("cuda:3", 3), ("cuda", None)])
def test_a_cuda_device_is_entered_by_its_index(
    device: str, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int | None] = []

    def enter(index: int | None) -> nullcontext[None]:
        entered.append(index)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", enter)
    with on_device_of(torch.device(device)):
        pass
    assert entered == [index]


@pytest.mark.gpu
def test_the_current_device_comes_back() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    before = torch.cuda.current_device()
    with on_device_of(last):
        assert torch.cuda.current_device() == last.index
    assert torch.cuda.current_device() == before


def test_a_test_that_lacks_gpu_memory_says_how_much_it_needs(
    needs_gpu_memory: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * 2**30, 80 * 2**30))
    needs_gpu_memory(4)
    with pytest.raises(pytest.skip.Exception, match=r"needs 7.5 GiB of GPU memory; 5.0 of 80.0 GiB are free"):
        needs_gpu_memory(7.5)
