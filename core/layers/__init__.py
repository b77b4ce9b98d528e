"""What `models` and `hf` share of a model's layers: one step of a layer, and one rank's part of a weight.

Functions take tensors and a step's `StepInputs`, and write the states, KV and inputs that it names. They know
neither a config nor the modules of a model.

mixer_step       a mixer's step: decode rows by one kernel, prefill rows by another; states and KV written
over_ranks       what the ranks that share the heads of a layer compute together: sums, gated norms, logits
weight_part      the rows or columns of weights that a rank keeps
"""
