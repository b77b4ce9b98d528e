"""The rules that a model keeps, and the error that names one."""

from enum import Enum


class Rule(Enum):
    """What a model must keep; the value says what to do where it does not."""

    SPEC = "Return the same HybridStateSpec at every call."
    RAISES = "Serve every step that StepInputs allows: decode rows, prefill rows, or both."
    LOGITS = "Return logits of inputs.logit_tokens, [tokens, vocab_size]."
    INPUTS_CHANGED = "Copy index tensors before changing them: later layers and steps read them."
    FOREIGN_WRITE = (
        "Write destinations and kv_write_positions only; drop -1 before indexing: other slots are other "
        "requests' states, and sources may be cached states."
    )
    FREE_MEMORY = (
        "Write all layers of every state tensor at state_destinations, chunks.destinations (scans) and "
        "checkpoints.destinations (windows), and KV at kv_write_positions. Read state_sources and kv_lengths "
        "tokens of a row, no more; mask with masked_fill or torch.where: 0 * NaN is NaN."
    )
    CUTS_DIFFER = (
        "A token sees itself and the tokens before it, also of earlier steps: begin with state_sources, "
        "attend to kv_lengths tokens, write at each destination the state after its token."
    )
    DECODE_DIFFERS = (
        "Compare the recurrence of one token with the prefill's. Read all sources of a layer before its "
        "first write; take positions from inputs.positions."
    )
    BATCH_DIFFERS = "Rows are independent: check which tokens, sources and blocks belong to which row."
    CACHE_DIFFERS = "Resumed rows begin after position 0, and tokens may have their KV cached already."
    DRAFTS_DIFFER = (
        "Token j of a decode row sees KV up to its position and the state after the tokens before it; its "
        "state goes to decode_destinations[row, j]. Or pass num_speculative_tokens=0."
    )
    PADDING_DIFFERS = (
        "Padding rows have kv_lengths 0 and -1 everywhere; padding tokens follow the real ones. Or pass "
        "padded_shapes=False, and never capture CUDA graphs."
    )


class ModelError(AssertionError):
    """The model breaks `rule`; the message says how, and what to do."""

    def __init__(self, rule: Rule, message: str) -> None:
        super().__init__(f"{rule.name.replace('_', ' ')}: {message}. {rule.value}")
        self.rule = rule
