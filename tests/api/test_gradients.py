"""Test sums over ranks.

Each shared gradient is summed once. If ranks pass different values, each rank raises and keeps its gradients.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import burst_portable as bp
from burst_portable.comm.base import Transport, WrappedTransport
from burst_portable.errors import BurstError, InputError, MismatchError
from tests.support.fork_server import run_program


def parameters(*sizes: int) -> list[Parameter]:
    """Return parameters of ones with these sizes. Each has a gradient of ones, except the last, which has none."""
    made = [Parameter(torch.ones(size)) for size in sizes]
    for one in made[:-1]:
        one.grad = torch.ones_like(one)
    return made


def frozen(*sizes: int) -> list[Parameter]:
    made = parameters(*sizes)
    return [made[0].requires_grad_(False), *made[1:]]


def sparse() -> list[Parameter]:
    made = parameters(5, 7, 2)
    made[0].grad = torch.ones(5).to_sparse()
    return made


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (
            lambda: parameters(5, 2),
            "parameters: 3 tensors of 14 numbers on rank 0, 2 but 2 tensors of 7 numbers on rank 1",
        ),
        (lambda: parameters(7, 5, 2), "3 tensors of 14 numbers on rank 0, 2 but another of that name on rank 1"),
        (lambda: frozen(5, 7, 2), "3 tensors of 14 numbers on rank 0, 2 but 2 tensors of 9 numbers on rank 1"),
        (lambda: parameters(5, 7, 2)[0], "must be an iterable of tensors; got Parameter"),
        (sparse, "sparse gradients are not supported"),
    ],
)
def test_all_reduce_gradients_rejects_different_parameters(odd: Callable[[], list[Parameter]], told: str):
    def work(mesh: bp.Mesh) -> str:
        bp.all_reduce(torch.ones(3), mesh)  # connects the ranks, so that a rank can report its error to the other ranks
        mine = odd() if mesh.rank == 1 else parameters(5, 7, 2)
        try:
            bp.all_reduce_gradients(mine, mesh)
        except BurstError as error:
            if mesh.rank != 1:
                assert [None if one.grad is None else one.grad.tolist() for one in mine] == [[1] * 5, [1] * 7, None]
            after = parameters(4, 1)
            bp.all_reduce_gradients(after, mesh)
            assert after[0].grad.tolist() == [3.0] * 4
            return str(error)
        return ""

    for message in bp.run_threads(3, work):
        assert told in message


@pytest.mark.parametrize("which", [0, 1, 2], ids=["float32", "frozen", "turned bfloat16"])
def test_all_reduce_gradients_rejects_different_values(which: int):
    """One bit of one number suffices; values are compared in the first call only."""

    def work(mesh: bp.Mesh) -> str:
        mine = [Parameter(torch.arange(6.0)), Parameter(torch.ones(4), requires_grad=False)]
        mine.append(Parameter(torch.arange(6.0).view(2, 3).T.bfloat16()))
        for one in (mine[0], mine[2]):
            one.grad = torch.ones_like(one)
        other = mine[which]
        assert not mine[2].is_contiguous()
        bits = torch.int16 if other.dtype == torch.bfloat16 else torch.int32
        change = torch.zeros_like(other.data, dtype=bits)
        change[1] = mesh.rank == 2
        other.data = (other.data.view(bits) + change).view(other.dtype)
        with pytest.raises(MismatchError) as caught:
            bp.all_reduce_gradients(mine, mesh)
        assert mine[0].grad.tolist() == [1] * 6
        other.data = (other.data.view(bits) - change).view(other.dtype)
        for _ in range(2):
            bp.all_reduce_gradients(mine, mesh)
            mine[0].data += mesh.rank
            for one in (mine[0], mine[2]):
                one.grad.mul_(1)  # as a backward pass, which adds to gradients in place
        assert mine[0].grad.tolist() == [9] * 6
        return str(caught.value)

    for message in bp.run_threads(3, work):
        assert re.search(r"values of the parameters: checksum \w{8} on rank 0, 1 but checksum \w{8} on rank 2", message)
        assert "seed ranks alike" in message


@pytest.mark.parametrize(
    ("odd", "told"), [("one", "x is not a tensor"), (torch.ones(3).to_sparse(), "x is not a dense tensor")]
)
def test_all_reduce_of_invalid_tensor_raises_on_all_ranks(odd: object, told: str):
    """The other ranks do not wait for the timeout."""

    def work(mesh: bp.Mesh) -> tuple[str, list[float]]:
        bp.all_reduce(torch.ones(3), mesh)
        with pytest.raises(BurstError) as caught:
            bp.all_reduce(odd if mesh.rank == 1 else torch.ones(3), mesh)
        return str(caught.value), bp.all_reduce(torch.ones(3), mesh).tolist()

    for message, after in bp.run_threads(3, work, timeout=20):
        assert told in message
        assert "not come" not in message
        assert after == [3.0] * 3


def test_all_reduce_with_gradients_raises_on_all_ranks():
    """Rank 0 would get the gradient of the loss of rank 0, which is 2. That of the sum over ranks is 6."""

    def work(mesh: bp.Mesh) -> tuple[str, list[float]]:
        bp.all_reduce(torch.ones(3), mesh)
        x = torch.ones(3, requires_grad=mesh.rank == 1)
        with pytest.raises(BurstError) as caught:
            ((mesh.rank + 1) * bp.all_reduce(2 * x, mesh)).sum().backward()
        with torch.no_grad():
            bp.all_reduce(2 * x, mesh)
        return str(caught.value), bp.all_reduce(x.detach(), mesh).tolist()

    for message, after in bp.run_threads(2, work, timeout=20):
        assert "all_reduce has no gradient; got a tensor that requires gradients; detach the tensor" in message
        assert after == [2.0] * 3


def test_invalid_first_all_reduce_raises_on_all_ranks():
    """No rank has sent anything yet; the parameters determine the transport for the error."""

    def work(mesh: bp.Mesh) -> str:
        with pytest.raises(BurstError) as caught:
            bp.all_reduce_gradients(sparse() if mesh.rank == 1 else parameters(5, 7, 2), mesh)
        return str(caught.value)

    for message in bp.run_threads(3, work, timeout=20):
        assert "sparse gradients are not supported" in message


def test_all_reduce_gradients_compares_known_parameters_again():
    """With two models in turn, a rank that passes the other model must not be summed."""

    def work(mesh: bp.Mesh) -> str:
        one, other = parameters(5, 2), parameters(5, 7, 2)
        for each in (one, other):
            bp.all_reduce_gradients(each, mesh)
        for parameter in (*one, *other):
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(MismatchError) as caught:
            bp.all_reduce_gradients(other if mesh.rank == 1 else one, mesh)
        return str(caught.value)

    for message in bp.run_threads(2, work):
        assert "2 tensors of 7 numbers on rank 0 but 3 tensors of 14 numbers on rank 1" in message


@pytest.mark.parametrize("listed", [[], frozen(5, 2)[:1]], ids=["none", "frozen"])
def test_all_reduce_gradients_without_gradients_does_nothing(listed: list[Parameter]):
    """No gradient determines a device, so no transport is needed."""
    assert bp.run_threads(2, lambda mesh: bp.all_reduce_gradients(listed, mesh)) == [None, None]
    assert listed == [] or listed[0].grad.tolist() == [1] * 5


@pytest.mark.parametrize(
    "beside",
    [torch.ones(2, dtype=torch.complex128), torch.ones(2, device="meta"), torch.ones(2).to_sparse()],
    ids=["of 16 bytes a number", "without memory", "sparse"],
)
def test_frozen_tensors_are_not_compared(beside: torch.Tensor):
    def work(mesh: bp.Mesh) -> list[float]:
        one = parameters(3, 1)[0]
        bp.all_reduce_gradients([one, beside], mesh)
        return one.grad.tolist()

    assert bp.run_threads(2, work) == [[2.0] * 3] * 2


class Counting(WrappedTransport):
    """Record the bytes of each buffer of an exchange among all ranks, by its label."""

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped)
        self.sizes: list[tuple[str, list[int]]] = []

    def all_to_all(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], label: str = "all_to_all"
    ) -> None:
        self.sizes.append((label, [x.numel() for x in sends]))
        super().all_to_all(sends, receives, label)


def exchanged(mesh: bp.Mesh, work: Callable[[bp.Mesh], Any]) -> tuple[Any, list[tuple[str, list[int]]]]:
    """Run work over a transport that counts; return its result and the bytes for each rank of each exchange."""
    counting = Counting(mesh.transport("cpu"))
    made = work(bp.Mesh(mesh.rank, mesh.size, lambda device_type: counting))
    return made, counting.sizes


def test_all_reduce_gradients_sums_expanded_gradients():
    """Sums are written in place. The error came after other gradients were summed, and the next call raised too."""

    def work(mesh: bp.Mesh) -> list[list[float]]:
        mine = parameters(2, 3, 1)[:2]
        (gradient,) = torch.autograd.grad(mine[1].sum() * (mesh.rank + 1), mine[1])
        assert gradient.stride() == (0,)
        mine[1].grad = gradient
        bp.all_reduce_gradients(mine, mesh, bucket_bytes=8)
        return [one.grad.tolist() for one in mine]

    assert bp.run_threads(2, work) == [[[2.0] * 2, [3.0] * 3]] * 2


def test_all_reduce_gradients_fills_buckets():
    """Gradients share a bucket of 8 bytes; a larger gradient has its own."""

    def work(mesh: bp.Mesh) -> list[int]:
        mine = parameters(1, 1, 1, 3, 1, 1)
        _, sizes = exchanged(mesh, lambda counted: bp.all_reduce_gradients(mine, counted, bucket_bytes=8))
        return [sum(parts) // 4 for label, parts in sizes if label == "summing gradients"]

    # Each gradient has one additional number, which identifies the ranks that have it. Two ranks divide all numbers.
    assert bp.run_threads(2, work) == [[2 + 2, 1 + 1, 3 + 1, 2 + 2]] * 2


def test_different_bucket_bytes_raise_on_all_ranks():
    def work(mesh: bp.Mesh) -> str:
        with pytest.raises(MismatchError) as caught:
            bp.all_reduce_gradients(parameters(1, 1, 1), mesh, bucket_bytes=4 if mesh.rank else 8)
        return str(caught.value)

    for message in bp.run_threads(2, work):
        assert "bucket_bytes: 8 on rank 0 but 4 on rank 1" in message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.bool, torch.complex64])
def test_all_reduce_accepts_dtypes_that_torch_does_not_add(dtype: torch.dtype):
    """The error came after the exchange, so that the next call raised too."""
    values = torch.tensor([1.0, 0.0, 1.5, 0.0, 1.0]).to(dtype)
    expected = values if dtype is torch.bool else (3 * values.to(torch.complex128)).real.to(dtype)
    for found in bp.run_threads(3, lambda mesh: bp.all_reduce(values, mesh)):
        assert found.dtype is dtype
        assert found.tolist() == expected.tolist()


def test_all_reduce_pads_to_multiple_of_ranks():
    """Five numbers on three ranks are sent as six."""

    def work(mesh: bp.Mesh) -> tuple[list[float], set[tuple[int, ...]]]:
        made, sizes = exchanged(mesh, lambda counted: bp.all_reduce(torch.arange(5.0), counted).tolist())
        return made, {tuple(parts) for label, parts in sizes if label in ("summing gradients", "gathering gradients")}

    for total, sent in bp.run_threads(3, work):
        assert total == [0, 3, 6, 9, 12]
        assert sent == {(8, 8, 8)}  # a third of six numbers to each rank


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_values_of_different_dtypes_are_compared(dtype: torch.dtype):
    def work(mesh: bp.Mesh) -> str:
        frozen = torch.full((3,), 2.0 if mesh.rank == 1 else 1.0).to(dtype)
        with pytest.raises(MismatchError) as caught:
            bp.all_reduce_gradients([*parameters(5, 1)[:1], frozen], mesh)
        return str(caught.value)

    for message in bp.run_threads(2, work):
        assert "values of the parameters: checksum" in message


def test_all_reduce_during_attention_raises_on_all_ranks():
    def work(mesh: bp.Mesh) -> str:
        x = torch.ones(1, 4, 2, 8)
        try:
            bp.all_reduce(x, mesh) if mesh.rank == 1 else bp.attention(x, x, x, mesh=mesh)
        except BurstError as error:
            return str(error)
        return ""

    for message in bp.run_threads(2, work):
        assert "pass: forward on rank 0 but all_reduce on rank 1" in message


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1 << 24, 1 << 53]),
        torch.tensor([3, 1 << 25], dtype=torch.int32),
        torch.tensor([5, 127], dtype=torch.uint8),
        torch.tensor([5, 32767], dtype=torch.int32).to(torch.uint16),
        torch.tensor([5, 1 << 50]).to(torch.uint64),
        torch.tensor([1 + 2j, -3j]),
        torch.tensor([1 + 1e-9j, 2], dtype=torch.complex128),
        torch.tensor([1.0, 1 / 3], dtype=torch.float64),
    ],
    ids=lambda values: str(values.dtype),
)
def test_all_reduce_is_exact_for_wide_integers_and_complex(values: torch.Tensor):
    """Integers keep all digits, and complex numbers both parts."""
    one_more = torch.tensor([x + 1 for x in values.tolist()], dtype=values.dtype)
    made = bp.run_threads(2, lambda mesh: bp.all_reduce(one_more if mesh.rank else values, mesh))
    for total in made:
        assert total.dtype is values.dtype
        assert total.tolist() == [2 * x + 1 for x in values.tolist()]


def test_all_reduce_gradients_of_complex_parameters():
    def work(mesh: bp.Mesh) -> list[complex]:
        one = Parameter(torch.ones(2, dtype=torch.complex64))
        one.grad = torch.tensor([1 + 2j, mesh.rank * 1j])
        bp.all_reduce_gradients([one], mesh)
        return one.grad.tolist()

    assert bp.run_threads(3, work) == [[3 + 6j, 3j]] * 3


def test_shared_parameter_is_summed_once():
    """Two modules share weights, which are in both lists and here in two buckets."""

    def work(mesh: bp.Mesh) -> list[float]:
        tied, other = (Parameter(torch.zeros(1)) for _ in range(2))
        tied.grad, other.grad = torch.ones(1), torch.full((1,), float(mesh.rank))
        bp.all_reduce_gradients([tied, other, tied], mesh, bucket_bytes=4)
        return [tied.grad.item(), other.grad.item()]

    assert bp.run_threads(3, work) == [[3.0, 3.0]] * 3


def test_unused_parameter_gets_no_gradient():
    """On one device the optimizer skips it too; a zero gradient would apply weight decay."""

    def work(mesh: bp.Mesh) -> list[float | None]:
        unused, everywhere, here = parameters = [Parameter(torch.ones(1)) for _ in range(3)]
        everywhere.grad = torch.full((1,), 5.0)
        here.grad = torch.full((1,), 7.0) if mesh.rank == mesh.size - 1 else None
        bp.all_reduce_gradients(parameters, mesh, bucket_bytes=8)
        torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5).step()
        assert unused.item() == 1.0
        return [None if p.grad is None else p.grad.item() for p in parameters]

    for ranks in (1, 3):
        assert bp.run_threads(ranks, work) == [[None, 5.0 * ranks, 7.0]] * ranks


@pytest.mark.parametrize(
    ("of", "got"),
    [
        (lambda model: model, "Linear"),
        (lambda model: model.weight, "Parameter"),
        (lambda model: model.named_parameters(), r"\('weight', Parameter"),
        (lambda model: [model.weight, torch.nn.Linear(2, 2, bias=False).bias], "None"),
    ],
)
def test_all_reduce_gradients_rejects_values_without_parameters(of: Callable[[torch.nn.Linear], Any], got: str):
    """Iterating over a single tensor gives rows, and its gradient would remain unsummed."""
    with pytest.raises(InputError, match=rf"got {got}.*; pass model\.parameters\(\), or a list of tensors"):
        bp.all_reduce_gradients(of(torch.nn.Linear(2, 2)), bp.Mesh.single())


def test_all_reduce_gradients_rejects_sparse_gradients():
    def work(mesh: bp.Mesh) -> None:
        table = torch.nn.Embedding(8, 2, sparse=True)
        table(torch.arange(3)).sum().backward()
        with pytest.raises(InputError, match=r"sparse gradients are not supported; .*without sparse=True"):
            bp.all_reduce_gradients(table.parameters(), mesh)

    bp.run_threads(2, work)


def test_second_all_reduce_gradients_raises():
    """It would multiply the gradients by the number of ranks."""

    def work(mesh: bp.Mesh) -> None:
        made = parameters(5, 7, 2)
        bp.all_reduce_gradients(made, mesh)
        with pytest.raises(InputError, match=r"sums over the ranks already.* shape \(5,\) that did not change"):
            bp.all_reduce_gradients(made, mesh)
        assert all((p.grad == 3).all() for p in made[:2])
        for p in made[:2]:
            p.grad += 1  # the backward pass of another batch
        bp.all_reduce_gradients(made, mesh)
        assert all((p.grad == 12).all() for p in made[:2])
        for p in made:
            p.grad = None if p.grad is None else torch.ones_like(p)
        bp.all_reduce_gradients(made, mesh)
        assert all((p.grad == 3).all() for p in made[:2])

    bp.run_threads(3, work)


@pytest.mark.parametrize("zeroed", ["none", "in place", "data", "copied", "never"])
def test_sum_after_each_micro_batch_of_own_model_raises(zeroed: str):
    """The second sum would add the first once per rank. Gradients that were zeroed or replaced are no sums."""
    whole, batches = torch.nn.Linear(5, 1).double(), [*torch.randn(2, 12, 5, dtype=torch.float64)]
    expected = batches if zeroed == "never" else batches[1:]

    def work(mesh: bp.Mesh) -> float:
        model = copy.deepcopy(whole)
        for batch in batches:
            mine = bp.shard(batch, mesh, dim=0)
            if zeroed == "copied" and batch is not batches[0]:
                gradients = torch.autograd.grad(model(mine).sum(), [*model.parameters()])
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p.grad.copy_(gradient)
            else:
                model(mine).sum().backward()
            if is_planted:
                mesh.gradient_records.added.clear()
            elif zeroed == "never" and batch is batches[1]:
                for _ in range(2):  # also an addition to a sum to which one was added
                    with pytest.raises(InputError, match=r"added to gradients that are sums.* after the last micro"):
                        bp.all_reduce_gradients(model.parameters(), mesh)
                    model(mine).sum().backward()
                return 0.0
            bp.all_reduce_gradients(model.parameters(), mesh)
            if batch is batches[0] and zeroed == "data":
                for p in model.parameters():
                    p.grad.data.zero_()  # without a new version
            elif batch is batches[0] and zeroed in ("none", "in place"):
                model.zero_grad(set_to_none=zeroed == "none")
        assert not copy.deepcopy(model).bias._backward_hooks
        return float((model.weight.grad - torch.cat(expected).sum(0)).norm())

    is_planted = False
    assert max(bp.run_threads(2, work)) < 1e-12
    is_planted = True
    assert (min(bp.run_threads(2, work)) > 0.01) == (zeroed == "never")


def test_sum_after_each_micro_batch_beside_empty_one_raises():
    """The smallest parameter is watched. The values of an empty one would count as zeroed."""
    batches = torch.randn(2, 12, 5, dtype=torch.float64)

    def work(mesh: bp.Mesh) -> float:
        weight, empty = (torch.nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in (5, 0))
        for number, batch in enumerate(batches):
            ((bp.shard(batch, mesh, dim=0) * weight).sum() + empty.sum()).backward()
            if is_planted:
                mesh.gradient_records.added.clear()
            elif number:
                with pytest.raises(InputError, match="added to gradients that are sums"):
                    bp.all_reduce_gradients([weight, empty], mesh)
                return 0.0
            bp.all_reduce_gradients([weight, empty], mesh)
        return float((weight.grad - batches.sum((0, 1))).norm())

    is_planted = False
    assert max(bp.run_threads(2, work)) < 1e-12
    is_planted = True
    assert min(bp.run_threads(2, work)) > 0.01


def test_parameter_may_be_summed_in_its_hook():
    """A sum replaces hooks, also while torch calls those of the parameter."""

    def work(mesh: bp.Mesh) -> None:
        weight = Parameter(torch.ones(3, dtype=torch.float64))
        weight.register_post_accumulate_grad_hook(lambda p: bp.all_reduce_gradients([p], mesh))
        for _ in range(3):
            weight.grad = None
            (weight * (mesh.rank + 1)).sum().backward()
            assert weight.grad.tolist() == [6.0] * 3

    bp.run_threads(3, work)


def test_gradients_of_one_rank_or_two_meshes_may_be_summed_again():
    """One rank multiplies nothing, and each mesh of ranks that share sequences or parameters adds once."""

    def work(mesh: bp.Mesh) -> None:
        made = parameters(5, 2)
        for _ in range(2):
            bp.all_reduce_gradients(made, bp.Mesh.single())
        bp.all_reduce_gradients(made, mesh)
        bp.all_reduce_gradients(made, bp.Mesh.single())
        assert (made[0].grad == 2).all()

    bp.run_threads(2, work)


SHARDED_GRADIENT = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from burst_portable import all_reduce_gradients, run_threads

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
data = init_device_mesh("cpu", (1,))
shard = lambda: DTensor.from_local(torch.ones(4), data, [Shard(0)])

def work(mesh):
    parameter = torch.nn.Parameter(shard())
    parameter.grad = shard()
    all_reduce_gradients([parameter], mesh)
    parameter.grad._local_tensor.fill_(1.0)  # FSDP2 adds to the shard
    all_reduce_gradients([parameter], mesh)
    return parameter.grad.to_local().tolist()

assert run_threads(2, work) == [[2.0] * 4] * 2
"""


def test_changed_shard_of_gradient_may_be_summed_again(tmp_path):
    """The version of a DTensor does not change with its shard."""
    path = tmp_path / "program.py"
    path.write_text(SHARDED_GRADIENT, encoding="utf-8")
    done = run_program(path)
    assert done.returncode == 0, done.stderr[-2000:]
