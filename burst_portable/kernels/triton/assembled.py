"""Triton's kernels compiled for a chip that need not be here, and what ptxas said when Triton called it."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as triton_compile
from triton.compiler.compiler import make_backend


def assembled(source: Any, target: GPUTarget, options: dict[str, Any], *, anew: bool = False) -> tuple[Any, str]:
    """(the compiled kernel, ptxas's log, which is empty for chips that have none). Raises what Triton raises.

    A kernel of Triton's cache is assembled once more for the log, as Triton would: the flags that it passes change from
    release to release.

    Args:
        source: of a kernel of Triton or Gluon, with the types of its parameters.
        anew: not from the cache, which would say nothing of how long it takes.
    """
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = anew
        kernel = triton_compile(source, target=target, options=options)
        if "ptx" in kernel.asm and not log.getvalue():
            backend = make_backend(target)
            backend.make_cubin(kernel.asm["ptx"], {}, backend.parse_options(options), target.arch)
    return kernel, log.getvalue()
