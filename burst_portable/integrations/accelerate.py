"""Shard sequences under accelerate and Transformers' Trainer: a `ParallelismConfig` whose mesh has such an axis.

The ranks of a sequence get the same rows and call the model with full batches (`parallelize(full_batches=True)`). To
the frameworks they are replicas of a data-parallel rank: counts of tokens, scaled losses and averaged gradients are
then those of fewer, larger devices. `cp_size` and `cp_enabled` therefore describe accelerate's own context parallelism,
which stays off. It would remove our masks and divide counts of tokens by its number of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from burst_portable.config import launched_processes
from burst_portable.errors import InputError
from burst_portable.integrations.accelerator_check import ON_CPUS, check_accelerator
from burst_portable.integrations.batch_norms import batch_norms, synchronize_calls
from burst_portable.integrations.gathering import gather_rows, warn_about_gathering
from burst_portable.integrations.schedulers import warn_about_schedulers
from burst_portable.integrations.transformers.models.adapters import check_adapters, reads_logits
from burst_portable.integrations.transformers.models.model_parts import part_below_head
from burst_portable.integrations.transformers.parallel import parallelize
from burst_portable.integrations.transformers.sharded_model import ShardedModel, sharded_model_of
from burst_portable.integrations.versions import check_version, importing
from burst_portable.mesh import Mesh

with importing("accelerate", "burst-portable[transformers]"):
    from accelerate import Accelerator, ParallelismConfig
    from transformers import PreTrainedModel

AXIS = "cp"
"""Name of the mesh axis. accelerate's data loaders give equal rows to ranks that differ only along it."""


