"""Which models can be sharded: those whose tokens meet in attention alone, and that say where a token stands."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from burst_portable.errors import InputError, UnsupportedError


def parameters_of(module: Any) -> list[str]:
    """The names that a module's forward takes, in order."""
    return list(inspect.signature(module.forward).parameters)


def takes(module: Any, name: str) -> bool:
    """Whether a module's forward takes an argument of that name, or any."""
    found = inspect.signature(module.forward).parameters
    return name in found or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse padding, caches, and counts of rows that mean the whole sequence."""
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask != 0).all())):
        raise UnsupportedError(
            "this attention_mask cannot be expressed",
            got="padding" if isinstance(mask, Tensor) and mask.dim() == 2 else type(mask).__name__,
            allowed="none, or [batch, tokens] without a zero",
            next_step="give the mask to handle.shard, or pack documents (see ShardedModel.shard)",
        )
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise UnsupportedError("a sharded model keeps no cache, so it cannot generate; elsewhere, pass use_cache=False")
    for name in ("encoder_hidden_states", "encoder_attention_mask"):
        if kwargs.get(name) is not None:
            raise UnsupportedError("cross attention, whose keys are another sequence", got=name)
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise UnsupportedError("logits_to_keep counts rows of a shard, not of the sequence", got=keep, allowed=0)
    if kwargs.get("output_attentions"):
        raise UnsupportedError("output_attentions: the weights are never made")


def check_no_document_lengths(kwargs: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for document lengths in transformers' names, which would count a shard's tokens."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if kwargs.get(name) is not None:
            next_step = "pass cu_seqlens= of the unsharded row to handle.shard"
            raise UnsupportedError("document lengths that count the tokens of a shard", got=name, next_step=next_step)


def checked_positions(given: Tensor | None, expected: Tensor, tokens: Tensor) -> Tensor:
    """The position ids ``[1 or B, S]``: those given, if they are this rank's."""
    if given is None:
        return expected.unsqueeze(0)
    fits = given.dim() == 2 and given.shape[0] in (1, tokens.shape[0]) and given.shape[1] == expected.shape[0]
    if not fits or not bool((given == expected).all()):
        raise InputError(
            "position_ids are not those of this rank's rows",
            got=f"{tuple(given.shape)}, from {given.flatten()[0].item()}" if given.numel() else "none",
            allowed=f"{expected.shape[0]} positions, from {expected[0].item()}",
            next_step="leave them out; packed documents are named with cu_seqlens=(0, end, ...)",
        )
    return given


HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def check_model(model: Any) -> None:
    """Raises `InputError` if this is no transformers model, `UnsupportedError` with the reason if we cannot run it."""
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            "parallelize takes a transformers model",
            got=type(model).__name__,
            next_step="unwrap it (DDP, PEFT, torch.compile) and wrap it again afterwards",
        )
    if reason := _why_not(model):
        raise UnsupportedError(f"{type(model).__name__} cannot be sharded", got=reason)


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
        return f"layers that are not attention: {', '.join(sorted(others))}"
    if not model._can_set_attn_implementation():
        return "an attention that does not go through transformers' AttentionInterface"
    if "position_ids" not in parameters_of(model):
        return "a forward without position_ids: a shard could not say where its tokens stand"
    if getattr(config, "trigram_input", False) or any(_mixes_rows(m) for m in model.modules()):
        return "tokens that meet outside attention, in a convolution or in embeddings of neighbours"
    if any(m.padding_idx is not None for name, m in model.named_modules() if _is_table_of_positions(name, m)):
        return "positions that are counted from its padding token, as in RoBERTa"
    if getattr(config, "output_attentions", False):
        return "output_attentions: the weights are never made"
    if not _rows_apart(model):
        return "a head or a pooler that reads single tokens of the sequence, which lie on one rank"
    return None


def _rows_apart(model: PreTrainedModel) -> bool:
    """Whether what comes after attention works on each token alone."""
    if model.base_model is model:
        return getattr(model, "pooler", None) is None
    return any(base.__name__.endswith(HEADS) for base in type(model).__mro__)


def _mixes_rows(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.kernel_size != (1,)


def _is_table_of_positions(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and "position" in name


def drops_layers(model: nn.Module) -> bool:
    """Whether there are modules that may leave layers out at random."""
    return any(hasattr(m, "layerdrop") for m in model.modules())


def check_layerdrop(model: Any) -> None:
    """Refuse to train with layers that are left out at random: ranks would leave out different ones."""
    if hardware := [m.layerdrop for m in model.modules() if m.training and getattr(m, "layerdrop", 0)]:
        raise UnsupportedError(
            "layers that are dropped at random, which each rank draws for itself",
            got=f"layerdrop={max(hardware)}",
            allowed=0,
            next_step="set layerdrop=0 in the config that the model is made from",
        )


def check_positions(config: Any, seq_len: int) -> None:
    """Refuse what depends on positions in a way that a shard would get wrong."""
    _check_rope(config, seq_len)
    scale = getattr(config, "floor_scale", None)
    # Llama 4 scales queries by their row number where it knows no position; 1 until that number reaches the scale.
    if scale is not None and getattr(config, "attn_temperature_tuning", False) and seq_len >= scale:
        raise UnsupportedError(
            "attention temperature by row number, which is another one on a shard",
            got=f"{seq_len} tokens",
            allowed=f"fewer than {scale}",
            next_step="or attn_temperature_tuning=False in the config",
        )


def _check_rope(config: Any, seq_len: int) -> None:
    """Refuse RoPE whose frequencies depend on the longest position at hand, which differs from rank to rank."""
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue
        own = getattr(config, "max_position_embeddings", None)
        trained = parameters.get("original_max_position_embeddings") or own or 0
        if seq_len > trained:
            raise UnsupportedError(
                f"RoPE of type {kind!r} follows the longest position at hand, which ranks do not share",
                got=f"{seq_len} tokens",
                allowed=f"at most {trained}",
            )


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The RoPE parameters of a config: one set, or one a type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters or "rope_theta" in parameters:
        yield parameters
    else:
        yield from (p for p in parameters.values() if isinstance(p, dict))
