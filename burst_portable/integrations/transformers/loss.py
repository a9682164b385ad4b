"""Compute the loss of a sharded model: Transformers' function over this rank's tokens, divided by all ranks' tokens."""

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
from burst_portable.integrations.transformers.models.signatures import is_of_transformers
from burst_portable.mesh import Mesh
from burst_portable.runtime.validation import broadcast_error
from burst_portable.utils.torch_modes import never_compiled

LOGITS_BYTES = 1 << 28  # limit of float32 logits that a causal loss holds at once
OWN_LOSS = "pass no labels and compute the loss from the logits; burst_portable.shard divides the labels"
OWN_FULL_LOSS = (
    "pass no labels and compute the loss from the logits of all tokens; Trainer has compute_loss_func for it"
)


_ATTRIBUTE = "_loss_function"
"""Attribute of a model with the function that a program set as its `loss_function`, or with our `ShardedLoss`."""


def loss_of(model: PreTrainedModel) -> Any:
    """Return the loss function that a model has now, without ours: that of a program, or that of its `loss_type`."""
    found = vars(model).get(_ATTRIBUTE)
    if isinstance(found, ShardedLoss):
        return found.function
    return found if _ATTRIBUTE in vars(model) else _default_loss(model)


def loss_name(model: PreTrainedModel) -> str:
    """Return the name of the loss function that a model has, to compare it on all ranks."""
    loss = loss_of(model)
    name: str = getattr(loss, "__qualname__", type(loss).__name__)
    return name


def _default_loss(model: Any) -> Any:
    """Return the loss function of a model for which a program set no function.

    A program may change `loss_type` and `LOSS_MAPPING` at any time. Transformers reads both in each call. It uses the
    causal loss if the type is unknown.
    """
    if _defines_loss(model):
        return model.loss_function
    if _ATTRIBUTE in model._modules:  # torch keeps modules there
        return model._modules[_ATTRIBUTE]
    of_class = inspect.getattr_static(type(model), _ATTRIBUTE, None)
    if of_class is not None:
        return of_class.__get__(model, type(model)) if hasattr(of_class, "__get__") else of_class
    kind = getattr(model, "loss_type", None)
    return LOSS_MAPPING[kind if kind in LOSS_MAPPING else "ForCausalLM"]


def _defines_loss(model: Any) -> bool:
    """Return whether the class of a model defines `loss_function` otherwise than Transformers."""
    classes = (type(model), PreTrainedModel)
    return len({id(inspect.getattr_static(x, "loss_function", None)) for x in classes}) > 1


def install_loss(model: PreTrainedModel, *, full_batches: bool) -> None:
    """Install a `ShardedLoss` in a model that has none, also if a program replaced it by another function.

    Raises:
        UnsupportedError: If its class defines `loss_function` itself.
    """
    values = vars(model)
    found = values.get(_ATTRIBUTE)
    if isinstance(found, ShardedLoss) and found.model is model:
        return
    if _defines_loss(model):
        raise UnsupportedError(
            "the class of this model defines its loss_function, which would divide by the labels of this rank",
            got=f"{type(model).__name__}.loss_function",
            next_step="remove it from the class, and set model.loss_function to a function instead",
        )
    function = _OF_MODEL if _ATTRIBUTE not in values else loss_of(model)
    # Not `setattr`: it would remove a loss function that is a module.
    values[_ATTRIBUTE] = ShardedLoss(function, model=model, full_batches=full_batches)


def remove_loss(model: PreTrainedModel) -> None:
    """Remove our loss functions from a model and its parts, which get those that they had."""
    for module in model.modules():
        found = vars(module).get(_ATTRIBUTE)
        if isinstance(found, ShardedLoss) and found.model is module:
            del vars(module)[_ATTRIBUTE]
            if found.is_set:
                vars(module)[_ATTRIBUTE] = found.function


def shifts_labels(function: Any) -> bool:
    """Return whether a loss compares a token with the next one's label.

    Raise `UnsupportedError` for a loss of which it is unknown, or that has no parameter for the number of labels.
    """
    if not callable(function):
        raise InputError("the loss_function of the model is no function", got=repr(function))
    parameters = inspect.signature(getattr(function, "forward", function)).parameters  # or a module
    if "shift_labels" in parameters:
        if "num_items_in_batch" in parameters or _is_known(function):
            return True
        raise UnsupportedError(
            "this loss takes shift_labels but has no parameter num_items_in_batch, so each rank would divide by the "
            "number of its own labels",
            got=f"model.loss_function = {getattr(function, '__name__', type(function).__name__)}",
            next_step="add the parameter num_items_in_batch=None; if it is not None, return the sum over the labels "
            "divided by it",
        )
    if _is_known(function):
        return False
    raise UnsupportedError(
        "it is unknown whether this loss shifts its labels; those of a shard are already shifted",
        got=f"model.loss_function = {getattr(function, '__name__', type(function).__name__)}",
        allowed="a loss of transformers, or one that takes shift_labels and num_items_in_batch like these",
        next_step="or keep the model's loss_function, and compute the loss from the logits and shift_labels",
    )


