"""Gather rows for metrics under accelerate, where the ranks of a sequence have the same rows.

accelerate gathers from all processes. It then has each row once per rank of its sequence, and cuts the last batch to
the number of rows that one rank of each sequence has.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from burst_portable.errors import InputError, format_error
from burst_portable.integrations.versions import importing
from burst_portable.utils.torch_modes import never_compiled
from burst_portable.utils.warning import warn_caller

with importing("accelerate", "burst-portable[transformers]"):
    from accelerate.utils.operations import gather_object, recursively_apply


def gather_rows(accelerator: Any, data: Any, ranks: int, *, batch_rows: int | None = None) -> Any:
    """Return the rows of all data-parallel ranks, as accelerate's `gather_for_metrics`, but each row once.

    Args:
        accelerator: The `Accelerator`, or None.
        data: Tensors ``[rows, ...]``, also in tuples, lists and dictionaries, or a list of one object per row. A tensor
            of shape [] is a number of the whole batch, and gives one number per sequence, or one for one sequence.
        ranks: Number of ranks that share a sequence.
        batch_rows: Rows of this rank's batch. A dataset without a length may end with it, and tensors of more than one
            dimension that have another number of rows are returned in full. Default: unknown, and all rows of such a
            last batch are returned, as by accelerate.

    Raises:
        InputError: If there is no accelerator.
    """
    if accelerator is None:
        next_step = "create Accelerator(parallelism_config=...) first, and keep it"
        raise InputError("no accelerator has this SequenceParallelism", next_step=next_step)
    processes, state, rows = accelerator.num_processes, accelerator.gradient_state, None
    if state.end_of_dataloader and state.remainder > 0:
        rows = state.remainder
    elif state.end_of_dataloader and state.remainder < 0 and batch_rows is not None:
        # Without a length, the last batch shows its rows. Trainer repeats its loss as for a full batch.
        rows = batch_rows * (processes // ranks)

    def gather(x: Tensor) -> Tensor:
        # A router loss; router logits, which have a row per token.
        is_number, is_of_tokens = x.dim() == 0, x.dim() > 1 and batch_rows not in (None, len(x))
        if processes > ranks:
            x = accelerator.gather(x).unflatten(0, (processes, -1))[::ranks].flatten(0, 1)
        return x if is_number or is_of_tokens else x[:rows]

    if _has_tensors_only(data):
        return recursively_apply(gather, data, error_on_other_type=True)
    parts = gather_object([data])[::ranks] if processes > ranks else [data]
    return [x for part in parts for x in part][:rows]


def _has_tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def warn_about_gathering(model: nn.Module, accelerator: weakref.ref[Any], config: Any) -> None:
    """Warn once in an evaluation by an own loop, on one process, if it does not use `gather_rows`.

    accelerate's function has no hook. So this is found in the calls of the model: in the second one of an evaluation,
    or in a last batch of which accelerate leaves rows out.

    Args:
        model: The parallelized model.
        accelerator: A weak reference to an `Accelerator`.
        config: Its `SequenceParallelism`.
    """
    calls = 0

    @never_compiled("hooks are not graphs")
    def warn(module: nn.Module, inputs: Any) -> None:
        nonlocal calls
        running = accelerator()
        is_shared = config.non_data_parallel_size > 1
        if running is None or torch.is_grad_enabled() or not (is_shared and running.gradient_state.in_dataloader):
            return
        calls += 1
        is_cut = running.gradient_state.end_of_dataloader and running.gradient_state.remainder > 0
        if not config.gathers_rows and calls < 2 and not is_cut:
            return
        hook.remove()
        if running.is_main_process and not config.gathers_rows:
            message = format_error(
                "accelerator.gather_for_metrics returns each row once per rank of its sequence, and leaves rows of a "
                "shorter last batch out",
                got="an evaluation without the gather_for_metrics of SequenceParallelism",
                next_step="call accelerator.parallelism_config.gather_for_metrics; nothing is wrong if the program "
                "gathers no rows",
            )
            warn_caller(message)

    hook = model.register_forward_pre_hook(warn)
