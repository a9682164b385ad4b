"""Fork ranks from one process, so that their common imports run once."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed.tensor  # a rank's first collective imports it, and with it sympy  # noqa: F401

from tests.support.poison import fresh_memory_is_nan

_LONGEST = 80.0  # seconds; the calling process waits longer


def run_forked(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(rank, *arguments)` in one process per rank, with NaN in fresh memory, and exit with 0 if all ranks did.

    The calling program must not have started threads; torch starts none before it computes.
    """
    context = multiprocessing.get_context("fork")
    gc.freeze()  # imported objects are excluded from garbage collection
    with fresh_memory_is_nan():
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
    until = time.monotonic() + _LONGEST
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    sys.exit(0 if codes == [0] * ranks else f"the ranks ended with {codes}; None: not in {_LONGEST:g} s")
