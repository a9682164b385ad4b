"""Divide a full batch in the forward pass of a sharded model, and return one device's loss and outputs.

Every rank of a sequence calls the model with the same unsharded rows. The value of the loss is one device's; its
backward pass computes this rank's part of the gradients. Gathered outputs behave alike: if every rank computes the same
loss from them, the sum of the ranks' gradients is one device's; with `averaged_gradients`, their average is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from burst_portable.errors import DtypeError, InputError, UnsupportedError
from burst_portable.gradients import all_reduce
from burst_portable.integrations.transformers.batch_check import KEY
from burst_portable.integrations.transformers.checks import has_head
from burst_portable.integrations.transformers.gradient_parts import check_differentiated_once
from burst_portable.integrations.transformers.left_padding import roll_rows
from burst_portable.integrations.transformers.ungathered import UngatheredOutput
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.sharding import shard, unshard

_OF_BATCH = (
    *("input_ids", "labels", "attention_mask", "position_ids", "cu_seqlens", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
_OTHERS = ("inputs_embeds", "num_items_in_batch")
"""Tensors of a call that are not divided as token ids are."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_LOSSES, _OUTPUTS = ("loss", "aux_loss"), ("logits", "last_hidden_state", "hidden_states")
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


def check_averaging(model: torch.nn.Module, mesh: Mesh, *, averaged: bool) -> None:
    """Raise `InputError` if DDP or FSDP2 averages gradients over the mesh, and `averaged_gradients` is False.

    Each rank has its part of the gradients, so their average is one device's gradient divided by the number of ranks.
    """
    if averaged or mesh.size == 1 or not torch.is_grad_enabled():
        return
    if set(mesh.global_ranks) <= averaging_ranks(model):
        raise InputError(
            "DDP or FSDP2 averages the gradients of full batches over the ranks of the sequence, which must be summed",
            got="averaged_gradients=False",
            next_step="pass averaged_gradients=True to parallelize",
        )


def averaging_ranks(model: torch.nn.Module) -> set[int]:
    """Return the global ranks over which the running DDP, or FSDP2 in a part of the model, averages gradients."""
    if (running := DistributedDataParallel._get_active_ddp_module()) is not None:
        return set(dist.get_process_group_ranks(running.process_group))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP2 replaces parameters during a call, so that they no longer show their mesh.
            for group in groups_of(module):
                if group.gradient_divide_factor is None:
                    return set(group.mesh_info.mesh.mesh.flatten().tolist())
    return set()


def groups_of(module: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of the parameters of a module."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # older releases of torch have one group
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def batch_of(kwargs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Remove the batch from the arguments of a call. Return it for `shard`, and the embeddings ``[B, N, H]``, if any.

    The embeddings' batch has checksums of the tokens in place of the ids, so that ranks compare the embeddings. Unknown
    tensors are part of the batch: `shard` raises an error for them.
    """
    unknown = [name for name, x in kwargs.items() if isinstance(x, Tensor) and x.dim() and name not in _OTHERS]
    batch = {name: x for name in dict.fromkeys((*_OF_BATCH, *unknown)) if (x := kwargs.pop(name, None)) is not None}
    embeddings = kwargs.get("inputs_embeds")
    if embeddings is not None and "input_ids" in batch:
        raise InputError("a call takes input_ids or inputs_embeds", got="both", next_step="pass one of them")
    if isinstance(embeddings, Tensor) and embeddings.dim() == 3:
        bits = _INTEGERS.get(embeddings.element_size())
        if bits is None or not embeddings.is_floating_point():
            allowed = "float16, bfloat16, float32 or float64"
            raise DtypeError("unsupported dtype of inputs_embeds", got=embeddings.dtype, allowed=allowed)
        batch["input_ids"] = embeddings.detach().contiguous().view(bits).sum(dim=-1)
    else:
        embeddings = None
    if "labels" not in batch and isinstance(batch.get("input_ids"), Tensor):
        batch["labels"] = torch.full_like(batch["input_ids"], -100)
    return batch, embeddings


def full_output(output: Any, mesh: Mesh, layout: Layout, requested: Outputs, scale: int) -> Any:
    """Return an output with the losses of all ranks and, if requested, the outputs of all tokens on every rank.

    Other fields, which describe the tokens of a shard, are left out. Gradients are multiplied by `scale`.
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
    for name in _OF_LABELS:
        if name in output:
            # Of the next token: the last token has none.
            fields[name] = full(output[name])[:, :-1]
    found = type(output)(**fields)
    for name in _OUTPUTS:
        if name in output and name not in fields:
            vars(found)[name] = UngatheredOutput(name)  # no item, so that frameworks do not gather or copy it
    return found


def _gathered(x: Tensor, mesh: Mesh, layout: Layout, scale: int) -> Tensor:
    """Return the output of all tokens ``[B, N, ...]``, with a gradient if `x` has one."""
    if not x.requires_grad:
        return unshard(x, mesh, seq_len=layout.length, layout=layout)
    gathered: Tensor = _Gather.apply(x, mesh, layout, scale)  # type: ignore[no-untyped-call]  # of torch
    return gathered


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
