"""Mark the arguments of a shard, so that a model which is not parallelized raises an error for them.

Such a model would compute with this rank's tokens as if they were the full sequence. Transformers ignores unknown
arguments (`seq_len`), but every model with attention reads its attention mask.
"""

from __future__ import annotations

from typing import NoReturn

from burst_portable.errors import InputError


class ShardReadError(InputError, AttributeError):
    """A model that is not parallelized reads the mask of a shard. For `hasattr`, the mask has no such attribute."""


class ShardMark:
    """Attention mask of a shard. A parallelized model replaces it; any use of it raises `ShardReadError`."""

    def __repr__(self) -> str:
        return "ShardMark()"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise `ShardReadError`: a model uses this mask as a tensor."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise ShardReadError(
            "this shard reached a model that is not parallelized, which would take it for the full sequence",
            got=f"attention_mask.{name}",
            next_step="call the model that was passed to parallelize(), before undo() and outside paused(); pass full "
            "batches to other models; for prompts of PEFT, which add tokens, parallelize with full_batches=True",
        )
