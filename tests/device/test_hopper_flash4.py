"""Test the Hopper kernel with the real flash-attn-4 on a device, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from burst_portable.backends.cuda import library_kernels
from burst_portable.backends.cuda.backend import CudaBackend
from burst_portable.backends.cuda.hopper import flash4_speeds
from burst_portable.backends.selection import choose_kernel
from burst_portable.kernels.base import BackwardInputs, LazyKernel
from tests.support.calls import kernel_call
from tests.support.flash4_cases import CAPPED, OPTIONS, box, call_package_always, causal, compare_whole, inputs
from tests.support.hopper_cases import gap, tiles_of

# While it compiles, the package warns about its arguments and about deprecated functions.
pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
NAME = "hopper+flash-attn-4"


@pytest.fixture(scope="module")
def kernel():
    if torch.version.hip or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no sm_90 device")
    pytest.importorskip("flash_attn.cute")
    problem = kernel_call(torch.bfloat16, "cuda", 4, 2, 128, 128, deterministic=False)
    found, _ = choose_kernel(CudaBackend(), problem, "auto")
    assert found.name == NAME
    return found


@pytest.fixture(autouse=True)
def use_package_for_small_work(monkeypatch):
    call_package_always(monkeypatch)


@pytest.mark.parametrize("length", [1, 129, 1000])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((4, 4), torch.bfloat16), ((6, 2), torch.bfloat16), ((8, 1), torch.float16)],  # each compiles for some seconds
    ids=["mha", "gqa", "mqa-fp16"],
)
def test_flash4_causal(kernel, length, heads, dim, dtype):
    compare_whole(kernel, *inputs(length, length, heads, dim, "cuda", dtype), causal(length))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_flash4_serves_head_size_only_if_right(dim, heads):
    """Of each head size that the package claims, all results must be right; `auto` may use it."""
    package = LazyKernel("flash-attn-4", f"{library_kernels.__name__}:Flash4Kernel", needs="flash_attn")
    call = kernel_call(torch.bfloat16, "cuda", *heads, dim, dim, deterministic=False)
    support = package.supports(call)
    assert support.ok == (dim % 32 == 0), support.reason
    if support.ok:
        for length in (129, 700):
            compare_whole(package.load(), *inputs(length, length, heads, dim, "cuda"), causal(length))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("rows", "columns"), [(333, 1111), (1111, 333), (1, 500), (500, 1)])
def test_flash4_boxes(kernel, rows, columns, dim):
    compare_whole(kernel, *inputs(rows, columns, (4, 2), dim, "cuda"), box(rows, columns))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["window:200", "documents:0,100,357,600"])
def test_flash4_other_masks(kernel, mask, dim):
    compare_whole(kernel, *inputs(600, 600, (4, 2), dim, "cuda"), tiles_of(mask, 600))


@pytest.mark.parametrize("left", [0, 1, 63, 200, None], ids=lambda left: "all but one" if left is None else str(left))
@pytest.mark.parametrize("length", [129, 600, 1000])
@pytest.mark.parametrize(
    ("dim", "v_dim", "dtype"),
    [
        (128, 128, torch.bfloat16),
        (128, 128, torch.float16),
        *((dim, dim, torch.bfloat16) for dim in (32, 64, 96, 192)),
        (192, 128, torch.bfloat16),
    ],
)
def test_flash4_windows(kernel, length, left, dim, v_dim, dtype):
    """Equal K/V and query heads: flash-attn-4 computes both passes."""
    left = length - 2 if left is None else left
    assert kernel._flash.load().traits.supports_causal_window
    tensors = inputs(length, length, (4, 4), dim, "cuda", dtype, v_dim=v_dim)
    compare_whole(kernel, *tensors, tiles_of(f"window:{left}", length))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("left", [1, 63, 200, 598])
def test_flash4_windows_of_package_kernel(kernel, left, dim, heads):
    """The kernel of the package computes their forward too, also with fewer K/V heads."""
    compare_whole(kernel._flash.load(), *inputs(600, 600, heads, dim, "cuda"), tiles_of(f"window:{left}", 600))


@pytest.mark.parametrize(
    ("heads", "dim", "v_dim"),
    [
        *((heads, dim, dim) for heads in ((4, 4), (6, 2)) for dim in (32, 64, 96, 128, 160, 192, 256)),
        ((4, 4), 192, 128),
    ],
)
def test_flash4_documents_of_package_kernel(kernel, heads, dim, v_dim):
    """Documents of one token and more, with and without padding at the end, in two batch rows and in one."""
    for text, length, batch in (
        ("documents:0,1,100,357,600", 600, 2),
        ("documents:0,1,2,130,700", 701, 2),
        ("documents:0,64,128,200", 333, 1),
    ):
        tensors = inputs(length, length, heads, dim, "cuda", batch=batch, v_dim=v_dim)
        compare_whole(kernel._flash.load(), *tensors, tiles_of(text, length))


@pytest.mark.parametrize(("dim", "v_dim"), [*((dim, dim) for dim in (32, 64, 96, 128, 160, 192, 256)), (192, 128)])
def test_flash4_softcap(kernel, dim, v_dim):
    """flash-attn-4 computes both passes, so its LSE is compared too."""
    for length in (1, 129, 1000):
        tensors = inputs(length, length, (4, 4), dim, "cuda", v_dim=v_dim)
        compare_whole(kernel, *tensors, causal(length), options=CAPPED)


@pytest.mark.parametrize(("dim", "v_dim"), [(160, 160), (192, 192), (192, 128)])
def test_flash4_softcap_backward_after_own_forward(kernel, monkeypatch, dim, v_dim):
    """`auto` computes large calls of these sizes like this."""
    monkeypatch.setitem(flash4_speeds.SPEEDS["softcap"], (dim, v_dim), ((0.0,) * 3, (2.0,) * 3))
    for length in (65, 700):
        tensors = inputs(length, length, (4, 4), dim, "cuda", v_dim=v_dim)
        compare_whole(kernel, *tensors, causal(length), options=CAPPED)


@pytest.mark.parametrize("mask", ["window:200", "documents:0,100,357,600", "full", "prefix:130"])
@pytest.mark.parametrize(("heads", "dim"), [((6, 2), 64), ((4, 4), 128), ((6, 2), 192)])
def test_flash4_softcap_of_package_kernel(kernel, heads, dim, mask):
    tensors = inputs(600, 600, heads, dim, "cuda")
    compare_whole(kernel._flash.load(), *tensors, tiles_of(mask, 600), merged=True, options=CAPPED)


@pytest.mark.parametrize(("dim", "dtype"), [(32, torch.bfloat16), (128, torch.float16)])
def test_flash4_full_documents_of_package_kernel(kernel, dim, dtype):
    tensors = inputs(601, 601, (4, 2), dim, "cuda", dtype)
    compare_whole(kernel._flash.load(), *tensors, tiles_of("full_documents:0,1,100,357,600", 601))


def test_flash4_many_documents_of_package_kernel(kernel):
    """Above 256 documents, the package finds them with another table."""
    text = ",".join(map(str, range(0, 3001, 10)))
    compare_whole(kernel._flash.load(), *inputs(3000, 3000, (4, 4), 32, "cuda"), tiles_of(f"documents:{text}", 3000))


def test_flash4_graph_replays_documents(kernel):
    """A captured call holds the table of lengths, and copies nothing to the device."""
    package, tiles = kernel._flash.load(), tiles_of("documents:0,1,100,357,600", 650)
    dout, q, k, v = inputs(650, 650, (4, 4), 32, "cuda")
    expect_same_numbers_in_graph(package, dout, q, k, v, tiles)


@pytest.mark.parametrize("dim", [64, 128])
def test_flash4_strides(kernel, dim):
    """Covers heads before rows, slices of a packed tensor, and rows not aligned to 16 bytes."""
    tensors = inputs(300, 300, (4, 4), dim, "cuda")
    compare_whole(kernel, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors), causal(300))
    for tiles in (causal(300), tiles_of("window:100", 300)):
        compare_whole(kernel, *torch.cat(tensors, 2).split(4, 2), tiles)
    compare_whole(kernel, *torch.cat(tensors, 3)[..., 1:].split(dim, 3)[:3], tensors[3], causal(300))


@pytest.mark.parametrize("dim", [64, 128])
def test_flash4_graph_replays_with_new_numbers(kernel, dim):
    expect_same_numbers_in_graph(kernel, *inputs(700, 700, (4, 2), dim, "cuda"), causal(700))


def expect_same_numbers_in_graph(kernel, dout, q, k, v, tiles):
    """Capture both passes, change q, and compare a replay with new calls."""

    def step():
        out, lse = kernel.forward_single_call(q, k, v, tiles, OPTIONS)
        return out, *kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, OPTIONS)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        torch.manual_seed(seed)
        q.normal_()
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        for mine, good in zip(captured, step(), strict=True):
            assert gap(mine, good.double()) < 1e-3
