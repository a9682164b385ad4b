"""The loss of a sharded model: transformers' own function over this rank's tokens, divided by those of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.gradients import all_reduce
from burst_portable.mesh import Mesh
from burst_portable.runtime.validation import broadcast_error
from burst_portable.utils.torch_modes import never_compiled

LOGITS_BYTES = 1 << 28
"""Default number of bytes of logits in float32 that a causal loss holds at a time."""

OWN_LOSS = "pass no labels and compute the loss from the logits; burst_portable.shard cuts the labels"


def loss_of(model: PreTrainedModel) -> Any:
    """The function with which a model computes its loss; transformers takes the causal one if a class names none."""
    given = getattr(model, "_loss_function", None)
    if isinstance(given, ShardedLoss):
        given = given.function
    return given or LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss)


def shifts_labels(function: Any) -> bool:
    """Whether a loss holds a token to the label of the next one: then it can be given labels that are shifted already.

    Raises `UnsupportedError` for somebody's own function that cannot: it may shift the labels of a shard by itself.
    """
    if "shift_labels" in inspect.signature(getattr(function, "forward", function)).parameters:  # or a module
        return True
    if function in LOSS_MAPPING.values():
        return False
    raise UnsupportedError(
        "nobody knows whether this loss shifts its labels, which is done before the cut",
        got=f"model.loss_function = {getattr(function, '__name__', type(function).__name__)}",
        allowed="one of transformers, or one that takes shift_labels and num_items_in_batch, as theirs does",
        next_step="or leave loss_function alone, and compute the loss from the logits and shift_labels",
    )


def sharded_loss(model: Any) -> ShardedLoss | None:
    """The function that `parallelize` put in place of a model's loss function."""
    found = getattr(model, "_loss_function", None)
    return found if isinstance(found, ShardedLoss) else None


