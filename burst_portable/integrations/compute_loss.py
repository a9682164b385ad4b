"""Check how subclasses of Trainer override `compute_loss`, whose count of labels is that of all processes."""

from __future__ import annotations

import dis
import inspect
from typing import Any

from burst_portable.errors import UnsupportedError, format_error
from burst_portable.utils.warning import warn_caller

_COUNT = "num_items_in_batch"


def check_order(trainer: type[Any], ours: type[Any], known_losses: tuple[type[Any], ...]) -> None:
    """Raise `UnsupportedError` if a class behind `SequenceTrainer` overrides `compute_loss`.

    `SequenceTrainer` divides its loss by the ranks, which is wrong if the override ignores `num_items_in_batch`.

    Args:
        trainer: The class of the trainer.
        ours: `SequenceTrainer`.
        known_losses: Classes that use the count as Trainer does.
    """
    classes = trainer.__mro__
    for base in classes[classes.index(ours) + 1 :]:
        is_known = base in known_losses or base.__module__.partition(".")[0] in ("transformers", "trl")
        if "compute_loss" in vars(base) and not is_known:
            raise UnsupportedError(
                "a compute_loss behind that of SequenceTrainer, whose loss would be divided by the ranks of a sequence",
                got=f"{base.__name__}.compute_loss in {trainer.__name__}",
                next_step=f"name SequenceTrainer last: class {trainer.__name__}({base.__name__}, SequenceTrainer)",
            )


def warn_about_counts(trainer: type[Any], ours: type[Any], processes: int) -> None:
    """Warn if a `compute_loss` before that of `SequenceTrainer` uses the count of labels and not that of processes.

    Trainer gathers the count from all processes, and DDP averages over them, so that a loss divided by it is too small
    by their number. Code of other functions that it may call is not read.

    Args:
        trainer: The class of the trainer.
        ours: `SequenceTrainer`.
        processes: Number of processes.
    """
    for base in trainer.__mro__[: trainer.__mro__.index(ours)]:
        if (loss := vars(base).get("compute_loss")) is None or base.__module__.startswith("burst_portable."):
            continue
        code = inspect.unwrap(loss).__code__
        reads = {x.argval for x in dis.get_instructions(code) if x.opname.startswith("LOAD")}
        reads = {name for x in reads for name in (x if isinstance(x, tuple) else (x,))}  # two at once since 3.13
        if _COUNT in reads and reads.isdisjoint({"num_processes", "compute_loss"}):
            message = format_error(
                f"a loss that is divided by {_COUNT} is too small by the number of processes, as under DDP",
                got=f"{base.__name__}.compute_loss, which does not read accelerator.num_processes",
                allowed=f"loss * {processes} if average_tokens_across_devices is true",
                next_step="return loss * self.accelerator.num_processes, or call super().compute_loss; nothing is "
                "wrong if a function that it calls does",
            )
            warn_caller(message)
