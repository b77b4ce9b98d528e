"""Whether a call is still under way, where an exception may have kept it from noting its end."""

from types import FrameType


def is_on_stack(wanted: FrameType, top: FrameType | None) -> bool:
    """Whether `wanted` is `top` or one of the frames that called it."""
    while top is not None and top is not wanted:
        top = top.f_back
    return top is not None