class SequenceParallelism(ParallelismConfig):  # type: ignore[misc]  # accelerate's names are Any
    """The `parallelism_config` of an `Accelerator` or of `TrainingArguments`, for sequences sharded over ranks.

    Pass it to `TrainingArguments`, and use `SequenceTrainer`. With an `Accelerator`, call `parallelize` before
    ``accelerator.prepare``. A batch must be equal on the ranks of a sequence, as from accelerate's data loaders. DDP
    or FSDP2 average gradients over all ranks.

    Args:
        cp_size: Number of ranks that share a sequence. Default: all that the data-parallel sizes leave. Afterwards
            `sequence_size` has it, and `cp_size`, accelerate's own context parallelism, is 1.
        dp_replicate_size: Number of replicas. Default: all that the other sizes leave.
        dp_shard_size: Number of data-parallel ranks over which FSDP2 shards, in addition to those of a sequence.
        strategy: As in `parallelize`.
        layout: As in `parallelize`.
        kernel: As in `parallelize`.

    Attributes:
        sequence_size: Number of ranks that share a sequence. None: not determined yet.
        has_model: Whether a model is sharded, or will be by a trainer.
        gathers_rows: Whether `gather_for_metrics` is used, or a trainer gathers rows itself.
    """

    def __init__(
        self,
        cp_size: int | None = None,
        *,
        dp_replicate_size: int | None = None,
        dp_shard_size: int = 1,
        strategy: Any = "auto",
        layout: str | None = None,
        kernel: str = "auto",
    ) -> None:
        check_version("accelerate", "1.12", "2", extra="transformers")
        self.sequence_size, self._replicas = cp_size, dp_replicate_size
        self.has_model = self.gathers_rows = False
        self._counts_every_rank = False
        self._mesh: Mesh | None = None  # one for all models, which then share its connections
        self._sequences: dist.ProcessGroup | None = None  # the ranks with the same part of different sequences
        self._accelerator: Any = None  # a weak reference
        self._options = {"strategy": strategy, "layout": layout, "kernel": kernel, "averaged_gradients": True}
        for name, value in (("cp_size", cp_size), ("dp_replicate_size", dp_replicate_size)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be positive", got=value)
        super().__init__(
            dp_replicate_size=dp_replicate_size or 1, dp_shard_size=dp_shard_size, tp_size=1, cp_size=1, sp_size=1
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the mesh, the group and the accelerator, which cannot be saved with `TrainingArguments`."""
        return self.__dict__ | {"device_mesh": None, "_mesh": None, "_sequences": None, "_accelerator": None}

    @property
    def cp_enabled(self) -> bool:
        """Return False: accelerate's own context parallelism stays off. `prepare` and Trainer read it first.

        Raises:
            InputError: If no model was parallelized yet. The ranks of a sequence would then compute the same.
        """
        if self.device_mesh is not None and self.non_data_parallel_size > 1 and not self.has_model:
            next_step = "use SequenceTrainer (integrations.trainer) or one of burst_portable.integrations.trl, not "
            next_step += "Trainer; with an Accelerator, call parallelize(model) of this object before prepare"
            raise InputError("no model is sharded by this SequenceParallelism", next_step=next_step)
        return False

    @property
    def total_size(self) -> int:
        return int(self.dp_replicate_size * self.dp_shard_size * (self.sequence_size or 1))

    @property
    def non_data_parallel_size(self) -> int:
        return 1 if self._counts_every_rank else self.sequence_size or 1

    @contextmanager
    def counting_every_rank(self) -> Iterator[None]:
        """Report no ranks that share a sequence, so that code of transformers divides no count by their number."""
        before, self._counts_every_rank = self._counts_every_rank, True
        try:
            yield
        finally:
            self._counts_every_rank = before

    @property
    def non_dp_dim_names(self) -> list[str]:
        return [AXIS] if self.non_data_parallel_size > 1 else []

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return [*super().dp_shard_cp_dim_names, *self.non_dp_dim_names]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [*super().dp_cp_dim_names, *self.non_dp_dim_names]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return the mesh of all processes, with the joint axes that FSDP2 uses. None for one process.

        Raises:
            InputError: If the sizes do not fit the number of processes.
        """
        processes = dist.get_world_size() if dist.is_initialized() else 1
        self._fit_sizes(processes)
        if processes == 1:
            return None
        sizes = {"dp_replicate": self.dp_replicate_size, "dp_shard": self.dp_shard_size, AXIS: self.sequence_size}
        names = tuple(name for name, n in sizes.items() if n > 1)
        mesh = init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, axes in joint.items():
            if axes:
                mesh[tuple(axes)]._flatten(name)
        return mesh

    def _fit_sizes(self, processes: int) -> None:
        """Determine sizes that were not given."""
        if self.sequence_size is None:
            self.sequence_size = max(1, processes // (self.dp_replicate_size * self.dp_shard_size))
        if self._replicas is None:
            self._set_size("dp_replicate", max(1, processes // (self.dp_shard_size * self.sequence_size)))
        if self.total_size != processes:
            got = f"cp_size={self.sequence_size}, dp_replicate_size={self.dp_replicate_size}, dp_shard_size="
            raise InputError(
                "the product of the sizes must be the number of processes",
                got=f"{got}{self.dp_shard_size} for {processes} processes",
                next_step=f"start with torchrun or accelerate launch; {ON_CPUS}",
            )

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Check that gradients will be averaged over all ranks. Accelerate calls it."""
        check_accelerator(accelerator, self)
        self._accelerator, self.has_model = weakref.ref(accelerator), False  # a Trainer sums an older model twice

    def parallelize(self, model: nn.Module, *, gather_outputs: bool | None = None) -> ShardedModel:
        """Shard the sequences of a model. Call it on all ranks, after the `Accelerator` was created.

        A model of an earlier `SequenceParallelism`, as that of an earlier trainer, follows this one from now on.

        Args:
            model: A Transformers model, one with adapters of PEFT, or a module around it. Its calls take full batches:
                see `transformers.parallelize`. Of a classifier, the base model is sharded. Each `SyncBatchNorm` counts
                a sequence once, unless the program set its group.
            gather_outputs: As in `transformers.parallelize`. Default: with labels as well if an adapter reads logits.

        Raises:
            InputError: If no accelerator has this configuration, or there is no Transformers model.
        """
        processes = dist.get_world_size() if dist.is_initialized() else launched_processes()
        if self._accelerator is None and self.device_mesh is None and processes > 1:
            next_step = "create Accelerator(parallelism_config=...) or the trainer first; a process has one config"
            raise InputError("no accelerator has this SequenceParallelism yet", next_step=next_step)
        if self._mesh is None and self.device_mesh is not None and self.non_data_parallel_size > 1:
            self._mesh = Mesh.from_device_mesh(self.device_mesh, AXIS)
        elif self._mesh is None and dist.is_initialized():
            self._mesh = Mesh.single()  # otherwise `parallelize` raises if torchrun started several processes
        if (inner := next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)) is None:
            raise InputError("SequenceParallelism needs a model of Transformers", got=type(model).__name__)
        check_adapters(inner, ranks=self.non_data_parallel_size, full_batches=True)
        inner = part_below_head(inner)
        self.has_model = True
        if gather_outputs is None and reads_logits(model):
            gather_outputs = True
        if (earlier := sharded_model_of(inner)) is not None and earlier.averaged_gradients:
            earlier.undo()
        sharded = parallelize(inner, self._mesh, full_batches=True, gather_outputs=gather_outputs, **self._options)
        if sharded.mesh.size > 1 and batch_norms(model):
            synchronize_calls(model, self._group_of_sequences(), lambda: sharded.is_sharded)
        if self._accelerator is not None:
            warn_about_schedulers(inner, self._accelerator, lambda: (self.total_size, self.non_data_parallel_size))
            warn_about_gathering(inner, self._accelerator, self)
        return sharded

    def _group_of_sequences(self) -> dist.ProcessGroup:
        """Return the group of the ranks that have the same part of different sequences."""
        if self._sequences is None and self.dp_dim_names:
            self._sequences = self.device_mesh["dp"].get_group()
        elif self._sequences is None:  # one sequence
            self._sequences = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return self._sequences

    def gather_for_metrics(self, data: Any) -> Any:
        """Return the rows of all sequences, each once and on every rank, in place of accelerate's function.

        Args:
            data: Tensors ``[rows, ...]``, also in tuples, lists and dictionaries, or a list of one object per row.
        """
        self.gathers_rows = True
        return gather_rows(self._accelerator and self._accelerator(), data, self.non_data_parallel_size)
