"""Test the random numbers of sharded calls."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from burst_portable.integrations.transformers.layers.dropout_streams import DropoutStreams, draws_numbers
from tests.support.models import SIZES, make

PLAIN = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "summary_first_dropout": 0.0}


def test_ranks_draw_different_numbers_and_equal_seeds():
    """Ranks draw as many numbers as they have tokens. Afterwards their generators are equal."""
    model, found = make("llama", attention_dropout=0.1), []
    layers = [layer.self_attn for layer in model.model.layers]
    for rank in range(3):
        torch.manual_seed(7)
        streams = DropoutStreams(model, rank)
        for _ in range(2):
            seed = streams.begin()
            numbers = torch.rand(5 + rank)[:5].tolist()
            seeds = [streams.seed_of(seed, layer, part) for layer in layers for part in (0, 1)]
            streams.end()
            found.append((seeds, numbers, torch.get_rng_state()))
    drawn = [tuple(numbers) for _, numbers, _ in found]
    assert len(set(drawn)) == 6
    for call in (0, 1):
        seeds, _, state = found[call]
        assert len(set(seeds)) == 4
        assert all(0 <= seed < 2**63 for seed in seeds)
        for rank in (1, 2):
            assert found[2 * rank + call][0] == seeds
            assert torch.equal(found[2 * rank + call][2], state)
    assert not set(found[0][0]) & set(found[1][0])


@pytest.mark.parametrize("training", [True, False])
def test_call_without_dropout_leaves_the_generator(training: bool):
    model = make("llama", **({} if training else {"attention_dropout": 0.1})).train(training)
    before, streams = torch.get_rng_state(), DropoutStreams(model, 1)
    assert streams.begin() is None
    assert streams.seed_of(None, model) is None
    streams.end()
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_numbers_finds_settings_and_modules():
    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    assert not draws_numbers(GPT2Model(GPT2Config(**sizes, **PLAIN)))
    for name in PLAIN:
        assert draws_numbers(GPT2Model(GPT2Config(**sizes, **PLAIN | {name: 0.1})))
    llama = LlamaModel(LlamaConfig(**SIZES))
    assert not draws_numbers(llama)
    llama.adapter = torch.nn.Dropout(0.1)  # as that of LoRA
    assert draws_numbers(llama)
    assert not draws_numbers(llama.eval())
    llama.adapter.train()  # predictions are sampled
    assert draws_numbers(llama)


@pytest.mark.parametrize("change", ["adapter", "rate", "sampling"])
def test_dropout_added_between_calls_keeps_generators_equal(change: str):
    """Otherwise dropout in the head of a classifier differs between ranks, without an error."""
    states = []
    for rank in range(2):
        model = make("llama")
        model.adapter = torch.nn.Dropout(0.0)
        streams = DropoutStreams(model, rank)
        torch.manual_seed(7)
        assert streams.begin() is None
        streams.end()
        if change == "adapter":
            model.added = torch.nn.Dropout(0.1)
        else:
            model.adapter.p = 0.1
        if change == "sampling":
            model.eval()
            model.adapter.train()
        streams.begin()
        torch.rand(5 + rank)
        streams.end()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
