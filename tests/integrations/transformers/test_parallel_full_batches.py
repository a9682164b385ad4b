"""Test calls with full batches: loss, gradients and logits of one device, on several ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from burst_portable import Mesh, run_threads
from burst_portable.errors import DtypeError, InputError, MismatchError, ShapeError, UnsupportedError
from burst_portable.integrations.transformers import (
    all_reduce,
    all_reduce_gradients,
    model_calls,
    parallelize,
    rank_agreement,
)
from burst_portable.integrations.transformers.batches import divider
from burst_portable.integrations.transformers.full_batches import outputs
from burst_portable.integrations.transformers.models.model_parts import part_below_head
from burst_portable.sharding import shard_batch
from tests.support.models import LENGTH, SIZES, gradients_of, make, tokens


def ranks_of(ranks: int, model: Any, call: Any, **options: Any) -> list[Any]:
    """Return the results of `call(copy of the model, mesh)` on all ranks, with full batches."""
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def on_a_rank(mesh: Mesh) -> Any:
        parallelize(copies[mesh.rank], mesh, full_batches=True, **options)
        return call(copies[mesh.rank], mesh)

    return run_threads(ranks, on_a_rank)


def batches() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the arguments of a sharded call and of one device, by name."""
    ids = tokens()
    few = ids.clone()
    few[:, :-3] = -100  # all labels are on one rank
    token = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 9]])
    padded = {"input_ids": ids, "labels": ids.masked_fill(~token, -100), "attention_mask": token.long()}
    starts = torch.cat([torch.arange(n) for n in (5, 30, LENGTH - 35)]).unsqueeze(0)
    packed_labels = ids[:1].masked_fill(starts == 0, -100)
    position_ids = {"input_ids": ids[:1], "labels": packed_labels, "position_ids": starts}
    cu_seqlens = {"input_ids": ids[:1], "labels": ids[:1], "cu_seqlens": (0, 5, 35, LENGTH)}
    found = {"plain": {"input_ids": ids, "labels": ids}, "few": {"input_ids": ids, "labels": few}, "padded": padded}
    found["counted"] = found["plain"] | {"num_items_in_batch": torch.tensor(300)}
    cases = {name: (batch, batch) for name, batch in found.items()}
    return cases | {"positions": (position_ids, position_ids), "cu_seqlens": (cu_seqlens, position_ids)}


CASES = batches()


