"""Check whether a model can be sharded: tokens interact only in attention, and position ids can be passed."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from burst_portable.errors import InputError, UnsupportedError, format_error
from burst_portable.integrations.transformers.models.model_parts import (
    HEADS,
    has_head,
    has_tokenwise_head,
    part_below_head,
    text_model_of,
)
from burst_portable.integrations.transformers.models.padding_positions import has_unknown_positions, padding_indices
from burst_portable.integrations.transformers.models.recurrent_layers import RECURRENT_TYPES, recurrent_layers
from burst_portable.integrations.transformers.models.signatures import parameters_of
from burst_portable.integrations.transformers.models.token_mixing import token_mixing_module
from burst_portable.integrations.versions import check_version
from burst_portable.mesh import Mesh

_READS_SINGLE_TOKENS = "a head or a pooler that reads single tokens, which only one rank has"
_UNKNOWN_HEAD = "an own forward around another model, which may read other tokens than those of this rank"
_COUNTS_PADDING = "embeddings of positions that depend on padding otherwise than RoBERTa's, or without pad_token_id"
_SCALES_BY_ROW = "token_dropout in other models than ESM's encoders, which scales embeddings by masked tokens of a row"
LAYER_TYPES = {"attention", "full_attention", "sliding_attention", "chunked_attention"}


def check_model(model: Any, *, full_batches: bool = False) -> None:
    """Raise an error if a model cannot be sharded.

    Args:
        model: The model.
        full_batches: Whether calls take full batches, which models of several parts need.

    Raises:
        InputError: If it is not a Transformers model.
        UnsupportedError: If it, or the version of Transformers, is not supported; the message contains the reason.
    """
    # Earlier versions of ESM count positions from the first token of a shard. Mask functions before 5.4 are others.
    check_version("transformers", "5.6", "6", extra="transformers")
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            "parallelize needs a transformers model",
            got=type(model).__name__,
            next_step="pass the model first: parallelize(model, mesh)"
            if isinstance(model, Mesh | ProcessGroup | DeviceMesh)
            else "pass the model before it is wrapped (DDP, torch.compile); of PEFT, pass model.get_base_model()",
        )
    if reason := _unsupported_reason(model, full_batches=full_batches):
        next_step = None
        if reason in (_READS_SINGLE_TOKENS, _UNKNOWN_HEAD) and (part := part_below_head(model)) is not model:
            name = next(name for name, module in model.named_modules() if module is part)
            name = "base_model" if part is model.base_model else name
            next_step = "use a trainer of burst_portable.integrations, which shards the base model of a classifier; or "
            next_step += f"parallelize(model.{name}, mesh, full_batches=True, averaged_gradients=True)"
            if reason == _UNKNOWN_HEAD:
                next_step += f"; or end the name of a class whose head works token by token with {' or '.join(HEADS)}"
        elif reason == _READS_SINGLE_TOKENS:
            next_step = "create the model without a pooler, if it allows that (add_pooling_layer=False)"
        elif reason == _SCALES_BY_ROW:
            next_step = "create the model with token_dropout=False, which changes results of models trained with it"
        elif getattr(model, "_is_stateful", False):
            next_step = "docs/hugging_face.md, 'Recurrent layers', lists the layers that continue from rank to rank"
        raise UnsupportedError(f"{type(model).__name__} cannot be sharded", got=reason, next_step=next_step)


def _unsupported_reason(model: PreTrainedModel, *, full_batches: bool = False) -> str | None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder and a decoder, with cross attention to another sequence"
    if any(getattr(config, name, None) is not None for name in config.sub_configs) or (
        config.get_text_config() is not config
    ):
        return _unsupported_part(model, full_batches=full_batches)
    layer_types = set(getattr(config, "layer_types", None) or ())
    continued = {id(part) for layer in recurrent_layers(model) for part in layer.modules()}
    unknown = layer_types - LAYER_TYPES - (RECURRENT_TYPES if continued else set())
    # Models with a recurrent state (Mamba, RWKV, hybrids) have this flag: their scan would restart on every shard.
    if getattr(model, "_is_stateful", False) and (unknown or not (layer_types or continued)):
        return "a recurrent state along the sequence"
    if unknown:
        return f"layers that are not attention: {', '.join(sorted(unknown))}"
    if not model._can_set_attn_implementation():
        return "an attention that does not go through transformers' AttentionInterface"
    if "position_ids" not in parameters_of(model):
        return "a forward without position_ids, which every shard needs"
    if getattr(config, "trigram_input", False):
        return "tokens that interact outside attention, in embeddings of neighbors"
    if (found := token_mixing_module(model, continued)) is not None:
        return f"tokens that interact outside attention, in {found}"
    if has_unknown_positions(model):
        return _COUNTS_PADDING
    # Padding of an encoder becomes a document. That of a decoder would count as tokens.
    if getattr(config, "token_dropout", False) and (
        getattr(config, "is_decoder", False) or not any(map(can_drop_tokens, model.modules()))
    ):
        return _SCALES_BY_ROW
    if getattr(config, "output_attentions", False):
        return "output_attentions, but attention weights are never computed"
    if not has_tokenwise_head(model):
        return _UNKNOWN_HEAD if model.base_model is model and has_head(model) else _READS_SINGLE_TOKENS
    return None


def _unsupported_part(model: PreTrainedModel, *, full_batches: bool) -> str | None:
    """Return why a model of several parts, for example a vision-language model, is not supported."""
    parts = f"a model of several parts ({', '.join(model.config.sub_configs)})"
    text = text_model_of(model)
    if text is model or not has_head(model):
        return f"{parts}; pass its language model"
    if recurrent_layers(text):
        return f"{parts}, of which {type(text).__name__} is not supported: recurrent layers within several parts"
    if padding_indices(text):
        return f"{parts}, of which {type(text).__name__} is not supported: positions that count from its padding token"
    if reason := _unsupported_reason(text):
        return f"{parts}, of which {type(text).__name__} is not supported: {reason}"
    return None if full_batches else f"{parts}; pass full_batches=True, or its language model"


def can_drop_tokens(module: nn.Module) -> bool:
    """Return whether embeddings may depend on the masked tokens of a row in the way of ESM-2 (see `token_dropout`)."""
    return type(module).__name__ == "EsmEmbeddings"


def drops_layers(model: nn.Module) -> bool:
    """Return whether a module may skip layers at random."""
    return any(hasattr(m, "layerdrop") for m in model.modules())


def check_layerdrop(model: Any) -> None:
    """Raise `UnsupportedError` if layers are skipped at random in training: ranks would skip different ones."""
    if rates := [m.layerdrop for m in model.modules() if m.training and getattr(m, "layerdrop", 0)]:
        raise UnsupportedError(
            "layerdrop is not supported: each rank would skip different layers",
            got=f"layerdrop={max(rates)}",
            allowed=0,
            next_step="set layerdrop=0 in the model's config before creating it",
        )


def keeps_activations(model: nn.Module) -> str | None:
    """Return a warning if layers are to be recomputed in the backward pass, but the model is in evaluation mode."""
    if model.training or not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return None
    return format_error(
        "gradient checkpointing has no effect in evaluation mode, so all activations stay in memory",
        got="model.training=False, and gradients are enabled",
        next_step="call model.train() before training, or disable gradients (torch.no_grad) for evaluation",
    )
