"""Return one device's loss and outputs from a call with a full batch.

Every rank of a sequence calls the model with the same unsharded rows. The value of the loss is one device's; its
backward pass computes this rank's part of the gradients. Gathered outputs behave alike: if every rank computes the same
loss from them, the sum of the ranks' gradients is one device's; with `averaged_gradients`, their average is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.gradients import all_reduce
from burst_portable.integrations.transformers.batches.left_padding import roll_rows
from burst_portable.integrations.transformers.full_batches.ungathered import ungathered
from burst_portable.integrations.transformers.models.model_parts import has_head
from burst_portable.integrations.transformers.training.batch_check import KEY
from burst_portable.integrations.transformers.training.gradient_parts import check_differentiated_once
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.sharding import shard, unshard

_LOSSES, _OUTPUTS = ("loss", "aux_loss"), ("logits", "last_hidden_state", "hidden_states")
_ROUTED = "router_logits"
"""Output of a mixture of experts, ``[tokens, experts]`` per layer: the tokens of one row after the other."""
_OF_LABELS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""Outputs of TRL's fused head, one number per label. Its argument is `FUSED`."""
FUSED = "fused_lm_head"


class Outputs(NamedTuple):
    """The outputs of a call: whether those of all tokens are gathered, and a text that is equal on ranks that agree.

    `padding`: Tokens of padding at the beginning of each row ``[B]``, which were moved to its end. None: none.
    `joined_rows`: Number of rows that the call has as one. None: rows are not joined.
    `is_padding`: Which tokens of the rows are padding ``[B, N]``. None: none is.
    """

    gather: bool
    text: str
    padding: Tensor | None = None
    joined_rows: int | None = None
    is_padding: Tensor | None = None


def requested_outputs(
    module: Any, model: Any, kwargs: dict[str, Any], *, gather: bool | None, averaged: bool = False
) -> Outputs:
    """Return the requested outputs of a call of `module`, which is `model` or a part of it.

    Args:
        module: The called module.
        model: The parallelized model.
        kwargs: Arguments of the call.
        gather: `ShardedModel.gather_outputs`.
        averaged: `ShardedModel.averaged_gradients`.

    Raises:
        InputError: If the batch is divided already.
        UnsupportedError: If the output is not a dictionary, or gradients would be wrong.
    """
    if divided := [name for name in ("seq_len", KEY, "shift_labels") if kwargs.get(name) is not None]:
        next_step = "pass the full batch with unshifted labels, or parallelize(model, mesh) without full_batches"
        raise InputError("full_batches=True divides the batch in the forward pass", got=divided[0], next_step=next_step)
    given = {name: kwargs.get(name) for name in ("return_dict", "output_hidden_states", "output_router_logits")}
    flags = {name: getattr(module.config, name, name == "return_dict") if x is None else x for name, x in given.items()}
    if not flags["return_dict"]:
        raise UnsupportedError("full_batches=True needs a dictionary output", got="return_dict=False", allowed=True)
    has_labels, is_fused = kwargs.get("labels") is not None, bool(kwargs.get(FUSED))
    if is_fused and not has_labels:
        raise UnsupportedError("TRL's fused head on full batches needs labels", got="no labels")
    gather = not has_labels if gather is None else gather
    # Every rank computes the full gradients of a head outside this call. Their average is right, their sum too large.
    is_summed = torch.is_grad_enabled() and not averaged
    if is_summed and (module is not model or not has_head(module)):
        raise UnsupportedError(
            "a model without a head would be trained by full_batches=True",
            got=type(module).__name__,
            next_step="call the parallelized model itself; disable gradients; divide batches by ShardedModel.shard; or "
            "average gradients (averaged_gradients=True)",
        )
    if is_summed and gather and flags["output_hidden_states"]:
        next_step = "disable gradients, pass output_hidden_states=False, or average gradients (averaged_gradients=True)"
        raise UnsupportedError("hidden states of all tokens would be trained by full_batches=True", next_step=next_step)
    names = [name for name, x in flags.items() if x and name != "return_dict"]
    words = ["labels"] * has_labels + ["gather_outputs"] * gather + [FUSED] * is_fused + names
    return Outputs(gather, f"{type(module).__name__} with {', '.join(words) or 'no outputs'}")