def step(model: Any, batch: dict[str, Any], mesh: Mesh | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    out = model(**batch, **({"use_cache": False} if mesh is None else {}))
    out.loss.backward()
    if mesh is not None:
        all_reduce_gradients(model.parameters(), mesh)
    return out.loss.detach(), out.logits.detach(), gradients_of(model)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_full_batch_gives_results_of_one_device(name: str, ranks: int) -> None:
    batch, reference = CASES[name]
    model = make("llama")
    loss, logits, gradients = step(copy.deepcopy(model), reference)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0
    for found in ranks_of(ranks, model, lambda m, mesh: step(m, batch, mesh), gather_outputs=True):
        torch.testing.assert_close(found[0], loss, rtol=4e-7, atol=0)  # transformers computes losses in float32
        torch.testing.assert_close(found[1][mask], logits[mask], rtol=1e-9, atol=1e-12)
        assert_same(found[2], gradients)


def test_full_batch_of_mixture_of_experts_has_global_router_loss() -> None:
    model, ids = make("mixtral", output_router_logits=True), tokens()
    batch = {"input_ids": ids, "labels": ids}
    loss, _, gradients = step(copy.deepcopy(model), batch)
    for found in ranks_of(3, model, lambda m, mesh: step(m, batch, mesh), gather_outputs=True):
        torch.testing.assert_close(found[0], loss, rtol=1e-6, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[2][name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 3])
def test_loss_of_gathered_logits_gives_gradients_of_one_device(ranks: int) -> None:
    """As DPO: log-probabilities of the rows, compared with each other, from embeddings without labels."""
    model, ids = make("llama"), tokens()

    def rows(m: Any, mesh: Mesh | None = None) -> dict[str, Tensor]:
        logits = m(inputs_embeds=m.get_input_embeddings()(ids)).logits[:, :-1]
        chosen, rejected = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum(dim=(1, 2))
        torch.nn.functional.logsigmoid(chosen - rejected).neg().backward()
        if mesh is not None:
            all_reduce_gradients(m.parameters(), mesh)
        return gradients_of(m)

    expected = rows(copy.deepcopy(model))
    for found in ranks_of(ranks, model, rows):
        assert_same(found, expected)


@pytest.mark.parametrize("has_labels", [True, False], ids=["loss", "logits"])
def test_averaged_gradients_equal_one_device(has_labels: bool) -> None:
    """As under Trainer with DDP: the loss is scaled in place, and gradients are averaged.

    Norms and losses are float32, so the number of ranks is a power of two, which scales them exactly.
    """
    model, ids = make("llama"), tokens()
    batch = {"input_ids": ids} | ({"labels": ids} if has_labels else {})

    def averaged(m: Any, mesh: Mesh | None = None) -> dict[str, Tensor]:
        out = m(**batch)
        loss = out.loss if has_labels else out.logits.log_softmax(-1)[..., 3].mean()
        loss *= 4
        loss.backward()
        if mesh is not None:
            return {name: all_reduce(gradient, mesh) / mesh.size for name, gradient in gradients_of(m).items()}
        return gradients_of(m)

    expected = averaged(copy.deepcopy(model))
    for found in ranks_of(2, model, averaged, averaged_gradients=True):
        assert_same(found, expected)
    too_small = ranks_of(2, model, averaged)[0]
    assert_same({name: 2 * gradient for name, gradient in too_small.items()}, expected)


CLASSIFIERS = {"row": LlamaForSequenceClassification, "token": LlamaForTokenClassification}
SIDES = {"none": (0, 0), "right": (0, 9), "left": (9, 0)}
"""Tokens of padding before and behind the tokens of a row."""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_head_outside_gets_gradients_of_one_device(kind: str, side: str, ranks: int) -> None:
    """Each rank computes the head, whose gradients are averaged: a sum has them once per rank."""
    config = LlamaConfig(**SIZES | {"pad_token_id": 0}, num_labels=5, classifier_dropout=0.0)
    model = CLASSIFIERS[kind](config).double()
    before, behind = SIDES[side]
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :before], mask[1, LENGTH - behind :] = 0, 0
    ids = (tokens() % 60 + 1) * mask
    labels = torch.tensor([1, 3]) if kind == "row" else (ids % 5).masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "labels": labels} | ({} if side == "none" else {"attention_mask": mask})

    def averaged(m: Any, mesh: Mesh | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        if mesh is not None:
            parallelize(part_below_head(m), mesh, full_batches=True, averaged_gradients=True)
        loss = m(**batch).loss
        loss.backward()
        if mesh is None:
            return loss.detach(), gradients_of(m)
        return loss.detach(), {name: all_reduce(x, mesh) / mesh.size for name, x in gradients_of(m).items()}

    expected, gradients = averaged(copy.deepcopy(model))
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    for loss, found in run_threads(ranks, lambda mesh: averaged(copies[mesh.rank], mesh)):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (found[name] - gradient).norm() / gradient.norm()
            assert error < 1e-6, name  # RoPE and norms are computed in float32
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("side", ["none", "right", "left", "unchecked"])
def test_head_that_reads_padding_raises(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """The softmax of LlamaForQuestionAnswering includes the states of padding, which are not those of one device."""
    if side == "unchecked":
        monkeypatch.setattr(model_calls, "check_padding_below_heads", lambda _, **__: None)
    model = LlamaForQuestionAnswering(LlamaConfig(**SIZES)).double()
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    if side != "none":
        mask[1, :9] = side != "left"
        mask[1, LENGTH - 9 :] = side == "left"
    places = {"start_positions": torch.tensor([10, 11]), "end_positions": torch.tensor([12, 15])}
    batch = {"input_ids": tokens(), "attention_mask": mask} | places

    def loss_of_rank(mesh: Mesh) -> Tensor:
        m = copies[mesh.rank]
        parallelize(part_below_head(m), mesh, full_batches=True, averaged_gradients=True)
        if side in ("left", "right"):
            with pytest.raises(UnsupportedError, match="LlamaForQuestionAnswering may read the states of padding"):
                m(**batch)
            return torch.zeros(())
        return m(**batch).loss.detach()

    expected = copy.deepcopy(model)(**batch).loss
    copies = [copy.deepcopy(model) for _ in range(2)]
    for loss in run_threads(2, loss_of_rank):
        if side == "none":
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        elif side == "unchecked":
            assert abs(loss / expected - 1) > 1e-5, "the planted fault"


def test_hidden_states_get_gradients_of_one_device() -> None:
    model, ids = make("llama"), tokens()

    def averaged(m: Any, mesh: Mesh | None = None) -> dict[str, Tensor]:
        states = m(input_ids=ids, output_hidden_states=True).hidden_states
        sum((x[:, ::3] ** 2).mean() for x in states).backward()
        if mesh is None:
            return gradients_of(m)
        return {name: all_reduce(x, mesh) / mesh.size for name, x in gradients_of(m).items()}

    expected = averaged(copy.deepcopy(model))
    for found in ranks_of(2, model, averaged, averaged_gradients=True):
        assert_same(found, expected)


def test_full_batches_with_planted_faults_differ_from_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered logits whose gradient is another rank's, and labels that are shifted after the division."""
    model, (batch, reference) = make("llama"), CASES["plain"]
    loss, _, _ = step(copy.deepcopy(model), reference)

    def own_loss(m: Any, mesh: Mesh | None = None) -> dict[str, Tensor]:
        m(input_ids=tokens()).logits.log_softmax(-1)[..., 3].sum().backward()
        if mesh is not None:
            all_reduce_gradients(m.parameters(), mesh)
        return gradients_of(m)

    expected = own_loss(copy.deepcopy(model))
    assert_same(ranks_of(2, model, own_loss)[0], expected)
    with monkeypatch.context() as planted:
        first = staticmethod(lambda ctx, grad: (grad[:, : ctx.layout.count(ctx.mesh.rank)], None, None, None))
        planted.setattr(outputs._Gather, "backward", first)
        with pytest.raises(AssertionError):
            assert_same(ranks_of(2, model, own_loss)[0], expected)
    with monkeypatch.context() as planted:
        late = lambda ids, labels, **options: shard_batch(ids, labels.roll(1, dims=1), **options)  # noqa: E731
        planted.setattr(divider, "shard_batch", late)
        found = ranks_of(2, model, lambda m, mesh: step(m, batch, mesh), gather_outputs=True)[0][0]
        assert (found - loss).abs() > 1e-3


@pytest.mark.parametrize("ranks", [1, 2])
def test_outputs_of_tokens_are_left_out_of_calls_with_labels(ranks: int) -> None:
    def keys(model: Any, mesh: Mesh) -> tuple[list[str], list[str]]:
        model.eval()
        with torch.no_grad():
            return [*model(input_ids=tokens(), labels=tokens())], [*model(tokens()), *model.model(tokens())]

    assert ranks_of(ranks, make("llama"), keys) == [(["loss"], ["logits", "last_hidden_state"])] * ranks


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.argmax(-1),
        lambda x: x[:, :-1],
        lambda x: x**2,
        lambda x: 2 * x,
        lambda x: torch.nn.functional.softmax(x, dim=-1),
        lambda x: torch.stack(tensors=[x]),
        len,
        bool,
    ],
)
def test_use_of_outputs_that_were_left_out_names_the_next_step(use: Any) -> None:
    """Transformers leaves them None, and an error about None does not contain the next step."""
    model = make("llama")
    parallelize(model, Mesh.single(), full_batches=True)
    with torch.no_grad():
        output = model(input_ids=tokens(), labels=tokens(), output_hidden_states=True)
    assert "logits" not in output
    assert not hasattr(output.logits, "shape")
    for name in ("logits", "hidden_states"):
        with pytest.raises(
            InputError, match=rf"return the {name} of all tokens.*gather_outputs=True.*trainer\.sharded"
        ):
            use(getattr(output, name))
    assert pickle.loads(pickle.dumps(output)).keys() == output.keys()


