"""Stand in for Megatron-core 0.16.1, which `make setup` does not install: the names that its integration imports.

tests/integration/test_megatron.py compares signatures, fields and defaults with the real ones where it is installed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class AttnMaskType(enum.Enum):
    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


@dataclass
class TransformerConfig:
    """The fields that the integration reads. Unlike here, attention_dropout is 0.1 by default."""

    attention_dropout: float = 0.0
    batch_invariant_mode: bool = False
    context_parallel_size: int = 1
    deterministic_mode: bool = False
    fine_grained_activation_offloading: bool = False
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    hybrid_context_parallel: bool = False
    init_method: Callable[[Tensor], Tensor] | None = None
    log_max_attention_logit: bool = False
    num_attention_heads: int = 0
    offload_modules: list[str] = field(default_factory=list)
    params_dtype: torch.dtype = torch.float32
    qk_clip: bool = False
    softmax_type: str = "vanilla"
    use_cpu_initialization: bool = False
    window_attn_skip_freq: Any = None
    window_size: tuple[int, int] | None = None


@dataclass
class PackedSeqParams:
    qkv_format: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    local_cp_size: Any = None
    cp_group: Any = None


@dataclass
class ModuleSpec:
    module: Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **self.params, **kwargs)


class ProcessGroupCollection:
    @classmethod
    def use_mpu_process_groups(cls, required_pgs=None): ...


class MegatronModule(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None): ...


class DotProductAttention(MegatronModule):
    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
        cp_comm_type=None, pg_collection=None,
    ):  # fmt: skip
        super().__init__(config)

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ): ...


class TEDotProductAttention(DotProductAttention):
    """That of Transformer Engine."""


def is_layer_window_attention(window_size, window_attn_skip_freq, layer_number):
    if not window_size or window_attn_skip_freq is None:
        return bool(window_size)
    if isinstance(window_attn_skip_freq, int):
        return layer_number % window_attn_skip_freq != 0
    return bool(window_attn_skip_freq[layer_number - 1])


def make_sharded_tensors_for_checkpoint(
    state_dict, prefix, tensor_parallel_layers_axis_map=None, sharded_offsets=(), extra_state_suffix="_extra_state",
    tp_group=None, dp_cp_group=None,
):  # fmt: skip
    axes = tensor_parallel_layers_axis_map
    return {prefix + name: (value, axes[name], tp_group, dp_cp_group) for name, value in state_dict.items()}


def get_pg_size(group=None):
    return 1 if group is None else group.size()


def get_pg_rank(group=None):
    return 0 if group is None else group.rank()


def get_batch_on_this_cp_rank(batch: dict[str, Tensor], ranks: int, rank: int) -> dict[str, Tensor]:
    """Return chunks `rank` and 2W-1-`rank` of 2W of rows ``[rows, tokens, ...]``."""
    chunks = {name: x.chunk(2 * ranks, 1) for name, x in batch.items()}
    return {name: torch.cat([x[rank], x[2 * ranks - 1 - rank]], 1) for name, x in chunks.items()}


def thd_get_partitioned_indices(cu_seqlens: list[int], total_tokens: int, ranks: int, rank: int) -> Tensor:
    """Return the tokens of a rank, as the function of Transformer Engine: for each of them its document and chunk."""
    local = [end // ranks for end in cu_seqlens]
    found = []
    for token in range(total_tokens // ranks):
        document = max(i for i, start in enumerate(local) if start <= token)
        half, index = (local[document + 1] - local[document]) // 2, token - local[document]
        offset = rank if index < half else 2 * (ranks - 1) - rank
        found.append(index + local[document] * ranks + half * offset)
    return torch.tensor(found)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention of ``[tokens, rows, heads, size]`` in the order of the sequence, by a full softmax."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : len(k)]
    return torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2)


PLACES = {
    "megatron.core.extensions.transformer_engine": [TEDotProductAttention],
    "megatron.core.process_groups_config": [ProcessGroupCollection],
    "megatron.core.transformer.dot_product_attention": [DotProductAttention],
    "megatron.core.transformer.enums": [AttnMaskType],
    "megatron.core.transformer.module": [MegatronModule],
    "megatron.core.transformer.spec_utils": [ModuleSpec],
    "megatron.core.transformer.utils": [is_layer_window_attention, make_sharded_tensors_for_checkpoint],
    "megatron.core.utils": [get_pg_rank, get_pg_size],
}
"""The modules of Megatron-core that have these names."""


def modules() -> dict[str, ModuleType]:
    """Return the modules to import from, packages included."""
    found: dict[str, ModuleType] = {}
    for place, members in PLACES.items():
        parts = place.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            found.setdefault(name, ModuleType(name))
        for member in members:
            setattr(found[place], member.__name__, member)
    return found