def _is_known(function: Any) -> bool:
    """Return whether a loss is one of Transformers. A program may set another one in its `LOSS_MAPPING`."""
    return function in LOSS_MAPPING.values() and is_of_transformers(function)


def sharded_loss(model: Any) -> ShardedLoss | None:
    """Return the loss function that `parallelize` installed in a model, or None."""
    found = vars(model).get(_ATTRIBUTE)
    return found if isinstance(found, ShardedLoss) else None


_OF_MODEL = object()
"""In place of a function: the one that the model has without a function of a program."""


class ShardedLoss:
    """A model's `loss_function` on a shard: the same function, with checks that its result is correct.

    A loss is a mean over tokens. On a shard it needs the number of tokens of all ranks, and labels that were shifted
    before sharding. A model raises an error if it computes its loss without `loss_function`, or does not pass these
    arguments.

    Args:
        function: The function.
        model: The model that has this one. Default: none.
        logits_bytes: Limit of float32 logits that a causal loss holds at once.
        full_batches: Whether calls take full batches.
    """

    def __init__(
        self, function: Any, *, model: Any = None, logits_bytes: int = LOGITS_BYTES, full_batches: bool = False
    ) -> None:
        self.is_set = function is not _OF_MODEL  # whether a program set it, or it follows the model's `loss_type`
        self.model, self._function, self.logits_bytes = model, function if self.is_set else None, logits_bytes
        self.is_pending = False
        self._count: Tensor | int | None = None  # for a model that does not pass it
        self._result: Tensor | None = None  # of the running call
        self._version = 0
        self._next_step = OWN_FULL_LOSS if full_batches else OWN_LOSS
        self._divides: Any = None  # the last function that was seen to divide by the number of labels

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, in which no call runs. The result of a call cannot be copied."""
        return vars(self) | {"is_pending": False, "_count": None, "_result": None}

    @property
    def function(self) -> Any:
        """Function that the model has now."""
        return self._function if self.is_set else _default_loss(self.model)

    @property
    def required(self) -> tuple[str, ...]:
        """Arguments that the function needs in addition to labels."""
        return ("shift_labels", "num_items_in_batch") if shifts_labels(self.function) else ("num_items_in_batch",)

    def expect(self, kwargs: dict[str, Any], *, calls_it: bool = True, passes_count: bool = True) -> None:
        """Check the arguments before a forward pass.

        Args:
            kwargs: Arguments of the call.
            calls_it: Whether the model calls this function. If not, its loss does not shift labels.
            passes_count: Whether the model passes `num_items_in_batch` to this function.

        Raises:
            InputError: For labels without the required arguments, or that were shifted for another function.
        """
        self._count = None if passes_count else kwargs.get("num_items_in_batch")
        has_labels = kwargs.get("labels") is not None
        self.is_pending = has_labels and not kwargs.get("fused_lm_head")  # TRL's head takes these arguments itself
        required = self.required if calls_it else ("num_items_in_batch",)
        if has_labels and "shift_labels" not in required and kwargs.get("shift_labels") is not None:
            what, got = "the labels of this shard were shifted, and the loss of the model shifts none", "shift_labels"
            next_step = "call sharded.shard(input_ids, labels) again after the loss of the model was changed"
            raise InputError(what, got=got, next_step=next_step)
        if has_labels and (missing := [name for name in required if kwargs.get(name) is None]):
            what = "labels must be shifted before sharding, and the loss divided by the tokens of all ranks"
            next_step = "call model(**sharded.shard(input_ids, labels))"
            raise InputError(what, got=f"labels without {' and '.join(missing)}", next_step=next_step)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of `function`."""
        if self._count is not None:
            kwargs = {"num_items_in_batch": self._count, **kwargs}
        if missing := [name for name in self.required if kwargs.get(name) is None]:
            what, got = "the model does not pass the required arguments to its loss", f"no {' and no '.join(missing)}"
            raise UnsupportedError(what, got=got, next_step=self._next_step)
        self.is_pending, function = False, self.function
        if function is ForCausalLMLoss:
            loss = causal_loss(*args, logits_bytes=self.logits_bytes, **kwargs)
        else:
            loss = function(*args, **kwargs)
            if function is not self._divides and not _is_known(function):
                self._check_that_it_divides(function, loss, args, kwargs)
        self._result, self._version = loss, _version_of(loss)
        return loss

    def _check_that_it_divides(
        self, function: Any, loss: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise `UnsupportedError` if twice the number of labels does not halve the loss. One nonzero loss shows it."""
        with torch.no_grad():
            half = function(*args, **{**kwargs, "num_items_in_batch": 2 * kwargs["num_items_in_batch"]})
        if not loss.isfinite() or loss == 0:
            return
        if not torch.allclose(2 * half.float(), loss.detach().float(), rtol=1e-3):
            name = getattr(function, "__name__", type(function).__name__)
            raise UnsupportedError(
                "this loss does not divide by num_items_in_batch, so the sum over ranks would be too large",
                got=f"model.loss_function = {name}, {loss.item():.4f} and {half.item():.4f} with twice the number",
                next_step="if num_items_in_batch is not None, return the sum over the labels divided by it",
            )
        self._divides = function

    def check_called(self, model: Any) -> None:
        """Raise `UnsupportedError` after a forward pass in which the function was not called."""
        if self.is_pending:
            what = f"{type(model).__name__} computes its loss from this rank's tokens only"
            got = None if sharded_loss(model) is self else "a loss_function set in its forward"
            raise UnsupportedError(what, got=got, next_step=self._next_step)

    def check_unchanged(self, model: Any, output: Any) -> None:
        """Raise `UnsupportedError` if the loss of an output is not the result of the function.

        A model may add terms to it, as Bamba's z-loss or the loss of a second head. Each rank computes them from its
        own tokens, so the sum over ranks has several means, and labels were shifted already. A router loss is replaced
        by `with_router_loss`.
        """
        result, self._result = self._result, None
        loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if result is None or not isinstance(loss, Tensor) or getattr(output, "aux_loss", None) is not None:
            return
        if loss is result and _version_of(result) == self._version:
            return
        if loss is not result and torch.allclose(loss.double(), result.double(), equal_nan=True):
            return
        what = f"{type(model).__name__} changes the result of its loss_function by terms of this rank's tokens only"
        raise UnsupportedError(what, next_step=self._next_step)


def _version_of(loss: Tensor) -> int:
    """Return how often a tensor was changed in place, which inference tensors do not count."""
    return 0 if loss.is_inference() else loss._version


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
    """Compute Transformers' `ForCausalLMLoss` with at most `logits_bytes` of the logits in float32 at once.

    Transformers holds two or three float32 copies of all logits: 8 GiB each for 16,384 tokens and 128,256 words. Here
    the backward pass needs the logits and their gradient, in their own dtype.
    """
    rows = max(1, logits_bytes // (4 * vocab_size))
    if logits.numel() <= rows * vocab_size:
        arguments = (logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        loss: Tensor = ForCausalLMLoss(*arguments, **others)
        return loss
    labels = shift_labels.view(-1).to(logits.device)
    total = _sum_in_parts(logits.reshape(-1, vocab_size), labels, ignore_index, rows)
    count = num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


@never_compiled("its backward pass takes gradients of its own")
def _sum_in_parts(logits: Tensor, labels: Tensor, ignore_index: int, rows: int) -> Tensor:
    total: Tensor = _InParts.apply(logits, labels, ignore_index, rows)  # type: ignore[no-untyped-call]  # of torch
    return total


class _InParts(torch.autograd.Function):
    """Sum of cross entropies over logits ``[R, V]`` and labels ``[R]`` in float32, computed `rows` rows at a time."""

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
        for x, y, part_gradient in zip(*(part.split(ctx.rows) for part in (logits, labels, gradient)), strict=True):
            x = x.detach().float().requires_grad_()
            with torch.enable_grad():
                loss = _cross_entropy(x, y, ctx.ignore_index)
            part_gradient.copy_(torch.autograd.grad(loss, x, grad)[0])
        return gradient, None, None, None


def _cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")


def router_loss(router_logits: Sequence[Tensor], top_k: int, mesh: Mesh, padding: Tensor | None = None) -> Tensor:
    """Return this rank's part of the load-balancing loss (Switch Transformer, arXiv 2101.03961, equations 4 to 6).

    The logits are ``[tokens, experts]`` per layer, of this rank's tokens, of which `padding` does not count. The sum of
    the results over ranks, and its gradients, equal one device's for the unsharded sequence.
    """
    experts = router_logits[0].shape[-1]
    # Counts of choices, then of tokens. In 16 bits, which may be the default dtype, they would stop at 256.
    counts = torch.zeros(experts + 1, dtype=torch.float32, device=router_logits[0].device)
    probability = counts.new_zeros(experts)
    for logits in router_logits:
        weights = logits.softmax(dim=-1)
        chosen = weights.detach().topk(top_k, dim=-1).indices
        choices = counts.new_zeros(weights.shape).scatter_(1, chosen, 1.0)  # `one_hot` would wait for some devices
        rows: Tensor | int = len(weights)
        if padding is not None:  # selected rows would wait for the device, which knows their number
            is_token = ~padding.flatten().to(logits.device, non_blocking=True)
            weights, choices = (x.where(is_token.unsqueeze(1), 0) for x in (weights, choices))
            rows = is_token.sum()
        counts[:experts] += choices.sum(dim=0)
        counts[experts] += rows
        probability = probability + weights.float().sum(dim=0)
    counts = all_reduce(counts, mesh)
    share = counts[:experts] / counts[experts]
    return experts * (share * probability).sum() / counts[experts]


def check_router(config: Any, kwargs: dict[str, Any], mesh: Mesh, *, is_inner: bool) -> None:
    """Raise `UnsupportedError` for a router loss that could not be replaced in the output.

    `is_inner`: Whether an inner model was called instead of the parallelized one, as `model.forward(...)` does. The
    outer model then computes its router loss from the tokens of a shard, after all hooks.
    """
    requested = kwargs.get("output_router_logits")
    if not (getattr(config, "output_router_logits", False) if requested is None else requested):
        return
    if mesh.size == 1:
        return
    if is_inner:
        what = "router logits of an inner model are those of a shard"
        next_step = "call the parallelized model itself, not its forward(); else pass output_router_logits=False"
        raise UnsupportedError(what, got="output_router_logits=True", next_step=next_step)
    if not kwargs.get("return_dict", getattr(config, "return_dict", True)):
        raise UnsupportedError("a router loss needs a dictionary output", got="return_dict=False", allowed=True)


def with_router_loss(
    model: Any,
    output: Any,
    mesh: Mesh,
    *,
    padding: Tensor | None = None,
    router_logits: Any = None,
    check: RouterCheck | None = None,
) -> Any:
    """Replace the router loss of a model's output, if it has one, by that over all ranks, also in the total loss.

    Args:
        model: The called model.
        output: Its output.
        mesh: The ranks of the sequence.
        padding: Which of this rank's tokens are padding, and do not count.
        router_logits: Those of the inner model, for an output without them, as of TRL's fused head.
        check: The check of the model's router loss. Default: a new one.
    """
    found = getattr(output, "aux_loss", None)
    if not isinstance(found, Tensor) or (mesh.size == 1 and padding is None):
        return output
    logits = getattr(output, "router_logits", None) or router_logits
    top_k: Any = getattr(model, "num_experts_per_tok", None)
    # The second name is JetMoe's.
    weight: Any = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))
    if (text := getattr(getattr(model, "config", None), "text_config", None)) is not None:  # of a model with images
        top_k, weight = (getattr(text, name, None) for name in ("num_experts_per_tok", "router_aux_loss_coef"))
    try:
        (check or RouterCheck()).run(model, found, logits, top_k, weight)
    except UnsupportedError as error:
        broadcast_error(mesh, error, found)  # rounding may differ: other ranks may wait for the sum
        raise
    part = router_loss(logits, top_k, mesh, padding)
    if output.loss is not None:
        output.loss = output.loss + weight * (part - found)
    output.aux_loss = part
    return output


class RouterCheck:
    """Checks that the router loss of a model is `router_loss`. One finite value shows it: a check waits for the device.

    Losses of another number of experts or layers are checked again.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, ...]] = set()

    def run(
        self, model: Any, found: Tensor, logits: Sequence[Tensor] | None, top_k: int | None, weight: float | None
    ) -> None:
        """Raise `UnsupportedError` if the loss is not `router_loss` of these tokens, or its weight is unknown."""
        got = "a model without a known weight of the loss or number of experts per token"
        if logits is None:
            got = "an output without router logits"
        elif top_k is not None and weight is not None:
            kind = (top_k, len(logits), logits[0].shape[-1])
            if kind in self._known:
                return
            with torch.no_grad():
                ours = router_loss(logits, top_k, Mesh.single())
            # Only the order of the sums may differ. A NaN comes from the model.
            if torch.allclose(ours, found.float(), rtol=1e-4, equal_nan=True):
                if found.isfinite():
                    self._known.add(kind)
                return
            got = f"{found.item():.6f} instead of {ours.item():.6f}"
        what = f"the router loss of {type(model).__name__} cannot be computed over ranks"
        raise UnsupportedError(what, got=got, next_step="pass output_router_logits=False")
