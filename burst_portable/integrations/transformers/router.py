"""The load-balancing loss of a mixture of experts, over the tokens of all ranks.

transformers computes it over the rows at hand: for each expert the share of choices that fell on it, times its mean
probability. That is a product of two means, so the ranks' values neither add up nor average to one device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burst_portable.checks import tell_the_others
from burst_portable.errors import UnsupportedError, explain
from burst_portable.gradients import sum_over_ranks
from burst_portable.mesh import Mesh

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
    counts = sum_over_ranks(counts, mesh)
    share, rows = counts[:experts] / counts[experts], counts[experts]
    return experts * (share * probability).sum() / rows


def check_router(config: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a router loss that could not be found in the output."""
    wanted = kwargs.get("output_router_logits")
    wanted = getattr(config, "output_router_logits", False) if wanted is None else wanted
    if wanted and not kwargs.get("return_dict", getattr(config, "return_dict", True)):
        raise UnsupportedError(explain("a router loss in a tuple", got="return_dict=False", allowed=True))


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
        tell_the_others(mesh, refusal, found)  # rounding may differ, and they would wait for the sum
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
        explain(
            f"the router loss of {type(model).__name__} is none that we can compute over ranks",
            got=got,
            next_step="pass output_router_logits=False",
        )
    )
