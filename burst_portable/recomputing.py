"""Where torch's selective checkpointing ends: it saves or repeats single operators, attention is repeated whole."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils import _python_dispatch as modes

_NOTHING = nullcontext()


def hidden_from_checkpoints() -> AbstractContextManager[object]:
    """Inside, no policy of torch.utils.checkpoint's create_selective_checkpoint_contexts is asked.

    Such a policy hands out what it saved in place of a repeated operator. Here that would be wrong: partial results are
    merged into the results of operators, and messages arrive in them. In a region with such a policy, other modes
    (FlopCounterMode) see no operators of attention either.
    """
    if not torch._C._len_torch_dispatch_stack() or not any(map(_selects, modes._get_current_dispatch_mode_stack())):
        return _NOTHING
    hidden: AbstractContextManager[object] = modes._disable_current_modes()
    return hidden


def _selects(mode: object) -> bool:
    # Imported here, since `import torch` alone does not load it; if one of its modes is active, it is loaded.
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    return isinstance(mode, _CachedTorchDispatchMode | _CachingTorchDispatchMode)
