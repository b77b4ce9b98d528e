"""The rules that a model keeps, each with what to do about a model that breaks it."""

from enum import StrEnum


class Rule(StrEnum):
    """What can be wrong with a model, in the order in which a report lists it."""

    SPEC = "spec"
    RAISES = "raises"
    INPUTS_CHANGED = "inputs changed"
    NOT_DETERMINISTIC = "not deterministic"
    LOGITS_SHAPE = "logits shape"
    LOGITS_NOT_FINITE = "logits not finite"
    STATES_NOT_FINITE = "states or KV not finite"
    # what the model must write
    NO_STATE_WRITTEN = "no state written"
    DECODE_STATE_NOT_WRITTEN = "decode state not written"
    PREFILL_STATE_NOT_WRITTEN = "prefill state not written"
    CHUNK_STATE_NOT_WRITTEN = "chunk state not written"
    WINDOW_NOT_WRITTEN = "window not written"
    KV_NOT_WRITTEN = "KV not written"
    KV_MISPLACED = "KV misplaced"
    # what the model must leave alone
    FOREIGN_SLOT_WRITTEN = "foreign slot written"
    SOURCE_WRITTEN = "source written"
    PADDING_SLOT_WRITTEN = "padding slot written"
    FOREIGN_KV_WRITTEN = "foreign KV written"
    PADDING_KV_WRITTEN = "padding KV written"
    # what the model must read, and no more
    SOURCES_IGNORED = "sources ignored"
    NO_SOURCE_NOT_ZEROS = "no source is not zeros"
    DESTINATION_READ = "destination read"
    FREE_STATE_READ = "free state read"
    FREE_KV_READ = "free KV read"
    IN_PLACE_DIFFERS = "in place differs"
    # one answer, whatever the way to it
    LOGITS_OF_OTHER_TOKENS = "logits of other tokens"
    NOT_CAUSAL = "not causal"
    DECODE_DIFFERS = "decode differs"
    DECODE_STATE_WRONG = "decode state wrong"
    PREFILL_STATE_WRONG = "prefill state wrong"
    CHUNK_STATE_WRONG = "chunk state wrong"
    WINDOW_WRONG = "window wrong"
    KV_WRONG = "KV wrong"
    CUTS_DIFFER = "cuts differ"
    BATCH_DIFFERS = "batch differs"
    CACHE_DIFFERS = "cache differs"
    DRAFTS_DIFFER = "drafts differ"
    PADDING_DIFFERS = "padding differs"

    @property
    def fix(self) -> str:
        """What to do about it, in one or two sentences."""
        return _FIXES[self]


