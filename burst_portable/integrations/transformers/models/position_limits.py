"""Read how a model uses positions, and check that a sequence is not too long for that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from burst_portable.errors import UnsupportedError, format_error

LONGER_CONTEXT = (
    "set a larger max_position_embeddings in the config, with a fixed RoPE scaling (linear, yarn or llama3); "
    "docs/hugging_face.md, 'Longer contexts', has an example"
)
"""What to do if a sequence is longer than the positions of a model."""
LENGTH_ROPE = ("dynamic", "longrope")
"""Types of RoPE whose frequencies depend on the largest position id."""


def check_positions(config: Any, seq_len: int, *, watched: bool = False) -> None:
    """Raise `UnsupportedError` if the model uses positions in a way that gives other results on a shard.

    `watched`: Whether `global_positions` found the modules that do so, and changed them.
    """
    if watched:
        return
    _check_rope(config, seq_len)
    scale = getattr(config, "floor_scale", None)
    # Llama 4 scales queries by their row number in layers without RoPE. The factor is 1 below `floor_scale`.
    if scale is not None and getattr(config, "attn_temperature_tuning", False) and seq_len >= scale:
        raise UnsupportedError(
            "attention temperature depends on the row number, which differs on a shard",
            got=f"{seq_len} tokens",
            allowed=f"fewer than {scale}",
            next_step="or set attn_temperature_tuning=False in the config",
        )


def _check_rope(config: Any, seq_len: int) -> None:
    """Raise `UnsupportedError` if RoPE frequencies depend on the largest position id, which differs between ranks."""
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", "default")
        if kind not in LENGTH_ROPE:
            continue
        longest = getattr(config, "max_position_embeddings", None)
        trained = parameters.get("original_max_position_embeddings") or longest or 0
        if seq_len > trained:
            raise UnsupportedError(
                f"RoPE of type {kind!r} depends on the largest position id, which differs between ranks",
                got=f"{seq_len} tokens",
                allowed=f"at most {trained}",
                next_step=LONGER_CONTEXT,
            )


def takes_shifted_rows(config: Any) -> bool:
    """Return whether a model computes the same if tokens move within their row and keep their position ids.

    Models without RoPE may count positions from the attention mask (OPT). Chunks and Llama 4's scales count rows.
    """
    chunks = getattr(config, "attention_chunk_size", None)
    return any(_rope_parameters(config)) and not chunks and not getattr(config, "attn_temperature_tuning", False)


def longer_than_trained(config: Any, length: int) -> str | None:
    """Return a warning if a document is longer than the positions of a model with RoPE, which computes without them."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None or length <= longest or not any(_rope_parameters(config)):
        return None
    return format_error(
        "a document is longer than the model's max_position_embeddings, and RoPE extrapolates",
        got=f"{length} tokens",
        allowed=f"at most {longest}",
        next_step=LONGER_CONTEXT,
    )


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the RoPE parameters of a config: one set, or one per type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters or "rope_theta" in parameters:
        yield parameters
    else:
        yield from (p for p in parameters.values() if isinstance(p, dict))
