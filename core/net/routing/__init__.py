"""Which replica a request goes to: what replicas publish of their states, and a router that reads it.

May import nothing but files of the package and of the root; no engine: a router keeps no states.
"""
