"""States that are stored in fewer bytes travel as they are stored, to engines that store them alike."""

import mambaslots as ms
import pytest
import torch
from mambaslots.net import decode_prefixes, encode_prefixes, export_prefixes, import_prefixes
from mambaslots.net.transfer.format import TransferError
from mambaslots.net.transfer.shard import join
from oracle.serving import random_tokens
from oracle.transfers import engine_of

pytestmark = pytest.mark.usefixtures("kind")

PROMPT = random_tokens(40, 1)
PARAMS = ms.SamplingParams(max_tokens=6, return_log_probs=True)


def warm(dtype: str | None) -> ms.DynamicInferenceEngine:
    engine = engine_of(durable_state_dtype=dtype)
    engine.generate([PROMPT], PARAMS)
    return engine


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_an_engine_of_the_same_encoding_goes_on_as_the_exporter_would(dtype: str) -> None:
    exporter, importer = warm(dtype), engine_of(durable_state_dtype=dtype)
    data = encode_prefixes(export_prefixes(exporter))
    shard = decode_prefixes(data)
    dtypes = {tensor.dtype for tensor in shard.tensors.values()}
    assert torch.bfloat16 in dtypes
    assert import_prefixes(importer, data).imported.states
    (expected,) = exporter.generate([[*PROMPT, 1, 2, 3]], PARAMS)
    (found,) = importer.generate([[*PROMPT, 1, 2, 3]], PARAMS)
    assert found.num_resumed_tokens == expected.num_resumed_tokens == 40
    assert (found.tokens, found.log_probs) == (expected.tokens, expected.log_probs)
    importer.check_integrity()


def test_numbers_and_scales_are_cut_and_joined_alike() -> None:
    shard = export_prefixes(warm("int8"))
    scaled = [name for name in shard.tensors if "_scales" in name]
    parts = dict(shard.shard)
    assert all(parts[name] == parts[name.replace("_scales", "")] for name in scaled)
    again = join([decode_prefixes(encode_prefixes(shard.cut(parts)))], parts)
    for name, tensor in shard.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name


@pytest.mark.parametrize(("exported", "own"), [("int8", None), (None, "int8"), ("bfloat16", "int8")])
def test_an_engine_of_another_encoding_refuses_them(exported: str | None, own: str | None, kind: str) -> None:
    export = export_prefixes(warm(exported))
    importer = engine_of(durable_state_dtype=own)
    if export.format.tensors == export_prefixes(importer).format.tensors:
        return  # windows are bfloat16 in both
    with pytest.raises(TransferError, match=r"the export does not fit: .*dtype is|tensors is"):
        import_prefixes(importer, export)
    importer.check_integrity()
