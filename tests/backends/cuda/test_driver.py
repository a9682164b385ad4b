"""How a launch packs its parameters: where the compiled kernel's own PTX says that they lie."""

import re
import struct
from types import SimpleNamespace

import pytest
import torch

from burst_portable.backends.cuda.driver import Described, KernelDriver, pack_described, packing, ready
from burst_portable.backends.cuda.hopper.kernel import _triton_reason
from burst_portable.errors import DeviceError, UnsupportedError

if _triton_reason():
    pytest.skip(_triton_reason(), allow_module_level=True)

from backends.cuda import aot
from burst_portable.backends.cuda.hopper.launch import Descriptors

SIZES = {"u32": 4, "f32": 4, "u64": 8}
SHAPE, STRIDES = [2, 300, 4, 64], [300 * 256, 256, 64, 1]


@pytest.fixture(scope="module")
def compiled():
    return aot.compiled(aot.forward_build(64, 2))[0]


@pytest.fixture(scope="module")
def parameters(compiled):
    """Offset and size of each parameter, by the rules of PTX for their alignment."""
    found, at = [], 0
    entry = compiled.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0]
    for wide, kind in re.findall(r"\.param (?:\.align 64 \.b8 \w+\[(\d+)\]|\.(\w+))", entry):
        size, align = (int(wide), 64) if wide else (SIZES[kind], SIZES[kind])
        at = -(-at // align) * align
        found.append((at, size))
        at += size
    return found


def described(letter, box):
    return Described(None, box, 128, pack_described(letter * 128, SHAPE, STRIDES))


@pytest.fixture(scope="module")
def args():
    rows, keys, out = (1, 64, 1, 64), (1, 128, 1, 64), (1, 64, 1, 32)
    maps = [
        described(letter, box) for letter, box in zip((b"q", b"k", b"v", b"o"), (rows, keys, keys, out), strict=True)
    ]
    return [*maps, *(torch.zeros(1) for _ in range(4)), 0.125, 300, 1 << 40, 2, 3, 4, -5, 11, 12, 13, 14, 15, 16]


def test_every_argument_lies_where_the_kernel_reads_it(args, parameters):
    form = packing(args, parameters)
    values = [
        a.packed if isinstance(a, Described) else a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args
    ]
    packed = form.pack(*values, 0, 0)
    read = {4: "=i", 8: "=q"}
    numbers = []
    for offset, size in parameters:
        if size == 128:
            numbers.append(packed[offset : offset + 1])
            assert len(set(packed[offset : offset + size])) == 1
        else:
            numbers += struct.unpack_from(read[size], packed, offset)
    expected = []
    for a in args:
        if isinstance(a, Described):
            expected += [a.packed[:1], *SHAPE, *STRIDES]
        elif isinstance(a, torch.Tensor):
            expected.append(a.data_ptr())
        else:
            expected.append(struct.unpack("=i", struct.pack("=f", a))[0] if isinstance(a, float) else a)
    assert numbers == [*expected, 0, 0]


def test_other_parameters_are_not_packed(args, parameters):
    for wrong in (
        parameters[:-1],
        [*parameters, (parameters[-1][0] + 8, 8)],
        [parameters[0], (parameters[1][0], 8), *parameters[2:]],
        [parameters[0], (parameters[1][0] + 4, 4), *parameters[2:]],
        [],
    ):
        assert packing(args, wrong) is None


class FakeDriver:
    def __init__(self, parameters):
        self._parameters, self.launches = parameters, []

    def parameters(self, function):
        return self._parameters

    def launch(self, *launch):
        self.launches.append(launch)


def test_a_launch(compiled, args, parameters):
    driver = FakeDriver(parameters)
    kernel = SimpleNamespace(function=77, metadata=compiled.metadata)
    launch = ready(driver, kernel, args)
    launch((3, 1, 1), args, stream=9)
    ((function, grid, threads, shared, stream, packed),) = driver.launches
    assert (function, grid, stream) == (77, (3, 1, 1), 9)
    assert threads == 12 * 32, "two workers, the loader, and those that fill its group up"
    assert shared == compiled.metadata.shared > 100_000
    assert len(packed) == sum(parameters[-1])


def test_what_is_not_packed_is_left_to_triton(compiled, args, parameters):
    driver = FakeDriver(parameters)
    kernel = SimpleNamespace(function=77, metadata=compiled.metadata)
    assert ready(None, kernel, args) is None
    assert ready(driver, kernel, [described(b"q", (1, 64, 1, 32)), *args[1:]]) is None, "another box"
    for change in ({"global_scratch_size": 16}, {"num_ctas": 2}):
        about = SimpleNamespace(**{**compiled.metadata._asdict(), **change})
        assert ready(driver, SimpleNamespace(function=77, metadata=about), args) is None


class Library:
    """libcuda, of which a thread has asked nothing yet."""

    def __init__(self, refusals):
        self.refusals, self.calls = refusals, []

    def __getattr__(self, name):
        def call(*_):
            self.calls.append(name)
            return self.refusals.pop(0) if name == "cuLaunchKernel" and self.refusals else 0

        return call


@pytest.mark.parametrize(("refusals", "launches"), [([], 1), ([201], 2)], ids=["known", "new"])
def test_a_thread_that_is_new_to_the_device(refusals, launches, monkeypatch):
    library = Library(refusals)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    KernelDriver().launch(77, (1, 1, 1), 384, 0, 0, b"packed")
    asked = [name for name in library.calls if name != "cuDriverGetVersion"]
    bound = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"] * (launches - 1)
    assert asked == ["cuLaunchKernel", *bound, "cuLaunchKernel"][: 1 + len(bound) + (launches - 1)]


def test_a_launch_that_the_driver_refuses(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: Library([700]))
    with pytest.raises(DeviceError, match="code 700"):
        KernelDriver().launch(77, (1, 1, 1), 384, 0, 0, b"packed")


def test_what_tma_cannot_read_is_copied_and_the_copy_described():
    kept = Descriptors()
    x = torch.randn(2, 8, 3, 64).bfloat16()
    same, described = kept.readable("q", x, 4, 64)
    assert same is x
    assert kept.readable("q", x, 4, 64) == (x, described)
    assert kept.readable("q", x, 8, 64)[1] is not described
    odd = torch.randn(2, 8, 3, 65).bfloat16()[..., :64]
    for _ in range(2):  # what is kept is of the copy, never of `odd` itself
        copy, described = kept.readable("q", odd, 4, 64)
        assert copy is not odd
        assert torch.equal(copy, odd)
        assert described is kept.rows("q", copy, 4, 64)
    with pytest.raises(UnsupportedError, match="cannot address q"):
        kept.rows("q", odd, 4, 64)
