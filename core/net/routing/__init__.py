"""Which replica a request goes to: what replicas publish of their states, and routers that read it."""
