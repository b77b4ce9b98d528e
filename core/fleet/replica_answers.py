"""The replica's side: an engine's answer to a request, in parts that can be sent."""

from collections.abc import AsyncGenerator
from dataclasses import replace

from ..errors import KVBlockCapacityError, QueueFullError
from ..serve.served_engine import AnswerStream, ServedEngine
from .engine_request import AnswerEnd, AnswerPart, EngineRequest, ReplicaLostError


async def answer_parts(
    engine: ServedEngine, request: EngineRequest, replica: str = ""
) -> AsyncGenerator[AnswerPart]:
    """Serve a request and yield its answer. Who closes or cancels this generator cancels the request.

    Args:
        engine: serves the request.
        request: the request.
        replica: the name of this replica, for the first part.

    Raises:
        ReplicaLostError: the engine takes no requests any more, its steps fail, or it was drained or reset
            before the answer was complete.
    """
    try:
        stream = await engine.stream(
            request.prompt,
            replace(request.sampling, num_generated=request.num_generated),
            cache_salt=request.cache_salt,
            checkpoint_plan=request.plan,
            tenant=request.tenant,
        )
    except (ValueError, QueueFullError) as error:
        yield AnswerPart(error=error, replica=replica)
        return
    except Exception as error:  # it is closing, or dead
        raise ReplicaLostError(f"the replica takes no request: {error}") from error
    try:
        yield AnswerPart(replica=replica)
        async for part in _parts(stream):
            yield part
    finally:
        stream.cancel()


async def _parts(stream: AnswerStream) -> AsyncGenerator[AnswerPart]:
    was_sent = False
    try:
        async for tokens in stream:
            yield AnswerPart(tokens, None if was_sent else stream.prompt_figures)
            was_sent = True
    except KVBlockCapacityError as error:
        yield AnswerPart(error=error)
        return
    except Exception as error:
        raise ReplicaLostError(f"the replica could not end the request: {error!r}") from error
    result = stream.result
    assert result is not None
    if result.finish_reason in ("cancelled", "reset"):
        raise ReplicaLostError(f"the request ended early: {result.finish_reason}")
    end = AnswerEnd(result.finish_reason, result.num_recomputed_tokens)
    yield AnswerPart(prompt=None if was_sent else stream.prompt_figures, end=end)
