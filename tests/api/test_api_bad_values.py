"""Test public functions with arbitrary arguments: a call either works or raises a one-line error of this library."""

from __future__ import annotations

import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import burst_portable as bp
from burst_portable.config import Config
from burst_portable.errors import BurstError
from burst_portable.nn import SelfAttention, apply_rotary_embedding
from burst_portable.planning.tiles import Tile


class Unhashable:
    __hash__ = None


class Shapeless:
    """A value like a nested tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("it has no sizes")


with warnings.catch_warnings(action="ignore"):  # torch will remove them
    QUANTIZED = torch.quantize_per_tensor(torch.ones(1, 16, 4, 8), 0.1, 0, torch.qint8)

VALUES = [
    10**5000,
    -(10**5000),
    [10**5000],
    1 << 62,
    *(None, True, False, 0, -1, 2, 3.0, 0.5, 10**30, float("nan"), float("inf"), "", "auto", "no such", b"ab"),
    *([], [1], [[1]], (), (0, 16), {"a": 1}, {16}, range(3), object(), object, Unhashable(), Shapeless(), ..., 1j),
    *(Decimal("0.5"), Fraction(1, 2), np.int64(3), np.float32(0.5), np.bool_(True), np.arange(2), np.array(3)),
    *(torch.tensor(3), torch.tensor(0.5), torch.tensor(True), torch.arange(2), torch.ones(2, 2), torch.zeros(0)),
    *(torch.ones((), device="meta"), torch.ones(1, 16, 4, 8, device="meta"), torch.ones(4).to_sparse(), QUANTIZED),
    *(torch.ones(4, requires_grad=True), torch.float32, torch.device("cpu"), Config(), ValueError("x")),
    *(bp.Mask.causal(), bp.make_layout("zigzag", 16, 1), bp.make_strategy("ring"), bp.Mesh.single()),
]
MESH = bp.Mesh.single()
Q, KV, IDS = torch.ones(1, 16, 4, 8), torch.ones(1, 16, 2, 8), torch.arange(16).view(1, 16)
CHOICES = {"mask": "causal", "mesh": MESH, "strategy": "ring", "layout": "zigzag"}
OPTIONS = {"seq_len": 16, "scale": 1.0, "softcap": 2.0, "kernel": "auto", "deterministic": True}
CALL = {"q": Q, "k": KV, "v": KV, "sinks": torch.zeros(4)} | CHOICES | OPTIONS
DROPOUT = {"dropout_p": 0.5, "first_head": 0}
PLANNED = {"seq_len": 16, "ranks": 2, "heads": 2}

FUNCTIONS = {
    "attention": (bp.attention, CALL | {"return_lse": False}),
    "attention with dropout": (bp.attention, CALL | DROPOUT | {"dropout_seed": 1}),
    "explain": (lambda **a: str(bp.explain(**a)), CALL | DROPOUT | {"device": "cpu"}),
    "partial_attention": (
        bp.partial_attention,
        {
            "q": Q,
            "k": KV,
            "v": KV,
            "tiles": [Tile(0, 16, 0, 16, 0, 15)],
            "scale": 1.0,
            "softcap": None,
            "kernel": "auto",
        },
    ),
    "merge_attention_states": (bp.merge_attention_states, {"parts": [(Q, torch.zeros(1, 4, 16))]}),
    "plan": (
        bp.plan,
        PLANNED | {"kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "batch": 1, "itemsize": 2, "mask": "full"},
    ),
    "local_position_ids": (
        bp.local_position_ids,
        {"mesh": MESH, "seq_len": 16, "layout": "zigzag", "mask": None, "device": None},
    ),
    "shard": (bp.shard, {"x": Q, "mesh": MESH, "dim": 1, "layout": "zigzag", "mask": None}),
    "unshard": (bp.unshard, {"x": Q, "mesh": MESH, "dim": 1, "seq_len": 16, "layout": "zigzag", "mask": None}),
    "shard_batch": (
        bp.shard_batch,
        {"input_ids": IDS, "labels": IDS, "position_ids": IDS, "cu_seqlens": (0, 16), "mesh": MESH, "ignore_index": -1},
    ),
    "all_reduce": (bp.all_reduce, {"x": Q, "mesh": MESH}),
    "all_reduce_gradients": (lambda **a: bp.all_reduce_gradients([], MESH, **a), {"bucket_bytes": 8}),
    "Mask": (bp.Mask, {"regions": (bp.Region(0, 4, 0, 4),), "name": "mine"}),
    "Region": (bp.Region, {"q_start": 0, "q_stop": 4, "k_start": 0, "k_stop": 4, "lo": 0, "hi": 3}),
    "documents": (bp.Mask.documents, {"cu_seqlens": (0, 16), "causal": True, "window": 3}),
    "window": (bp.Mask.window, {"left": 1, "right": 1}),
    "prefix_lm": (bp.Mask.prefix_lm, {"prefix": 1}),
    "sink_window": (bp.Mask.sink_window, {"num_sink_tokens": 1, "left": 1}),
    "global_window": (bp.Mask.global_window, {"num_global_tokens": 1, "left": 1, "right": 1}),
    "block_causal": (bp.Mask.block_causal, {"cu_seqlens": (0, 16)}),
    "block_sparse": (
        bp.Mask.block_sparse,
        {"length": 16, "block_size": 4, "percent": 50, "seed": 1, "causal": True, "variable": True},
    ),
    "share_question": (bp.Mask.share_question, {"seqlens": (4, 4)}),
    "parse": (bp.Mask.parse, {"text": "block_causal:4", "length": 16}),
    "fully_masked_tokens": (bp.Mask.causal().fully_masked_tokens, {"length": 16}),
    "num_pairs": (bp.Mask.causal().num_pairs, {"q_length": 16, "k_length": 16}),
    "Mesh": (
        bp.Mesh,
        {"rank": 0, "size": 2, "connect": len, "group": None, "ranks_per_node": 1, "backend": "cpu", "config": None},
    ),
    "single": (bp.Mesh.single, {"backend": "cpu", "config": None}),
    "Config": (Config, {"timeout": 5.0, "kernel": "auto", "transport": "auto"}),
    "run_threads": (
        lambda **a: bp.run_threads(work=lambda mesh: mesh.rank, **a),
        {"ranks": 2, "timeout": 5.0, "ranks_per_node": 1, "backend": "cpu"},
    ),
    "make_layout": (bp.make_layout, {"name": "zigzag", "length": 16, "ranks": 2, "mask": None}),
    "make_strategy": (lambda name, **a: bp.make_strategy(name, **a), {"name": "ring", "prefetch_steps": 2}),
    "ring": (lambda **a: bp.plan(strategy=bp.make_strategy("ring", **a), **PLANNED), {"transfer": "direct"}),
    "double_ring": (
        lambda **a: bp.plan(strategy=bp.make_strategy("double_ring", **a), **PLANNED),
        {"ranks_per_node": 1, "backward_circulates": "q"},
    ),
    "usp": (
        lambda **a: bp.plan(strategy=bp.make_strategy("usp", **a), **PLANNED),
        {"ranks_per_node": 2, "backward_circulates": "q", "transfer": "direct", "gradient_comm_dtype": "float32"},
    ),
    "auto": (
        lambda **a: bp.plan(strategy=bp.make_strategy("auto", **a), **PLANNED),
        {"ranks_per_node": 1, "hardware": None},
    ),
    "apply_rotary_embedding": (apply_rotary_embedding, {"x": Q, "position_ids": IDS[0], "theta": 1e4}),
    "SelfAttention": (SelfAttention, {"dim": 8, "heads": 2, "kv_heads": 1, "theta": 1e4} | CHOICES),
    "forward": (SelfAttention(8, 2), {"x": torch.ones(1, 16, 8), "seq_len": 16, "position_ids": IDS[0]}),
}


@pytest.mark.parametrize(
    ("function", "argument"), [(name, argument) for name, (_, usual) in FUNCTIONS.items() for argument in usual]
)
def test_arguments_serve_or_raise_one_line_errors(function, argument):
    call, usual = FUNCTIONS[function]
    call(**usual)
    refusals = []
    for value in VALUES:
        try:
            call(**usual | {argument: value})
        except BurstError as error:
            refusals.append(str(error))
    assert len(refusals) > len(VALUES) // 3
    assert not [text for text in refusals if "\n" in text or len(text) > 800]
