"""Test RoPE that depends on the length of the sequence, and queries that are scaled by their row."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from transformers import (
    EuroBertConfig,
    EuroBertForMaskedLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from burst_portable import Mesh, run_threads, unshard
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce_gradients, model_calls, parallelize, shard_arguments
from burst_portable.integrations.transformers.layers import global_positions
from tests.support.models import (
    SIZES,
    assert_same,
    checkpoint_activations,
    mesh_without_peer,
    on_one_device,
    on_ranks,
    tokens,
)

TRAINED = 32  # positions; sequences have 47
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": TRAINED,
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "long_factor": [2.0 + 0.5 * i for i in range(4)],
}


def dynamic():
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": TRAINED}, rope_parameters=dict(DYNAMIC))
    return LlamaForCausalLM(config).double().train()


def long():
    torch.manual_seed(0)
    sizes = {**SIZES, "pad_token_id": 0, "original_max_position_embeddings": TRAINED}
    config = Phi3Config(**sizes, rope_parameters=dict(LONG))
    return Phi3ForCausalLM(config).double().train()


def scaled():
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **SIZES, num_local_experts=2, floor_scale=7, attn_scale=0.5, attention_chunk_size=11, pad_token=0,
        no_rope_layers=[1, 0],
    )  # fmt: skip
    return Llama4ForCausalLM(config).double().train()


KINDS = {"dynamic": dynamic, "longrope": long, "scaled": scaled}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_other_ranks_count(kind, layout):
    model, ids = KINDS[kind](), tokens()
    expected = on_one_device(model, ids)
    # Llama 4 computes scales in float32, and log1p may round differently at another place of a vector.
    exact = 1e-8 if kind == "scaled" else 1e-12
    for ranks in (2, 3):
        for answer in on_ranks(ranks, model, ids, layout=layout):
            assert_same(answer, expected, exact=exact)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_of_a_shard_alone_is_wrong(kind, monkeypatch):
    """The frequencies of rank 0 would be those of a sequence that ends with its shard."""
    model, ids = KINDS[kind](), tokens()
    expected = on_one_device(model, ids)
    monkeypatch.setattr(global_positions, "depends_on_length", lambda module: False)
    with pytest.raises(UnsupportedError, match="RoPE of type"):
        on_ranks(2, model, ids, layout="contiguous")
    monkeypatch.setattr(model_calls, "check_positions", lambda *_, **__: None)
    answer = on_ranks(2, model, ids, layout="contiguous")[0]
    with pytest.raises(AssertionError):
        assert_same(answer, expected)


def test_rows_of_a_shard_alone_are_wrong(monkeypatch):
    model, ids = scaled(), tokens()
    expected = on_one_device(model, ids)
    monkeypatch.setattr(global_positions, "scales_by_row", lambda module: False)
    with pytest.raises(UnsupportedError, match="temperature"):
        on_ranks(2, model, ids, layout="contiguous")
    model.config.floor_scale = 100  # past the check
    answer = on_ranks(2, model, ids, layout="contiguous")[0]
    with pytest.raises(AssertionError):
        assert_same(answer, expected)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_longest_document_counts(kind):
    """On one device, position ids restart in each document, and the largest one counts."""
    model, ids, ends = KINDS[kind](), tokens(1), (0, 6, 41, 47)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)]).unsqueeze(0)
    plain = copy.deepcopy(model)
    mask = torch.block_diag(*(torch.ones(b - a, b - a) for a, b in pairwise(ends))).tril().bool()
    logits = plain(input_ids=ids, position_ids=positions, attention_mask=mask[None, None], use_cache=False).logits

    def work(mesh: Mesh) -> torch.Tensor:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        batch = sharded.shard(ids, cu_seqlens=ends)
        return unshard(mine(**batch).logits.detach(), mesh, seq_len=47, layout=sharded.layout_of(47, ends))

    for found in run_threads(2, work):
        torch.testing.assert_close(found, logits.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_undo_restores_length_dependence(kind):
    model, ids = KINDS[kind](), tokens()
    expected = on_one_device(model, ids)
    sharded = parallelize(model, Mesh.single())
    model(**sharded.shard(ids))
    with sharded.paused():
        assert_same(on_one_device(model, ids), expected)
    sharded.undo()
    assert_same(on_one_device(model, ids), expected)
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_keep_positions(kind):
    model, ids = KINDS[kind](), tokens()
    expected = on_one_device(model, ids)
    checkpoint_activations(model)
    for answer in on_ranks(2, model, ids):
        assert_same(answer, expected, exact=1e-8 if kind == "scaled" else 1e-12)


def test_calls_of_different_lengths_keep_frequencies():
    """Dynamic RoPE keeps the frequencies of the longest call, and returns to the trained ones for short calls."""
    model, lengths = dynamic(), (47, 20, 40, 60)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    expected = [plain(input_ids=tokens(1, n), labels=tokens(1, n), use_cache=False).loss.item() for n in lengths]
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> list[float]:
        mine = models[mesh.rank]
        sharded = parallelize(mine, mesh, layout="contiguous")
        found = []
        for n in lengths:
            mine.zero_grad()
            loss = mine(**sharded.shard(tokens(1, n))).loss
            loss.backward()
            all_reduce_gradients(mine.parameters(), mesh)
            found.append(loss.item())
        return found

    losses = run_threads(2, work)
    for i, right in enumerate(expected):
        assert abs(losses[0][i] + losses[1][i] - right) <= 1e-6 * right


def test_rope_outside_a_call_raises():
    model = dynamic()
    parallelize(model, mesh_without_peer())
    with pytest.raises(InputError, match="outside its model's forward"):
        model.model.rotary_emb(torch.zeros(1, 4, 8), torch.arange(4)[None])


SHORT = 20  # tokens of the longest padded row, fewer than `TRAINED`


def padded_batch(is_left: bool) -> dict[str, torch.Tensor]:
    """Return rows of 20 and 9 tokens with padding; position ids that count from their first token if it is first."""
    ids = tokens()
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[SHORT], [9]])).long()
    mask = mask.flip(1) if is_left else mask
    token = (mask.cumsum(1) > 1) & (mask != 0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~token, -100)}
    return batch | ({"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if is_left else {})


def encoder(kind: str) -> EuroBertForMaskedLM:
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": TRAINED, "pad_token_id": 0}
    return EuroBertForMaskedLM(EuroBertConfig(**sizes, rope_parameters=dict(LONG if kind == "long" else DYNAMIC)))


PADDED = {
    "dynamic": dynamic,
    "longrope": long,
    "dynamic encoder": lambda: encoder("dynamic").double().train(),
    "longrope encoder": lambda: encoder("long").double().train(),
}


def padded_difference(kind: str, ranks: int, *, is_left: bool) -> float:
    """Return the largest difference of loss and logits of tokens from one device."""
    model, batch = PADDED[kind](), padded_batch(is_left)
    token = batch["attention_mask"] != 0
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("sdpa")
    expected = alone(**batch)
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def work(mesh: Mesh) -> float:
        parallelize(models[mesh.rank], mesh, full_batches=True, gather_outputs=True)
        out = models[mesh.rank](**batch)
        difference = (out.logits - expected.logits)[token].abs().max()
        return max(difference.item(), 1e-3 * (out.loss - expected.loss).abs().item())

    return max(run_threads(ranks, work))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("kind", PADDED)
def test_largest_position_of_padded_rows_counts(kind: str, is_left: bool, ranks: int) -> None:
    assert padded_difference(kind, ranks, is_left=is_left) < 1e-9


@pytest.mark.parametrize("kind", PADDED)
def test_length_of_padded_rows_alone_is_wrong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = shard_arguments.take_shard_arguments
    monkeypatch.setattr(model_calls, "take_shard_arguments", lambda kwargs: without(kwargs)._replace(longest=None))
    assert padded_difference(kind, 2, is_left=True) > 1e-5
