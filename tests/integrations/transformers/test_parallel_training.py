"""Test each documented model on several ranks, with all ways to train and to evaluate.

By default, few cases cover each pair of choices; with -m full, all cases run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_portable import Mesh, run_threads, unshard
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from tests.support.models import MODELS, checkpoint_activations, gradients_of, make, tokens


@dataclass(frozen=True)
class Way:
    kind: str
    training: bool
    reentrant: bool | None  # None: no checkpointing
    batches: int
    dtype: torch.dtype  # 16 bits by autocast
    ranks: int

    def __str__(self) -> str:
        checkpointing = {None: "kept", True: "reentrant", False: "checkpointed"}[self.reentrant]
        mode = "train" if self.training else "eval"
        return f"{self.kind}-{mode}-{checkpointing}-{self.batches}-{str(self.dtype)[6:]}-{self.ranks}"

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self.dtype) if self.dtype.itemsize < 4 else nullcontext()


CHOICES = (tuple(MODELS), (True, False), (None, True, False), (1, 2), (torch.float64, torch.bfloat16), (2, 3))
EVERY = [Way(*choice) for choice in product(*CHOICES)]
assert len(CHOICES) == len(fields(Way))


def covering() -> Iterator[Way]:
    """Yield cases until each pair of choices occurs. Each time, take the case with the most missing pairs."""
    missing = {pair for way in EVERY for pair in pairs(way)}
    while missing:
        best = max(EVERY, key=lambda way: len(missing & pairs(way)))
        missing -= pairs(best)
        yield best


def pairs(way: Way) -> set[Any]:
    return set(combinations(enumerate(astuple(way)), 2))


FEW = list(covering())
CASES = [pytest.param(way, id=str(way), marks=[] if way in FEW else [pytest.mark.full]) for way in EVERY]


@dataclass
class Answer:
    loss: float
    tensors: dict[str, Tensor]  # logits of each batch, and gradients


def data(way: Way) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return ids, labels, and the number of labels of all batches, by which the loss of a step is divided."""
    ids = [tokens(seed=seed) for seed in range(way.batches)]
    labels = [x.clone() for x in ids]
    labels[-1][0, 3:40] = -100
    return ids, labels, torch.stack([(x[:, 1:] != -100).sum() for x in labels]).sum()


def prepared(way: Way, model: Any) -> Any:
    model = copy.deepcopy(model).train(way.training)
    if way.reentrant is not None:
        checkpoint_activations(model, use_reentrant=way.reentrant)
    return model


def on_one_device(way: Way, model: Any) -> Answer:
    alone, found, total = prepared(way, model), {}, 0.0
    alone.set_attn_implementation("eager" if way.kind == "gemma2" else "sdpa")
    ids, labels, count = data(way)
    for i, (x, y) in enumerate(zip(ids, labels, strict=True)):
        with torch.set_grad_enabled(way.training):
            with way.autocast():
                out = alone(input_ids=x, labels=y, num_items_in_batch=count, use_cache=False)
            if way.training:
                out.loss.backward()
        total += out.loss.item()
        found[f"logits {i}"] = out.logits.detach()
    return Answer(total, found | gradients_of(alone))


def on_a_rank(way: Way, mine: Any, mesh: Mesh) -> Answer:
    sharded, found, total = parallelize(mine, mesh), {}, 0.0
    ids, labels, count = data(way)
    for i, (x, y) in enumerate(zip(ids, labels, strict=True)):
        with torch.set_grad_enabled(way.training):
            with way.autocast():
                out = mine(**sharded.shard(x, y) | {"num_items_in_batch": count})
            if way.training:
                out.loss.backward()
        total += all_reduce(out.loss.detach().reshape(1), mesh).item()
        found[f"logits {i}"] = unshard(out.logits.detach(), mesh, seq_len=x.shape[1], layout=sharded.layout)
    if way.training:
        all_reduce_gradients(mine.parameters(), mesh)
    return Answer(total, found | gradients_of(mine))


def apart(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize("way", CASES)
def test_training_configurations_equal_one_device(way: Way):
    model = make(way.kind, torch.promote_types(way.dtype, torch.float32))
    expected = on_one_device(way, model)
    exact = on_one_device(Way(way.kind, way.training, None, way.batches, torch.float64, 1), model.double())
    model = make(way.kind, torch.promote_types(way.dtype, torch.float32))
    models = [prepared(way, model) for _ in range(way.ranks)]
    for answer in run_threads(way.ranks, lambda mesh: on_a_rank(way, models[mesh.rank], mesh)):
        assert answer.tensors.keys() == exact.tensors.keys()
        for name, right in exact.tensors.items():
            # transformers computes the loss and eager softmax in float32. In 16 bits, the error against float64 may not
            # exceed that of one device by more than a factor for rounding.
            allowed = 1e-6
            if way.dtype.itemsize < 4:
                allowed = 1.5 * apart(expected.tensors[name], right)
            assert apart(answer.tensors[name], right) <= allowed, name
        assert answer.loss == pytest.approx(expected.loss, rel=1e-6 if way.dtype is torch.float64 else 1e-3)


def test_every_pair_of_settings_is_tested():
    assert len(FEW) < 40
    assert {pair for way in FEW for pair in pairs(way)} == {pair for way in EVERY for pair in pairs(way)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_model_generates_between_training_steps(ranks: int):
    """As policy gradients do it: each step trains on the rows that the model generates, on every rank alike."""
    model, prompts = make("llama"), tokens(batch=2, length=5)

    def trained(mine: Any, mesh: Mesh | None = None) -> tuple[list[Tensor], list[float]]:
        sharded = None if mesh is None else parallelize(mine, mesh)
        optimizer, rows, losses = torch.optim.SGD(mine.parameters(), lr=0.5), [], []
        for _ in range(3):
            with nullcontext() if sharded is None else sharded.paused():
                rows.append(mine.generate(prompts, max_new_tokens=8, do_sample=False, pad_token_id=0))
            labels = rows[-1].clone()
            labels[:, :5] = -100
            if sharded is None or mesh is None:
                loss = mine(input_ids=rows[-1], labels=labels).loss
            else:
                loss = mine(**sharded.shard(rows[-1], labels)).loss
            (-loss).backward()  # away from what it generates, so that the next rows differ
            if mesh is not None:
                all_reduce_gradients(mine.parameters(), mesh)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach() if mesh is None else all_reduce(loss.detach(), mesh)))
        return rows, losses

    rows, losses = trained(copy.deepcopy(model))
    assert not torch.equal(rows[0], rows[1])
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    for found, values in run_threads(ranks, lambda mesh: trained(copies[mesh.rank], mesh)):
        assert all(map(torch.equal, found, rows))
        assert values == pytest.approx(losses, rel=1e-5)
