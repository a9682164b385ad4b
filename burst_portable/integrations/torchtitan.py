"""Attention of torchtitan's decoders over its context-parallel ranks: an override of its configuration.

``--override.imports burst_portable.integrations.torchtitan.attention`` replaces the attention of each layer. torchtitan
divides the rows, counts tokens, and reduces gradients as before. Documents are read from the positions of the tokens,
which torchtitan's data loaders restart at each document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from burst_portable.api import attention as attend
from burst_portable.errors import InputError, MismatchError, UnsupportedError
from burst_portable.integrations.versions import check_version, importing
from burst_portable.layout import Layout, make_layout
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh, as_mesh
from burst_portable.sharding import unshard
from burst_portable.utils.torch_modes import never_compiled

with importing("torchtitan", "burst-portable[torchtitan]"):
    from torchtitan.config import derive, override
    from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention
    from torchtitan.protocols.module import Module

_LAYOUTS = ("zigzag", "contiguous")
"""Those of torchtitan's load balancer "headtail", and of none."""


@override(target=GQAttention.Config, exact=True)  # type: ignore[untyped-decorator]
def attention(
    cfg: GQAttention.Config, strategy: str = "auto", kernel: str = "auto", layout: str = "auto"
) -> GQAttention.Config:
    """Return the configuration of a layer's attention that runs over the context-parallel ranks.

    Args:
        cfg: torchtitan's configuration of the layer.
        strategy: Name of a strategy.
        kernel: Name of a kernel.
        layout: "zigzag" for torchtitan's load balancer "headtail", "contiguous" for none. Default: found out from the
            positions of the tokens.

    Raises:
        UnsupportedError: If torchtitan's version is not supported, or an option of its attention has no equivalent.
        InputError: If the layout is unknown.
    """
    check_version("torchtitan", "0.3", "0.4")
    if layout not in ("auto", *_LAYOUTS):
        raise InputError("unknown layout for torchtitan", got=layout, allowed=f"auto, {', '.join(_LAYOUTS)}")
    inner = cfg.inner_attention
    if type(inner) is not FlexAttention.Config and inner != VarlenAttention.Config(
        sharding_config=inner.sharding_config
    ):
        allowed = "FlexAttention, or VarlenAttention without a window"
        raise UnsupportedError("this inner attention of torchtitan", got=inner, allowed=allowed)
    sharding = inner.sharding_config
    if sharding is not None:  # K and V stay divided
        sources = sharding.in_src_shardings
        gradients = replace(sharding.local_map, in_grad_placements=tuple(sources.values()))
        sharding = replace(sharding, in_dst_shardings=sources, local_map=gradients)
    options = {"strategy": strategy, "kernel": kernel, "layout": layout, "sharding_config": sharding}
    return derive(cfg, SequenceAttention.Config, inner_attention=SequenceInnerAttention.Config(**options))


class Rows(NamedTuple):
    """The mask of each row of a batch, and the layout of its tokens."""

    masks: tuple[Mask, ...]
    layout: str


