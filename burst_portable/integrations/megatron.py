"""Attention of Megatron-core's layers over its context-parallel ranks: the `core_attention` of a layer specification.

Megatron divides rows and rotary embeddings, and reduces losses and gradients, as before. A rank's tokens are chunks r
and 2W-1-r of 2W, of the row or of each packed document: the layouts "zigzag" and "document_zigzag".
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from burst_portable.api import attention as attend
from burst_portable.errors import InputError, ShapeError, UnsupportedError
from burst_portable.integrations.versions import check_version, importing
from burst_portable.layout import make_layout
from burst_portable.mask import UNBOUNDED, Mask, Region
from burst_portable.mesh import Mesh, as_mesh

with importing("megatron", "megatron-core>=0.16,<0.20"):
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
    from megatron.core.utils import get_pg_rank, get_pg_size

_PACKED = {AttnMaskType.padding: AttnMaskType.no_mask, AttnMaskType.padding_causal: AttnMaskType.causal}
_FP8 = ("fp8_dot_product_attention", "fp8_multi_head_attention")
_REJECTED = ("batch_invariant_mode", "hybrid_context_parallel", "log_max_attention_logit", "qk_clip", *_FP8)


def replace_attention(spec: Any, *, strategy: str = "auto", kernel: str = "auto") -> Any:
    """Return a copy of a layer or block specification whose attention runs over the context-parallel ranks.

    Args:
        spec: Result of a function such as `get_gpt_layer_with_transformer_engine_spec`.
        strategy: Name of a strategy.
        kernel: Name of a kernel.

    Raises:
        UnsupportedError: If an attention is neither `DotProductAttention` nor `TEDotProductAttention`.
        InputError: If the specification has no attention.
    """

    def replaced(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return type(part)(map(replaced, part))
        if not is_dataclass(part) or isinstance(part, type):
            return part
        changes = {one.name: replaced(getattr(part, one.name)) for one in fields(part)}
        if "core_attention" in changes:
            module = getattr(changes["core_attention"], "module", changes["core_attention"])
            if module is None or module not in (DotProductAttention, TEDotProductAttention):
                raise UnsupportedError("an attention other than Megatron's DotProductAttention and TE's", got=module)
            params = {**getattr(changes["core_attention"], "params", {}), "strategy": strategy, "kernel": kernel}
            changes["core_attention"] = ModuleSpec(module=CoreAttention, params=params)
        return replace(part, **changes)

    if (result := replaced(spec)) == spec:
        raise InputError("the specification has no core_attention", got=type(spec).__name__)
    return result


class CoreAttention(MegatronModule):  # type: ignore[misc]  # Megatron's names are Any, see pyproject.toml
    """Attention of this rank's queries to the keys of all context-parallel ranks. `replace_attention` inserts it.

    Arguments are those of Megatron's attention, whose `cp_comm_type` has no effect, and of `replace_attention`.

    Raises:
        UnsupportedError: If Megatron-core's version is not supported, or an option has no equivalent.
        InputError: If the context-parallel group does not have the configured size.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        strategy: str = "auto",
        kernel: str = "auto",
    ) -> None:
        check_version("megatron-core", "0.16", "0.20")
        super().__init__(config=config)
        rejected = [name for name in _REJECTED if getattr(config, name)]
        if config.fine_grained_activation_offloading and "core_attn" in config.offload_modules:
            rejected.append("offload_modules=core_attn")
        if rejected or attention_type != "self":
            got = ", ".join(rejected) or f"attention_type={attention_type!r}"
            raise UnsupportedError("an option of Megatron's attention without an equivalent", got=got)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.mesh = Mesh.single() if config.context_parallel_size == 1 else as_mesh(groups.cp)
        if self.mesh.size != config.context_parallel_size:
            raise InputError("the context-parallel group and context_parallel_size differ", got=self.mesh.size)
        self.tp_group, self.attn_mask_type, self.softmax_offset = groups.tp, attn_mask_type, None
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        self.options: dict[str, Any] = {"mesh": self.mesh, "scale": softmax_scale}
        self.options |= {"strategy": strategy, "kernel": kernel, "deterministic": config.deterministic_mode or None}
        is_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, max(1, layer_number))
        self.window = tuple(config.window_size) if is_window else (-1, -1)
        if config.softmax_type != "vanilla":
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            heads = config.num_attention_heads // get_pg_size(groups.tp)
            self.softmax_offset = torch.zeros(heads, device=device, dtype=config.params_dtype)
        if config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(config.init_method(self.softmax_offset))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return the attention, ``[tokens, rows, heads * size]``. Packed documents have one row."""
        if attention_mask is not None or attention_bias is not None:
            allowed = "None: see create_attention_mask of GPTDatasetConfig"
            raise UnsupportedError("attention_mask or attention_bias", got="a tensor", allowed=allowed)
        kind, documents, layout = attn_mask_type or self.attn_mask_type, None, "zigzag"
        if packed_seq_params is not None:
            documents, layout = _packed_documents(self.mesh).read(packed_seq_params, query.shape[0] * self.mesh.size)
            kind = _PACKED.get(kind, kind)  # all padding is in cu_seqlens
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        elif query.shape[0] % 2 and self.mesh.size > 1:
            raise ShapeError("a rank needs two equal chunks, see get_batch_on_this_cp_rank", got=query.shape[0])
        sinks = None if self.softmax_offset is None else self.softmax_offset.to(query.device)
        options = {**self.options, "mask": _mask(documents, kind, self.window), "layout": layout, "sinks": sinks}
        if self.training and self.dropout_p:
            options |= {"dropout_p": self.dropout_p, "first_head": get_pg_rank(self.tp_group) * query.shape[2]}
        out = cast(Tensor, attend(*(x.transpose(0, 1) for x in (query, key, value)), **options)).transpose(0, 1)
        return out.flatten(2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the learned sinks for a distributed checkpoint, as Megatron's attention does."""
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        values, axes = self.state_dict(keep_vars=True), {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(values, prefix, axes, sharded_offsets, **groups)


class PackedDocuments:
    """Reads `PackedSeqParams` on the host, once for all layers."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self._last = mesh, cast(tuple[Any, ...], (None,))

    def read(self, packed: Any, length: int) -> Any:
        """Return the documents [start, stop) without padding, and the layout of `length` tokens of all ranks."""
        if packed.qkv_format != "thd" or packed.cp_group is not None or packed.local_cp_size is not None:
            raise UnsupportedError("these packed_seq_params", got=packed, allowed="qkv_format='thd' without cp_group")
        tensors = [getattr(packed, f"cu_seqlens_{name}") for name in ("q", "kv", "q_padded", "kv_padded")]
        key = length, [(id(x), getattr(x, "_version", 0)) for x in tensors]
        if self._last[0] == key:
            return self._last[1]
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("a CUDA graph would keep the documents of its first batch")
        q, kv, q_padded, kv_padded = ([] if x is None else x.tolist() for x in tensors)
        places, pieces = q_padded or q, 2 * self.mesh.size if self.mesh.size > 1 else 1
        is_equal = q == kv and places == (kv_padded or kv) and len(q) == len(places)
        sizes = [(end - start, b - a) for (start, end), (a, b) in zip(pairwise(places), pairwise(q), strict=is_equal)]
        if not is_equal or places[-1] != length or any(room % pieces or size > room for room, size in sizes):
            what = "cu_seqlens must be equal for queries and keys, end at the number of tokens, and be divisible"
            got, allowed = f"{q}, {kv}; padded {q_padded}, {kv_padded}", f"up to {length}, in multiples of {pieces}"
            raise InputError(what, got=got, allowed=allowed)
        documents = tuple((start, start + size) for start, (_, size) in zip(places, sizes, strict=False) if size)
        layout = make_layout("document_zigzag", length, self.mesh.size, Mask.documents(sorted({*places})))
        self._last = key, (documents, layout), tensors  # tensors stay alive, so that no other one gets their id
        return self._last[1]


_packed_documents = lru_cache(maxsize=8)(PackedDocuments)  # one for all layers


@lru_cache(maxsize=64)
def _mask(documents: tuple[tuple[int, int], ...] | None, kind: AttnMaskType, window: tuple[int, int]) -> Mask:
    """Return the mask of documents, or of one row. A side of -1 has no limit."""
    is_causal = kind == AttnMaskType.causal
    if not is_causal and kind != AttnMaskType.no_mask:
        raise UnsupportedError("this mask", got=kind.name, allowed="causal, no_mask; of packed documents also padding")
    if window != (-1, -1) and (window[1] if is_causal else min(window) < 0):  # Megatron's attentions differ here
        raise UnsupportedError("this window_size", got=window, allowed="(LEFT, 0) if causal, else at least (0, 0)")
    left, right = (UNBOUNDED if side < 0 else side for side in window)
    rows = ((0, UNBOUNDED),) if documents is None else documents
    regions = tuple(Region(a, b, a, b, lo=0 if is_causal else -right, hi=left) for a, b in rows)
    return Mask(regions, kind.name if window == (-1, -1) else f"{kind.name}, window {window}")
