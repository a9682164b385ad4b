"""Compile the Hopper kernels to sm_90 machine code without a GPU: no spills in forward loops, no serialized wgmma."""

from importlib.metadata import version

import pytest

from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.backends.cuda.hopper.support import triton_reason

pytest.importorskip("triton")
if triton_reason():
    pytest.skip(triton_reason(), allow_module_level=True)

from backends.cuda import aot, machine_code
from burst_portable.backends.cuda.hopper.configs import TALL
from tests.support.calls import kernel_call

# Spilled bytes of the tall forward with ptxas 13.4 (Triton 3.9); 12.8 and 12.9 need 8 at most.
TALL_SCRATCH = 48
BUILDS = {build.name: build for build in aot.builds()}
OFTEN = {
    "forward D=64 bf16 mode 0, tall", "forward D=128 bf16 mode 2",
    "backward D=64 bf16", "backward D=128 bf16, stores, ordered",
}  # fmt: skip
"""Compiled every time: both sizes, and each mode that changes a loop. The rest with -m full."""


def marks(name):
    return [] if name in OFTEN else pytest.mark.full


@pytest.fixture(scope="module")
def compiled(compilers, request):
    """Compile all builds of the selected tests."""
    test = test_hopper_kernel_machine_code
    names = [item.callspec.params["name"] for item in request.session.items if getattr(item, "function", None) is test]
    return {name: compilers.submit(compile_named, name) for name in names}


def compile_named(name):
    return aot.compile_build(BUILDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in BUILDS])
def test_hopper_kernel_machine_code(name, compiled):
    report = compiled[name].result()
    tall = name.endswith("tall") and triton_from((3, 9))
    assert report.scratch_bytes <= (TALL_SCRATCH if tall else machine_code.allowed_hopper_scratch(name)), report
    check(report)


def test_builds_cover_each_cut():
    """Every head size of the tables, and each launch of a backward."""
    assert BUILDS.keys() >= OFTEN
    assert sum(name.startswith("dK") for name in BUILDS) == 3 * sum(max(head) > 128 for head in aot.HEADS)
    assert sum(name.endswith("tall") for name in BUILDS) == 3 * len(TALL)


def triton_from(first):
    return tuple(int(part) for part in version("triton").split(".")[:2]) >= first


def check(report):
    assert not report.warnings, "ptxas serialises wgmma (C7510 to C7517)"
    assert report.wgmma > 0
    assert report.early_releases == 0
    assert not report.descriptors
    assert report.shared_bytes <= aot.SHARED_LIMIT
    print(report)


def test_early_releases_counts_release_before_last_read():
    good = "wgmma.wait_group.sync.aligned 0;\nbar.sync 0, 128;\n@%p mbarrier.arrive.shared::cta.b64 _, [%r];\n"
    # a former error: the barrier for another instruction was between the start and the end of the product
    early = (
        "wgmma.mma_async\nbar.sync 0, 128;\nwgmma.wait_group.sync.aligned 0;\n@%p mbarrier.arrive.shared::cta.b64 _;\n"
    )
    assert aot._early_releases(good * 2) == 0
    assert aot._early_releases(good + early + good) == 1


def test_hopper_kernel_declines_with_reason():
    import torch

    kernel = HopperKernel()
    good = {"dtype": torch.bfloat16, "device": "cpu", "heads": 2, "kv_heads": 1, "head_dim": 128, "v_head_dim": 128}
    for change, words in (
        ({}, "NVIDIA"),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"head_dim": 264, "v_head_dim": 264}, "head sizes"),
        ({"head_dim": 100, "v_head_dim": 100}, "multiples of 8"),
        ({"head_dim": 64}, "no cut for values of 128"),
    ):
        support = kernel.supports(kernel_call(**{**good, **change}))
        assert not support.ok
        assert words in support.reason
