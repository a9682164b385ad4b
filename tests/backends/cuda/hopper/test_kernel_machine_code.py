"""The Hopper kernels as real sm_90 machine code, with no GPU: no spills in the forward's loops, no serialised wgmma."""

from importlib.metadata import version

import pytest

from burst_portable.backends.cuda.hopper.kernel import HopperKernel, triton_reason

pytest.importorskip("triton")
if triton_reason():
    pytest.skip(triton_reason(), allow_module_level=True)

from backends.cuda import aot
from burst_portable.backends.cuda.hopper.configs import FORWARD, TALL
from tests.support.calls import kernel_call

# Scratch of the backward lies in its masked branch and in what runs once an item; its full blocks reload a few
# addresses. More than this says that something began to spill in the loop.
BACKWARD_SCRATCH = {64: 56, 128: 0}
# Of the tall forward, with ptxas 13.4 (Triton 3.9) as well; 12.8 and 12.9 need 8 at most.
TALL_SCRATCH = 48


CUTS = {"64": (64, FORWARD), "64-tall": (64, TALL), "128": (128, FORWARD)}


def forward(cut, mode):
    dim, configs = CUTS[cut]
    return aot.compile_build(aot.forward_build(dim, mode, config=configs[dim]))


def backward(dim, store):
    return aot.compile_build(aot.backward_build(dim, store=store))


# Mode 1 is mode 2 without what it merges with; of one cut it is compiled every time.
FORWARDS = [
    pytest.param(cut, mode, marks=pytest.mark.full if mode == 1 and cut != "128" else [])
    for mode in (0, 1, 2)
    for cut in CUTS
]


@pytest.fixture(scope="module")
def compiled(compilers, request):
    """Every build that is asked for."""
    builds = []
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if getattr(item, "function", None) is test_hopper_forward_machine_code:
            builds.append((forward, given["cut"], given["mode"]))
        elif getattr(item, "function", None) is test_hopper_backward_machine_code:
            builds.append((backward, given["dim"], given["store"]))
    return {build: compilers.submit(*build) for build in builds}


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "mode"), FORWARDS)
def test_hopper_forward_machine_code(cut, mode, compiled):
    report = compiled[forward, cut, mode].result()
    assert report.scratch_bytes <= (TALL_SCRATCH if cut == "64-tall" and triton_from((3, 9)) else 0), report
    check(report)


@pytest.mark.slow
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_backward_machine_code(dim, store, compiled):
    report = compiled[backward, dim, store].result()
    assert report.scratch_bytes <= BACKWARD_SCRATCH[dim], report
    check(report)


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
    # as it once stood here: the barrier that another instruction needed lay between the product's start and its end
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
        ({"head_dim": 96, "v_head_dim": 96}, "head sizes"),
        ({"v_head_dim": 64}, "value heads"),
        ({"softcap": 30.0}, "softcap"),
    ):
        support = kernel.supports(kernel_call(**{**good, **change}))
        assert not support.ok
        assert words in support.reason
