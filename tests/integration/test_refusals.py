"""What would be computed wrongly on shards is refused before anything runs, and the model stays usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_overlay

from burst_portable import Mesh
from burst_portable.comm.local import Fabric, LocalTransport
from burst_portable.errors import BurstError, InputError, LayoutError, UnknownNameError, UnsupportedError
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.masks import Band, read_mask
from tests.integration.models import SIZES, make, tokens


def one_of_two() -> Mesh:
    """Rank 0 of 2, with nobody on the other side: a refusal must not need one."""
    transport = LocalTransport(Fabric(2, 1.0), 0)
    return Mesh(0, 2, lambda device_type: transport)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"attention_mask": torch.tensor([[1] * 23 + [0]])}, UnsupportedError, "padding"),
        ({"attention_mask": torch.ones(1, 1, 24, 24)}, UnsupportedError, "attention_mask"),
        ({"attention_mask": {"full_attention": None}}, UnsupportedError, "attention_mask"),
        ({"use_cache": True}, UnsupportedError, "use_cache"),
        ({"logits_to_keep": 1}, UnsupportedError, "logits_to_keep"),
        ({"output_attentions": True}, UnsupportedError, "output_attentions"),
        ({"shift_labels": None}, InputError, "shift_labels"),
        ({"num_items_in_batch": None}, InputError, "num_items_in_batch"),
        ({"position_ids": torch.arange(24).unsqueeze(0)}, InputError, "position_ids"),
        ({"position_ids": torch.arange(23).unsqueeze(0)}, InputError, "position_ids"),
        ({"input_ids": tokens(1, 20)}, LayoutError, "another number"),
        ({"seq_len": None, "input_ids": tokens(1, 20)}, InputError, "position_ids"),
        ({"documents": (0, 12)}, InputError, "documents"),
        ({"cu_seq_lens_q": torch.tensor([0, 24])}, UnsupportedError, "cu_seq_lens_q"),
    ],
)
def test_arguments(change: dict[str, Any], error: type[BurstError], told: str):
    model = make("llama")
    with parallelize(model, one_of_two()) as handle:
        inputs = handle.shard(tokens(1, 47)) | change
        with pytest.raises(error, match=told):
            model(**inputs)
        assert handle.call is None
    assert model(input_ids=tokens(1, 8)).logits.shape == (1, 8, 64)


def test_a_mask_of_ones_is_no_padding():
    model = make("llama")
    with parallelize(model, Mesh.single()) as handle:
        inputs = handle.shard(tokens(1, 8))
        with_mask = model(**inputs, attention_mask=torch.ones(1, 8, dtype=torch.long)).logits
        torch.testing.assert_close(with_mask, model(**inputs).logits, rtol=0, atol=0)


def test_attention_dropout_in_training():
    model = make("llama", attention_dropout=0.1)
    with parallelize(model, Mesh.single()) as handle:
        with pytest.raises(UnsupportedError, match="dropout"):
            model(**handle.shard(tokens(1, 8)))
        model.eval()
        assert model(**handle.shard(tokens(1, 8))).loss > 0


def test_generating():
    model = make("llama")
    with parallelize(model, Mesh.single()), pytest.raises(UnsupportedError, match="cache"):
        model.generate(tokens(1, 8), max_new_tokens=2)


def test_rope_that_follows_the_longest_position():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make("llama", rope_parameters=rope)
    with parallelize(model, one_of_two()) as handle, pytest.raises(UnsupportedError, match="dynamic"):
        model(**handle.shard(tokens(1, 200)))


def test_models_that_cannot_be_sharded():
    with pytest.raises(InputError, match="transformers model"):
        parallelize(torch.nn.Linear(2, 2), Mesh.single())
    state_space = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedError, match="MambaForCausalLM cannot be sharded"):
        parallelize(state_space, Mesh.single())
    with pytest.raises(UnknownNameError, match="rng"):
        parallelize(make("llama"), Mesh.single(), strategy="rng")


def test_a_config_that_two_models_share():
    config = LlamaConfig(**SIZES)
    one, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    with parallelize(one, Mesh.single()), pytest.raises(InputError, match="its own copy"):
        other(input_ids=tokens(1, 8), use_cache=False)


def test_mask_functions():
    window = and_masks(sliding_window_overlay(5), causal_mask_function)
    assert read_mask(window) == Band(lo=0, hi=4)

    def custom(batch: int, head: int, q: int, k: int) -> bool:
        return q - k < 7

    for function in (custom, and_masks(causal_mask_function, custom), or_masks(causal_mask_function, custom)):
        with pytest.raises(UnsupportedError, match="mask function"):
            read_mask(function)
