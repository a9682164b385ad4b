"""Lower Triton kernels with triton-ascend to its linalg IR: all of its compiler that runs without CANN.

CANN's bishengir-compile makes machine code from that IR. A scalar loop over addresses without a known structure is
tagged `DiscreteMemAccess`: a gather, which is slow on these devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = "Ascend910B3"
GATHER = "DiscreteMemAccess"


def lower(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    """Return the IR of a kernel.

    Args:
        kernel: the jitted function.
        types: Triton's types of the arguments, such as ``*bf16``, by name.
        constants: compile-time parameters by name.
    """
    backend = AscendBackend(GPUTarget("npu", TARGET, 0))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=kernel, signature=dict(types), constants=dict(constants))
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"hash": "lowered", **options.__dict__}
    module = make_ttir(module, metadata, options)
    return str(ttir_to_linalg(module, metadata, options, named_ops=True))
