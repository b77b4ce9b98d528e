"""A trace, served by several replicas behind a router on one clock."""
