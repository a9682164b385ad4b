"""Where torch's selective checkpointing ends: it saves or repeats single operators, and attention is repeated whole."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils import _python_dispatch as modes

_NOTHING = nullcontext()


def hidden_from_checkpoints() -> AbstractContextManager[object]:
    """Inside, no policy of torch.utils.checkpoint's create_selective_checkpoint_contexts is asked.

    What it saves it hands out again in the place of a repeated operator, and here partial results are merged into what
    operators made, and messages arrive in it. Other modes (FlopCounterMode) see no operators either in such a region.
    """
    if not torch._C._len_torch_dispatch_stack() or not any(map(_selects, modes._get_current_dispatch_mode_stack())):
        return _NOTHING
    hidden: AbstractContextManager[object] = modes._disable_current_modes()
    return hidden


def _selects(mode: object) -> bool:
    # Asked for here, since `import torch` alone does not load it: it is there where one of its modes is.
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    return isinstance(mode, _CachedTorchDispatchMode | _CachingTorchDispatchMode)
