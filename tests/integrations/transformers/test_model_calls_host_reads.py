"""Check that a training step of a sharded model reads no tensor on the host, so that the host never waits for a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from burst_portable import Mesh, run_threads
from burst_portable.integrations.transformers import all_reduce_gradients, parallelize
from tests.support.host_reads import HostReads
from tests.support.models import make, tokens

PADDED = (torch.arange(47) < torch.tensor([[31], [47]])).long()
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "packed": {"cu_seqlens": (0, 20, 47)},
    "experts": {"kind": "mixtral"},
}


def places_of_step(mesh: Mesh, model: Any, **options: Any) -> list[str]:
    """Return the places of the package that read a tensor in the third step on this rank, as on a device."""
    mesh.transport("cpu").host = False
    sharded = parallelize(model, mesh)
    with HostReads() as reads:
        for _ in range(3):
            reads.places.clear()
            model.zero_grad()
            model(**sharded.shard(tokens(), **options)).loss.backward()
            all_reduce_gradients(model.parameters(), mesh)
    return [place for place in reads.places if place]


def models_of(kind: str) -> list[Any]:
    options = {"output_router_logits": True} if kind == "mixtral" else {}
    return [copy.deepcopy(make(kind, torch.float32, **options)) for _ in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_training_step_reads_no_tensor(case: str) -> None:
    """Each call reads the comparison of the call before, by `tolist` of a copy on the host, which is not recorded."""
    options = dict(CASES[case])
    models = models_of(options.pop("kind", "llama"))
    found = run_threads(2, lambda mesh: places_of_step(mesh, models[mesh.rank], **options))
    assert found == [[], []]


def test_read_of_attention_mask_is_recorded() -> None:
    """Whether a batch has padding decides which labels and documents it may have."""
    models = models_of("llama")
    options = {"labels": tokens().masked_fill(PADDED == 0, -100), "attention_mask": PADDED}
    for places in run_threads(2, lambda mesh: places_of_step(mesh, models[mesh.rank], **options)):
        assert {place.rpartition(":")[0] for place in places} == {"padding.py:has_padding"}


def test_number_copied_from_host_is_recorded() -> None:
    """`x[2] = 0` copies a tensor of the host to an element. `zero_` and a slice pass the number to a kernel."""
    x = torch.ones(3)
    with HostReads() as reads:
        x[1].zero_()
        x[:1] = 2
        assert reads.places == []
        x[2] = 0
    assert reads.places == [""]
    assert x.tolist() == [2, 0, 0]


def places_of_sum(mesh: Mesh) -> list[str]:
    """Return the places of the package that read or write one number on this rank. The last rank has one gradient."""
    mesh.transport("cpu").host = False
    parameters = [torch.zeros(5, requires_grad=True) for _ in range(3)]
    for parameter in parameters[: 1 if mesh.rank == mesh.size - 1 else 2]:
        parameter.grad = torch.ones(5)
    with HostReads() as reads:
        all_reduce_gradients(parameters, mesh)
    assert [None if p.grad is None else p.grad.tolist() for p in parameters] == [[2] * 5, [1] * 5, None]
    return [place for place in reads.places if place]


def test_missing_gradient_copies_no_number_from_host() -> None:
    """A rank without a gradient reads the number of ranks that have one, by `tolist`, which is not recorded."""
    assert run_threads(2, places_of_sum) == [[], []]
