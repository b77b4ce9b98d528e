"""Cached prefixes to another replica: exports, files, and hand-overs between running replicas.

An export is a forest of prefixes, the KV of its blocks, and states at some of them. Each rank has a part.

format      what an export is, typed and bounded: its tensors, which part a rank holds, the forest
shard       one rank's part with its numbers: cut and joined for another split, and as bytes
export      out of an engine's cache
import_     into it, on all ranks of a replica or on none; `Placement` finds room
files       a directory with a file a rank, and a manifest
hand_over   TransferChannel, which two running replicas call
session     a rank's connections in a hand-over, and who sends which message when
pipe        the messages, and what carries the bytes: such messages, or NCCL
pieces      which bytes a piece holds, and copies between pools and pieces

May import `engines`, `contexts`, `cache`, `kernels`, and of `net` the channel and `all_ranks`.
"""
