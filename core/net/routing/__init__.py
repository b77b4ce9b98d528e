"""Which replica a request goes to: what replicas tell of their states, and routers that know it."""
