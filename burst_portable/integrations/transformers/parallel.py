"""Shard the input sequence of a Transformers model over the ranks of a mesh: `parallelize`."""

from __future__ import annotations

from transformers import PreTrainedModel

from burst_portable.errors import InputError, UnsupportedError, shown
from burst_portable.integrations.transformers.attention import ATTRIBUTE
from burst_portable.integrations.transformers.attention_check import check_functions
from burst_portable.integrations.transformers.layers.recurrent_states import LAYOUT
from burst_portable.integrations.transformers.models.checks import check_model
from burst_portable.integrations.transformers.models.model_parts import text_model_of
from burst_portable.integrations.transformers.models.recurrent_layers import recurrent_layers
from burst_portable.integrations.transformers.sharded_model import ShardedModel, release_copy
from burst_portable.mesh import MeshLike, as_mesh
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import make_strategy


def parallelize(
    model: PreTrainedModel,
    mesh: MeshLike = None,
    *,
    strategy: Strategy | str = "auto",
    layout: str | None = None,
    seq_len: int | None = None,
    kernel: str = "auto",
    full_batches: bool = False,
    gather_outputs: bool | None = None,
    averaged_gradients: bool = False,
) -> ShardedModel:
    """Shard the sequence of a Transformers model over the ranks of a mesh, without editing the model.

    Every rank calls the model with its own tokens: ``model(**sharded.shard(input_ids))``. All layers but attention
    process these tokens only; attention covers the unsharded sequence. A mask that `Mask` does not express raises an
    error.

    Args:
        model: A Transformers model, usually a decoder. It is changed in place; `ShardedModel.undo` restores it.
        mesh: A `Mesh`, a process group, a device mesh of one dimension, or None for the default process group.
        strategy: Name of a strategy, or a `Strategy`. "auto" selects the one with the shortest predicted time.
        layout: Name of a layout. "auto" selects, per sequence, the one with the shortest predicted time on the device
            that has the model now. Default: "zigzag", or "contiguous" for a model with recurrent layers, which need it.
        seq_len: Tokens of the unsharded sequence, for calls without `seq_len`. Default: each call must have it, as
            those with `ShardedModel.shard` do. Calls with tokens that you divided yourself also need `position_ids`,
            or a `layout` that is named here.
        kernel: Name of a kernel. "auto" selects one for each call.
        full_batches: Whether every rank calls ``model(**batch)`` with the same full batch, which is divided in the
            forward pass. The value of the loss is then one device's, and its backward pass computes this rank's part
            of the gradients. Default: the caller divides batches by `ShardedModel.shard`. Models with images need it.
        gather_outputs: Whether a call with `full_batches` returns the logits and hidden states of all tokens on every
            rank. Otherwise it returns losses only. Default: in calls without labels.
        averaged_gradients: Whether DDP, FSDP2 or a framework averages gradients over the ranks of the mesh, and no one
            else sums them. Gradients of a call with `full_batches` are then multiplied by the number of ranks, so that
            their average is one device's gradient.

    Returns:
        The sharded model. It is also a context manager that undoes the changes.

    Raises:
        InputError: If `model` is not a Transformers model, a part of it is parallelized already, or arguments
            contradict each other.
        UnknownNameError: If a name is unknown.
        UnsupportedError: If the model cannot be sharded; the message contains the reason.
    """
    check_model(model, full_batches=full_batches)
    release_copy(model)
    _check_free(model)
    check_functions(text_model_of(model))
    name = _checked_layout(model, layout)
    if isinstance(strategy, str):
        make_strategy(strategy)
    if full_batches and seq_len is not None:
        raise InputError("full_batches=True takes the length from each batch", got=f"seq_len={shown(seq_len)}")
    if gather_outputs is not None and not full_batches:
        raise InputError("gather_outputs is for calls with full batches", next_step="pass full_batches=True as well")
    if averaged_gradients and not full_batches:
        next_step = "pass full_batches=True as well, or multiply the loss by the number of ranks"
        raise InputError("averaged_gradients is for calls with full batches", next_step=next_step)
    is_order_known = layout not in (None, "auto") or name == LAYOUT
    options = (full_batches, gather_outputs, averaged_gradients, is_order_known)
    return ShardedModel(model, as_mesh(mesh), strategy, name, seq_len, kernel, *options)


def _checked_layout(model: PreTrainedModel, layout: str | None) -> str:
    """Return the name of the layout. Raise `UnsupportedError` if recurrent layers need another one."""
    if not recurrent_layers(model):
        return "zigzag" if layout is None else layout
    if layout not in (None, LAYOUT):
        what = "recurrent layers continue from one rank to the next, so each rank needs one part of the sequence"
        raise UnsupportedError(what, got=f"layout={layout!r}", allowed=f"layout={LAYOUT!r}, or none")
    return LAYOUT


def _check_free(model: PreTrainedModel) -> None:
    """Raise `InputError` if a module is already part of a sharded model."""
    if used := next(((name, module) for name, module in model.named_modules() if hasattr(module, ATTRIBUTE)), None):
        name, module = used
        got = f"its part {name} ({type(module).__name__})" if name else type(model).__name__
        next_step = "call undo() of its ShardedModel first"
        raise InputError("the model is parallelized already", got=got, next_step=next_step)
