"""Runs cases in Triton's interpreter, in a process of its own: the switch must be set before kernels are imported.

Reads one JSON line a case from standard input and answers each with one line.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings

import torch

from tests.kernels.triton_cases import CHECKS, Case, check


def main() -> None:
    from burst_portable.backends.ascend.triton_launch import AscendTritonKernel, Cut
    from burst_portable.kernels.triton import TritonKernel
    from burst_portable.kernels.triton.tuning import HALF, Blocks, Tuning

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "overflow encountered in exp2")  # a softcap that saturates, as it should
    kernel = TritonKernel()
    blocks = (Blocks(32, 16, 1, 1, tma=True),)
    tables = {**HALF, "interpreter": {256: Tuning(blocks, blocks, blocks)}}
    kernels = {"pointers": kernel, "descriptors": TritonKernel(tables, tables)}
    small = {256: (Cut(32, 16), Cut(16, 32))}
    kernels["ascend"] = AscendTritonKernel(small, small, programs=3)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            chosen = kernels[request.pop("loads", "pointers")]
            if name := request.pop("check", None):
                CHECKS[name](chosen, "cpu")
                answer: object = {}
            else:
                answer = check(chosen, Case(**{**request, "dtype": getattr(torch, request["dtype"])}), "cpu")
            print(json.dumps({"errors": answer}), flush=True)
        except Exception:  # noqa: BLE001 - the asking test fails with it
            print(json.dumps({"failed": traceback.format_exc()}), flush=True)


if __name__ == "__main__":
    main()
