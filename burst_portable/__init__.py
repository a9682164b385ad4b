"""Exact attention over sequences that are sharded over ranks, on CUDA, ROCm, Ascend and CPU.

>>> import torch, burst_portable as bp
>>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
>>> bp.attention(q, k, v, mask="causal").shape
torch.Size([1, 128, 8, 64])

Importing this package does not import torch. A name imports its module at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {  # module of this package -> its public names
    "api": ("attention", "partial_attention"),
    "errors": ("BurstError",),
    "gradients": ("all_reduce", "all_reduce_gradients"),
    "layout": ("Layout", "Segment", "make_layout"),
    "mask": ("Mask", "Region"),
    "mesh": ("Mesh", "run_threads"),
    "numerics": ("merge_attention_states",),
    "profiling.session": ("profile",),
    "runtime.explanation": ("explain",),
    "runtime.mesh_plans": ("plan_for_mesh",),
    "sharding": ("local_position_ids", "shard", "shard_batch", "unshard"),
    "strategies.planner": ("plan",),
    "strategies.registry": ("make_strategy",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*sorted(_HOMES), "__version__"]

if TYPE_CHECKING:
    from burst_portable import nn as nn
    from burst_portable.api import attention as attention
    from burst_portable.api import partial_attention as partial_attention
    from burst_portable.errors import BurstError as BurstError
    from burst_portable.gradients import all_reduce as all_reduce
    from burst_portable.gradients import all_reduce_gradients as all_reduce_gradients
    from burst_portable.layout import Layout as Layout
    from burst_portable.layout import Segment as Segment
    from burst_portable.layout import make_layout as make_layout
    from burst_portable.mask import Mask as Mask
    from burst_portable.mask import Region as Region
    from burst_portable.mesh import Mesh as Mesh
    from burst_portable.mesh import run_threads as run_threads
    from burst_portable.numerics import merge_attention_states as merge_attention_states
    from burst_portable.profiling.session import profile as profile
    from burst_portable.runtime.explanation import explain as explain
    from burst_portable.runtime.mesh_plans import plan_for_mesh as plan_for_mesh
    from burst_portable.sharding import local_position_ids as local_position_ids
    from burst_portable.sharding import shard as shard
    from burst_portable.sharding import shard_batch as shard_batch
    from burst_portable.sharding import unshard as unshard
    from burst_portable.strategies.planner import plan as plan
    from burst_portable.strategies.registry import make_strategy as make_strategy

else:  # hidden from type checkers: __getattr__ would make every name valid

    def __getattr__(name: str) -> object:
        if name == "nn":
            return import_module(f"burst_portable.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'burst_portable' has no attribute {name!r}")
        # A global is found without another call of this function.
        found = globals()[name] = getattr(import_module(f"burst_portable.{_HOMES[name]}"), name)
        return found


def __dir__() -> list[str]:
    return __all__
