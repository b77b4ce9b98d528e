"""Cached prefixes to another replica: exports, files, and hand-overs between running replicas.

format, shard        what is saved or sent, typed and bounded; one rank's part of it, and as bytes
export, import_      out of an engine's cache and into it
files                a directory of parts
hand_over, session   TransferChannel; messages between the ranks of two replicas
pieces, pipe         the bytes of a hand-over

May import `engines`, `contexts`, `cache`, `kernels`, and the channel of `net`.
"""
