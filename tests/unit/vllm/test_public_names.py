"""The public names of `mambaslots.vllm`, and what importing them imports."""

import mambaslots.vllm
from oracle.fresh_process import printed_by


def imported(code: str) -> set[str]:
    """The modules that a fresh process has imported after `code`."""
    listing = f"{code}\nimport sys\nprint(*sys.modules)"
    printed = printed_by(listing)
    return set(printed.split())


def test_every_name_exists_once() -> None:
    names = mambaslots.vllm.__all__
    assert len(set(names)) == len(names)
    for name in names:
        assert hasattr(mambaslots.vllm, name)


def test_buffers_for_a_cpu_import_no_triton() -> None:
    code = """
import torch
from mambaslots.vllm import MambaBuffers, MambaCacheConfig
MambaBuffers.create(MambaCacheConfig(16, (("layer",),), 3), torch.device("cpu"))
"""
    modules = imported(code)
    assert "mambaslots.vllm" in modules
    assert modules.isdisjoint({"triton", "mambaslots.vllm.align_kernels"})


def test_mambaslots_alone_does_not_import_it() -> None:
    assert "mambaslots.vllm" not in imported("import mambaslots")
