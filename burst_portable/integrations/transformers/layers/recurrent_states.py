"""Continue the recurrent layers of hybrid models from rank to rank: Mamba, Gated DeltaNet and short convolutions.

Such a layer reads its tokens in order and keeps a state. With the layout "contiguous", rank r computes its tokens from
the state in which rank r - 1 ended, which it receives together with the last tokens before its convolution. The
gradients of both return in the backward pass. Layers get and set these states through their argument for a cache, so a
`LocalStates` replaces the cache.

Packed documents begin without a state. A layer computes those of a rank one after another.

A layer computes on one rank at a time: rank r starts when rank r - 1 has finished the same layer. Rank r - 1 then
computes its next layers, until one of them is attention. So for n recurrent layers in a row, the last rank finishes
W - 1 layers later than it would by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from burst_portable.comm.agreement import Facts, agree, call_signature
from burst_portable.comm.base import Message
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers.attention import ATTRIBUTE, DOCUMENTS
from burst_portable.integrations.transformers.layers.selective_scans import SelectiveScan, selective_scan_of
from burst_portable.integrations.transformers.models.recurrent_layers import (
    PASSES_MASK_ONLY,
    Sizes,
    cache_argument,
    product,
    recurrent_layers,
    sizes_of,
)
from burst_portable.integrations.transformers.models.signatures import parameters_of
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.utils.torch_modes import never_compiled

LAYOUT = "contiguous"
"""The layout in which each rank has one part of the sequence, in the order of ranks."""
LABEL = "recurrent states"
"""Name of the messages in errors."""


_MASK = "attention_mask"
"""Name of the argument for a mask."""


def check_recurrent_sequence(layout: Layout) -> None:
    """Raise `UnsupportedError` if recurrent layers cannot compute a sequence. Equal on all ranks."""
    if layout.ranks > 1 and (fewest := min(map(layout.count, range(layout.ranks)))) < 2:
        got, allowed = f"{layout.length} tokens on {layout.ranks} ranks", "at least 2 tokens on each rank"
        raise UnsupportedError(f"a rank with {fewest} tokens and recurrent layers", got=got, allowed=allowed)


class LocalDocuments(NamedTuple):
    """The parts of packed documents on one rank.

    Attributes:
        borders: Numbers of this rank's tokens at which parts begin, then their number: ``(0, ..., S)``.
        continues: Whether the first part belongs to a document that begins on an earlier rank.
    """

    borders: tuple[int, ...]
    continues: bool


def local_documents(layout: Layout, rank: int, cu_seqlens: tuple[int, ...]) -> LocalDocuments:
    """Return the parts of documents on a rank, of a sequence with the layout "contiguous"."""
    count = layout.count(rank)
    start = sum(map(layout.count, range(rank)))
    inside = (end - start for end in cu_seqlens)
    return LocalDocuments((0, *(x for x in inside if 0 < x < count), count), start not in cu_seqlens)


class LocalStates:
    """The states of one layer before and after this rank's tokens. Replaces the cache, whose methods it has.

    Attributes:
        recurrent: The recurrent state ``[B, ...]``: before the call the first one, or None; then the last one.
        conv: Inputs of the convolution that precede the next token, ``[B, C, K - 1]``. None: zeros.
        earlier: Outputs of the layer ``[B, S, H]`` for earlier documents on this rank.
        continues: Whether the last document may continue on the next rank, which then needs the last states.
    """

    def __init__(self, sizes: Sizes, scan: SelectiveScan | None) -> None:
        self._sizes, self._scan = sizes, scan
        self.recurrent: Tensor | None = None
        self.conv: Tensor | None = None
        self.earlier: list[Tensor] = []
        self.continues = True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the layer convolves all its tokens (see `update_conv_state`)."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state before the first token of this rank."""
        return self.recurrent

    def update_conv_state(self, x: Tensor, layer_idx: int, **_: Any) -> Tensor:
        """Return inputs of a convolution ``[B, C, S]`` after those that precede them: ``[B, C, K - 1 + S]``."""
        channels, before = self._sizes.conv
        if self.conv is None:
            self.conv = x.new_zeros(x.shape[0], channels, before)
        full = torch.cat([self.conv.to(x.dtype), x], dim=-1)
        self.conv = full[..., full.shape[-1] - before :]
        self._conv_inputs = full
        return full

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> Tensor:
        """Keep the state after the last token of this rank, which a Mamba 1 layer has computed from zeros."""
        if self._scan is not None and (self.continues or self.recurrent is not None):
            state = self._scan.resume(self.recurrent, self._conv_inputs)
        self.recurrent = state
        return state

    def of_next_document(self) -> LocalStates:
        """Return the states before a document that begins on this rank."""
        return LocalStates(self._sizes, self._scan)

    def packed(self, dtype: torch.dtype) -> Tensor:
        """Return the states after the layer as one tensor, one-dimensional."""
        states = [self.conv] if self._sizes.recurrent is None else [self.recurrent, self.conv]
        return torch.cat([x.to(dtype).flatten() for x in states if x is not None])

    def unpack(self, x: Tensor, batch: int) -> None:
        """Set the states of which `x` is the result of `packed`."""
        sizes = self._sizes
        recurrent, conv = x.split([batch * product(sizes.recurrent), batch * product(sizes.conv)])
        self.recurrent = None if sizes.recurrent is None else recurrent.view(batch, *sizes.recurrent)
        self.conv = conv.view(batch, *sizes.conv)


