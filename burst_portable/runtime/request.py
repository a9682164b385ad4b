"""Define `Request`: the keywords of `attention` as they were written, part of the key of a prepared call."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from torch import Tensor

from burst_portable.errors import InputError, shown
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import MeshLike
from burst_portable.runtime.validation import as_number, checked_deterministic, checked_dropout
from burst_portable.strategies.base import Strategy
from burst_portable.utils.values import size


class RequestOptions(TypedDict, total=False):
    """Keywords of `attention` that define the computation, the plan and the kernel."""

    mask: Mask | str
    strategy: Strategy | str
    layout: Layout | str
    seq_len: int | None
    scale: float | None
    softcap: float | None
    kernel: str
    deterministic: bool | None
    dropout_p: float
    first_head: int


class AttentionOptions(RequestOptions, total=False):
    """Keywords of `attention` except `return_lse`."""

    mesh: MeshLike
    sinks: Tensor | None
    dropout_seed: int | None


class Request(NamedTuple):
    """The keywords of `attention` except its mesh, its tensors and the seed of dropout.

    Part of the key under which a mesh caches a prepared call. A cached call neither parses a mask nor makes a layout.
    """

    mask: Mask | str = "causal"
    strategy: Strategy | str = "auto"
    layout: Layout | str = "zigzag"
    seq_len: int | None = None
    scale: float | None = None
    softcap: float | None = None
    kernel: str = "auto"
    deterministic: bool | None = None
    return_lse: bool = False
    dropout_p: float = 0.0
    first_head: int = 0

    @property
    def has_length(self) -> bool:
        """Return whether the caller passed the tokens of the unsharded sequence. Else a rank's rows define them."""
        return self.seq_len is not None or isinstance(self.layout, Layout)

    def checked(self) -> Request:
        """Return the request with numbers as ints or floats: 1, 1.0 and True are equal as keys.

        Raises:
            InputError: A number, a name or a flag has the wrong type.
        """
        mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic, return_lse, dropout_p, first_head = self
        if seq_len is not None:
            seq_len = size("seq_len", seq_len)
        if scale is not None:
            scale = as_number("scale", scale)
        if softcap is not None:
            softcap = as_number("softcap", softcap)
        if not isinstance(kernel, str):
            raise InputError("kernel must be a name", got=shown(kernel), allowed="'auto', or a kernel of the backend")
        deterministic = checked_deterministic(deterministic)
        if not isinstance(return_lse, bool):
            raise InputError("return_lse must be a bool", got=shown(return_lse), allowed="True or False")
        is_dropped = not isinstance(dropout_p, int | float) or dropout_p != 0.0
        if is_dropped or type(first_head) is not int or first_head != 0:
            dropout_p, first_head = checked_dropout(dropout_p, first_head)
        return Request(
            mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic, return_lse, dropout_p, first_head
        )
