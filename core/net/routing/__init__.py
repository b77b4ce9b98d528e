"""Which replica a request goes to: what replicas publish of their states, and a router that reads it.

May import `cache`; no engine: a router keeps no states.
"""
