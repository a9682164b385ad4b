"""Test that a launch packs its parameters at the offsets that the PTX of the compiled kernel declares."""

import ctypes
import enum
import re
import struct
from types import SimpleNamespace

import pytest
import torch

from burst_portable.backends.cuda.driver import Described, KernelDriver, pack_described, packing, ready
from burst_portable.backends.cuda.hopper.support import triton_reason
from burst_portable.errors import DeviceError

if triton_reason():
    pytest.skip(triton_reason(), allow_module_level=True)

from backends.cuda import aot

SIZES = {"u32": 4, "f32": 4, "u64": 8}
SHAPE, STRIDES = [2, 300, 4, 64], [300 * 256, 256, 64, 1]


@pytest.fixture(scope="module")
def compiled():
    return aot.compiled(aot.forward_build((64, 64), 2))[0]


@pytest.fixture(scope="module")
def parameters(compiled):
    """Return the offset and size of each parameter by the alignment rules of PTX."""
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
    boxes = (rows, rows, keys, keys, keys, keys, out, out)  # both panels of q, k, v and out
    maps = [described(bytes([letter]), box) for letter, box in zip(b"qQkKvVoO", boxes, strict=True)]
    return [*maps, *(torch.zeros(1) for _ in range(4)), 0.125, 300, 1 << 40, 2, 3, 4, -5, 11, 12, 13, 14, 15, 16]


def test_packing_places_arguments_at_kernel_offsets(args, parameters):
    form = packing(args, parameters)
    values = [
        a.packed if isinstance(a, Described) else a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args
    ]
    packed = form.form.pack(*values, 0, 0)
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


def test_packing_returns_none_for_other_parameters(args, parameters):
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

    def load(self, kernel):
        return kernel.function

    def parameters(self, function):
        return self._parameters

    def launch(self, what, stream, extra):
        buffer, packed, size, count, end = (ctypes.c_uint64 * 5).from_address(extra)
        assert (buffer, size, end) == (1, 2, 0), "CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END"
        self.launches.append((what, stream, ctypes.string_at(packed, ctypes.c_size_t.from_address(count).value)))


def test_ready_launch_passes_grid_threads_and_arguments(compiled, args, parameters):
    driver = FakeDriver(parameters)
    kernel = SimpleNamespace(function=77, metadata=compiled.metadata)
    launch = ready(driver, kernel, args)
    launch((3, 1, 1), args, stream=9)
    (((function, *grid, threads, one, other, shared), stream, packed),) = driver.launches
    assert (function, grid, stream) == (77, [3, 1, 1], 9)
    assert (threads, one, other) == (12 * 32, 1, 1), "two workers, the loader, and those that fill its group up"
    assert shared == compiled.metadata.shared > 100_000
    assert len(packed) == sum(parameters[-1])
    values = [a.packed if isinstance(a, Described) else a for a in args]
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in values]
    assert packed == packing(args, parameters).form.pack(*values, 0, 0)


def test_ready_returns_none_if_triton_must_launch(compiled, args, parameters):
    driver = FakeDriver(parameters)
    kernel = SimpleNamespace(function=77, metadata=compiled.metadata)
    assert ready(None, kernel, args) is None
    assert ready(driver, kernel, [described(b"q", (1, 64, 1, 32)), *args[1:]]) is None, "another box"
    for change in ({"global_scratch_size": 16}, {"num_ctas": 2}):
        about = SimpleNamespace(**{**compiled.metadata._asdict(), **change})
        assert ready(driver, SimpleNamespace(function=77, metadata=about), args) is None


