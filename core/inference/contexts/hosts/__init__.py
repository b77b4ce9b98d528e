"""States of a host: an engine with a KV cache of its own, such as megatron-core. For `MambaSlotAllocator`.

settings     what the host's context says: policy, plan, sizes, device
states       the index of the host's states by its KV blocks; their tensors, and copies between them
step_plan    which states the rows of a host's step store, and where
"""