class ShardedLoss:
    """A model's `loss_function` on a shard: the same function, after checking that it can be right there.

    A loss is a mean over tokens. On a shard it must be told how many tokens all ranks have and, where labels are
    shifted, have that done before the cut. A model that computes its loss without transformers' `loss_function`, or
    does not pass these on, is noticed and refused.
    """

    def __init__(self, function: Any, *, logits_bytes: int = LOGITS_BYTES) -> None:
        self.function = function
        self.logits_bytes = logits_bytes
        self.awaited = False

    @property
    def needed(self) -> tuple[str, ...]:
        """The arguments that the function needs besides labels."""
        return ("shift_labels", "num_items_in_batch") if shifts_labels(self.function) else ("num_items_in_batch",)

    def expect(self, kwargs: dict[str, Any]) -> None:
        """Before a forward pass. Raises `InputError` for labels that came alone."""
        self.awaited = kwargs.get("labels") is not None
        if self.awaited and (missing := [name for name in self.needed if kwargs.get(name) is None]):
            raise InputError(
                "labels of a shard need to be shifted before the cut, and divided by the tokens of all ranks",
                got=f"labels without {' and '.join(missing)}",
                next_step="call the model with handle.shard(input_ids, labels)",
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The result of `function`."""
        if missing := [name for name in self.needed if kwargs.get(name) is None]:
            raise UnsupportedError(
                "the model does not pass on to its loss what a shard's loss needs",
                got=f"no {' and no '.join(missing)}",
                next_step=OWN_LOSS,
            )
        self.awaited = False
        if self.function is ForCausalLMLoss:
            return causal_loss(*args, logits_bytes=self.logits_bytes, **kwargs)
        loss: Tensor = self.function(*args, **kwargs)
        return loss

    def check_called(self, model: Any) -> None:
        """After a forward pass."""
        if self.awaited:
            raise UnsupportedError(
                f"{type(model).__name__} computes its loss as if its rows were all there are", next_step=OWN_LOSS
            )


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    shift_labels: Tensor,
    num_items_in_batch: Tensor | int,
    ignore_index: int = -100,
    logits_bytes: int = LOGITS_BYTES,
    **others: Any,
) -> Tensor:
    """transformers' `ForCausalLMLoss`, with at most `logits_bytes` of the logits at a time in float32.

    It would hold two or three copies of all of them: of 16,384 tokens and 128,256 words, 8 GiB each. Here the backward
    pass needs the logits and their gradient, in their own dtype.
    """
    rows = max(1, logits_bytes // (4 * vocab_size))
    if logits.numel() <= rows * vocab_size:
        arguments = (logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        whole: Tensor = ForCausalLMLoss(*arguments, **others)
        return whole
    labels = shift_labels.view(-1).to(logits.device)
    total = _sum_in_parts(logits.reshape(-1, vocab_size), labels, ignore_index, rows)
    count = num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


@never_compiled("its backward pass takes gradients of its own")
def _sum_in_parts(logits: Tensor, labels: Tensor, ignore_index: int, rows: int) -> Tensor:
    total: Tensor = _InParts.apply(logits, labels, ignore_index, rows)  # type: ignore[no-untyped-call]  # of torch
    return total


class _InParts(torch.autograd.Function):
    """The sum of cross entropies over logits ``[R, V]`` and labels ``[R]``, some rows at a time; float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, rows: int) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.ignore_index, ctx.rows = ignore_index, rows
        parts = zip(logits.split(rows), labels.split(rows), strict=True)
        return torch.stack([_cross_entropy(x.float(), y, ignore_index) for x, y in parts]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for x, y, into in zip(*(part.split(ctx.rows) for part in (logits, labels, gradient)), strict=True):
            wide = x.detach().float().requires_grad_()
            with torch.enable_grad():
                loss = _cross_entropy(wide, y, ctx.ignore_index)
            into.copy_(torch.autograd.grad(loss, wide, grad)[0])
        return gradient, None, None, None


def _cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")


_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Where models keep the weight of the router loss in the loss; the second name is JetMoe's."""


def router_loss(router_logits: Sequence[Tensor], top_k: int, mesh: Mesh) -> Tensor:
    """This rank's part of the load-balancing loss (Switch Transformer, arXiv 2101.03961, equations 4 to 6).

    Args:
        router_logits: a layer each, ``[rows, experts]`` of this rank's tokens.
        top_k: experts that a token is sent to.
        mesh: the ranks that share the sequence.

    Returns:
        A scalar in float32. Summed over ranks, it and its gradients are what one device gets for the whole sequence.
    """
    experts = router_logits[0].shape[-1]
    # Of choices, and of rows. 16 bits, which may be the default, would count to 256.
    counts = torch.zeros(experts + 1, dtype=torch.float32, device=router_logits[0].device)
    probability = counts.new_zeros(experts)
    for logits in router_logits:
        weights = logits.softmax(dim=-1)
        chosen = weights.detach().topk(top_k, dim=-1).indices
        counts[:experts] += torch.nn.functional.one_hot(chosen, experts).sum(dim=(0, 1))
        counts[experts] += logits.shape[0]
        probability = probability + weights.float().sum(dim=0)
    counts = all_reduce(counts, mesh)
    share, rows = counts[:experts] / counts[experts], counts[experts]
    return experts * (share * probability).sum() / rows


def check_router(config: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a router loss that could not be found in the output."""
    wanted = kwargs.get("output_router_logits")
    wanted = getattr(config, "output_router_logits", False) if wanted is None else wanted
    if wanted and not kwargs.get("return_dict", getattr(config, "return_dict", True)):
        raise UnsupportedError("a router loss in a tuple", got="return_dict=False", allowed=True)


def with_router_loss(model: Any, output: Any, mesh: Mesh) -> Any:
    """A model's output whose router loss is over all ranks, where it has one; and its loss with it.

    Raises `UnsupportedError` where the model's router loss is another formula than ours; the other ranks are told.
    """
    found = getattr(output, "aux_loss", None)
    if not isinstance(found, Tensor) or mesh.size == 1:
        return output
    logits = output.router_logits
    top_k: Any = getattr(model, "num_experts_per_tok", None)
    weight: Any = next((getattr(model, name) for name in _WEIGHTS if hasattr(model, name)), None)
    try:
        _check_known(model, found, logits, top_k, weight)
    except UnsupportedError as refusal:
        broadcast_error(mesh, refusal, found)  # rounding may differ, and they would wait for the sum
        raise
    part = router_loss(logits, top_k, mesh)
    if output.loss is not None:
        output.loss = output.loss + weight * (part - found)
    output.aux_loss = part
    return output


def _check_known(model: Any, found: Tensor, logits: Sequence[Tensor], top_k: int | None, weight: float | None) -> None:
    """Refuse a router loss that is not `router_loss` of the rows at hand, and one whose weight is not found."""
    got = "a model that does not say its weight, or how many experts a token is sent to"
    if top_k is not None and weight is not None:
        with torch.no_grad():
            ours = router_loss(logits, top_k, Mesh.single())
        # The sums' order differs, and nothing else may. What is no number came from the model.
        if torch.allclose(ours, found.float(), rtol=1e-4, equal_nan=True):
            return
        got = f"{found.item():.6f} where ours is {ours.item():.6f}"
    raise UnsupportedError(
        f"the router loss of {type(model).__name__} is none that we can compute over ranks",
        got=got,
        next_step="pass output_router_logits=False",
    )
