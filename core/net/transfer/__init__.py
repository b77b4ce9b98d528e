"""Cached prefixes to another replica: exports, files, and hand-overs between running replicas.

forest, format, parts, shard     the prefixes of an export, its tensors, and one rank's part of them
cache_access, export, import_    out of an engine's cache and into it
codec, files                     a part as bytes; a directory of them
placement                        where an import goes in the pools
hand_over                        TransferChannel: messages between two replicas
pieces, staging, nccl_pipe       the bytes of a hand-over
"""
