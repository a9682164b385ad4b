"""Test calls that once gave a wrong number silently. Each test shows it, and that the call now raises."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate.big_modeling
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForSequenceClassification

from burst_portable import Mesh, local_position_ids, run_threads
from burst_portable.comm.local import LocalTransport
from burst_portable.config import environment_of_children
from burst_portable.errors import InputError, MismatchError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, model_calls, parallelize
from burst_portable.integrations.transformers.training.batch_check import checksum, parameter_checksum
from tests.support.fork_server import run_program
from tests.support.models import SIZES, make, tokens


def _embedded(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a multimodal model's call of its text model."""
    return {"inputs_embeds": model.get_input_embeddings()(ids).detach()}


@pytest.mark.parametrize("part", ["model", "base model", "embeddings"])
def test_call_without_seq_len_raises(part: str) -> None:
    """Each rank would attend to the full rows as a shard of a sequence twice as long."""
    whole, ids = make("llama"), tokens(1, 32)

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        called = model.model if part == "base model" else model
        arguments = _embedded(model, ids) if part == "embeddings" else {"input_ids": ids}
        expected = called(**arguments)[0].detach()
        parallelize(called, mesh)
        with pytest.raises(
            InputError, match=r"number of tokens of the unsharded sequence.* got 32 tokens on rank \d, no seq_len"
        ):
            called(**arguments)
        assumed = local_position_ids(mesh, seq_len=64)[None]
        wrong = called(**arguments, position_ids=assumed, seq_len=64)[0].detach()
        return float((wrong - expected).norm() / expected.norm())

    assert min(run_threads(2, work)) > 0.01


@pytest.mark.parametrize("when", ["before", "after"])
def test_layer_that_is_not_causal_raises(when: str) -> None:
    """On one device, sdpa attends to later tokens, as in recipes that make encoders of decoders."""
    whole, ids = make("llama"), tokens(1, 32)
    causal = whole(input_ids=ids).logits.detach()

    def make_bidirectional(model: Any) -> Any:
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        return model

    alone = make_bidirectional(copy.deepcopy(whole))
    alone.set_attn_implementation("sdpa")
    assert (alone(input_ids=ids).logits - causal).norm() > 0.1 * causal.norm()

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        if when == "before":
            make_bidirectional(model)
        sharded = parallelize(model, mesh)
        if when == "after":
            make_bidirectional(model)
        with pytest.raises(UnsupportedError, match=r"is_causal=False of a layer.*set config\.is_causal = False"):
            model(**sharded.shard(ids))

    run_threads(2, work)


def test_rows_sharded_by_caller_need_seq_len() -> None:
    whole, ids = make("llama"), tokens(1, 32)
    expected = whole(input_ids=ids).logits.detach()

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh, layout="contiguous", seq_len=32)
        rows = slice(16 * mesh.rank, 16 * mesh.rank + 16)
        torch.testing.assert_close(model(input_ids=ids[:, rows]).logits, expected[:, rows], rtol=0, atol=1e-5)
        sharded.seq_len = None
        torch.testing.assert_close(
            model(input_ids=ids[:, rows], seq_len=32).logits, expected[:, rows], rtol=0, atol=1e-5
        )
        with pytest.raises(InputError, match="pass seq_len="):
            model(input_ids=ids[:, rows])

    run_threads(2, work)


