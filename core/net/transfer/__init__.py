"""Cached prefixes to another replica: exports, files, and hand-overs between running replicas.

An export is a forest of prefixes, the KV of its blocks, and states at some of them. Each rank has a part.

exports, imports, placement       out of the pools; into them, on all ranks or none; where in them
format, shard, prefix_files       what is saved or sent; one part, cut and joined, as bytes; in a directory
hand_over, session                between running replicas: the call, and its two sides
hand_over_messages, pieces, pipe  what the sides say; what each piece holds; what carries pieces
"""
