"""One rank of a split model leads: it takes the calls of an engine, and the other ranks follow.

leading_engine, follower, call_messages, rank_connections: the two sides, what they send, which rank is lost
"""