def test_rows_of_unknown_order_raise() -> None:
    """Callers often divide a sequence into one piece per rank, of as many tokens as "zigzag" has."""
    whole, ids = make("llama"), tokens(1, 32)
    expected = whole(input_ids=ids).logits.detach()

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh, seq_len=32)
        rows = slice(16 * mesh.rank, 16 * mesh.rank + 16)
        with pytest.raises(InputError, match=r"order of tokens that you divided .* pass position_ids=.* or name"):
            model(input_ids=ids[:, rows])
        with pytest.raises(InputError, match="position_ids are not those of this rank's tokens"):
            model(input_ids=ids[:, rows], position_ids=torch.arange(32)[None, rows])
        assumed = sharded.layout_of(32).positions(mesh.rank)
        right = model(input_ids=ids[:, assumed], position_ids=torch.tensor(assumed)[None]).logits
        torch.testing.assert_close(right, expected[:, assumed], rtol=0, atol=1e-9)
        wrong = model(input_ids=ids[:, rows], position_ids=torch.tensor(assumed)[None]).logits
        return float((wrong - expected[:, rows]).detach().norm())

    assert min(run_threads(2, work)) > 0.01


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
def test_full_rows_on_all_ranks_raise(kind: str, given: str) -> None:
    """With the sum of the ranks' tokens as its length, each rank would attend to a sequence that repeats itself."""
    whole, ids = make("llama"), tokens(1, 32)
    expected = whole(input_ids=ids).logits.detach()

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        parallelize(model, mesh if kind == "host" else _device_like(mesh), layout="contiguous", seq_len=64)
        arguments = {"input_ids": ids} if given == "input_ids" else _embedded(model, ids)
        if kind == "device":
            model(**arguments)
        with pytest.raises(InputError, match="all ranks of a sequence have the same tokens"):
            model(**arguments)
        model(input_ids=torch.full_like(ids, 7))  # all parts of such a sequence are equal
        model(input_ids=(ids + mesh.rank) % 64)
        positions = torch.arange(32)[None] + 32 * mesh.rank
        return float((model(**arguments, position_ids=positions).logits - expected).detach().norm())

    assert max(run_threads(2, work)) > 0.01


def test_ranks_that_name_positions_and_not_raise() -> None:
    whole, ids = make("llama"), tokens(1, 32)

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        parallelize(model, mesh, layout="contiguous", seq_len=32)
        rows = slice(16 * mesh.rank, 16 * mesh.rank + 16)
        positions = {"position_ids": torch.arange(32)[None, rows]} if mesh.rank else {}
        with pytest.raises(MismatchError, match="position_ids: none on rank 0"):
            model(input_ids=ids[:, rows], **positions)

    run_threads(2, work)


@pytest.mark.parametrize("count", [15, 30])
def test_labels_divided_by_caller_raise(count: int) -> None:
    """Shifted on each rank, the label of the first token of a shard is lost. A count of one rank's labels doubles."""
    whole, ids = make("llama"), tokens(1, 32)
    loss = whole(input_ids=ids, labels=ids).loss.item()

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh, layout="contiguous", seq_len=32)
        own = ids[:, 16 * mesh.rank : 16 * mesh.rank + 16]
        shifted = torch.nn.functional.pad(own, (0, 1), value=-100)[:, 1:]
        labels = {"labels": own, "shift_labels": shifted, "num_items_in_batch": count}
        with pytest.raises(InputError, match=r"whether labels were shifted before.* got labels without sharded.shard"):
            model(input_ids=own, **labels)
        inputs = sharded.shard(ids)
        del inputs["batch_checksum"]  # a change that is intended
        right = all_reduce(model(**inputs).loss.detach(), mesh).item()
        assert right == pytest.approx(loss, rel=1e-6)
        return all_reduce(model(**inputs | labels).loss.detach(), mesh).item()

    assert abs(run_threads(2, work)[0] - loss) > 1e-4 * loss


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_replaced_after_shard_raise(name: str) -> None:
    """A shard has them under two names, and the loss reads `shift_labels`: others in `labels` would not count."""
    whole, ids = make("llama"), tokens(1, 32)
    loss = whole(input_ids=ids, labels=ids).loss.item()

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        inputs = parallelize(model, mesh).shard(ids)
        model(**{key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in inputs.items()})  # as on a device
        replaced = inputs | {name: inputs[name].masked_fill(inputs["input_ids"] < 32, -100)}
        with pytest.raises(MismatchError, match=r"rows of the batch.*change them before shard\(\)"):
            model(**replaced)
        del replaced["batch_checksum"]
        return all_reduce(model(**replaced).loss.detach(), mesh).item()

    found = run_threads(2, work)[0]
    assert (found == pytest.approx(loss, rel=1e-6)) == (name == "labels")  # as if nothing was replaced


