"""Test that a launch which is repeated from its addresses equals one whose parameters are packed again."""

import ctypes
import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from burst_portable.backends.cuda import driver as cuda_driver
from burst_portable.backends.cuda.driver import MAP, Described
from burst_portable.backends.cuda.hopper import descriptors, launcher, prepared_launches
from burst_portable.backends.cuda.hopper import kernel as hopper_kernel
from burst_portable.backends.cuda.hopper.compiled_kernels import CompiledKernels
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.backends.cuda.hopper.support import triton_reason
from burst_portable.kernels.base import BackwardInputs
from burst_portable.planning.tiles import Tiles, make_tile
from tests.support.calls import settings
from tests.support.emulator.hopper import replace_in_launches

if triton_reason():
    pytest.skip(triton_reason(), allow_module_level=True)

ROWS, HEADS, DIM, SPLIT_DIM = 24, 2, 64, 256  # heads of SPLIT_DIM have a launch for each gradient
COUNTERS = torch.zeros(4, dtype=torch.int32).split(1)  # by stream


class RecordingDriver:
    """Record the parameters of launches. The tensor maps contain everything from which they are made."""

    def __init__(self):
        self.launches, self.args, self.maps = [], (), 0

    def load(self, kernel):
        return 77

    def parameters(self, function):
        """Return parameters for the arguments that `ready` got: pointers and integers take 8 bytes."""
        found, at = [], 0
        for arg in (*self.args, None, None):
            rank = len(arg.box) if isinstance(arg, Described) else 0
            sizes = [MAP, *[4] * rank, *[8] * rank] if rank else [4 if isinstance(arg, float) else 8]
            for size in sizes:
                at = -(-at // min(size, 64)) * min(size, 64)
                found.append((at, size))
                at += size
        return found

    def tensor_map(self, *about):
        self.maps += 1
        return repr(about).encode().ljust(MAP)

    def launch(self, what, stream, extra):
        _, packed, _, count, _ = (ctypes.c_uint64 * 5).from_address(extra)
        self.launches.append((what, stream, ctypes.string_at(packed, ctypes.c_size_t.from_address(count).value)))


@pytest.fixture
def driver(monkeypatch):
    """Launch with a driver that records, and with an allocator that gives equal requests the same memory."""
    driver = RecordingDriver()
    metadata = SimpleNamespace(
        num_ctas=1, launch_pdl=False, launch_cooperative_grid=False, global_scratch_size=0, profile_scratch_size=0,
        num_warps=4, shared=0,
    )  # fmt: skip

    def ready(_, kernel, args, renewed=None):
        driver.args = args
        maps = [a for a in args if isinstance(a, Described)]
        swizzles = {0: 0, 32: 1, 64: 2, 128: 3}
        metadata.tensordesc_meta = [{"block_size": m.box, "swizzle": swizzles[m.swizzle]} for m in maps]
        return cuda_driver.ready(driver, SimpleNamespace(metadata=metadata), args, renewed)

    for module in (descriptors, launcher):
        monkeypatch.setattr(module, "kernel_driver", lambda: driver)
    monkeypatch.setattr(launcher, "compiled_kernel", lambda kernel, *_: kernel)
    monkeypatch.setattr(launcher, "ready", ready)
    kernels = CompiledKernels()
    kernels.counter = lambda device, stream: COUNTERS[stream]
    replace_in_launches(monkeypatch, "compiled_kernels", lambda: kernels)
    monkeypatch.setattr(hopper_kernel, "on", lambda device: nullcontext())
    replace_in_launches(monkeypatch, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch, "empty", functools.cache(torch.empty))
    monkeypatch.setattr(torch, "empty_like", like)
    monkeypatch.setattr(torch, "tensor", lambda numbers, dtype: table(tuple(numbers), dtype))
    monkeypatch.setattr(torch.Tensor, "repeat", functools.cache(torch.Tensor.repeat))
    return driver


def like(x, *, dtype=None, memory_format):
    """Return the same memory for all tensors of a shape and an element size: here nothing is computed."""
    dtype = dtype or x.dtype
    same_size = torch.float32 if dtype.itemsize == 4 else torch.bfloat16
    return memory("like", same_size, tuple(x.shape)).view(dtype)


_new_tensor = torch.tensor


@functools.cache
def table(numbers, dtype):
    """Return the same tensor for the same numbers, so that two kernels have their tables at one address."""
    return _new_tensor(numbers, dtype=dtype)


def causal(rows):
    return Tiles([make_tile(0, rows, 0, rows, 0, rows)])


def base_inputs(dim=DIM, **changes):
    """Return the inputs of both passes. Equal calls return tensors at the same addresses."""
    rows = torch.bfloat16, (1, ROWS, HEADS, dim)
    made = {name: memory(name, *rows) for name in ("q", "k", "v", "out", "dout")}
    made |= {name: memory(name, torch.float32, rows[1]) for name in ("dq", "dk", "dv")}
    made |= {name: memory(name, torch.float32, (1, HEADS, ROWS)) for name in ("lse", "delta")}
    return SimpleNamespace(**{**made, "scale": 0.125, "softcap": None, "deterministic": False, **changes})


@functools.cache
def memory(name, dtype, shape, copy=0):
    """Return a tensor that lives until the tests end."""
    return torch.zeros(shape, dtype=dtype)


def forward(kernel, x):
    call = settings(scale=x.scale, softcap=x.softcap)
    kernel.attend_into(x.q, x.k, x.v, causal(x.q.shape[1]), call, x.out, x.lse)


def backward(kernel, x):
    call = settings(scale=x.scale, softcap=x.softcap, deterministic=x.deterministic)
    inputs = BackwardInputs(x.dout, x.q, x.k, x.v, x.lse, x.out)
    kernel.attend_backward(inputs, causal(x.q.shape[1]), call, into=(x.dq, x.dk, x.dv))


def backward_with_delta(kernel, x):
    call = settings(scale=x.scale, softcap=x.softcap, deterministic=x.deterministic)
    inputs = BackwardInputs(x.dout, x.q, x.k, x.v, x.lse, None, x.delta)
    kernel.attend_backward(inputs, causal(x.q.shape[1]), call, into=(x.dq, x.dk, x.dv))


def single_backward(kernel, x):
    call = settings(scale=x.scale, softcap=x.softcap, deterministic=x.deterministic)
    kernel.backward_single_call(BackwardInputs(x.dout, x.q, x.k, x.v, x.lse, x.out), causal(x.q.shape[1]), call)


def other_strides(x):
    """Return a tensor at the same address with the same shape and other strides."""
    _, rows, _, dim = x.shape
    return x.as_strided(x.shape, (x.numel(), dim, rows * dim, 1))


def moved(name):
    """Return a change: a tensor like that of the name at another address."""
    return lambda x: {name: memory(name, getattr(x, name).dtype, tuple(getattr(x, name).shape), copy=1)}


def strides(name):
    return lambda x: {name: other_strides(getattr(x, name))}


def number(**changes):
    return lambda x: changes


def as_float16(x):
    return {name: getattr(x, name).view(torch.float16) for name in ("q", "k", "v", "out", "dout")}


def first_rows(x):
    """Return the first 16 rows of each tensor, at the same address with the same strides."""
    tensors = {name: value for name, value in vars(x).items() if isinstance(value, torch.Tensor)}
    return {name: t[:, :16] if t.dim() == 4 else t[..., :16] for name, t in tensors.items()}


BOTH = {
    "scale": number(scale=0.25),
    "softcap": number(softcap=30.0),
    "dtype": as_float16,
    "rows": first_rows,
    **{f"{name} at another address": moved(name) for name in ("q", "k", "v", "lse")},
    **{f"strides of {name}": strides(name) for name in ("q", "k", "v", "out")},
}
SPLIT = BOTH | {"dout at another address": moved("dout"), "strides of dout": strides("dout")}
BACKWARD = SPLIT | {"deterministic": number(deterministic=True)}
SUMS = {f"{name} at another address": moved(name) for name in ("dq", "dk", "dv")}
CASES = [
    (forward, DIM, BOTH),
    (backward, DIM, BACKWARD | SUMS),
    (backward_with_delta, DIM, {"delta at another address": moved("delta")}),
    (single_backward, DIM, BACKWARD),
    (backward, SPLIT_DIM, SPLIT | SUMS),
    (single_backward, SPLIT_DIM, SPLIT),
]
PASSES = [pytest.param(run, dim, id=f"{run.__name__}-{dim}") for run, dim, _ in CASES]
EVERY = [
    pytest.param(run, dim, change, id=f"{run.__name__}-{dim}-{name}")
    for run, dim, cases in CASES
    for name, change in cases.items()
]


def launches(driver, run, kernel, x):
    """Return the launches of a call: what is launched, the stream, and the packed parameters."""
    driver.launches.clear()
    run(kernel, x)
    return list(driver.launches)


def differs(driver, run, dim, change):
    """Return whether a kernel that kept a call launches something else for a changed call than a new kernel."""
    kernel, x = HopperKernel(), base_inputs(dim)
    for _ in range(2):
        run(kernel, x)
    other = base_inputs(dim, **change(x))
    return launches(driver, run, kernel, other) != launches(driver, run, HopperKernel(), other)


@pytest.mark.parametrize(("run", "dim", "change"), EVERY)
def test_launch_after_similar_one_is_packed_again(driver, run, dim, change):
    assert not differs(driver, run, dim, change)
    x = base_inputs(dim)
    before, after = (launches(driver, run, HopperKernel(), one) for one in (x, base_inputs(dim, **change(x))))
    assert before != after, "the change is visible in the parameters"


@pytest.mark.parametrize(("run", "dim"), PASSES)
def test_equal_launch_is_repeated_without_packing(driver, run, dim, monkeypatch):
    kernel = HopperKernel()
    first = launches(driver, run, kernel, base_inputs(dim))
    with monkeypatch.context() as patch:
        patch.setattr(cuda_driver.Ready, "__call__", None)
        assert launches(driver, run, kernel, base_inputs(dim)) == first
        replace_in_launches(patch, "placed", lambda *_: ("new",))
        with pytest.raises(TypeError):  # the planted bug: a key that is never found
            run(kernel, base_inputs(dim))


def without_strides(call, *tensors):
    return call.scale, call.softcap, *[part for x in tensors for part in (x.data_ptr(), x.dtype)]


def without_dtype(call, *tensors):
    return call.scale, call.softcap, *[part for x in tensors for part in (x.data_ptr(), x.stride())]


def without_address(call, *tensors):
    return call.scale, call.softcap, *[part for x in tensors for part in (x.stride(), x.dtype)]


def without_numbers(_, *tensors):
    return tuple(part for x in tensors for part in (x.data_ptr(), x.stride(), x.dtype))


@pytest.mark.parametrize(("run", "dim"), [one for one in PASSES if one.values[0] is not backward_with_delta])
@pytest.mark.parametrize(
    ("placed", "case"),
    [
        (without_strides, "strides of q"),
        (without_dtype, "dtype"),
        (without_address, "lse at another address"),
        (without_numbers, "scale"),
    ],
)
def test_planted_incomplete_key_repeats_stale_launch(driver, monkeypatch, run, dim, placed, case):
    replace_in_launches(monkeypatch, "placed", placed)
    assert differs(driver, run, dim, BOTH[case])


def test_repeated_launch_gets_counter_of_its_stream(driver, monkeypatch):
    kernel = HopperKernel()
    plain = [launches(driver, forward, kernel, base_inputs())[0] for _ in range(2)][1]
    replace_in_launches(monkeypatch, "current_stream", lambda device: 3)
    (repeated,) = launches(driver, forward, kernel, base_inputs())
    (packed,) = launches(driver, forward, HopperKernel(), base_inputs())
    assert repeated == packed
    assert (plain[1], repeated[1]) == (0, 3)
    before, after = (COUNTERS[i].data_ptr().to_bytes(8, "little") for i in (0, 3))
    assert plain[2].replace(before, after) == repeated[2] != plain[2]


def test_repeated_deterministic_launch_gets_new_order(driver, monkeypatch):
    """The kernel changes the order in memory: an old one, or that of another call, would make it wait forever."""
    kernel, x, orders = HopperKernel(), base_inputs(deterministic=True), []

    def repeat(turns, count):
        orders.append(torch.cat([turns] * count))
        return orders[-1]

    monkeypatch.setattr(torch.Tensor, "repeat", repeat)
    first, second = (launches(driver, backward, kernel, x)[-1] for _ in range(2))
    before, after = (order.data_ptr().to_bytes(8, "little") for order in orders)
    assert first[2].replace(before, after) == second[2] != first[2]


def test_repeated_deterministic_call_writes_its_turns_again(driver):
    kernel, x = HopperKernel(), base_inputs(deterministic=True)
    first, second = (launches(driver, single_backward, kernel, x) for _ in range(2))
    prepared, computed = second
    assert [launched for launched, *_ in first] == [prepared[0], computed[0]]
    assert prepared[0] != computed[0]


@pytest.mark.parametrize(("deterministic", "blocks"), [(False, 0), (True, -(-ROWS // 128))])
def test_prepare_gets_the_number_of_turns(driver, deterministic, blocks):
    """The parameter has 32 bits. Row terms of long inputs have more elements than that."""
    compiled, given = hopper_kernel.compiled_kernels(), []
    launch = compiled.row_terms
    compiled.row_terms = lambda key, grid, args, *rest: given.append(args[15]) or launch(key, grid, args, *rest)
    launches(driver, single_backward, HopperKernel(), base_inputs(deterministic=deterministic))
    assert given == [blocks]


@pytest.mark.parametrize(("run", "name"), [(forward, "q"), (forward, "k"), (forward, "v"), (backward, "dout")])
def test_launch_of_copied_input_is_not_repeated(driver, monkeypatch, run, name):
    odd = torch.zeros(1, ROWS, HEADS, DIM + 4, dtype=torch.bfloat16)[..., :DIM]
    kernel, copies = HopperKernel(), []
    for _ in range(2):  # a repeated launch would read the first copy, which is freed
        monkeypatch.setattr(torch.Tensor, "clone", lambda x, **_: copies.append(x.contiguous()) or copies[-1])
        last = launches(driver, run, kernel, base_inputs(**{name: odd}))[-1]
    assert len(copies) == 2
    assert f"({copies[1].data_ptr()}, ".encode() in last[2]


def test_launches_of_two_devices_are_kept_apart(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "to", lambda table, device: (device, table))
    q = memory("q", torch.bfloat16, (1, ROWS, HEADS, DIM))
    sizes = prepared_launches.sizes_of(q, q, q)
    kept = functools.lru_cache(prepared_launches.build_forward_launch)
    one, other, again = (kept(causal(ROWS), sizes, torch.device("cuda", i), True, False) for i in (0, 1, 0))
    assert one is again
    assert one.bound is not other.bound
    assert (one.table[0].index, other.table[0].index) == (0, 1)
