"""One rank of a split model leads: it takes the calls of an engine, and the other ranks follow."""