@pytest.mark.parametrize(
    "outer", ["labels", "logits_to_keep", "router", "pooled", pytest.param("compiled", marks=pytest.mark.full)]
)
def test_outer_model_of_parallelized_part_raises(outer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hook of it runs, so it would compute losses, and outputs of single tokens, from a shard."""
    whole: Any = make("mixtral", output_router_logits=True) if outer == "router" else make("llama")
    if outer == "pooled":
        whole = LlamaForSequenceClassification(LlamaConfig(**SIZES | {"pad_token_id": 0}, num_labels=3)).double()
    ids = tokens(1, 32)

    @torch.no_grad()
    def output(model: Any, rows: slice) -> torch.Tensor:
        labels = {"labels": ids[:, rows]} if outer in ("labels", "compiled") else {}
        keep = {"logits_to_keep": 1} if outer == "logits_to_keep" else {}
        found = model(input_ids=ids[:, rows], **labels, **keep)
        return found.aux_loss if outer == "router" else found.loss if labels else found.logits

    def work(mesh: Mesh) -> torch.Tensor | None:
        model = copy.deepcopy(whole)
        parallelize(model.model, mesh, layout="contiguous", seq_len=32)
        called = torch.compile(model, backend="eager") if outer == "compiled" else model
        rows = slice(16 * mesh.rank, 16 * mesh.rank + 16)
        if is_planted:
            return output(called, rows)
        with pytest.raises(UnsupportedError, match=rf"{type(model).__name__} is not parallelized, only its part"):
            output(called, rows)
        return None

    is_planted = False
    run_threads(2, work)
    monkeypatch.setattr(model_calls, "check_outer_models", lambda module: None)
    is_planted = True
    expected, wrong = output(whole, slice(0, 32)), run_threads(2, work)
    wrong = sum(wrong) / 2 if outer in ("labels", "compiled", "router") else wrong[0]
    assert abs(wrong - expected).max() > 1e-4 * abs(expected).max()


def test_outer_model_without_labels_has_logits_of_shard() -> None:
    whole, ids = make("llama"), tokens(1, 32)
    expected = whole(input_ids=ids).logits.detach()

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model.model, mesh)
        inputs = sharded.shard(ids)
        logits = model(**{name: inputs[name] for name in ("input_ids", "position_ids", "seq_len")}).logits
        own = expected[:, sharded.layout_of(32).positions(mesh.rank)]
        torch.testing.assert_close(logits, own, rtol=0, atol=1e-9)

    run_threads(2, work)


@pytest.mark.parametrize("called", ["undone", "paused", "other model"])
def test_shard_in_model_that_is_not_parallelized_raises(called: str) -> None:
    """It would take the shard for the full sequence, and its attention would miss the other ranks' tokens."""
    whole, ids = make("llama"), tokens(1, 32)
    loss = whole(input_ids=ids, labels=ids).loss.item()

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        inputs = pickle.loads(pickle.dumps(sharded.shard(ids)))  # as from a worker of a data loader
        with sharded.paused() if called == "paused" else nullcontext():
            if called == "undone":
                sharded.undo()
            other = whole if called == "other model" else model
            with pytest.raises(InputError, match=r"this shard reached a model that is not parallelized.* before undo"):
                other(**inputs)
            with pytest.raises(InputError, match="not parallelized"):
                other.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=2)
            wrong: float = other(**inputs | {"attention_mask": None}).loss.item()
        assert not hasattr(inputs["attention_mask"], "to")  # accelerate moves what has it
        return wrong

    wrong = sum(run_threads(2, work))
    assert abs(wrong - loss) > 1e-4 * loss


BEFORE_THE_GROUP = """
import torch, burst_portable as bp
from burst_portable.integrations.transformers import all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.training.batch_check import checksum
from tests.support.models import make
q = torch.ones(1, 8, 2, 8)
positions = lambda: bp.local_position_ids(seq_len=8)
for call in (lambda: bp.attention(q, q, q), lambda: parallelize(make("llama")), positions):
    try:
        call()
    except bp.BurstError as error:
        assert "a launcher started 2 processes, but there is no process group" in str(error), error
    else:
        raise SystemExit("a process of two computed as if it were alone")
assert bp.attention(q, q, q, mesh=bp.Mesh.single()).shape == q.shape
assert parallelize(make("llama"), bp.Mesh.single()).mesh.size == 1
"""


