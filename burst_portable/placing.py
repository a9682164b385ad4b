"""Where the rows of a graph of torch.compile stand in the whole sequence: an operator, besides those of `graphs`.

How many rows there are, the graph knows from its tensors. So the operator needs no plan while a graph is made, and
compares the rows with the layout when it runs, as `attention` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.checks import check_rows, tell_the_others
from burst_portable.graphs import NOT_RECORDED, Given, given_as, named
from burst_portable.mesh import Mesh, as_mesh
from burst_portable.planning import layout_of, mask_of
from burst_portable.sharding import positions
from burst_portable.values import size


def positions_in_graph(rows: int, seq_len: int, mesh: Mesh, layout: str, mask: str, device: torch.device) -> Tensor:
    """`positions` of a rank that holds `rows` rows, while the compiler looks; it reads this function."""
    found: Tensor = torch.ops.burst_portable.positions(rows, seq_len, device, _name(mesh, layout, mask))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def _name(mesh: Mesh, layout: str, mask: str) -> str:
    return named(Given(mesh, False, (mask, "auto", layout, None, None, None, "auto", None)))


@torch.library.custom_op("burst_portable::positions", mutates_args=(), tags=NOT_RECORDED)
def positions_(rows: int, seq_len: int, device: torch.device, name: str) -> Tensor:
    """The global positions of this rank's rows: int64 ``[rows]``."""
    given = given_as(name)
    mesh, (mask, _, layout, *_) = as_mesh(given.mesh), given.arguments
    try:
        seq_len = size("seq_len", seq_len)
        check_rows(layout_of(layout, seq_len, mesh.size, mask_of(mask, seq_len)), rows, mesh)
        return positions(mesh, seq_len=seq_len, layout=layout, mask=mask, device=device)
    except Exception as refusal:
        tell_the_others(mesh, refusal, torch.empty(0, device=device))
        raise


@positions_.register_fake
def _(rows: int, seq_len: int, device: torch.device, name: str) -> Tensor:
    return torch.empty(rows, dtype=torch.int64, device=device)
