"""Compare small vision-language models of transformers on several ranks with one device: loss, logits, gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from image_models import FAMILIES, batch, make
from model_trials import RANKS, Answer, Trial, allowed, apart, gradients
from torch import Tensor

from burst_portable import Mesh, run_threads
from burst_portable.integrations.transformers import all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.models.model_parts import text_model_of


def try_images(name: str) -> Trial:
    """Compare a family on all numbers of ranks and on its batches."""
    model, plain = make(name), FAMILIES[name].reference
    worst = 0.0
    for options in FAMILIES[name].batches:
        inputs = batch(name, model, **options)
        worst = max(worst, *(compare(model, inputs, ranks, plain) for ranks in RANKS))
    return Trial("equal" if worst <= allowed(plain) else "different", "", worst, plain)


def compare(model: Any, inputs: dict[str, Tensor], ranks: int, plain: str = "sdpa", **options: Any) -> float:
    """Return the largest relative difference of a full batch on several ranks from one device.

    Args:
        model: The model, which is copied.
        inputs: The batch.
        ranks: Number of ranks.
        plain: Attention of the text model on one device.
        **options: Options of `parallelize`.
    """
    token = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) != 0

    def answer(part: Any, mesh: Mesh | None = None) -> Answer:
        out = part(**copy.deepcopy(inputs))
        out.loss.backward()
        if mesh is not None:
            all_reduce_gradients(part.parameters(), mesh)
        return Answer(out.logits.detach()[token], out.loss.item(), gradients(part))

    def on_a_rank(mesh: Mesh) -> Answer:
        part = copies[mesh.rank]
        parallelize(part, mesh, full_batches=True, gather_outputs=True, **options)
        return answer(part, mesh)

    alone = copy.deepcopy(model)
    text_model_of(alone).set_attn_implementation(plain)
    expected = answer(alone)
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    return max(apart(found, expected) for found in run_threads(ranks, on_a_rank))