_FIXES: dict[Rule, str] = {
    Rule.SPEC: "Return one HybridStateSpec that describes the tensors the model uses.",
    Rule.RAISES: (
        "The shapes of the pools follow from state_spec(), those of the index tensors from "
        "inputs.shape; any of them may have length 0."
    ),
    Rule.INPUTS_CHANGED: "Leave the index tensors as they are; compute on copies.",
    Rule.NOT_DETERMINISTIC: "Call model.eval(), and draw no random numbers in the forward pass.",
    Rule.LOGITS_SHAPE: (
        "Select hidden[inputs.logit_tokens] before the LM head and return [len(inputs.logit_tokens), "
        "vocab_size]; a step may want no logits at all."
    ),
    Rule.LOGITS_NOT_FINITE: "Look for a division by 0, an exp that overflows, or a softmax over no entry.",
    Rule.STATES_NOT_FINITE: "Look for a division by 0, or an exp that overflows.",
    Rule.NO_STATE_WRITTEN: (
        "Write state_pool[name][layer] at state_destinations, or take the tensor, or the layer, out of "
        "state_spec().states."
    ),
    Rule.DECODE_STATE_NOT_WRITTEN: (
        "After every token of a decode row write the state at inputs.decode_destinations[row, token], "
        "all layers, where that is not -1."
    ),
    Rule.PREFILL_STATE_NOT_WRITTEN: (
        "After the last token of every prefill row write the state at "
        "inputs.prefill_destinations[row], all layers."
    ),
    Rule.CHUNK_STATE_NOT_WRITTEN: (
        "After chunk c also write the state at inputs.chunks.destinations[c], all layers, "
        "where that is not -1. Later requests resume from it."
    ),
    Rule.WINDOW_NOT_WRITTEN: (
        "For every entry of inputs.checkpoints also write the window or state before token_ends at "
        "destinations, all layers. Later requests resume from it."
    ),
    Rule.KV_NOT_WRITTEN: (
        "Write keys and values of token kv_write_tokens[i] at kv_write_positions[i], in every layer "
        "of kv_cache."
    ),
    Rule.KV_MISPLACED: (
        "A position is block * block_size_tokens + offset in the whole cache: write kv_cache[layer, 0 "
        "or 1].flatten(0, 1)[kv_write_positions]."
    ),
    Rule.FOREIGN_SLOT_WRITTEN: (
        "Write the pool at destinations only; the other slots are the states of other requests, and "
        "cached states."
    ),
    Rule.SOURCE_WRITTEN: (
        "A source is only read: it may be a cached state that others resume from. Write the new state "
        "at the destination instead."
    ),
    Rule.PADDING_SLOT_WRITTEN: "Drop destinations of -1 before indexing: keep = destinations >= 0.",
    Rule.FOREIGN_KV_WRITTEN: (
        "Write the KV cache at kv_write_positions, and zeros behind the last token of a block whose first "
        "token is among them; tokens that are not among kv_write_tokens lie in blocks that others read."
    ),
    Rule.PADDING_KV_WRITTEN: "Drop entries whose kv_write_positions is -1 before indexing.",
    Rule.SOURCES_IGNORED: (
        "Begin every row with the state at inputs.state_sources[row], every tensor of "
        "every layer; state_sources and state_destinations are often different slots."
    ),
    Rule.NO_SOURCE_NOT_ZEROS: (
        "Replace the states of rows whose source is -1 by zeros, with masked_fill or torch.where: -1 "
        "as an index is the last slot of the pool."
    ),
    Rule.DESTINATION_READ: "Overwrite destinations; what they hold before is of no meaning.",
    Rule.FREE_STATE_READ: (
        "Read the pool at state_sources only, and remove what -1 has read with masked_fill or "
        "torch.where: 0 * NaN is NaN."
    ),
    Rule.FREE_KV_READ: (
        "Read kv_lengths tokens of a row, no more. Where more is loaded, mask the values with "
        "masked_fill or torch.where as well as the scores: 0 * NaN is NaN."
    ),
    Rule.IN_PLACE_DIFFERS: (
        "Read all sources of a layer before its first write: the source of a row may be its destination."
    ),
    Rule.LOGITS_OF_OTHER_TOKENS: "Return logits of inputs.logit_tokens, in that order.",
    Rule.NOT_CAUSAL: "A token sees itself and the tokens before it in its own row.",
    Rule.DECODE_DIFFERS: (
        "Compare the recurrence of one token with that of the prefill, and the state that the prefill "
        "leaves behind; positions are inputs.positions, never counted from the step's first token."
    ),
    Rule.DECODE_STATE_WRONG: (
        "decode_destinations[row, j] takes the state after exactly the first j + 1 tokens of the row."
    ),
    Rule.PREFILL_STATE_WRONG: "prefill_destinations[row] takes the state after exactly the row's tokens.",
    Rule.CHUNK_STATE_WRONG: (
        "chunks.destinations[c] takes the state after the token cu_chunk_seqlens[c + 1] - 1 of "
        "the packed prefill tokens, and nothing of the tokens behind it."
    ),
    Rule.WINDOW_WRONG: (
        "checkpoints.destinations[i] takes the window or state after the token token_ends[i] - 1 "
        "of the packed prefill tokens, in row checkpoints.rows[i]."
    ),
    Rule.KV_WRONG: (
        "kv_write_tokens[i] is the token whose keys and values go to kv_write_positions[i]: index "
        "keys and values with it; rotary angles follow inputs.positions."
    ),
    Rule.CUTS_DIFFER: (
        "A prefill row continues from state_sources and attends to all kv_lengths tokens of its "
        "sequence, also to those of earlier steps; chunks begin at multiples of chunks.chunk_size in "
        "the sequence."
    ),
    Rule.BATCH_DIFFERS: (
        "Rows are independent: check how tokens are mapped to rows (chunks.token_rows, "
        "chunks.query_start_loc), and the use of kv_lengths and block_table per row."
    ),
    Rule.CACHE_DIFFERS: (
        "Resumed rows begin behind position 0, and tokens whose KV is cached already are not among "
        "kv_write_tokens: take keys and values from the cache."
    ),
    Rule.DRAFTS_DIFFER: (
        "Token j of a decode row sees kv up to its own position, and the state after the tokens "
        "before it; rows may end with padding tokens. Or pass num_speculative_tokens=0, and never "
        "draft."
    ),
    Rule.PADDING_DIFFERS: (
        "Padding rows have kv_lengths 0 and -1 everywhere, padding tokens lie behind the real ones. "
        "Or pass padded_shapes=False, and never capture CUDA graphs."
    ),
}
