"""One rank of a split model leads: it takes the calls of an engine, and the other ranks follow.

leading_engine, follower     the two sides
messages, rank_connections   what they send; how far each rank is, and which is lost
"""
