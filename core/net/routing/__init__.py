"""Which replica a request goes to: what replicas publish of their states, and a router that reads it."""
