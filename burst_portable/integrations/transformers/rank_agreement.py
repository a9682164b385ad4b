"""Compare a call with those of the other ranks of its sequence, and find training loops that are wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_portable.integrations.transformers.loss import loss_name
from burst_portable.integrations.transformers.masked_loss import has_masked_tokens
from burst_portable.integrations.transformers.model_settings import settings_of
from burst_portable.integrations.transformers.shard_arguments import ShardArguments
from burst_portable.integrations.transformers.training.batch_check import (
    BatchCheck,
    checksum_of_call,
    has_all_labels,
    rows_checksum,
)
from burst_portable.integrations.transformers.training.gradient_checks import LossScaleCheck, watch_gradient
from burst_portable.integrations.transformers.training.gradient_parts import check_differentiated_once
from burst_portable.integrations.transformers.training.padding_gradients import PaddingGradients
from burst_portable.mesh import Mesh


class RankAgreement:
    """The comparisons of a model's calls. They need those of earlier calls, so a copy of a model has its own."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh, *, full_batches: bool) -> None:
        self._model, self._mesh, self._full_batches = model, mesh, full_batches
        self._batch, self._loss_scale = BatchCheck(has_masked_tokens=has_masked_tokens(model)), LossScaleCheck()
        self._padding = PaddingGradients(mesh)
        self._has_all_labels: Tensor | None = None  # of the running call
        self._gradient_hooks: list[Any] | None = None

    def begin(self, shard: ShardArguments, kwargs: dict[str, Any], *, outputs: str, is_unordered: bool) -> None:
        """Check the training step of the last call, and compare this call on all ranks, before the model runs.

        Args:
            shard: The arguments of its shard.
            kwargs: Its other arguments.
            outputs: Description of the outputs that will be gathered; empty for none.
            is_unordered: Whether the caller divided the tokens and passed no position ids, so that their order is
                assumed to be that of the layout.

        Raises:
            InputError: If the last loss was scaled wrongly, or ranks have equal tokens that they must not have.
            MismatchError: If ranks differ.
        """
        count = kwargs.get("num_items_in_batch")
        if torch.is_grad_enabled():
            self._begin_training(shard.checksum, count)
        checksum = shard.checksum
        if checksum is not None:
            checksum = checksum_of_call(checksum, kwargs, shard.tokens.device)
        rows = rows_checksum(shard.tokens, self._mesh.rank) if is_unordered else None
        device = shard.tokens.device
        mode = [
            "train()" if self._model.training else "eval()",
            "gradients" * torch.is_grad_enabled() or "no gradients",
            loss_name(self._model),  # the settings of the first call have it too, but a program may change it
        ]
        outputs = ", ".join([outputs or "those of a shard", *mode])
        settings = partial(settings_of, self._model)
        self._batch.compare(checksum, count, self._model.parameters(), self._mesh, device, outputs, rows, settings)

    def _begin_training(self, batch_checksum: Tensor | None, count: Any) -> None:
        if self._gradient_hooks is None:
            self._gradient_hooks = watch_gradient(self._model, self._mesh)
        if not self._full_batches:
            self._loss_scale.begin(self._model, self._mesh)
            self._has_all_labels = has_all_labels(batch_checksum, count)

    def confirm(self) -> None:
        """Wait for the comparison of the running call. Raise its error."""
        self._batch.confirm()

    def end(self, loss: Any) -> None:
        """Watch the backward pass of the loss of a call that has ended, if it has one."""
        if isinstance(loss, Tensor) and loss.requires_grad and self._mesh.size > 1:
            loss.register_hook(lambda _: check_differentiated_once())
        self._loss_scale.watch(loss, self._has_all_labels, self._mesh)
        self._has_all_labels = None

    def watch_outputs(self, output: Any, is_padding: Tensor | None) -> Any:
        """Return the output of a full batch, after its backward pass is watched. `is_padding`: None if none is."""
        self._padding.watch(output, is_padding)
        return output

    def remove_hooks(self) -> None:
        """Stop watching gradients, until the next training call."""
        for hook in self._gradient_hooks or ():
            hook.remove()
        self._gradient_hooks = None
