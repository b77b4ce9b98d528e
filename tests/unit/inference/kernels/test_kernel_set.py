"""The sets of kernels are whole: each function of the torch set is in the GPU's, under its name."""

from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet
from mambaslots.inference.kernels.torch_kernels import KernelSet


def test_a_gpu_runs_no_torch_function() -> None:
    names = {name for name, function in vars(KernelSet).items() if isinstance(function, staticmethod)}
    assert names - vars(GpuKernelSet).keys() == {"compute_dtype"}
    for kernels in (KernelSet, GpuKernelSet):
        assert {name for name in names if getattr(kernels, name).__name__ != name} == set()