class StateExchange:
    """The messages between neighboring ranks, and the hooks of layers that send and receive them."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._agreed: set[bytes] = set()

    def hooks(self, model: nn.Module) -> Iterator[Any]:
        """Install hooks on the recurrent layers, and yield their handles."""
        for layer in recurrent_layers(model):
            sizes, scan, cache = sizes_of(layer), selective_scan_of(layer), cache_argument(layer)
            yield layer.register_forward_pre_hook(partial(self._enter, sizes, scan, cache), with_kwargs=True)
            yield layer.register_forward_hook(partial(self._leave, sizes, cache), with_kwargs=True)
            if scan is not None:
                yield from scan.hooks()
        for layer in model.modules():
            # FSDP2 derives a class from that of a layer.
            if PASSES_MASK_ONLY & {base.__name__ for base in type(layer).__mro__}:
                yield layer.register_forward_pre_hook(_pass_documents, with_kwargs=True)

    @never_compiled("transports and hooks are not graphs")
    def _enter(
        self,
        sizes: Sizes,
        scan: SelectiveScan | None,
        cache: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the cache by the states after the previous rank's tokens (pre-hook)."""
        names = parameters_of(layer)
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        documents = _documents_of(layer, kwargs)
        if documents is None and self._mesh.size == 1:
            return (), kwargs
        if kwargs.get(_MASK) is not None:
            got = type(kwargs[_MASK]).__name__
            raise UnsupportedError(f"a mask in the recurrent layer {type(layer).__name__}", got=got)
        hidden: Tensor = kwargs["hidden_states"]
        batch, dtype = hidden.shape[0], _dtype(hidden)
        self._agree(batch, sizes, dtype, hidden.device.type)
        if scan is not None:
            scan.check_projections()
        states = LocalStates(sizes, scan)
        if self._mesh.rank > 0:
            # The gradient of the states is sent even if the layer's input needs none.
            needed = torch.is_grad_enabled() and (
                hidden.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())
            )
            anchor = hidden.new_zeros(0, requires_grad=needed)
            hidden, received = _Receive.apply(hidden, anchor, self, batch * sizes.total, dtype)  # type: ignore[no-untyped-call]  # of torch
            kwargs["hidden_states"] = hidden
            states.unpack(received, batch)
        if documents is not None:
            states, kwargs["hidden_states"] = _compute_earlier(layer, kwargs, cache, states, documents)
        kwargs[cache] = states
        return (), kwargs

    @never_compiled("transports and hooks are not graphs")
    def _leave(
        self, sizes: Sizes, cache: str, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Send the states after this rank's tokens to the next rank (hook)."""
        states = kwargs.get(cache)
        if isinstance(states, LocalStates) and states.earlier:
            output = torch.cat([*states.earlier, output], dim=1)
        if self._mesh.rank == self._mesh.size - 1:
            return output
        assert isinstance(states, LocalStates)
        packed = states.packed(_dtype(output))
        if packed.numel() != (expected := output.shape[0] * sizes.total):
            what = f"the states of {type(layer).__name__} have an unknown size"
            raise UnsupportedError(what, got=packed.numel(), allowed=expected)
        sent: Tensor = _Send.apply(output, packed, self)  # type: ignore[no-untyped-call]  # of torch
        return sent

    def _agree(self, batch: int, sizes: Sizes, dtype: torch.dtype, device_type: str) -> None:
        """Compare the sizes of messages between all ranks, once: ranks are at different layers otherwise."""
        shapes = str((batch, *sizes))
        facts: Facts = {"pass": LABEL, "shapes of recurrent states": shapes, "dtype": str(dtype).removeprefix("torch.")}
        signature = call_signature(facts)
        if signature.digest not in self._agreed:
            agree(self._mesh.transport(device_type), signature)
            self._agreed.add(signature.digest)

    def send(self, x: Tensor, distance: int) -> None:
        """Send a one-dimensional tensor to the rank at this distance."""
        transport = self._mesh.transport(x.device.type)
        transport.check_in_sync()
        with transport.between_passes():
            buffer = transport.buffer(x.numel() * x.element_size(), x.device)
            buffer.copy_(x.contiguous().view(torch.uint8))
            sends, _ = transport.post([Message(buffer, self._mesh.rank + distance)], [], LABEL)
            for handle in sends:
                handle.wait()

    def receive(self, size: int, dtype: torch.dtype, device: torch.device, distance: int) -> Tensor:
        """Return a tensor of `size` elements from the rank at this distance."""
        transport = self._mesh.transport(device.type)
        transport.check_in_sync()
        with transport.between_passes():
            buffer = transport.buffer(size * dtype.itemsize, device)
            _, receives = transport.post([], [Message(buffer, self._mesh.rank + distance)], LABEL)
            for handle in receives:
                handle.wait()
        return buffer.view(dtype)


@never_compiled("hooks are not graphs")
def _pass_documents(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the mask, which a layer passes on to its recurrent layer, by this rank's documents (pre-hook)."""
    documents = kwargs.pop(DOCUMENTS, None)
    return args, kwargs if documents is None else kwargs | {_MASK: documents}


def _documents_of(layer: Any, kwargs: dict[str, Any]) -> LocalDocuments | None:
    """Remove this rank's documents from the arguments of a layer, and return them. None: it has a part of one only.

    Models pass them on to their layers, also in a recomputation, in which the sequence of the call is unknown.
    """
    documents: LocalDocuments | None = kwargs.pop(DOCUMENTS, None)
    if documents is None and isinstance(kwargs.get(_MASK), LocalDocuments):
        documents = kwargs.pop(_MASK)
    call = getattr(layer, ATTRIBUTE).call
    if documents is None and call is not None and len(call.cu_seqlens or ()) > 2:
        what = f"packed documents in {type(layer).__name__}, whose model does not pass arguments of a call on to it"
        raise UnsupportedError(what, next_step="pass one document per row, with padding")
    return documents


def _compute_earlier(
    layer: nn.Module, kwargs: dict[str, Any], cache: str, states: LocalStates, documents: LocalDocuments
) -> tuple[LocalStates, Tensor]:
    """Compute a layer for all documents of this rank but the last. Return the states and the input of the last one.

    Args:
        layer: The recurrent layer.
        kwargs: Its arguments.
        cache: Name of the argument for a cache.
        states: States after the previous rank's tokens.
        documents: Documents on this rank.
    """
    hidden: Tensor = kwargs["hidden_states"]
    earlier: list[Tensor] = []
    if not documents.continues:
        states = states.of_next_document()
    *parts, last = pairwise(documents.borders)
    for start, stop in parts:
        states.continues = False
        tokens = hidden[:, start:stop]
        if stop - start == 1:  # a layer that gets one token and states would update them in place
            tokens = tokens.expand(-1, 2, -1)
        output: Tensor = layer.forward(**kwargs | {"hidden_states": tokens, cache: states})
        earlier.append(output[:, : stop - start])
        states = states.of_next_document()
    states.earlier = earlier
    return states, hidden[:, slice(*last)]


def _dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of messages: layers compute states in float32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


class _Receive(torch.autograd.Function):
    """Receive the previous rank's states; send their gradient. Passes the layer's input on, so that both run."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, anchor: Tensor, exchange: StateExchange, size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return hidden.view_as(hidden), exchange.receive(size, dtype, hidden.device, -1)

    @staticmethod
    def backward(ctx: Any, hidden: Tensor, states: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.exchange.send(states, -1)
        return hidden, None, None, None, None


class _Send(torch.autograd.Function):
    """Send states to the next rank; receive their gradient. Passes the layer's output on, so that both run."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, states: Tensor, exchange: StateExchange) -> Tensor:
        ctx.exchange, ctx.like = exchange, (states.numel(), states.dtype, states.device)
        exchange.send(states.detach(), 1)
        # A recomputation (gradient checkpointing) ends at the last saved tensor, so this ensures that it sends.
        ctx.save_for_backward(states.new_empty(0))
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, output: Tensor) -> tuple[Tensor, Tensor, None]:
        _ = ctx.saved_tensors  # recomputes before it waits: the next rank's backward pass needs the recomputed states
        return output, ctx.exchange.receive(*ctx.like, 1), None
