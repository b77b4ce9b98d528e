"""Which replica a request goes to: what replicas publish of their states, and a router that reads it.

state_events, state_index, state_router: messages and who makes them, who reads them, the choice
"""
