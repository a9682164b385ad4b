"""Warn about learning-rate schedulers that accelerate steps once per process, also for the ranks of a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from burst_portable.errors import format_error
from burst_portable.utils.torch_modes import never_compiled
from burst_portable.utils.warning import warn_caller


def warn_about_schedulers(
    model: nn.Module, accelerator: weakref.ref[Any], sizes: Callable[[], tuple[int, int]]
) -> None:
    """Warn in the first training call of a model, on one process, if accelerate steps a scheduler once per process.

    Programs that multiply the length of a schedule by `num_processes` are right, and those that take the length of the
    loader before `prepare` are wrong. A scheduler does not show which.

    Args:
        model: The parallelized model.
        accelerator: A weak reference to an `Accelerator`.
        sizes: Returns the number of processes, and that of the ranks that share a sequence.
    """

    @never_compiled("hooks are not graphs")
    def warn(module: nn.Module, inputs: Any) -> None:
        running = accelerator()
        if running is None or not torch.is_grad_enabled():
            return
        hook.remove()
        prepared = running._schedulers if running.is_main_process else ()
        processes, ranks = sizes()
        if ranks > 1 and any(x.step_with_optimizer and not x.split_batches for x in prepared):
            message = format_error(
                "accelerate steps a prepared scheduler once per process, and the ranks of a sequence are several",
                got=f"{processes} steps per optimizer step, and {processes // ranks} data-parallel ranks",
                allowed=f"a schedule with {processes} times as many steps as optimizer steps",
                next_step="otherwise do not pass the scheduler to prepare(), and step it if accelerator.sync_gradients "
                "is true",
            )
            warn_caller(message)

    hook = model.register_forward_pre_hook(warn)
