"""Every mistake that an author makes is named, and no other: one wrong model for each."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from mambaslots.state_spec import StateTensor
from mambaslots.testing import ModelError, check_model
from mambaslots.testing.rules import Rule
from oracle.ema_lm import DIM, TAPS, VOCABULARY, EmaLM
from oracle.state_tensors import conv_and_ssm
from torch import Tensor

WRONG: list[tuple[type, Rule]] = []


def _states(layers: int, conv_shape: tuple[int, ...]) -> tuple[StateTensor, ...]:
    return conv_and_ssm(layers, conv_shape, (DIM,), torch.float64, torch.float64)


def breaks(rule: Rule) -> Callable[[type], type]:
    """The wrong model below breaks this rule."""

    def note(model: type) -> type:
        WRONG.append((model, rule))
        return model

    return note


def none_kept(ends: tuple[Tensor, Tensor], dropped: Tensor) -> tuple[Tensor, Tensor]:
    return ends[0], ends[1].masked_fill(dropped, -1)


# ---- what the model must write


@breaks(Rule.DECODE_DIFFERS)
class ForgetsDecodeStates(EmaLM):
    def ends(self, inputs):
        tokens, destinations = super().ends(inputs)
        return none_kept((tokens, destinations), torch.arange(len(tokens)) < inputs.num_decode_tokens)


@breaks(Rule.DECODE_DIFFERS)
class ForgetsDecodeStatesInPlace(ForgetsDecodeStates):
    def state_spec(self):
        return replace(super().state_spec(), separate_states=False)


@breaks(Rule.DRAFTS_DIFFER)
class StoresOnlyTheLastStateOfADecodeRow(EmaLM):
    def ends(self, inputs):
        tokens, destinations = super().ends(inputs)
        followed = torch.zeros(len(tokens), dtype=torch.bool)
        width = inputs.shape.decode_tokens
        real = inputs.decode_destinations >= 0
        followed[: inputs.num_decode_tokens] = (torch.arange(width) < real.sum(1, keepdim=True) - 1).flatten()
        return none_kept((tokens, destinations), followed)


@breaks(Rule.FREE_MEMORY)
class ForgetsPrefillStates(EmaLM):
    def ends(self, inputs):
        tokens, destinations = super().ends(inputs)
        return none_kept((tokens, destinations), torch.arange(len(tokens)) >= inputs.num_decode_tokens)


@breaks(Rule.FREE_MEMORY)
class ForgetsChunkStates(EmaLM):
    def chunk_ends(self, inputs):
        tokens, destinations = super().chunk_ends(inputs)
        return tokens[:0], destinations[:0]


@breaks(Rule.FREE_MEMORY)
class ForgetsWindowsInBfloat16(EmaLM):
    dtype = torch.bfloat16

    def window_ends(self, inputs):
        tokens, destinations = super().window_ends(inputs)
        return tokens[:0], destinations[:0]


@breaks(Rule.FREE_MEMORY)
class ForgetsWindows(EmaLM):
    def window_ends(self, inputs):
        tokens, destinations = super().window_ends(inputs)
        return tokens[:0], destinations[:0]


@breaks(Rule.FREE_MEMORY)
class ForgetsInnerStatesOfOneLayer(EmaLM):
    layers = 2

    def recur(self, layer, x, inputs):
        if layer == 0:
            return super().recur(layer, x, inputs)
        chunks = replace(inputs.chunks, destinations=torch.full_like(inputs.chunks.destinations, -1))
        windows = torch.full_like(inputs.checkpoints.destinations, -1)
        checkpoints = replace(inputs.checkpoints, destinations=windows)
        return super().recur(layer, x, replace(inputs, chunks=chunks, checkpoints=checkpoints))


@breaks(Rule.FREE_MEMORY)
class WritesHalfOfAChunkState(EmaLM):
    def recur(self, layer, x, inputs):
        out = super().recur(
            layer,
            x,
            replace(
                inputs,
                chunks=replace(inputs.chunks, destinations=torch.full_like(inputs.chunks.destinations, -1)),
            ),
        )
        averages = inputs.state_pool["ssm"][layer]
        _, _, after = self.scan(
            layer, x, self.read(inputs.state_pool["conv"][layer], inputs), self.read(averages, inputs),
            inputs,
        )  # fmt: skip
        self.write(averages[:, : DIM // 2], after[:, : DIM // 2], self.chunk_ends(inputs))
        return out


@breaks(Rule.FREE_MEMORY)
class WritesNoState(EmaLM):
    def write(self, states, values, ends):
        pass


@breaks(Rule.FREE_MEMORY)
class ClaimsALayerTooMany(EmaLM):
    def state_spec(self):
        return replace(
            super().state_spec(),
            states=_states(2, (TAPS - 1, DIM)),
        )


@breaks(Rule.FREE_MEMORY)
class ForgetsKV(EmaLM):
    def store(self, cache, key, value, inputs):
        pass


@breaks(Rule.FREE_MEMORY)
class ForgetsValues(EmaLM):
    def store(self, cache, key, value, inputs):
        super().store(torch.stack([cache[0], cache[1]]), key, value, inputs)
        keep = inputs.kv_write_positions >= 0
        cache[0].flatten(0, 1)[inputs.kv_write_positions[keep]] = key[inputs.kv_write_tokens[keep]]


@breaks(Rule.FOREIGN_WRITE)
class WritesKVBesideItsPlace(EmaLM):
    def store(self, cache, key, value, inputs):
        keep = inputs.kv_write_positions >= 0
        places = inputs.kv_write_positions[keep] + 1
        for memory, new in zip(cache, (key, value), strict=True):
            memory.flatten(0, 1)[places] = new[inputs.kv_write_tokens[keep]]


# ---- what the model must leave alone


@breaks(Rule.FOREIGN_WRITE)
class ClearsThePoolBeforeReading(EmaLM):
    def read(self, states, inputs):
        states.zero_()
        return super().read(states, inputs)


@breaks(Rule.FOREIGN_WRITE)
class ClearsThePoolAfterReading(EmaLM):
    def read(self, states, inputs):
        known = super().read(states, inputs)
        states.zero_()
        return known


@breaks(Rule.FOREIGN_WRITE)
class WritesTheNextSlotToo(EmaLM):
    def write(self, states, values, ends):
        super().write(states, values, ends)
        super().write(states, values, (ends[0], (ends[1] + 1).where(ends[1] >= 0, -1)))


@breaks(Rule.FOREIGN_WRITE)
class UpdatesSourcesToo(EmaLM):
    def recur(self, layer, x, inputs):
        out = super().recur(layer, x, inputs)
        known = inputs.state_sources[inputs.state_sources >= 0]
        taken = torch.cat([inputs.state_destinations, inputs.chunks.destinations])
        inputs.state_pool["ssm"][layer, known[~torch.isin(known, taken)]] *= 0.5
        return out


@breaks(Rule.FOREIGN_WRITE)
class TakesNoDestinationForTheLastSlot(EmaLM):
    def write(self, states, values, ends):
        states[ends[1]] = values[ends[0]]


@breaks(Rule.FOREIGN_WRITE)
class TakesNoDestinationForTheFirstSlot(EmaLM):
    def write(self, states, values, ends):
        states[ends[1].clamp(min=0)] = values[ends[0]]


@breaks(Rule.FOREIGN_WRITE)
class TakesNoPositionForTheLastPlace(EmaLM):
    def store(self, cache, key, value, inputs):
        for memory, new in zip(cache, (key, value), strict=True):
            memory.flatten(0, 1)[inputs.kv_write_positions] = new[inputs.kv_write_tokens]


# ---- what the model must read, and no more


@breaks(Rule.CUTS_DIFFER)
class BeginsWithZeros(EmaLM):
    def read(self, states, inputs):
        return torch.zeros(inputs.shape.rows, *states.shape[1:], dtype=states.dtype)


@breaks(Rule.FREE_MEMORY)
class BeginsWithWhatDestinationsHold(EmaLM):
    def read(self, states, inputs):
        first = torch.cat([inputs.decode_destinations[:, 0], inputs.prefill_destinations])
        none = (inputs.state_sources < 0).view(-1, *[1] * (states.dim() - 1))
        return states[first.clamp(min=0)].masked_fill(none, 0.0)


@breaks(Rule.CUTS_DIFFER)
class PrefillsFromZeros(EmaLM):
    def read(self, states, inputs):
        known = super().read(states, inputs)
        known[inputs.num_decodes :] = 0
        return known


@breaks(Rule.DECODE_DIFFERS)
class IgnoresAWindowWhileDecoding(EmaLM):
    layers = 2

    def scan(self, layer, x, windows, averages, inputs):
        if layer == 1:
            windows = windows.clone()
            windows[: inputs.num_decodes] = 0
        return super().scan(layer, x, windows, averages, inputs)


@breaks(Rule.FREE_MEMORY)
class TakesNoSourceForTheLastSlot(EmaLM):
    def read(self, states, inputs):
        return states[inputs.state_sources]


@breaks(Rule.FREE_MEMORY)
class TakesNoSourceForTheFirstSlot(EmaLM):
    def read(self, states, inputs):
        return states[inputs.state_sources.clamp(min=0)]


@breaks(Rule.FREE_MEMORY)
class MultipliesNoSourceByZero(EmaLM):
    def read(self, states, inputs):
        known = (inputs.state_sources >= 0).view(-1, *[1] * (states.dim() - 1))
        return states[inputs.state_sources.clamp(min=0)] * known


@breaks(Rule.FREE_MEMORY)
class LooksAtTheWholePool(EmaLM):
    def read(self, states, inputs):
        return super().read(states, inputs) + 1e-3 * states.mean()


@breaks(Rule.FREE_MEMORY)
class AddsToDestinations(EmaLM):
    def write(self, states, values, ends):
        keep = ends[1] >= 0
        states[ends[1][keep]] += values[ends[0][keep]]


@breaks(Rule.FREE_MEMORY)
class WeighsMaskedValuesByZero(EmaLM):
    def masked(self, values, seen):
        return values


@breaks(Rule.FREE_MEMORY)
class WeighsTablePaddingByZero(EmaLM):
    def look(self, query, cache, inputs):
        self.block = cache.shape[2]
        self.lengths = torch.cat([inputs.kv_lengths, inputs.kv_lengths.new_ones(1)])[self.rows(inputs)]
        return super().look(query, cache, inputs)

    def masked(self, values, seen):
        padding = torch.arange(values.shape[1]) >= -(-self.lengths[:, None] // self.block) * self.block
        return values.masked_fill(~(seen | padding)[:, :, None, None], 0.0)


@breaks(Rule.FREE_MEMORY)
class LooksOneTokenTooFar(EmaLM):
    def seen(self, inputs, places):
        return torch.arange(places) <= inputs.positions[:, None] + 1


@breaks(Rule.FREE_MEMORY)
class LooksBeforeItWrites(EmaLM):
    def attend(self, x, inputs):
        before = inputs.kv_cache.clone()
        super().attend(x, inputs)
        return super().attend(
            x,
            replace(
                inputs, kv_cache=before, kv_write_positions=torch.full_like(inputs.kv_write_positions, -1)
            ),
        )


@breaks(Rule.CUTS_DIFFER)
class ClearsDestinationsBeforeReading(EmaLM):
    def read(self, states, inputs):
        states[inputs.state_destinations[inputs.state_destinations >= 0]] = 0
        return super().read(states, inputs)


# ---- calls


@breaks(Rule.INPUTS_CHANGED)
class CountsPositionsInPlace(EmaLM):
    def attend(self, x, inputs):
        attended = super().attend(x, inputs)
        inputs.positions.add_(1)
        return attended


@breaks(Rule.CUTS_DIFFER)
class DropsOut(EmaLM):
    def logits(self, x, inputs):
        return super().logits(torch.nn.functional.dropout(x, 0.2), inputs)


@breaks(Rule.LOGITS)
class ReturnsLogitsOfAllTokens(EmaLM):
    def logits(self, x, inputs):
        return x @ self.head


@breaks(Rule.LOGITS)
class ReturnsAList(EmaLM):
    def logits(self, x, inputs):
        return super().logits(x, inputs).tolist()


@breaks(Rule.LOGITS)
class ClaimsALargerVocabulary(EmaLM):
    def state_spec(self):
        return replace(super().state_spec(), vocab_size=VOCABULARY + 1)

    def __call__(self, inputs):
        return super().__call__(replace(inputs, token_ids=inputs.token_ids.clamp(max=VOCABULARY - 1)))


@breaks(Rule.LOGITS)
class ReturnsWholeNumbers(EmaLM):
    def logits(self, x, inputs):
        return super().logits(x, inputs).long()


@breaks(Rule.FREE_MEMORY)
class DividesByZero(EmaLM):
    def logits(self, x, inputs):
        return super().logits(x, inputs) * math.nan


@breaks(Rule.FREE_MEMORY)
class StoresInfinity(EmaLM):
    def write(self, states, values, ends):
        super().write(states, values / 0.0, ends)


@breaks(Rule.RAISES)
class HasMoreLayersThanItSays(EmaLM):
    layers = 2

    def state_spec(self):
        return replace(
            super().state_spec(),
            states=_states(1, (TAPS - 1, DIM)),
        )


@breaks(Rule.RAISES)
class HasOtherWindowsThanItSays(EmaLM):
    def state_spec(self):
        return replace(super().state_spec(), states=_states(1, (TAPS, DIM)))


# ---- one answer, whatever the way to it


@breaks(Rule.CUTS_DIFFER)
class ReturnsLogitsOfTheFirstTokens(EmaLM):
    def logits(self, x, inputs):
        return x[: len(inputs.logit_tokens)] @ self.head


@breaks(Rule.CUTS_DIFFER)
class LooksAhead(EmaLM):
    def seen(self, inputs, places):
        rows = self.rows(inputs)
        lengths = torch.cat([inputs.kv_lengths, torch.ones(1, dtype=torch.int64)])[rows]
        return torch.arange(places) < lengths[:, None]


@breaks(Rule.DECODE_DIFFERS)
class DecodesWithAnotherDecay(EmaLM):
    def scan(self, layer, x, windows, averages, inputs):
        averages = averages.clone()
        averages[: inputs.num_decodes] *= 0.9
        return super().scan(layer, x, windows, averages, inputs)


@breaks(Rule.CUTS_DIFFER)
class LeavesTheStateBeforeTheLastToken(EmaLM):
    def ends(self, inputs):
        tokens, destinations = super().ends(inputs)
        late = torch.arange(len(tokens)) >= inputs.num_decode_tokens
        return (tokens - late.long()).clamp(min=0), destinations


@breaks(Rule.CUTS_DIFFER)
class CountsPositionsFromTheStep(EmaLM):
    def attend(self, x, inputs):
        rows = self.rows(inputs)
        starts = (
            torch.cat([inputs.kv_lengths, inputs.kv_lengths.new_zeros(1)])[rows]
            - torch.bincount(rows, minlength=len(inputs.kv_lengths) + 1)[rows]
        )
        moved = (inputs.positions - starts).clamp(min=0)
        heads = (2, DIM // 2)
        turn = (moved[:, None] * 0.3).cos()
        query, key, value = (
            torch.unflatten(part, 1, heads)
            for part in ((x @ self.query) * turn, (x @ self.key) * turn, x @ self.value)
        )
        self.store(inputs.kv_cache[0], key, value, inputs)
        return self.look(query, inputs.kv_cache[0], inputs).flatten(1)


@breaks(Rule.DRAFTS_DIFFER)
class StoresTheLastStateBehindEveryDraft(EmaLM):
    def ends(self, inputs):
        tokens, destinations = super().ends(inputs)
        if inputs.num_decodes:
            real = (inputs.decode_destinations >= 0).sum(1, keepdim=True)
            width = inputs.shape.decode_tokens
            last = torch.arange(inputs.num_decodes)[:, None] * width + real - 1
            tokens[: inputs.num_decode_tokens] = last.expand(-1, width).flatten().clamp(min=0)
        return tokens, destinations


@breaks(Rule.BATCH_DIFFERS)
class StoresTheStateOfTheLastRow(EmaLM):
    def ends(self, inputs):
        tokens, destinations = super().ends(inputs)
        real = int((inputs.chunks.query_start_loc.diff() > 0).sum())
        if real > 1:
            tokens[inputs.num_decode_tokens :] = tokens[inputs.num_decode_tokens + real - 1]
        return tokens, destinations


@breaks(Rule.CUTS_DIFFER)
class StoresTheRowsLastStateBehindEveryChunk(EmaLM):
    def chunk_ends(self, inputs):
        tokens, destinations = super().chunk_ends(inputs)
        last = inputs.num_decode_tokens + inputs.chunks.query_start_loc[1:] - 1
        return last[inputs.chunks.seq_idx.long()] if inputs.num_prefills else tokens, destinations


@breaks(Rule.CUTS_DIFFER)
class StoresTheRowsLastWindowBehindEveryChunk(EmaLM):
    def window_ends(self, inputs):
        tokens, destinations = super().window_ends(inputs)
        last = inputs.num_decode_tokens + inputs.chunks.query_start_loc[1:] - 1
        return last[inputs.checkpoints.rows] if inputs.num_prefills else tokens, destinations


@breaks(Rule.CACHE_DIFFERS)
class StoresTheFirstTokensKV(EmaLM):
    def store(self, cache, key, value, inputs):
        first = torch.arange(len(inputs.kv_write_tokens))
        super().store(cache, key, value, replace(inputs, kv_write_tokens=first))


@breaks(Rule.CUTS_DIFFER)
class PrefillsAttendToTheirOwnStep(EmaLM):
    def seen(self, inputs, places):
        seen = super().seen(inputs, places)
        prefilled = slice(inputs.num_decode_tokens, None)
        rows = self.rows(inputs)[prefilled]
        counts = torch.cat([inputs.chunks.query_start_loc.diff(), torch.ones(1, dtype=torch.int64)])
        lengths = torch.cat([inputs.kv_lengths, torch.ones(1, dtype=torch.int64)])
        starts = lengths[rows] - counts[rows - inputs.num_decodes]
        seen[prefilled] &= torch.arange(places) >= starts[:, None]
        return seen


@breaks(Rule.BATCH_DIFFERS)
class BeginsEveryRowWithTheFirstSource(EmaLM):
    def read(self, states, inputs):
        known = super().read(states, inputs)
        return known[:1].expand(known.shape)


@breaks(Rule.CACHE_DIFFERS)
class SkipsAttentionWithoutNewKV(EmaLM):
    def attend(self, x, inputs):
        attended = super().attend(x, inputs)
        return attended if (inputs.kv_write_positions >= 0).any() else torch.zeros_like(attended)


@breaks(Rule.DRAFTS_DIFFER)
class DraftsLookAhead(EmaLM):
    def seen(self, inputs, places):
        seen = super().seen(inputs, places)
        decoded = inputs.num_decode_tokens
        lengths = inputs.kv_lengths[: inputs.num_decodes].repeat_interleave(inputs.shape.decode_tokens)
        seen[:decoded] = torch.arange(places) < lengths[:, None]
        return seen


@breaks(Rule.DRAFTS_DIFFER)
class TakesEveryDecodeRowForFull(EmaLM):
    def seen(self, inputs, places):
        seen = super().seen(inputs, places)
        width = inputs.shape.decode_tokens
        positions = inputs.kv_lengths[: inputs.num_decodes, None] - width + torch.arange(width)
        seen[: inputs.num_decode_tokens] = torch.arange(places) <= positions.clamp(min=0).flatten()[:, None]
        return seen


@breaks(Rule.PADDING_DIFFERS)
class RefusesPadding(EmaLM):
    def __call__(self, inputs):
        assert (self.rows(inputs) < inputs.shape.rows).all(), "a token without a row"
        assert (inputs.kv_lengths > 0).all(), "a row without tokens"
        return super().__call__(inputs)


@breaks(Rule.PADDING_DIFFERS)
class TakesPaddingForTheFirstRowsTokens(EmaLM):
    def rows(self, inputs):
        return super().rows(inputs).masked_fill(super().rows(inputs) >= inputs.shape.rows, inputs.num_decodes)

    def ends(self, inputs):
        tokens, destinations = super().ends(inputs)
        rows = self.rows(inputs)
        for index in range(inputs.num_prefills):
            own = (rows == inputs.num_decodes + index).nonzero()
            if len(own):
                tokens[inputs.num_decode_tokens + index] = own.max()
        return tokens, destinations


FIRST = {rule: model for model, rule in reversed(WRONG)}
CASES = [
    pytest.param(model, rule, id=model.__name__, marks=[] if FIRST[rule] is model else pytest.mark.long)
    for model, rule in WRONG
]
"""`make test` has one model that breaks each rule."""


@pytest.mark.parametrize(("model", "rule"), CASES)
def test_a_wrong_model_is_answered_with_what_is_wrong(model: type, rule: Rule) -> None:
    with pytest.raises(ModelError) as caught:
        check_model(model())
    assert caught.value.rule is rule
    assert rule.value in str(caught.value)


def test_every_rule_has_a_model_that_breaks_it() -> None:
    assert {rule for _, rule in WRONG} == set(Rule) - {Rule.SPEC}  # which tests of check_model break