class Result(enum.Enum):
    """The values of CUresult that these tests need."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Library:
    """Simulate `cuda.bindings.driver` in a thread without a context."""

    CUresult = Result

    def __init__(self, *refusals):
        self.refusals, self.calls = list(refusals), []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            refused = self.refusals and name == "cuLaunchKernel"
            code = self.refusals.pop(0) if refused else Result.CUDA_SUCCESS
            alone = name in ("cuLaunchKernel", "cuCtxSetCurrent") or name.startswith("cuFuncSet")
            return (code,) if alone else (code, f"of {name}")

        return call


class Names:
    """Simulate an enumeration whose numbers do not matter."""

    def __getattr__(self, name):
        return name


WHAT = (77, 1, 1, 1, 384, 1, 1, 0)
LAUNCH = ("cuLaunchKernel", *WHAT, 9, 0, 64)


BIND = [
    ("cuDeviceGet", 1),
    ("cuDevicePrimaryCtxRetain", "of cuDeviceGet"),
    ("cuCtxSetCurrent", "of cuDevicePrimaryCtxRetain"),
]


@pytest.mark.parametrize(("shared", "context"), [(1000, 5), (200_000, 5), (1000, 0)])
def test_load_makes_no_launcher(shared, context, monkeypatch):
    """The simulated driver gets machine code; `CompiledKernel.function` of Triton would make a launcher too."""
    images = []

    class Loading(Library):
        CUfunction_attribute = CUfunc_cache = Names()

        def cuCtxGetCurrent(self):
            return Result.CUDA_SUCCESS, context

        def cuModuleLoadData(self, address):
            images.append(ctypes.string_at(address, 4))
            return Result.CUDA_SUCCESS, "module"

        def cuModuleGetFunction(self, *arguments):
            assert arguments == ("module", b"forward_kernel")
            return Result.CUDA_SUCCESS, 77

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    library = Loading()
    kernel = SimpleNamespace(name="forward_kernel", kernel=b"\x7fE\0F", metadata=SimpleNamespace(shared=shared))
    assert KernelDriver(library).load(kernel) == 77
    assert images == [b"\x7fE\0F"]
    more = [
        ("cuFuncSetCacheConfig", 77, "CU_FUNC_CACHE_PREFER_SHARED"),
        ("cuFuncSetAttribute", 77, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", shared),
    ]
    assert library.calls == [("cuDriverGetVersion",), *BIND * (context == 0), *more * (shared > 49152)]


@pytest.mark.parametrize("new", [False, True], ids=["known", "new"])
def test_kernel_driver_binds_context_in_new_thread(new, monkeypatch):
    library = Library(*[Result.CUDA_ERROR_INVALID_CONTEXT] * new)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    KernelDriver(library).launch(WHAT, 9, 64)
    assert library.calls == [("cuDriverGetVersion",), LAUNCH, *[*BIND, LAUNCH] * new]


def test_kernel_driver_raises_device_error_on_failed_launch():
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        KernelDriver(Library(Result.CUDA_ERROR_ILLEGAL_ADDRESS)).launch(WHAT, 9, 64)


@pytest.mark.parametrize(
    ("version", "rows", "cleared"), [(13000, 300, True), (13000, 3000, False), (13020, 300, False)]
)
def test_tensor_map_clears_bit_set_by_older_drivers(version, rows, cleared):
    """The bit is cleared only for small tensors, and all other bits of the tensor map are kept."""
    room = ctypes.create_string_buffer(b"\xff" * 128, 128)
    asked = []

    class Encoding(Library):
        CUtensorMapDataType = CUtensorMapInterleave = CUtensorMapL2promotion = CUtensorMapFloatOOBfill = Names()
        CUtensorMapSwizzle = cuuint32_t = cuuint64_t = staticmethod(int)

        def cuDriverGetVersion(self):
            return Result.CUDA_SUCCESS, version

        def cuTensorMapEncodeTiled(self, *arguments):
            asked.append(arguments)
            return Result.CUDA_SUCCESS, SimpleNamespace(getPtr=lambda: ctypes.addressof(room))

    made = KernelDriver(Encoding()).tensor_map(
        1 << 40, torch.bfloat16, [1, rows, 1, 64], [rows * 64, 64, 64, 1], (1, 64, 1, 64), 128
    )
    ((_, rank, address, extents, steps, box, ones, _, swizzle, *_),) = asked
    assert (rank, address, swizzle, ones) == (4, 1 << 40, 3, [1] * 4)
    assert (extents, box) == ([64, 1, rows, 1], [64, 1, 64, 1]), "the last one first"
    assert steps[:3] == [128, 128, rows * 128], "bytes"
    assert int.from_bytes(made, "little") == (1 << 1024) - 1 - ((1 << 64 + 21) if cleared else 0)
