"""One rank of a split model leads: it takes the calls of an engine, and the other ranks follow.

leading_engine   the engine of rank 0
following        the calls as messages, and the ranks that make them
followers        the leading rank's connections to those, and how each call ended on each of them

May import `engines`, `contexts`, `cache`, and the channel and heartbeat of `net`.
"""
