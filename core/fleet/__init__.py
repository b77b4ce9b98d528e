"""Several replicas of one model at one address, on Ray Serve. They need the extra `mambaslots[fleet]`."""

_NEEDED = "replicas need Ray Serve: pip install 'mambaslots[fleet]'"


def check_installed() -> None:
    """Raise an ImportError, which names the extra, unless what replicas need can be imported."""
    try:
        from ray import serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(_NEEDED) from error
