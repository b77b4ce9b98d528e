"""Batch invariance: whether the bits of an answer depend on its request alone, decided at an engine's start.

A model is checked before its engine has a context, on pools and requests of this room, which are freed after
the check. Of the files of `engines` only `cuda_graphs` is imported. An engine calls `mode.decide` once, and
in each step `check_switches`; the rest is not called outside.

mode           a device, a model and its sizes: are they batch-invariant, and how few rows may decodes have?
products       the check of a model's matrix products: do the bits of a row depend on other rows?
forwards       the check of the whole model: do the bits of logits depend on how a sequence is cut?
dummy_steps    the steps of both checks
switches       torch's settings that products depend on, set while an engine needs them
stamp          the file that says that a model has passed, for later starts
"""