def test_parallelize_before_process_group_raises(tmp_path: Path) -> None:
    """Under torchrun each process would be a mesh of one rank, which is data parallelism."""
    environment = environment_of_children(WORLD_SIZE="2", RANK="0")
    path = tmp_path / "program.py"
    path.write_text(BEFORE_THE_GROUP, encoding="utf-8")
    done = run_program(path, environment=environment)
    assert done.returncode == 0, done.stderr


def _device_like(mesh: Mesh) -> Mesh:
    """Return a mesh whose transport compares calls as device transports do: without the host."""
    transport = mesh.transport("cpu")
    transport.host = False
    return mesh


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("changed", ["input_ids", "labels", "attention_mask", "order"])
def test_different_rows_raise_on_all_ranks(kind: str, changed: str) -> None:
    """A loader per rank gives rows of equal shape, and losses of no sequence."""
    whole, ids = make("llama"), tokens(2, 32)
    mask = torch.ones_like(ids)
    other = {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}
    if changed == "order":
        other = {**other, "input_ids": ids.flip(0), "labels": ids.flip(0)}
    elif changed == "attention_mask":
        other["attention_mask"] = mask.clone()
        other["attention_mask"][:, -1] = 0
        other["labels"][:, -1] = -100
    else:
        other[changed] = other[changed].clone()
        other[changed][1, 7] = (other[changed][1, 7] + 1) % 64
    batch = {
        "input_ids": ids,
        "labels": other["labels"] if changed == "attention_mask" else ids,
        "attention_mask": mask,
    }

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh if kind == "host" else _device_like(mesh))
        model(**sharded.shard(batch))
        mine = sharded.shard(batch if mesh.rank else other)
        if kind == "host":
            with pytest.raises(MismatchError, match=r"rows of the batch: checksum .* on rank 0 but .* on rank 1"):
                model(**mine)
        else:
            model(**mine)
            with pytest.raises(MismatchError, match="differed in the rows of the batch of the last call"):
                model(**sharded.shard(batch))

    run_threads(2, work)


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("changed", ["input_ids", "shift_labels"])
def test_shard_changed_on_one_rank_raises(kind: str, changed: str) -> None:
    """The loss would be that of a batch that no rank has. Removing the checksum allows it."""
    whole, ids = make("llama"), tokens(1, 32)
    loss = whole(input_ids=ids, labels=ids).loss.item()

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh if kind == "host" else _device_like(mesh))
        wrong = sharded.shard(ids)
        if mesh.rank:
            wrong[changed] = sharded.shard(ids.flip(1))[changed]
        if kind == "host":
            with pytest.raises(MismatchError, match=r"rows of the batch.* change them before shard\(\)"):
                model(**wrong)
        else:
            model(**wrong)
            with pytest.raises(MismatchError, match="rows of the batch of the last call"):
                model(**sharded.shard(ids))
        del wrong["batch_checksum"]
        return all_reduce(model(**wrong).loss.detach(), mesh).item()

    assert abs(run_threads(2, work)[0] - loss) > 1e-4 * loss


def test_checksum_depends_on_values_order_and_arguments() -> None:
    ids = torch.arange(64).reshape(2, 32)
    found = {
        int(checksum(x)) for x in (ids, ids.flip(0), ids.flip(1), ids + 1, ids.roll(1), ids.T.contiguous(), ids * 0)
    }
    found |= {int(checksum(*x)) for x in ((ids, ids), (ids, None), (ids, None, ids), (ids, ids, ids))}
    assert len(found) == 11
    assert int(checksum(ids.int())) == int(checksum(ids))


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("summed", [True, False])
def test_training_without_all_reduce_gradients_raises(kind: str, summed: bool) -> None:
    """Each rank would step by its own part of the gradients and train its own model."""
    whole, ids = make("llama"), tokens(1, 32)

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh if kind == "host" else _device_like(mesh))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**sharded.shard(ids)).loss.backward()
        if summed:
            all_reduce_gradients(model.parameters(), mesh)
        optimizer.step()
        if summed:
            model(**sharded.shard(ids))
            model(**sharded.shard(ids))
            return
        if kind == "device":
            model(**sharded.shard(ids))  # the result of this comparison is read at the next call
        with pytest.raises(MismatchError, match=r"values of the parameters.*or call all_reduce_gradients"):
            model(**sharded.shard(ids))

    run_threads(2, work)


