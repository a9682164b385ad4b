"""Scale embeddings by the masked tokens of the unsharded document, as ESM-2 does with `token_dropout`.

Such a model sets embeddings of masked tokens to zero, and multiplies all embeddings by a factor. This is the share
of tokens that were not masked in its training, divided by that share in the row. A shard has some of the masked tokens,
so the ranks add their counts. The model's own scale is disabled. Each packed document has a share, as if it was alone.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.gradients import all_reduce
from burst_portable.integrations.transformers.attention import ATTRIBUTE
from burst_portable.integrations.transformers.batches.divider import on_device
from burst_portable.integrations.transformers.layers.disabled_flag import DisabledFlag
from burst_portable.integrations.transformers.models.checks import can_drop_tokens
from burst_portable.sharding import local_position_ids
from burst_portable.utils.torch_modes import never_compiled

_DROPOUT = DisabledFlag("token_dropout", "_burst_drops_tokens")
_KEPT = 1 - 0.15 * 0.8
"""Share of tokens that are not masked in the training of all ESM models. `EsmEmbeddings` has it as a number too."""


def watch_token_dropout(model: nn.Module) -> list[Any]:
    """Replace the scale of embeddings that drop masked tokens. Return the hooks."""
    hooks: list[Any] = []
    module: Any
    for module in model.modules():
        if can_drop_tokens(module) and module.token_dropout:
            _DROPOUT.disable(module)
            words = module.word_embeddings
            hooks.append(module.register_forward_pre_hook(partial(_check, words)))
            hooks.append(words.register_forward_hook(partial(_scale, module)))
    return hooks


def restore_token_dropout(model: nn.Module) -> None:
    """Restore the modules that `watch_token_dropout` changed, apart from the hooks."""
    _DROPOUT.restore(model)


def _check(words: nn.Module, module: Any, args: Any) -> None:
    """Raise `UnsupportedError` if word embeddings are others than those with the hook (pre-hook)."""
    if module.word_embeddings is not words:
        what, got = "word embeddings were replaced after parallelize", type(module.word_embeddings).__name__
        next_step = "call undo() of the sharded model, and parallelize it again"
        raise UnsupportedError(what, got=got, next_step=next_step)


@never_compiled("messages are not a part of the graph")
def _scale(module: Any, words: nn.Module, args: tuple[Tensor], embeddings: Tensor) -> Tensor:
    """Return the scaled embeddings of this rank's tokens ``[B, S, H]`` (hook of the word embeddings)."""
    state = getattr(module, ATTRIBUTE)
    call = state.call
    if call is None:
        raise InputError("embeddings ran outside their model's forward: call the model that was parallelized")
    ids = args[0]
    ends = call.cu_seqlens or (0, call.seq_len)
    places = local_position_ids(state.mesh, seq_len=call.seq_len, layout=call.layout, device=ids.device)
    document = torch.searchsorted(on_device(ends[:-1], ids.device), places, right=True) - 1
    is_masked = ids == module.mask_token_id
    counts = torch.zeros(len(ids), len(ends) - 1, dtype=torch.float32, device=ids.device)
    counts = all_reduce(counts.index_add_(1, document, is_masked.float()), state.mesh)
    lengths = on_device(tuple(stop - start for start, stop in pairwise(ends)), ids.device)
    masked = (counts / lengths)[:, document].unsqueeze(-1)
    scaled = embeddings.masked_fill(is_masked.unsqueeze(-1), 0.0) * _KEPT / (1 - masked)
    return scaled.to(embeddings.dtype)