def full_output(output: Any, mesh: Mesh, layout: Layout, requested: Outputs, scale: int) -> Any:
    """Return an output with the losses of all ranks and, if requested, the outputs of all tokens on every rank.

    Other fields, which describe the tokens of a shard, raise an error if they are used. Gradients are multiplied by
    `scale`.
    """

    def full(x: Tensor) -> Tensor:
        x = _gathered(x, mesh, layout, scale)
        if requested.joined_rows is not None:
            x = x.squeeze(0).unflatten(0, (requested.joined_rows, -1))
        return x if requested.padding is None else roll_rows(x, -requested.padding)

    total: Any = _Sum.apply
    fields: dict[str, Any] = {name: total(output[name], mesh, scale) for name in _LOSSES if name in output}
    for name in _OUTPUTS:
        if requested.gather and name in output:
            x = output[name]
            fields[name] = tuple(full(part) for part in x) if isinstance(x, tuple) else full(x)
    if requested.gather and (routed := _rows_of(output, layout.count(mesh.rank))):
        fields[_ROUTED] = tuple(full(x).flatten(0, 1) for x in routed)
    for name in _OF_LABELS:
        if name in output:
            # Of the next token: the last token has none.
            fields[name] = full(output[name])[:, :-1]
    found = type(output)(**fields)
    for name in output:
        if name not in fields:  # no item, so that frameworks do not gather or copy it
            vars(found)[name] = ungathered(name, output[name], is_gathered=requested.gather)
    return found


def _rows_of(output: Any, tokens: int) -> list[Tensor]:
    """Return the router logits of this rank's tokens as rows ``[B, tokens, experts]``; none for other shapes.

    Args:
        output: Output of a model.
        tokens: Tokens of a row on this rank.
    """
    rows = next((len(output[name]) for name in _OUTPUTS[:2] if name in output), 0)
    logits: Any = output.get(_ROUTED) or ()
    if any(not isinstance(x, Tensor) or x.dim() != 2 or len(x) != rows * tokens for x in logits):
        return []
    return [x.view(rows, tokens, x.shape[1]) for x in logits]


def _gathered(x: Tensor, mesh: Mesh, layout: Layout, scale: int) -> Tensor:
    """Return the output of all tokens ``[B, N, ...]``, with a gradient if `x` has one."""
    if not x.requires_grad:
        return unshard(x, mesh, seq_len=layout.length, layout=layout)
    gathered: Tensor = _Gather.apply(x, mesh, layout, scale)  # type: ignore[no-untyped-call]  # of torch
    return gathered


def depends_on_gathered(x: Tensor) -> bool:
    """Return whether a tensor was computed from gathered outputs, of this or another sharded model."""
    found, seen = [x.grad_fn], set[Any]()
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "_forward_cls", None) is _Gather:
            return True
        seen.add(node)
        found += [before for before, _ in node.next_functions]
    return False


class _Sum(torch.autograd.Function):
    """Sum over ranks, whose gradient is that of this rank's part, times `scale`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: Mesh, scale: int) -> Tensor:
        ctx.scale = scale
        return all_reduce(part, mesh).clone()  # not a view, so that Trainer may scale it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.scale, None, None


class _Gather(torch.autograd.Function):
    """Unsharded tensor ``[B, N, ...]`` on every rank.

    Its gradient is that of this rank's tokens ``[B, S, ...]``, times `scale`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, layout: Layout, scale: int) -> Tensor:
        ctx.mesh, ctx.layout, ctx.scale = mesh, layout, scale
        return unshard(x, mesh, seq_len=layout.length, layout=layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        check_differentiated_once()
        return shard(grad, ctx.mesh, layout=ctx.layout) * ctx.scale, None, None, None