@pytest.mark.parametrize("of", ["loss", "logits"])
def test_penalty_of_gradients_raises(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a head is differentiated without attention, which would raise. Its parts do not add up."""
    model = make("llama")

    def penalty(m: Any, mesh: Mesh | None = None) -> Tensor:
        output = m(input_ids=tokens(), labels=tokens())
        value = output.loss if of == "loss" else output.logits.logsumexp(-1).mean()
        (gradient,) = torch.autograd.grad(value, [m.lm_head.weight], create_graph=True)
        return gradient.square().sum().detach()

    def raised(m: Any, mesh: Mesh) -> None:
        with pytest.raises(UnsupportedError, match=r"part of the gradient.* pass with create_graph=True"):
            penalty(m, mesh)

    expected = penalty(copy.deepcopy(model))
    ranks_of(2, model, raised, gather_outputs=True)
    for module in (outputs, rank_agreement):
        monkeypatch.setattr(module, "check_differentiated_once", lambda: None)
    for found in ranks_of(2, model, penalty, gather_outputs=True):
        assert (found / expected - 1).abs() > 1e-2, "the planted fault"


def test_penalty_of_gradients_of_shards_raises() -> None:
    def work(mesh: Mesh) -> None:
        sharded = parallelize(model := make("llama"), mesh)
        loss = model(**sharded.shard(tokens())).loss
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            torch.autograd.grad(loss, [model.lm_head.weight], create_graph=True)

    run_threads(2, work)


@pytest.mark.parametrize("shape", [(2, LENGTH - 1), (2 * LENGTH,)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_labels_of_another_shape_raise(shape: tuple[int, ...], is_padded: bool) -> None:
    model, mask = make("llama"), torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, LENGTH - 4 * is_padded :] = 0
    with (
        parallelize(model, Mesh.single(), full_batches=True),
        pytest.raises(ShapeError, match=r"labels and input_ids have different shapes; got \(.*; allowed: \(2, 47\)"),
    ):
        model(input_ids=tokens(), attention_mask=mask, labels=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("changed", ["gather_outputs", "output_hidden_states", "labels"])
def test_ranks_that_request_different_outputs_raise_at_once(changed: str, kind: str) -> None:
    """Otherwise one rank would wait for tensors that the other does not send."""

    def call(model: Any, mesh: Mesh) -> None:
        mesh.transport("cpu").host = kind == "host"
        arguments: dict[str, Any] = {"input_ids": tokens(), "labels": torch.full((2, LENGTH), -100)}
        if mesh.rank and changed == "gather_outputs":
            model._burst_portable.gather_outputs = False
        elif mesh.rank:
            arguments |= {"labels": None} if changed == "labels" else {changed: True}
        with torch.no_grad(), pytest.raises(MismatchError, match=r"requested outputs|number of labels"):
            model(**arguments)

    ranks_of(2, make("llama"), call, gather_outputs=True)


def test_ranks_with_different_full_batches_raise_on_each_rank() -> None:
    def call(model: Any, mesh: Mesh) -> str:
        named = []
        for batch in ({"input_ids": tokens(seed=mesh.rank)}, {"inputs_embeds": torch.rand(1, 9, 32).double()}):
            with pytest.raises(MismatchError) as error:
                model(**batch)
            named.append(str(error.value))
        return " ".join(named)

    assert all(text.count("rows of the batch") >= 2 for text in ranks_of(2, make("llama"), call))


def test_paused_model_generates_and_is_sharded_again() -> None:
    model = make("llama").eval()
    prompt = tokens(batch=1, length=5)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False), model(tokens()).logits.detach()

    def call(m: Any, mesh: Mesh) -> tuple[Tensor, Tensor]:
        sharded = m._burst_portable
        with torch.no_grad(), pytest.raises(UnsupportedError, match="generate"):
            m.generate(prompt, max_new_tokens=4)
        with torch.no_grad(), sharded.paused() as plain:
            generated = plain.generate(prompt, max_new_tokens=4, do_sample=False)
        logits = m(tokens()).logits.detach()
        sharded.undo()
        with sharded.paused():
            pass
        assert "undone" in repr(sharded)
        return generated, logits

    for found in ranks_of(2, model, call):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "fused head": ({"fused_lm_head": True}, UnsupportedError, "fused head .*no labels"),
    "unknown tensor": ({"token_type_ids": tokens()}, InputError, "token_type_ids"),
    "ids and embeddings": ({"inputs_embeds": torch.rand(2, LENGTH, 32)}, InputError, "both"),
    "complex": ({"input_ids": None, "inputs_embeds": torch.rand(2, 9, 32).cfloat()}, DtypeError, "complex64"),
    "8 bits": ({"input_ids": None, "inputs_embeds": torch.ones(2, 9, 32).to(torch.int8)}, DtypeError, "int8"),
    "dictionary": ({"input_ids": {"input_ids": tokens()}}, InputError, r"model\(\*\*batch\)"),
    "trained hidden states": ({"output_hidden_states": True}, UnsupportedError, "hidden states"),
    "padding inside": (
        {"attention_mask": (torch.arange(LENGTH) != 3).long().expand(2, -1)},
        UnsupportedError,
        "before a",
    ),
    "shifted labels": ({"shift_labels": tokens()}, InputError, "shift_labels"),
    "divided": ({"seq_len": 2 * LENGTH}, InputError, "seq_len"),
    "tuples": ({"return_dict": False}, UnsupportedError, "return_dict"),
    "last token": ({"logits_to_keep": 1}, UnsupportedError, "logits_to_keep"),
    "cache": ({"use_cache": True}, UnsupportedError, "KV cache"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_calls_with_full_batches_raise_for(name: str, ranks: int) -> None:
    arguments, error, words = REFUSED[name]

    def call(model: Any, mesh: Mesh) -> None:
        with pytest.raises(error, match=words):
            model(**{"input_ids": tokens()} | arguments)

    ranks_of(ranks, make("llama"), call)


def test_full_batches_raise_for_shard_and_trained_inner_models() -> None:
    def call(model: Any, mesh: Mesh) -> None:
        with pytest.raises(UnsupportedError, match="without a head"):
            model.model(tokens())
        with pytest.raises(InputError, match="full_batches=True"):
            model._burst_portable.shard(tokens())

    ranks_of(2, make("llama"), call)
    with pytest.raises(InputError, match="seq_len=9"):
        parallelize(make("llama"), Mesh.single(), full_batches=True, seq_len=9)
    for option in ("gather_outputs", "averaged_gradients"):
        with pytest.raises(InputError, match=option):
            parallelize(make("llama"), Mesh.single(), **{option: True})
