"""Compare model FLOPs and utilization with hand-computed values."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from burst_portable.cli.run.models import outline
from burst_portable.cli.run.setup import mfu, model_flops
from tests.support.models import SIZES

QKVO = 32 * 32 + 2 * 32 * 16 + 32 * 32
MATRICES = 2 * (QKVO + 3 * 32 * 48 + 2 * 32) + 32  # of two layers with their norms, and of the last norm
TABLE = 64 * 32
GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=1000)


@pytest.mark.parametrize(
    ("config", "parameters", "products"),
    [
        # Two products of 32 = 4 heads of 8, over 47 * 48 / 2 pairs, in two layers.
        (LlamaConfig(**SIZES), MATRICES + TABLE, 2 * 2 * 2 * 32 * 1128),
        (LlamaConfig(**SIZES, tie_word_embeddings=True), MATRICES + TABLE, 2 * 2 * 2 * 32 * 1128),
        # Position embeddings need no product. There are biases of q, k, v and o, of norms, and of a plain MLP.
        (GPT2, 2 * (4 * 32 * 32 + 2 * 32 * 128 + 4 * 32 + 32 + 128 + 4 * 32) + 2 * 32 + TABLE, 2 * 2 * 2 * 32 * 1128),
        # One layer has a window of 9 tokens, and its first 8 rows see fewer. There are biases of q, k, v.
        (
            Qwen2Config(
                **SIZES,
                use_sliding_window=True,
                sliding_window=9,
                layer_types=["full_attention", "sliding_attention"],
            ),
            MATRICES + TABLE + 2 * 64,
            2 * 2 * 32 * (1128 + 47 * 9 - 36),
        ),
    ],
    ids=["llama", "tied", "positions", "windows"],
)
def test_model_flops_counts_parameters_and_attention(config, parameters: int, products: int):
    forward = 3 * (2 * 47 * parameters + products)
    sketch = outline(config)
    assert model_flops(config, sketch, seq_len=47, batch=3, scoring=True) == forward
    assert model_flops(config, sketch, seq_len=47, batch=3, scoring=False) == 3 * forward


def test_unknown_flops_or_peak_give_no_utilization():
    config = MixtralConfig(**SIZES, num_local_experts=4)
    assert model_flops(config, outline(config), seq_len=47, batch=1, scoring=False) is None
    assert mfu(None, 1.0, 2, 1e12) is mfu(10**12, 1.0, 2, None) is None
    assert mfu(10**12, 2.0, 4, 1e12) == 0.125