@pytest.mark.parametrize("trained", ["all", "lm_head", "layers.1.mlp.up_proj"])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_training_that_moves_no_norm_needs_sums(kind: str, trained: str) -> None:
    """In bf16 no norm moves by so small a step, or the optimizer has none: the smallest parameters remain equal."""
    whole, ids = make("llama").bfloat16(), tokens(1, 32)

    def work(mesh: Mesh) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh if kind == "host" else _device_like(mesh))
        stepped = [p for name, p in model.named_parameters() if trained == "all" or trained in name]
        optimizer = torch.optim.AdamW(stepped, lr=1e-4, weight_decay=0.0)
        model(**sharded.shard(ids)).loss.backward()
        optimizer.step()
        if kind == "device":
            model(**sharded.shard(ids))  # the result of this comparison is read at the next call
        with pytest.raises(MismatchError, match=r"values of the parameters.*or call all_reduce_gradients"):
            model(**sharded.shard(ids))
        return {name: p.detach() for name, p in model.named_parameters()}

    first, second = run_threads(2, work)
    smallest = sorted(first, key=lambda name: first[name].numel())[:4]
    assert all(torch.equal(first[name], second[name]) for name in smallest)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_sampled_parameters_of_equal_models_are_equal() -> None:
    """A change of any parameter is found within a few calls, also of one with another dtype or that is a transpose."""
    model = torch.nn.ParameterList(torch.randn(300 + i, 7) for i in range(70))
    model.append(torch.randn(40, 40).bfloat16())
    model.append(torch.randn(50, 40).T)
    model.append(torch.zeros(0))
    device = torch.device("cpu")
    calls = range(8)
    before = [int(parameter_checksum(model, device, call)) for call in calls]
    assert before == [int(parameter_checksum(copy.deepcopy(model), device, call)) for call in calls]
    for changed in model[:71]:
        copied = changed.detach().clone()
        changed.data.mul_(1.5)
        assert [int(parameter_checksum(model, device, call)) for call in calls] != before
        changed.data.copy_(copied)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_evaluation_of_different_models_raises(kind: str) -> None:
    """Ranks with different seeds have equal norms, and would evaluate a mixture of their models."""
    whole, ids = [make("llama"), make("llama")], tokens(1, 32)
    with torch.no_grad():
        loss = whole[0](input_ids=ids, labels=ids).loss.item()
        whole[1].model.layers[1].mlp.up_proj.weight.mul_(-1.5)

    @torch.no_grad()
    def work(mesh: Mesh) -> float:
        model, wrong = whole[mesh.rank], torch.zeros(())
        sharded = parallelize(model, mesh if kind == "host" else _device_like(mesh))
        if kind == "device":
            wrong = all_reduce(model(**sharded.shard(ids)).loss, mesh)
        with pytest.raises(MismatchError, match="values of the parameters"):
            model(**sharded.shard(ids))
        return wrong.item()

    assert abs(run_threads(2, work)[0] - loss) > 1e-4 * loss  # of the call that the device compares afterwards


def test_sum_of_gradients_for_an_average_raises() -> None:
    """Gradients that DDP would average are multiplied by the ranks, so their sum is too large."""
    whole, ids = make("llama"), tokens(1, 32)
    whole(input_ids=ids, labels=ids).loss.backward()
    expected = whole.lm_head.weight.grad.clone()
    whole.zero_grad()

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh, full_batches=True, averaged_gradients=True)
        model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(InputError, match=r"multiplied by the number of ranks.* leave out averaged_gradients"):
            all_reduce_gradients(model.parameters(), mesh)
        sharded.undo()
        all_reduce_gradients(model.parameters(), mesh)
        torch.testing.assert_close(model.lm_head.weight.grad, 2 * expected, rtol=1e-6, atol=1e-9)

    run_threads(2, work)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_different_numbers_of_labels_raise(kind: str) -> None:
    """A count of a rank's own labels gives a loss that is no mean over the sequence."""
    whole, ids = make("llama"), tokens(1, 32)

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh if kind == "host" else _device_like(mesh))
        inputs = sharded.shard(ids)
        assert inputs["num_items_in_batch"] == 31
        model(**inputs)
        own = inputs | {"num_items_in_batch": (inputs["shift_labels"] != -100).sum()}  # 16 and 15
        if kind == "device":
            model(**own)
            own = inputs
        with pytest.raises(MismatchError, match="number of labels"):
            model(**own)

    run_threads(2, work)


