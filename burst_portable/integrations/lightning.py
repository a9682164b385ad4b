"""Strategies of Lightning for ranks that share sequences: one argument of its Trainer.

The ranks of a sequence get the same rows, and models of Transformers divide them in their forward pass
(`parallelize(full_batches=True)`). To Lightning they are copies of one data-parallel rank. Losses, logged values,
accumulation and clipping are then those of as many devices as there are sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

from burst_portable.errors import InputError
from burst_portable.integrations.batch_norms import synchronize_sequences
from burst_portable.integrations.metrics import gather_from_sequences
from burst_portable.integrations.transformers import ShardedModel, parallelize
from burst_portable.integrations.transformers.models.adapters import check_adapters
from burst_portable.integrations.transformers.models.model_parts import part_below_head
from burst_portable.integrations.versions import check_version, importing
from burst_portable.mesh import Mesh

with importing("lightning", "burst-portable[lightning]"):
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
    from transformers import PreTrainedModel


class _SequenceStrategy(ParallelStrategy):  # type: ignore[misc]  # Lightning's names are Any, see pyproject.toml
    """Shards the models of a LightningModule, and gives ranks of one sequence the same rows."""

    def __init__(
        self,
        cp_size: int | None = None,
        *,
        models: Sequence[str] | None = None,
        strategy: Any = "auto",
        layout: str | None = None,
        kernel: str = "auto",
        **options: Any,
    ) -> None:
        check_version("lightning", "2.6", "3", extra="lightning")
        if cp_size is not None and cp_size < 1:
            raise InputError("cp_size must be positive", got=cp_size)
        self._cp_size, self._names = cp_size, models
        self._options = {"strategy": strategy, "layout": layout, "kernel": kernel}
        self._axes: DeviceMesh | None = None
        self._mesh: Mesh | None = None
        self.sharded: list[ShardedModel] = []
        self._metrics: list[Any] = []  # of torchmetrics, which gather from sequences while they are here
        self._norms: list[nn.SyncBatchNorm] = []  # the same for batch norms
        super().__init__(**options)

    @property
    def _ranks(self) -> int:
        """Number of all ranks, also before they are connected."""
        return int(self.num_nodes * self.num_processes)

    def setup_environment(self) -> None:
        cp_size = self._cp_size or self._ranks
        if self._ranks % cp_size:
            what = "the number of processes must be a multiple of cp_size"
            got = f"cp_size={cp_size} for {self._ranks} processes"
            raise InputError(what, got=got, next_step="change devices or num_nodes of the Trainer")
        super().setup_environment()
        if self._axes is None:
            shape = (self._ranks // cp_size, cp_size)
            self._axes = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("data", "sequence"))
            self._mesh = Mesh.from_device_mesh(self._axes, "sequence")

    def model_to_device(self) -> None:
        super().model_to_device()
        options = self._options | {"full_batches": True, "averaged_gradients": True}
        self._check_gradients(self.lightning_module)
        self._metrics = gather_from_sequences(self.lightning_module, self._sequences(None))
        self._norms = synchronize_sequences(self.lightning_module, self._sequences(None))
        for model in self._models():
            check_adapters(model, ranks=self._cp_size or self._ranks, full_batches=True)
            self.sharded.append(parallelize(part_below_head(model), self._mesh, **options))

    def _models(self) -> list[PreTrainedModel]:
        """Return the models to shard: those of Transformers that are not part of another one."""
        module: nn.Module = self.lightning_module
        found: dict[str, PreTrainedModel] = {}
        for name, part in module.named_modules():
            inner = any(name == outer or name.startswith(f"{outer}.") for outer in found)
            if isinstance(part, PreTrainedModel) and not inner and (self._names is None or name in self._names):
                found[name] = part
        if missing := sorted(set(self._names or ()) - set(found)):
            raise InputError("the LightningModule has no such model of Transformers", got=", ".join(missing))
        if not found:
            next_step = "create it in __init__() or configure_model(); or use Lightning's own strategies"
            what, got = "the LightningModule has no model of Transformers", type(module).__name__
            raise InputError(what, got=got, next_step=next_step)
        return list(found.values())

    def _check_gradients(self, module: nn.Module) -> None:
        """Raise `InputError` if gradients will not be averaged over all ranks."""

    def teardown(self) -> None:
        for sharded in self.sharded:
            sharded.undo()
        self.sharded.clear()
        for metric in self._metrics:
            metric.dist_sync_fn = None
        self._metrics.clear()
        for norm in self._norms:
            norm.process_group = None
        self._norms.clear()
        super().teardown()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        assert self._axes is not None
        return {"num_replicas": self._axes.size(0), "rank": self._axes.get_local_rank("data")}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Check that ranks of a sequence get the same rows from a sampler.

        Raises:
            InputError: If a `DistributedSampler` of the user divides the rows among all ranks.
        """
        wanted, sampler = self.distributed_sampler_kwargs, getattr(dataloader, "sampler", None)
        given = {name: getattr(sampler, name, None) for name in wanted}
        if isinstance(sampler, DistributedSampler) and given != wanted:
            raise InputError(
                "a DistributedSampler gives the ranks of a sequence different rows",
                got=_named(given),
                allowed=_named(wanted),
                next_step="remove it, as Lightning makes one; or pass **trainer.distributed_sampler_kwargs",
            )
        return super().process_dataloader(dataloader)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the sum or mean over sequences, unless there is another group. Ranks of one have equal values."""
        return super().reduce(tensor, self._sequences(group), reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather one value per sequence, ``[sequences, ...]``. As on one device, a single one stays as it is."""
        group = self._sequences(group)
        return tensor if dist.get_world_size(group) == 1 else super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any of them, decide so."""
        found = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(found, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(found)

    def _sequences(self, group: Any) -> Any:
        """Return the group of ranks that have the same part of different sequences, in place of that of all ranks."""
        assert self._axes is not None
        return self._axes.get_group("data") if group in (None, dist.group.WORLD) else group


class SequenceStrategy(_SequenceStrategy, DDPStrategy):  # type: ignore[misc]
    """DDP, with each sequence sharded over ranks: ``Trainer(strategy=SequenceStrategy(cp_size=4))``.

    The LightningModule stays as it is: its Transformers models are sharded when a Trainer starts, and restored when it
    ends. Each rank has all parameters.

    Args:
        cp_size: Number of ranks that share a sequence. Default: all.
        models: Names of the attributes that are models to shard. Default: all models of Transformers.
        strategy: As in `parallelize`.
        layout: As in `parallelize`.
        kernel: As in `parallelize`.
        options: As for `DDPStrategy`.

    Raises:
        UnsupportedError: If the version of Lightning is not supported.
        InputError: If the sizes do not fit the processes, there is no model, or a sampler divides rows among all ranks.
    """


class SequenceFSDPStrategy(_SequenceStrategy, ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2, with each sequence sharded over ranks: ``Trainer(strategy=SequenceFSDPStrategy(cp_size=4))``.

    As for `ModelParallelStrategy`, call `fully_shard` in `configure_model`, with the mesh
    ``self.device_mesh["data_parallel"]``. Here it contains all ranks, which also average the gradients.

    Args:
        cp_size: As in `SequenceStrategy`.
        options: As in `SequenceStrategy`, and those of `ModelParallelStrategy` but its sizes.

    Raises:
        InputError: As in `SequenceStrategy`, and if a trained parameter is not sharded over all ranks.
    """

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self._ranks, 1
        super().setup_environment()

    def _check_gradients(self, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # after a forward pass without a backward pass, the root has unsharded parameters
        for name, p in module.named_parameters():
            size = p.device_mesh.size() if isinstance(p, DTensor) else 1
            if p.requires_grad and size != self._ranks:
                got = f"{name} on {size} of {self._ranks} ranks"
                next_step = "in configure_model(): fully_shard(..., mesh=self.device_mesh['data_parallel'])"
                raise InputError("FSDP2 must shard parameters over all ranks", got=got, next_step=next_step)


def _named(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
