"""Test which loss a sharded model has if a program sets `loss_type`, `loss_function` or `LOSS_MAPPING` at some time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from burst_portable import Mesh, run_threads
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, loss, parallelize
from tests.support.models import SIZES, gradients_of, make, tokens


def twice(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    counted = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
    return 2 * ForCausalLMLoss(logits, labels, vocab_size, **counted)


def undivided(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    """Return the mean over the labels of a rank, whatever the number of all ranks is."""
    return ForCausalLMLoss(logits, labels, vocab_size, shift_labels=shift_labels)


def set_then_type(model: Any) -> None:
    model.loss_function, model.loss_type = twice, "ForMaskedLM"


def set_then_delete(model: Any) -> None:
    model.loss_function = twice
    del model._loss_function


def set_class(model: Any) -> None:
    model.__class__ = type("OfClass", (type(model),), {"_loss_function": staticmethod(twice), "__module__": __name__})


SET: dict[str, tuple[Callable[[Any], None], str]] = {
    "masked": (lambda model: setattr(model, "loss_type", "ForMaskedLM"), "masked"),
    "causal": (lambda model: setattr(model, "loss_type", "ForConditionalGeneration"), "causal"),
    "unknown": (lambda model: setattr(model, "loss_type", "unknown"), "causal"),
    "config": (lambda model: setattr(model.config, "loss_type", "ForMaskedLM"), "causal"),  # Transformers ignores it
    "function": (lambda model: setattr(model, "loss_function", twice), "twice"),
    "function, then type": (set_then_type, "twice"),  # as on one device
    "deleted": (set_then_delete, "causal"),
    "class": (set_class, "twice"),
}


def result(kind: str, model: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of one device, computed from its logits in float64."""
    alone, ids = copy.deepcopy(model), tokens()
    logits = alone(input_ids=ids).logits
    if kind != "masked":
        logits, ids = logits[:, :-1], ids[:, 1:]
    total = cross_entropy(logits.flatten(0, 1), ids.flatten()) * (2 if kind == "twice" else 1)
    total.backward()
    return total.item(), gradients_of(alone)


