"""What goes between who answers clients and the replicas that generate: a request, and parts of an answer."""

from dataclasses import dataclass

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.request import GeneratedToken
from ..request import FinishReason, PromptFigures, SamplingParams


class ReplicaLostError(RuntimeError):
    """The replica that served a request is gone, or cannot go on; another one may answer."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as a replica gets it. It can be pickled.

    Attributes:
        request_id: the same in all attempts.
        prompt: token ids: the client's prompt, then what lost replicas have generated.
        num_generated: how many of the last tokens of `prompt` lost replicas have generated. They belong to
            the answer: they count for its length and for its random numbers.
        sampling: how tokens are chosen; its seed is set.
        cache_salt: the engine's salt.
        plan: which states are taken; None for the replica's own plan.
        keys: the hash of each whole block of `prompt`, in order; a router compares them with what replicas
            hold. Empty where the replicas cache nothing.
        tenant: whom the replica's figures count the request for; None where requests have no salt.
        lost: names of the replicas that were lost while they answered; a router avoids them.
    """

    request_id: str
    prompt: tuple[int, ...]
    num_generated: int
    sampling: SamplingParams
    cache_salt: bytes | None = None
    plan: CheckpointPlan | None = None
    keys: tuple[int, ...] = ()
    tenant: str | None = None
    lost: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """One line, without tokens and salt: they are the user's."""
        prompt, given = len(self.prompt) - self.num_generated, self.num_generated
        return f"<EngineRequest {self.request_id}: {prompt} prompt tokens, {given} generated>"

    @property
    def num_answer_tokens(self) -> int:
        """The most tokens that are still to be generated."""
        return self.sampling.num_tokens_to_generate - self.num_generated


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How a replica's part of an answer ended.

    Attributes:
        finish_reason: as `RequestResult.finish_reason`.
        num_recomputed_tokens: tokens that the replica computed again after it preempted the request.
    """

    finish_reason: FinishReason
    num_recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Some of what a replica answers. It can be pickled.

    The first part says that the replica has the request: it may be empty. The last part has `end` or `error`.

    Attributes:
        tokens: new tokens, with what is asked for of them.
        prompt: what became of the prompt; in the first part that has tokens or `end`, None in the others.
        end: how the answer ended.
        error: why the replica refuses the request. ValueError: it can never run. QueueFullError: too many
            wait. KVBlockCapacityError: pinned prefixes leave too little memory. A replica that cannot go on
            for another reason raises ReplicaLostError.
        replica: the name of the replica, in its first part; "" where it has none.
    """

    tokens: tuple[GeneratedToken, ...] = ()
    prompt: PromptFigures | None = None
    end: AnswerEnd | None = None
    error: Exception | None = None
    replica: str = ""
