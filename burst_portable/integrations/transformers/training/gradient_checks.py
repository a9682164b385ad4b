"""Find training loops that scale or clip gradients wrongly, without waiting for a device.

- A gradient that was clipped before `all_reduce_gradients` was clipped by the norm of one rank's part. A hook records
  the version of one gradient when a backward pass adds to it, and `all_reduce_gradients` compares.
- A gradient that was summed after each micro-batch has the earlier sums once per rank. `gradients.watch_additions`
  records that a backward pass added to a sum.
- DDP and FSDP2 average the ranks' parts of a gradient, which must be summed. The loss must therefore be multiplied by
  the number of ranks. A hook copies the gradient of the loss, and the next call of the model reads it.
- Gradients that DDP has averaged would become too large by a sum as well. Each call records whether DDP averages.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from burst_portable.errors import InputError
from burst_portable.gradients import versions, watch_additions
from burst_portable.integrations.transformers.training.averaging import averaging_ranks, groups_of
from burst_portable.integrations.transformers.training.batch_check import HostCopy, is_sharded
from burst_portable.mesh import Mesh


def watch_gradient(model: nn.Module, mesh: Mesh) -> list[Any]:
    """Record each change of a small gradient by a backward pass, in `GradientRecords`.

    Return the handles of the hooks: none if the model has no trainable parameter, or DDP or FSDP2 changes gradients
    after the backward pass.
    """
    if DistributedDataParallel._get_active_ddp_module() is not None:
        return []
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained or any(map(is_sharded, trained)):
        return []
    watched = min(trained, key=Tensor.numel)

    def record(parameter: Tensor) -> None:
        if parameter.grad is not None:
            mesh.gradient_records.accumulated[parameter.grad] = versions(parameter)

    return [*watch_additions(watched, mesh), watched.register_post_accumulate_grad_hook(record)]


class LossScaleCheck:
    """Checks that the loss of a shard is multiplied by the number of ranks if DDP or FSDP2 averages gradients.

    A factor of 1 is reported at the next call, if gradients were None before both calls. Other factors may be intended,
    as those of accumulated batches, and so may a count that the caller divided by the number of ranks.
    """

    def __init__(self) -> None:
        self._is_unscaled: HostCopy | None = None
        self._averaged: tuple[Any, Tensor, int] | None = None  # group of FSDP2, a parameter, number of ranks
        self._is_known = False
        self._is_watched = False

    def begin(self, model: nn.Module, mesh: Mesh) -> None:
        """Check the last call at the beginning of the next one, which computes gradients.

        Raises:
            InputError: If the loss of the last call was not multiplied.
        """
        running: Any = DistributedDataParallel._get_active_ddp_module()
        if not self._is_known:
            self._is_known, self._averaged = True, _averaged_parameter(model, mesh, running)
        pending, self._is_unscaled, self._is_watched = self._is_unscaled, None, False
        if self._averaged is None:
            return
        averages = running is not None and running.require_backward_grad_sync and not running._comm_hooks
        _record_average(model, mesh, averages=averages)
        if running is not None and not averages:  # no_sync(), or a hook with a sum or another average
            return
        group, parameter, ranks = self._averaged
        if parameter.grad is not None or (group is not None and not group.reduce_grads):
            return  # batches are accumulated
        self._is_watched = True
        if pending is not None and pending.read():
            raise InputError(
                "the loss of the last call was not multiplied by the number of ranks, and DDP or FSDP2 averages the "
                "gradients of the ranks of a sequence, which must be summed",
                got="a factor of 1",
                allowed=f"{ranks}, if num_items_in_batch counts the labels of all ranks",
                next_step=f"(loss * {ranks}).backward()",
            )

    def watch(self, loss: Any, has_all_labels: Tensor | None, mesh: Mesh) -> None:
        """Record the factor of a loss in its backward pass.

        Args:
            loss: Loss of a shard, if the call has one.
            has_all_labels: Whether it was divided by all labels of the sequence, or more: bool ``[]``. None: unknown.
            mesh: The ranks of the sequence.
        """
        if not self._is_watched or has_all_labels is None or not isinstance(loss, Tensor) or not loss.requires_grad:
            return

        def record(gradient: Tensor) -> None:
            self._is_unscaled = HostCopy((gradient == 1) & has_all_labels, mesh)

        loss.register_hook(record)


def _record_average(model: nn.Module, mesh: Mesh, *, averages: bool) -> None:
    """Record whether DDP averages the gradients of a call over the mesh. `all_reduce_gradients` must not sum those."""
    averaged = mesh.gradient_records.averaged_by_ddp
    if averages:
        averaged.add(model)
    else:
        averaged.discard(model)


def _averaged_parameter(model: nn.Module, mesh: Mesh, running: Any) -> tuple[Any, Tensor, int] | None:
    """Return a trained parameter whose gradients DDP or FSDP2 averages over the mesh, with its group and the ranks."""
    ranks = averaging_ranks(model)
    if not set(mesh.global_ranks) <= ranks:
        return None
    if running is not None:
        trained = (p for p in model.parameters() if p.requires_grad)
        return next(((None, p, len(ranks)) for p in trained), None)
    # FSDP2 replaces parameters during a call, so that those of the model are not those that have gradients.
    groups = (group for module in model.modules() if isinstance(module, FSDPModule) for group in groups_of(module))
    found = ((group, p.sharded_param) for group in groups for p in group.fsdp_params)
    return next(((group, p, len(ranks)) for group, p in found if p.requires_grad), None)