def check(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    """Compare losses and gradients. Transformers computes losses in float32."""
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-15, name


def step(model: Any, sharded: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of the ranks."""
    batch = {"input_ids": tokens(), "labels": tokens()}
    model.zero_grad()
    found = model(**batch if sharded.full_batches else sharded.shard(batch)).loss
    found.backward()
    all_reduce_gradients(model.parameters(), sharded.mesh)
    total = found.detach() if sharded.full_batches else all_reduce(found.detach(), sharded.mesh)
    return total.item(), gradients_of(model)


@pytest.mark.parametrize("full_batches", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "between", "paused", "again", "copied"])
@pytest.mark.parametrize("name", SET)
def test_loss_that_a_program_set_equals_one_device(name: str, when: str, full_batches: bool) -> None:
    """With loss_type="ForMaskedLM", loss and gradients of two ranks were off by 5e-3 and 1.4."""
    change, kind = SET[name]
    whole = make("llama")
    usual, expected = (result(x, whole) for x in ("causal", kind))
    models = [copy.deepcopy(whole) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        model = models[mesh.rank]
        if when == "before":
            change(model)
        sharded = parallelize(model, mesh, full_batches=full_batches)
        if when in ("between", "copied"):
            check(step(model, sharded), usual)
        if when == "copied":
            model = copy.deepcopy(model)
            sharded.undo()
            sharded = parallelize(model, mesh, full_batches=full_batches)
        if when == "again":
            sharded.undo()
            assert "_loss_function" not in vars(model)
            change(model)
            sharded = parallelize(model, mesh, full_batches=full_batches)
        if when == "paused":
            with sharded.paused():
                change(model)
        if when in ("after", "between", "copied"):
            change(model)
        check(step(model, sharded), expected)
        check(step(model, sharded), expected)
        sharded.undo()
        has_function = name in ("function", "function, then type")
        assert vars(model).get("_loss_function") is (twice if has_function else None)
        model.loss_type = "ForMaskedLM"  # counts again unless a program has set a function
        assert (model.loss_function is LOSS_MAPPING["ForMaskedLM"]) is (kind != "twice")

    run_threads(2, work)


@pytest.mark.parametrize("name", LOSS_MAPPING)
def test_each_loss_type_equals_one_device_or_raises(name: str) -> None:
    """Losses of other tasks take other arguments, so that they raise on one device too."""
    whole, ids = make("llama"), tokens()
    alone = copy.deepcopy(whole)
    alone.loss_type = name
    try:
        expected = alone(input_ids=ids, labels=ids).loss.item()
    except (TypeError, ValueError, RuntimeError, ImportError, NotImplementedError) as error:
        expected = error

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        model.loss_type = name
        return step(model, sharded)[0]

    if isinstance(expected, float):
        assert run_threads(2, work) == pytest.approx([expected] * 2, rel=1e-6)
    else:
        with pytest.raises((type(expected), InputError, UnsupportedError)):
            run_threads(2, work)


def raises_between(change: Callable[[Any], None], kind: type[Exception], words: str) -> None:
    """Check that an error is raised if a program changes a model after it divided a batch."""
    models = [make("llama") for _ in range(2)]

    def work(mesh: Mesh) -> None:
        model = models[mesh.rank]
        sharded = parallelize(model, mesh)
        inputs = sharded.shard(tokens())
        model(**inputs)
        change(model)
        with pytest.raises(kind, match=words):
            model(**inputs)

    run_threads(2, work)


def test_labels_that_were_shifted_for_another_loss_raise() -> None:
    raises_between(lambda m: setattr(m, "loss_type", "ForMaskedLM"), InputError, "the loss of the model shifts none")


def test_labels_that_were_not_shifted_raise() -> None:
    models = [make("llama") for _ in range(2)]

    def work(mesh: Mesh) -> None:
        model = models[mesh.rank]
        sharded = parallelize(model, mesh)
        model.loss_type = "ForMaskedLM"
        inputs = sharded.shard(tokens(), tokens())
        model.loss_type = "ForCausalLM"
        with pytest.raises(InputError, match="labels must be shifted before sharding"):
            model(**inputs)

    run_threads(2, work)


def test_loss_function_that_is_none_raises() -> None:
    """It raises a TypeError on one device. The causal loss was taken in its place."""
    raises_between(lambda m: setattr(m, "loss_function", None), InputError, "is no function; got None")


def test_loss_mapping_changed_between_calls_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    found = loss.ShardedLoss(ForCausalLMLoss)
    loss.install_loss(model, full_batches=False)
    installed = loss.sharded_loss(model)
    assert installed is not None
    assert installed.function is ForCausalLMLoss
    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", twice)
    assert (installed.function, found.function) == (twice, ForCausalLMLoss)
    model.loss_function = model.loss_function
    assert loss.sharded_loss(model) is installed
    model.loss_type = None
    assert installed.function is LlamaForCausalLM.loss_function.fget(make("llama")) is twice
    other = make("llama")
    other.loss_function = model.loss_function  # that of the other model
    loss.install_loss(other, full_batches=False)
    other.loss_type = "ForMaskedLM"
    assert loss.loss_of(other) is twice
    loss.remove_loss(other)
    assert other.loss_function is twice
    assert loss.sharded_loss(model) is installed


class Weighted(nn.Module):
    """A loss function with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(
        self, logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None
    ) -> Tensor:
        counted = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
        return self.weight * ForCausalLMLoss(logits, labels, vocab_size, **counted)


@pytest.mark.parametrize("when", ["before", "after"])
def test_loss_function_that_is_a_module_equals_one_device(when: str) -> None:
    """torch keeps it among the modules of the model, where a function cannot replace it."""
    models = [make("llama") for _ in range(2)]
    expected = result("twice", models[0])

    def work(mesh: Mesh) -> None:
        model = models[mesh.rank]
        if when == "before":
            model._loss_function = Weighted()
        sharded = parallelize(model, mesh)
        if when == "after":
            model._loss_function = Weighted()
        total, gradients = step(model, sharded)
        weight = gradients.pop("_loss_function.weight")
        check((total, gradients), expected)
        assert weight.item() == pytest.approx(expected[0] / 2, rel=1e-6)
        sharded.undo()
        assert isinstance(model.loss_function, Weighted)
        assert "_loss_function" not in vars(model)

    run_threads(2, work)


class Method(LlamaForCausalLM):
    def loss_function(self, logits: Any, labels: Any, vocab_size: int, **others: Any) -> Tensor:
        return twice(logits, labels, vocab_size, **others)


class Fixed(LlamaForCausalLM):
    @property
    def loss_function(self) -> Any:
        return twice


class Kept(LlamaForCausalLM):
    @property
    def loss_function(self) -> Any:
        return self.kept

    @loss_function.setter
    def loss_function(self, function: Any) -> None:
        self.kept = function


@pytest.mark.parametrize("kind", [Method, Fixed, Kept])
def test_loss_function_of_a_class_raises(kind: type[Any]) -> None:
    """Without the error, the loss of two ranks was half of that of one device: the causal one replaced it."""
    copies = [kind(LlamaConfig(**SIZES)).double() for _ in range(2)]

    def work(mesh: Mesh) -> None:
        with pytest.raises(UnsupportedError, match=rf"defines its loss_function, .*; got {kind.__name__}\."):
            parallelize(copies[mesh.rank], mesh)

    run_threads(2, work)
    if kind is Kept:
        copies[0].loss_function = twice
    if kind is not Method:  # it is right on one rank
        model, sharded = copies[0], parallelize(copies[0], Mesh.single())
        check(step(model, sharded), result("twice", model))


def test_model_can_be_copied_after_its_forward_was_called() -> None:
    """The hooks of the model do not run, so the result of the loss was kept, which cannot be copied."""
    models = [make("llama") for _ in range(2)]
    expected = result("causal", models[0])

    def work(mesh: Mesh) -> None:
        sharded = parallelize(models[mesh.rank], mesh)
        total = all_reduce(models[mesh.rank].forward(**sharded.shard(tokens())).loss.detach(), mesh)
        assert total.item() == pytest.approx(expected[0], rel=1e-6)
        model = copy.deepcopy(models[mesh.rank])
        model.loss_type = "ForMaskedLM"
        assert loss.loss_of(models[mesh.rank]) is ForCausalLMLoss
        sharded.undo()
        check(step(model, model._burst_portable), result("masked", models[mesh.rank]))

    run_threads(2, work)


def test_function_of_a_program_is_checked_in_forward_too() -> None:
    """Without the check, the loss of two ranks was twice that of one device."""
    models = [make("llama") for _ in range(2)]

    def work(mesh: Mesh) -> None:
        model = models[mesh.rank]
        inputs = parallelize(model, mesh).shard(tokens())
        model.loss_function = undivided
        with pytest.raises(UnsupportedError, match="does not divide by num_items_in_batch"):
            model.forward(**inputs)

    run_threads(2, work)


class SetsLoss(LlamaForCausalLM):
    """Sets its loss function in each call."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        self.loss_function = undivided
        return super().forward(*args, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize("full_batches", [False, True])
def test_loss_function_that_is_set_in_the_call_raises(full_batches: bool) -> None:
    """Without the error, the loss of two ranks was twice that of one device."""
    model = SetsLoss(LlamaConfig(**SIZES)).double()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        sharded = parallelize(copies[mesh.rank], mesh, full_batches=full_batches)
        with pytest.raises(
            UnsupportedError, match="from this rank's tokens only; got a loss_function set in its forward"
        ):
            step(copies[mesh.rank], sharded)

    run_threads(2, work)


@pytest.mark.parametrize("full_batches", [False, True])
def test_masked_language_model_ignores_its_loss_type(full_batches: bool) -> None:
    """The forward of BERT does not call `loss_function`. Its labels were shifted for the causal loss."""
    torch.manual_seed(0)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    whole = BertForMaskedLM(BertConfig(**SIZES, **options)).double().train()
    expected = result("masked", whole)
    models = [copy.deepcopy(whole) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        model = models[mesh.rank]
        sharded = parallelize(model, mesh, full_batches=full_batches)
        model.loss_type = "ForCausalLM"
        check(step(model, sharded), expected)
        model.loss_function = lambda logits, labels: logits.mean()
        check(step(model, sharded), expected)

    run_threads(2, work)
