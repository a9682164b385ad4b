"""Train Megatron-core's GPT on two context-parallel ranks: tests/integration/test_megatron.py.

python -m tests.support.megatron_ranks FOLDER

Each rank compares the loss and all gradients with those of the model on one device, whose attention is a full softmax.
Megatron's rotary embeddings and its recomputation need a GPU, so these models learn their positions.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages for GPUs that are not installed
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.attention import CoreAttentionBuilder
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_batch_on_this_cp_rank

    from burst_portable.integrations.megatron import CoreAttention, replace_attention

from burst_portable.errors import InputError, MismatchError
from tests.support import stand_in_megatron
from tests.support.forked import run_forked
from tests.support.stand_in_megatron import dense_attention, thd_get_partitioned_indices

IS_NEW = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters  # of Megatron-core 0.19
OPTIONS: dict[str, Any] = {"is_hybrid_cp": False} if IS_NEW else {}
RANKS, TOKENS, VOCABULARY = 2, 32, 64
REAL, PADDED = [0, 10, 28], [0, 12, 32]
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
MORE: dict[str, dict[str, Any]] = {
    "grouped": {"num_query_groups": 2},
    "dropout": {"num_query_groups": 2, "attention_dropout": 0.2},
    "learned sinks": {"softmax_type": "learnable"},
    "packed": {"num_query_groups": 2},
}


class DenseAttention(MegatronModule):
    """A full softmax with the parameters of a layer."""

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, softmax_scale, pg_collection, **unused
    ) -> None:
        super().__init__(config)
        self.scale, self.softmax_offset = softmax_scale, None
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(config.num_attention_heads))

    def forward(self, q, k, v, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None) -> Tensor:
        seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
        if packed_seq_params is not None:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
            real = [
                torch.arange(TOKENS).lt(start + b - a) & torch.arange(TOKENS).ge(start)
                for start, a, b in zip(PADDED, REAL, REAL[1:], strict=False)
            ]
            seen &= sum(x[:, None] & x for x in real) > 0
        return dense_attention(q, k, v, seen, self.scale, self.softmax_offset)


def build(name: str, ranks: int, *, dense: bool = False) -> Any:
    """Return a GPT of two layers. Its parameters are the same on all ranks."""
    options = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False, **SIZES, **MORE[name]}
    config = TransformerConfig(**options, context_parallel_size=ranks)
    spec = get_gpt_layer_local_spec()
    if dense:
        spec.submodules.self_attention.submodules.core_attention = DenseAttention
    else:
        spec = replace_attention(spec)
    # Megatron takes the groups of its global state, which here divide the sequence: one device has others.
    one = dist.new_subgroups(1)[0] if ranks == 1 else None
    groups = ProcessGroupCollection(tp=one, cp=one, pp=one, embd=None, pos_embd=None) if one else None
    model = GPTModel(config, spec, VOCABULARY, TOKENS, pg_collection=groups)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, p in sorted(model.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + ("norm" in key))
    return model


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(7))
    weights = torch.ones(2, TOKENS)
    weights[:, :5] = 0
    positions = torch.arange(TOKENS).expand(2, -1).clone()
    return {
        "tokens": ids[:, :-1].clone(),
        "labels": ids[:, 1:].clone(),
        "loss_mask": weights,
        "position_ids": positions,
    }


def packed_batch() -> tuple[dict[str, Tensor], PackedSeqParams]:
    """Return one row of packed documents, and their ends."""
    whole = {name: x[:1] for name, x in batch().items()}
    for start, stop, end in zip(PADDED, (10, 30), PADDED[1:], strict=False):
        whole["position_ids"][:, start:end] = torch.arange(end - start)
        whole["loss_mask"][:, stop:end] = 0
    real, padded = (torch.tensor(x, dtype=torch.int32) for x in (REAL, PADDED))
    return whole, PackedSeqParams("thd", real, real, padded, padded, max_seqlen_q=20, max_seqlen_kv=20)


def results(name: str, ranks: int, *, dense: bool = False) -> dict[str, Tensor]:
    """Return the loss and the gradients, summed over ranks."""
    model, packed = build(name, ranks, dense=dense), None
    if name.startswith("packed"):
        part, packed = packed_batch()
        if ranks > 1:
            index = thd_get_partitioned_indices(PADDED, TOKENS, ranks, dist.get_rank())
            part = {key: x.index_select(1, index) for key, x in part.items()}
    else:
        part = get_batch_on_this_cp_rank(batch(), **OPTIONS) if ranks > 1 else batch()
    torch.manual_seed(13)
    rows = model(part["tokens"], part["position_ids"], None, labels=part["labels"], packed_seq_params=packed)
    loss = (rows * part["loss_mask"]).sum()
    loss.backward()
    found = {"loss": loss.detach()} | {key: p.grad for key, p in model.named_parameters()}
    if ranks > 1:
        for x in found.values():
            dist.all_reduce(x)
    return found


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def check_stand_ins() -> None:
    """Compare the stand-ins of the tests that run everywhere with Megatron: arguments, fields, defaults and results."""
    for place, members in stand_in_megatron.PLACES.items():
        for ours in members:
            theirs = getattr(import_module(place), ours.__name__)
            if inspect.isfunction(ours):
                assert names(theirs) == names(ours), ours
            for method in ("__call__", "forward", "sharded_state_dict", "use_mpu_process_groups"):
                if method in vars(ours) and theirs is not None:  # None without Transformer Engine
                    assert names(getattr(theirs, method)) == names(getattr(ours, method)), (ours, method)
    assert {x.name: x.value for x in AttnMaskType} == {x.name: x.value for x in stand_in_megatron.AttnMaskType}
    for theirs, ours in (
        (PackedSeqParams, stand_in_megatron.PackedSeqParams),
        (ModuleSpec, stand_in_megatron.ModuleSpec),
        (TransformerConfig, stand_in_megatron.TransformerConfig),
    ):
        defaults = {one.name: one.default for one in fields(theirs)}
        for one in fields(ours):
            assert one.name in defaults
            assert one.name in ("attention_dropout", "module") or defaults[one.name] == one.default, one.name
    for builder in (CoreAttentionBuilder.__call__, DotProductAttention.__init__):
        assert set(names(builder)) <= set(names(CoreAttention.__init__))
    assert names(CoreAttention.forward) == names(DotProductAttention.forward)
    alone = stand_in_megatron.get_batch_on_this_cp_rank(batch(), RANKS, dist.get_rank())
    for name, x in get_batch_on_this_cp_rank(batch(), **OPTIONS).items():
        assert torch.equal(x, alone[name])


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
    check_stand_ins()
    for name in MORE:
        found = results(name, RANKS)
        # Dropped weights are those of this library on one device; a test of the attention has another oracle.
        expected = results(name, 1, dense=name != "dropout")
        assert found.keys() == expected.keys()
        for key, x in expected.items():
            error = (found[key] - x).norm() / x.norm()
            assert error < 1e-5, (name, key, error)
    assert (results("dropout", RANKS)["loss"] - results("grouped", RANKS)["loss"]).abs() > 1e-3
    attention = build("dropout", RANKS).decoder.layers[0].self_attention.core_attention
    torch.manual_seed(rank)  # ranks of a sequence must draw the same numbers
    with pytest.raises(MismatchError, match="dropout"):
        attention(*torch.ones(3, 4, 1, 4, 8).unbind(), None)
    full = torch.randn(3, 4, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="all ranks hold the same V"):  # a batch that was not divided
        attention.eval()(*full.unbind(), None)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(RANKS, main, Path(sys.argv[1]))
