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
