"""States of a host: an engine with a KV cache of its own, such as megatron-core. For `MambaSlotAllocator`.

states       what the host's context says: policy, plan, sizes, device; the index of its states by its KV
             blocks; their tensors, and copies between them
step_plan    which states the rows of a host's step store, and where
"""
