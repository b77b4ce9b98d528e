"""The forwards that replace small operations of transformers' modules by kernels of the `KernelSet`.

They compute what the modules compute, and round less often. `install` replaces them, instance by instance.
"""
