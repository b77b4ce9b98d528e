"""Cached prefixes to another replica: exports, files, and hand-overs between running replicas.

An export is a forest of prefixes, the KV of its blocks, and states at some of them. Each rank has a part.
May import `engines`, `contexts`, `cache`, `kernels`; no other folder of the package.
"""
