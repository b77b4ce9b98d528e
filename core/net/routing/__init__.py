"""Which replica a request goes to: what replicas publish of their states, and a router that reads it.

state_events, state_publisher    the messages; a replica sends them
state_index, state_router        what they add up to; the choice of a replica
"""
