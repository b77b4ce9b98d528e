"""What a cache would have resumed: traces of requests, served by the engine's own books without a model."""