class SequenceAttention(GQAttention):  # type: ignore[misc]  # torchtitan's names are Any, see pyproject.toml
    """Grouped-query attention that finds the documents of its rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):  # type: ignore[misc]
        pass

    def forward(
        self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None
    ) -> Tensor:  # torchtitan's names
        if attention_masks is not None:  # torchtitan makes none for an inner attention of another package
            raise UnsupportedError("a mask other than documents", got=type(attention_masks).__name__)
        rows = self.inner_attention.rows_of(positions)
        return super().forward(x_BLD, rows, positions)  # type: ignore[no-any-return]


class SequenceInnerAttention(Module):  # type: ignore[misc]
    """Attention of this rank's queries to the keys of all context-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        strategy: str = "auto"
        kernel: str = "auto"
        layout: str = "auto"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.options = {"strategy": config.strategy, "kernel": config.kernel}
        self.layout = config.layout
        self.mesh: Mesh | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        axis = parallel_dims.get_optional_mesh("cp")
        self.mesh = Mesh.single() if axis is None else as_mesh(axis)

    @never_compiled("documents are read on the host; compile the loss only: --compile.components loss")
    def rows_of(self, positions: Tensor | None) -> Rows:
        """Return the masks of rows, from this rank's positions ``[rows, tokens]``."""
        if self.mesh is None:
            next_step = "pass --parallelism.spmd_backend spmd_types"
            raise UnsupportedError("torchtitan did not parallelize this attention", next_step=next_step)
        if positions is None:
            raise InputError("the batch has no positions", next_step="return them from the data loader")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            next_step = "pass --training.disable_cuda_graphs"
            raise UnsupportedError("a CUDA graph would keep the documents of its first batch", next_step=next_step)
        return _documents(self.mesh, self.layout).rows(positions)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Rows,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unknown: Any,
    ) -> Tensor:
        if given := [name for name, value in unknown.items() if value is not None]:
            raise UnsupportedError("an argument of torchtitan's attention without an equivalent", got=", ".join(given))
        masks, layout = attention_masks
        options: Any = {"mesh": self.mesh, "layout": layout, "scale": scale, **self.options}
        if len(set(masks)) == 1:
            return attend(q_BLNH, k_BLNH, v_BLNH, mask=masks[0], **options)  # type: ignore[no-any-return]
        rows = zip(q_BLNH.split(1), k_BLNH.split(1), v_BLNH.split(1), masks, strict=True)
        return torch.cat([attend(q, k, v, mask=mask, **options) for q, k, v, mask in rows])


class Documents:
    """Reads the documents of rows from the positions of all ranks, once per batch. `layout`: a name, or "auto"."""

    def __init__(self, mesh: Mesh, layout: str) -> None:
        self.mesh, self.layout = mesh, layout
        self._positions, self._version, self._rows = torch.empty(0), -1, Rows((), layout)

    def rows(self, positions: Tensor) -> Rows:
        """Return the masks of rows, from this rank's positions ``[rows, tokens]``. All ranks must call this.

        Raises:
            MismatchError: If the positions of all ranks do not count up in any layout.
            InputError: If they do in several ones, and no earlier batch decided.
        """
        if self._positions is positions and self._version == positions._version:
            return self._rows
        local = positions.to_local() if isinstance(positions, DTensor) else positions
        ranks, count = self.mesh.size, local.shape[1]
        gathered = unshard(local, self.mesh, seq_len=ranks * count, layout="contiguous").cpu()
        names = (self.layout,) if self.layout in _LAYOUTS else _LAYOUTS[ranks == 1 or count % 2 :]
        layouts = [make_layout(name, ranks * count, ranks) for name in names]
        found = {layout.name: rows for layout in layouts if (rows := _cu_seqlens(gathered, layout))}
        if not found:
            what = "the positions of all ranks do not count up in their documents"
            next_step = "give the ranks of a sequence the same rows; the load balancer 'ptrr' is not supported"
            raise MismatchError(what, got=f"layout {self.layout!r}", next_step=next_step)
        name = self._rows.layout if self._rows.layout in found else next(iter(found))
        if len(found) > 1 and name != self._rows.layout:
            next_step = f'pass --override.imports \'{__name__}.attention={{"layout": "zigzag"}}\' for the load '
            next_step += 'balancer "headtail", and "contiguous" for none'
            raise InputError("several layouts fit this batch", got=" and ".join(found), next_step=next_step)
        masks = tuple(Mask.causal() if len(row) == 2 else Mask.documents(row) for row in found[name])
        self._positions, self._version, self._rows = positions, positions._version, Rows(masks, name)
        return self._rows


@lru_cache(maxsize=8)
def _documents(mesh: Mesh, layout: str) -> Documents:
    """Return the reader that all layers share."""
    return Documents(mesh, layout)


def _cu_seqlens(gathered: Tensor, layout: Layout) -> list[tuple[int, ...]] | None:
    """Return the cumulative lengths of the documents of each row if its tokens have a layout, else None.

    `gathered`: Positions of each rank's tokens, one rank after the other, ``[rows, all tokens]``.
    """
    places = torch.tensor([place for rank in range(layout.ranks) for place in layout.positions(rank)])
    rows = gathered[:, places.argsort()]
    starts = rows[:, 1:] == 0
    if not (starts | (rows[:, 1:] == rows[:, :-1] + 1)).all():
        return None
    return [(0, *(row.nonzero().flatten() + 1).tolist(), layout.length) for row in starts]
