"""Check whether an `Accelerator` averages the gradients of all ranks, as `SequenceParallelism` needs."""

from __future__ import annotations

from typing import Any

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.versions import importing

with importing("accelerate", "burst-portable[transformers]"):
    from accelerate.utils import DistributedType

ON_CPUS = "without accelerators, pass use_cpu=True to TrainingArguments, or cpu=True to Accelerator"


def check_accelerator(accelerator: Any, config: Any) -> None:
    """Raise an error if an `Accelerator` does not fit its `SequenceParallelism`.

    Raises:
        InputError: If it uses a part of the processes.
        UnsupportedError: If it wraps models in another way than DDP or FSDP2, or shards them in another way as well.
    """
    if config.tp_size > 1 or config.cp_size > 1 or config.sp_size > 1:
        sizes = f"tp_size={config.tp_size}, cp_size={config.cp_size}, sp_size={config.sp_size}"
        raise UnsupportedError(
            "SequenceParallelism with another model parallelism", got=sizes, next_step="leave these sizes at 1"
        )
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) or (
        kind == DistributedType.FSDP and not accelerator.is_fsdp2
    ):
        got = "FSDP version 1" if kind == DistributedType.FSDP else kind.value
        raise UnsupportedError("SequenceParallelism needs DDP or FSDP2", got=got, allowed="DDP, FSDP version 2")
    if accelerator.num_processes != config.total_size:
        got, allowed = accelerator.num_processes, config.total_size
        raise InputError("accelerate uses a part of the processes", got=got, allowed=allowed, next_step=ON_CPUS)
