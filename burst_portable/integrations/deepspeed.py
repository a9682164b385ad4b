"""DeepSpeed's ZeRO for ranks that share sequences: the `mpu` argument of `deepspeed.initialize`.

DeepSpeed reads from this object which rows a rank gets: the ranks of a sequence get the same ones. It averages
gradients over all ranks, and partitions parameters, gradients and optimizer states over them. The model divides the
rows in its forward pass (`parallelize(full_batches=True)`).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from burst_portable.errors import InputError
from burst_portable.integrations.transformers.models.model_parts import part_below_head
from burst_portable.integrations.transformers.parallel import parallelize
from burst_portable.integrations.transformers.sharded_model import ShardedModel
from burst_portable.integrations.versions import check_version, importing
from burst_portable.mesh import Mesh

with importing("deepspeed", "deepspeed>=0.19,<0.20"):
    import deepspeed
    from transformers import PreTrainedModel


class SequenceUnit:
    """The `mpu` of `deepspeed.initialize` that shards each sequence: ``mpu=SequenceUnit(model, cp_size=4)``.

    Create it on all ranks right before that call. DeepSpeed's process group is created if there is none. The loss of
    ``engine(**batch)`` is that of one device.

    Args:
        model: A Transformers model, or one with adapters of PEFT. It is sharded in place: of a classifier, its base
            model.
        cp_size: Number of ranks that share a sequence. Default: all.
        strategy: As in `parallelize`.
        layout: As in `parallelize`.
        kernel: As in `parallelize`.

    Attributes:
        sharded: The result of `parallelize`.

    Raises:
        UnsupportedError: If the version of DeepSpeed is not supported, or the model cannot be sharded.
        InputError: If the number of processes is not a multiple of `cp_size`, or there is no Transformers model.
    """

    def __init__(
        self,
        model: nn.Module,
        cp_size: int | None = None,
        *,
        strategy: Any = "auto",
        layout: str | None = None,
        kernel: str = "auto",
    ) -> None:
        check_version("deepspeed", "0.19", "0.20")
        if not dist.is_initialized():
            deepspeed.init_distributed()
        ranks = dist.get_world_size()
        cp_size = ranks if cp_size is None else cp_size
        if cp_size < 1 or ranks % cp_size:
            got = f"cp_size={cp_size} for {ranks} processes"
            raise InputError("the number of processes must be a multiple of cp_size", got=got)
        found = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
        if found is None:
            raise InputError("SequenceUnit needs a model of Transformers", got=type(model).__name__)
        device_type = deepspeed.get_accelerator().device_name()
        shape, names = (ranks // cp_size, cp_size, 1), ("data", "sequence", "model")
        self._axes: DeviceMesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        mesh = Mesh.from_device_mesh(self._axes, "sequence")
        options: Any = {"strategy": strategy, "layout": layout, "kernel": kernel}
        part = part_below_head(found)
        self.sharded: ShardedModel = parallelize(part, mesh, full_batches=True, averaged_gradients=True, **options)

    # ----------------------------------------------------------------------------------------- the rows of a rank

    def get_data_parallel_rank(self) -> int:
        return self._axes.get_local_rank("data")

    def get_data_parallel_world_size(self) -> int:
        return self._axes["data"].size()

    # ---------------------------------------------------- the ranks that average gradients and partition parameters
    # DeepSpeed's own sequence-parallel axis stays off: with it, stage 3 does not add the gradients of a sequence.

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(range(dist.get_world_size()))

    def get_sequence_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    # ------------------------------------------------------------------------------- model parallelism, which is off

    def get_model_parallel_group(self) -> Any:
        return self._axes.get_group("model")

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1