def test_mask_removed_by_hook_raises() -> None:
    """Accelerate's context parallelism removes attention masks, so that documents would attend to each other."""
    whole, ids = make("llama"), tokens(1, 32)

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        accelerate.big_modeling._attach_context_parallel_hooks(model)
        with pytest.raises(UnsupportedError, match=r"mask did not come from .* use no other context parallelism"):
            model(**sharded.shard(ids, cu_seqlens=(0, 20, 32)))

    run_threads(2, work)


def test_router_loss_in_direct_forward_call_raises() -> None:
    """forward() runs no hooks, so each rank would return the router loss of its local tokens."""
    whole, ids = make("mixtral", output_router_logits=True), tokens(1, 32)

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        with pytest.raises(UnsupportedError, match="call the parallelized model itself, not its forward"):
            model.forward(**sharded.shard(ids))
        assert model(**sharded.shard(ids)).aux_loss.isfinite()

    run_threads(2, work)


@pytest.mark.full
@pytest.mark.parametrize("parameters", ["original", "flat"])
def test_shards_of_fsdp1_are_not_taken_for_different_parameters(parameters: str) -> None:
    """Each rank has another part of a flat parameter, which once counted as a model that had drifted apart."""
    done = run_program("tests.support.fsdp1_ranks", parameters)
    assert done.returncode == 0, done.stderr[-2000:]
    model, ids = make("llama").float(), tokens(1, 32)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-4)


def test_averages_of_parts_of_gradients_raise(tmp_path: Path) -> None:
    """DDP and FSDP2 would train with gradients that are too small by the number of ranks."""
    done = run_program("tests.support.ddp_ranks", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    model, ids = make("llama"), tokens(1, 32)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    right, messages, summed, wrong, shards, sums = found[:2], found[2:4], found[4], found[5:7], found[7], found[8:]
    assert [*right, summed] == pytest.approx([expected] * 3)
    assert all("pass averaged_gradients=True" in message for message in messages)
    assert wrong == pytest.approx([expected / 2] * 2)
    for wrap in ("DistributedDataParallel", "fully_shard"):
        first, message = shards.pop(f"{wrap} none")
        assert first == pytest.approx(expected / 2)
        assert "was not multiplied by the number of ranks" in message
        assert "(loss * 2).backward()" in message
    assert torch.tensor([*shards.values()]).flatten().tolist() == pytest.approx([expected] * 12)
    for alone, message, averaged, twice in (sums[:4], sums[4:]):
        assert [alone, averaged, twice / 2] == pytest.approx([expected] * 3)
        assert "DDP already averages these gradients" in message


@pytest.mark.parametrize("change", ["clip", "scale", "none"])
def test_gradients_changed_before_their_sum_raise(change: str) -> None:
    """Each rank would clip its part of the gradients by the norm of this part."""
    whole, ids = make("llama"), tokens(1, 32)
    whole(input_ids=ids, labels=ids).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    clipped = whole.lm_head.weight.grad.clone()
    whole.zero_grad()

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        for _ in range(2):
            model(**sharded.shard(ids) | {"num_items_in_batch": 62}).loss.backward()  # two batches
        parameters = list(model.parameters())
        if change == "clip":
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        elif change == "scale":
            torch._foreach_mul_([p.grad for p in parameters], 0.5)
        if is_planted:
            mesh.gradient_records.accumulated.clear()
        elif change != "none":
            with pytest.raises(InputError, match=r"changed between the backward pass and their sum.* clip and unscale"):
                all_reduce_gradients(parameters, mesh)
            return 0.0
        all_reduce_gradients(parameters, mesh)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1).item()
        if change == "none":
            assert norm == pytest.approx(expected.item())
            torch.testing.assert_close(model.lm_head.weight.grad, clipped, rtol=1e-6, atol=1e-9)
            with pytest.raises(InputError, match="changed between the backward pass"):
                all_reduce_gradients(parameters, mesh)  # a second time
        return float((model.lm_head.weight.grad - clipped).norm() / clipped.norm())

    is_planted = False
    run_threads(2, work)
    if change == "clip":
        is_planted = True
        assert min(run_threads(2, work)) > 0.01


