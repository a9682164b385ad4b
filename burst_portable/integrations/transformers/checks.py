"""Which models can be sharded: those whose tokens meet in attention alone, and that say where a token stands."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from burst_portable.errors import InputError, UnsupportedError, explain

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def check_model(model: Any) -> None:
    """Raises `InputError` for what is no transformers model, `UnsupportedError` with the reason for one we cannot."""
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            explain(
                "parallelize takes a transformers model",
                got=type(model).__name__,
                next_step="unwrap it (DDP, PEFT, torch.compile) and wrap it again afterwards",
            )
        )
    if reason := _why_not(model):
        raise UnsupportedError(explain(f"{type(model).__name__} cannot be sharded", got=reason))


def _why_not(model: PreTrainedModel) -> str | None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder and a decoder, whose cross attention has keys of another sequence"
    if config.sub_configs or config.get_text_config() is not config:
        return f"a model of several parts ({', '.join(config.sub_configs)}); pass its language model"
    # The flag of models that carry a state along the sequence (Mamba, RWKV, hybrids): their scan would start anew
    # on every shard.
    if getattr(model, "_is_stateful", False):
        return "a state that runs along the sequence, beside attention"
    if others := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        return f"layers that are no attention: {', '.join(sorted(others))}"
    if not model._can_set_attn_implementation():
        return "an attention that does not go through transformers' AttentionInterface"
    if "position_ids" not in parameters_of(model):
        return "a forward without position_ids: a shard could not say where its tokens stand"
    if getattr(config, "output_attentions", False):
        return "output_attentions: the weights are never made"
    if getattr(config, "output_router_logits", False):
        return "a router loss, which is a mean over the tokens of one rank; set output_router_logits=False"
    return None


def parameters_of(module: Any) -> list[str]:
    """The names that a module's forward takes, in order."""
    return list(inspect.signature(module.forward).parameters)


def check_rope(config: Any, seq_len: int) -> None:
    """Refuse RoPE whose frequencies depend on the longest position at hand, which differs from rank to rank."""
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue
        trained = parameters.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", 0)
        if seq_len > trained:
            raise UnsupportedError(
                explain(
                    f"RoPE of type {kind!r} follows the longest position at hand, which ranks do not share",
                    got=f"{seq_len} tokens",
                    allowed=f"at most {trained}",
                )
            )


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The RoPE parameters of a config: one set, or one a type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters or "rope_theta" in parameters:
        yield parameters
    else:
        yield from (p for p in parameters.values() if isinstance(p, dict))
