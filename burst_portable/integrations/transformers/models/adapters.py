"""Check adapters of PEFT in a parallelized model: most change each token alone, and some do not.

`get_peft_model` gives the configurations of its adapters to the model. PEFT's prompts are not among them: they add
tokens to the embeddings of a call, which full batches may have.
"""

from __future__ import annotations

from typing import Any

from burst_portable.errors import UnsupportedError


def reads_logits(model: Any) -> bool:
    """Return whether a model of PEFT computes its loss from the logits of calls with labels, as context-aware prompts.

    With full batches, such calls must return the logits (`gather_outputs=True`).
    """
    configs = getattr(model, "peft_config", None) or {}
    return any(getattr(config.peft_type, "value", config.peft_type) == "CPT" for config in configs.values())


def check_adapters(model: Any, *, ranks: int, full_batches: bool) -> None:
    """Raise `UnsupportedError` for an adapter with which ranks of a sequence would not compute one device's results.

    Args:
        model: The parallelized model.
        ranks: Number of ranks that share a sequence.
        full_batches: Whether its calls take full batches.
    """
    if (configs := getattr(model, "peft_config", None)) is None:
        return
    # An adapter of the model's own `add_adapter` has no model of PEFT around it, which calls forward and adds a norm.
    calls_forward = not getattr(model, "_hf_peft_config_loaded", False)
    for config in configs.values():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind == "ADALORA" and full_batches and calls_forward:
            what = "AdaLoRA calls forward() of the model, which then does not divide full batches"
            next_step = "use LoRA; or divide batches by ShardedModel.shard, with orth_reg_weight=0"
            raise UnsupportedError(what, got="full_batches=True", next_step=next_step)
        if ranks == 1:
            continue
        weight = getattr(config, "orth_reg_weight", 0)
        if kind == "ADALORA" and weight and calls_forward:
            raise UnsupportedError(
                "AdaLoRA adds a norm of its weights to the loss of a shard, so that it counts once per rank",
                got=f"orth_reg_weight={weight}",
                allowed=0,
                next_step="use LoRA; or set orth_reg_weight=0, and add the term divided by the number of ranks",
            )
        if kind == "LILY":
            what = "this adapter averages its router over all tokens of a call, and a shard has a part of them"
            raise UnsupportedError(what, got=kind, next_step="use LoRA")
        if getattr(config, "alora_invocation_tokens", None):
            what = "an activated LoRA starts at certain tokens of a row, which a shard may not have"
            raise UnsupportedError(what, got="alora_invocation_tokens", next_step="use LoRA without them")
