"""Which replica a request goes to: what replicas publish of their states, and a router that reads it.

state_publisher   a replica's states, as messages of what has changed
state_events      such a message, and its bytes
state_index       the states of all replicas, by hash
state_router      which replica a request costs the fewest tokens at

May import `cache`; no engine: a router keeps no states.
"""