@pytest.mark.parametrize("zeroed", ["none", "in place", "data", "never"])
def test_sum_after_each_micro_batch_raises(zeroed: str) -> None:
    """The second sum would add the first once per rank. Gradients that were zeroed in between are no sums."""
    whole, batches = make("llama"), (tokens(1, 24), tokens(1, 32, seed=2))
    for ids in batches if zeroed == "never" else batches[1:]:
        whole(input_ids=ids, labels=ids).loss.backward()
    expected = whole.lm_head.weight.grad.clone()
    whole.zero_grad()

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        sharded, parameters = parallelize(model, mesh), list(model.parameters())
        passes = 2 if zeroed == "data" else 1  # of the same batch
        for ids in batches:
            for _ in range(passes):
                model(**sharded.shard(ids)).loss.backward()
            if is_planted:
                mesh.gradient_records.added.clear()
            elif zeroed == "never" and ids is batches[1]:
                with pytest.raises(InputError, match=r"added to gradients that are sums.* after the last micro-batch"):
                    all_reduce_gradients(parameters, mesh)
                model(**sharded.shard(ids)).loss.backward()  # an addition to a sum to which one was added
                with pytest.raises(InputError, match="added to gradients that are sums"):
                    all_reduce_gradients(parameters, mesh)
                return 0.0
            all_reduce_gradients(parameters, mesh)
            if zeroed == "data" and ids is batches[0]:
                for p in parameters:
                    p.grad.data.zero_()  # without a new version
            elif zeroed != "never" and ids is batches[0]:
                model.zero_grad(set_to_none=zeroed == "none")
        return float((model.lm_head.weight.grad / passes - expected).norm() / expected.norm())

    is_planted = False
    assert max(run_threads(2, work)) < 1e-9
    is_planted = True
    assert (min(run_threads(2, work)) > 0.01) == (zeroed == "never")


@pytest.mark.parametrize(
    ("kind", "exchanges"), [("host", {"share": 6, "all_gather": 1}), ("device", {"all_gather": 2})]
)
def test_checks_add_one_exchange_per_training_step(kind: str, exchanges: dict[str, int], monkeypatch) -> None:
    """The gradients take an all-gather. Over a host transport, so many checks: a call, 4 passes and the gradients.

    Over a device transport, ranks compare repeated calls once, and each batch in 32 bytes that no host waits for.
    """
    whole, ids, found = make("llama"), tokens(1, 32), Counter()

    def counted(name: str) -> Any:
        original = getattr(LocalTransport, name)

        def call(self: LocalTransport, *args: Any, **kwargs: Any) -> Any:
            found[name] += self.rank == 0
            return original(self, *args, **kwargs)

        return call

    for name in ("share", "all_gather"):
        monkeypatch.setattr(LocalTransport, name, counted(name))

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh if kind == "host" else _device_like(mesh))
        for _ in range(3):
            if mesh.rank == 0:
                found.clear()
            model.zero_grad()
            model(**sharded.shard(ids)).loss.backward()
            all_reduce_gradients(model.parameters(), mesh)

    run_threads(2, work)
    assert +found == exchanges


class _Reads(TorchDispatchMode):
    """Record the operators whose result the host reads, for which it would wait on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "_unique2", "masked_select"):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cu_seqlens", [None, (0, 20, 32)])
def test_checks_of_a_step_read_no_values(cu_seqlens: Any) -> None:
    """Over a device transport, from the batch to the gradients: Transformers reads position ids, once per call."""
    whole, ids = make("llama"), tokens(1, 32)
    with _Reads() as plain:
        whole(input_ids=ids, labels=ids, position_ids=torch.arange(32)[None], use_cache=False).loss.backward()
    assert len(plain.found) == 1
    whole.zero_grad()

    def work(mesh: Mesh) -> list[str]:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, _device_like(mesh))
        with _Reads() as mode:
            for _ in range(2):
                model(**sharded.shard(ids, cu_seqlens=cu_seqlens)).loss.backward()
        return mode.found

    assert run_threads(2, work) == [2 * plain.found] * 2
