"""Test unedited transformers models on several ranks against the same models on one device."""

from __future__ import annotations

import copy
import io
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BatchEncoding
from transformers.loss.loss_utils import ForCausalLMLoss

from burst_portable import Mesh, run_threads
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from burst_portable.integrations.transformers import loss as losses
from burst_portable.integrations.transformers.bands import Band
from burst_portable.integrations.transformers.deferred_mask import DeferredMask
from burst_portable.layout import OF_DOCUMENTS
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.registry import OURS
from tests.support.models import (
    LENGTH,
    MODELS,
    SIZES,
    assert_same,
    checkpoint_activations,
    gradients_of,
    make,
    on_one_device,
    on_ranks,
    tokens,
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_sharded_model_equals_one_device(kind: str, ranks: int):
    model, ids = make(kind), tokens()
    expected = on_one_device(model, ids)
    for answer in on_ranks(ranks, model, ids):
        # Only transformers' eager attention has a softcap, and its softmax is float32 whatever the model.
        assert_same(answer, expected, exact=1e-6 if kind == "gemma2" else 1e-12)


def test_layers_that_share_keys_equal_one_device():
    """The last layers of Gemma 4 use keys and values of earlier ones, and slice their masks to all rows."""
    config = transformers.Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=8,
        global_head_dim=8,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
    )
    torch.manual_seed(0)
    model, ids = transformers.Gemma4ForCausalLM(config).double().train(), tokens()
    expected = on_one_device(model, ids)
    for answer in on_ranks(2, model, ids):
        assert_same(answer, expected, exact=2e-6)  # its rotary embedding is float32


def test_part_of_mask_raises():
    mask = DeferredMask(Band(lo=0))
    assert mask[:, :, slice(0, None), ...] is mask
    with pytest.raises(UnsupportedError, match="part of its mask"):
        mask[:, :, -1:, :]


def test_hybrid_model_of_attention_layers_equals_one_device():
    config = transformers.GraniteMoeHybridConfig(
        **SIZES, layer_types=["attention"] * 2, num_local_experts=0, shared_intermediate_size=48, mamba_n_heads=8
    )
    torch.manual_seed(0)
    model, ids = transformers.GraniteMoeHybridForCausalLM(config).double().train(), tokens()
    expected = on_one_device(model, ids)
    for answer in on_ranks(2, model, ids):
        assert_same(answer, expected)


@pytest.mark.parametrize("layout", ["contiguous", "striped", "document_zigzag", "dispatched"])
@pytest.mark.parametrize(("strategy", "ranks"), [("ring", 2), ("burst", 2), ("ulysses", 2), ("usp", 4)])
def test_sharded_model_with_each_strategy_and_layout(strategy: str, ranks: int, layout: str):
    model, ids = make("mistral"), tokens()
    expected = on_one_device(model, ids)
    for answer in on_ranks(ranks, model, ids, strategy=strategy, layout=layout):
        assert_same(answer, expected)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", OURS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3_moe"])
def test_models_with_every_strategy_equal_one_device(kind: str, strategy: str, ranks: int):
    model, ids = make(kind), tokens()
    expected = on_one_device(model, ids)
    for answer in on_ranks(ranks, model, ids, strategy=strategy):
        assert_same(answer, expected)


def test_ignored_labels_do_not_count():
    """The mean is over all tokens with a label, on any rank."""
    model, ids = make("llama"), tokens()
    labels = ids.clone()
    labels[0, 5:30] = -100
    labels[1, :40] = -100
    expected = on_one_device(model, ids, labels)
    for answer in on_ranks(3, model, ids, labels):
        assert_same(answer, expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_label_counts_add_up_over_batches(ranks: int):
    """A batch without labels counts 0, and its loss is 0 instead of 0 / 0."""
    model, ids = make("llama"), tokens()
    nothing = torch.full_like(ids, -100)
    expected = on_one_device(model, ids)

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        batches = [sharded.shard(ids), sharded.shard(ids, nothing)]
        assert mine(**batches[1]).loss.item() == 0.0
        assert mine(**batches[1] | {"num_items_in_batch": 0}).loss.item() == 0.0
        count = torch.stack([batch["num_items_in_batch"] for batch in batches]).sum()
        loss = sum(mine(**batch | {"num_items_in_batch": count}).loss for batch in batches)
        loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        assert all_reduce(loss.detach(), mesh).item() == pytest.approx(expected.loss, rel=1e-6)
        torch.testing.assert_close(gradients_of(mine), expected.gradients, rtol=1e-6, atol=1e-8)

    run_threads(ranks, work)


def test_loss_and_gradients_in_parts_equal_one_device():
    """Logits are computed in parts of 7 rows, and gradient buckets are small."""
    model, ids = make("llama"), tokens()
    labels = ids.clone()
    labels[0, 5:30] = -100
    expected = on_one_device(model, ids, labels)

    def with_small_parts(mine):
        losses.sharded_loss(mine).logits_bytes = 7 * 64 * 4
        return mine

    for answer in on_ranks(2, model, ids, labels, wrap=with_small_parts, bucket_bytes=8 * 32 * 32):
        assert_same(answer, expected)


def test_large_logits_are_not_copied_to_float32():
    logits = torch.randn(1, 60, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    labels = tokens(1, 60)
    alone = logits.detach().clone().requires_grad_()
    expected = ForCausalLMLoss(alone, labels, 64, shift_labels=labels, num_items_in_batch=60)
    expected.backward()
    sharded = losses.ShardedLoss(ForCausalLMLoss, logits_bytes=7 * 64 * 4)
    with _Largest() as seen:
        found = sharded(logits, labels, 64, shift_labels=labels, num_items_in_batch=60)
        found.backward()
    assert seen.size == 7 * 64
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(logits.grad, alone.grad)


def test_causal_loss_accepts_sliced_logits():
    """The rows are a slice of a longer sequence, so no view makes them contiguous."""
    logits = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()[:, :30]
    options = {"labels": None, "vocab_size": 64, "shift_labels": tokens(2, 30), "num_items_in_batch": 60}
    expected = losses.causal_loss(logits, **options)
    torch.testing.assert_close(losses.causal_loss(logits, **options, logits_bytes=7 * 64 * 4), expected)


def _own_loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **_):
    """Compute a smoothed loss, as in custom models. Labels are shifted here unless `shift_labels` is given."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    count = (shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    logits, labels = logits.reshape(-1, vocab_size), shift_labels.reshape(-1)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1) / count


@pytest.mark.parametrize("when", ["before", "after"])
def test_custom_loss_function_equals_one_device(when: str):
    model, ids = make("llama"), tokens()
    alone = copy.deepcopy(model)
    alone.loss_function = _own_loss
    expected = alone(input_ids=ids, labels=ids).loss
    expected.backward()

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        if when == "before":
            mine.loss_function = _own_loss
        sharded = parallelize(mine, mesh)
        if when == "after":
            mine.loss_function = _own_loss
        loss = mine(**sharded.shard(ids)).loss
        loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        torch.testing.assert_close(all_reduce(loss.detach(), mesh), expected.detach())
        for got, wanted in zip(mine.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-9, atol=1e-12)
        sharded.undo()
        assert mine.loss_function is _own_loss

    run_threads(2, work)


def test_loss_function_that_shifts_labels_raises():
    def work(mesh: Mesh) -> None:
        model = make("llama")
        sharded = parallelize(model, mesh)
        inputs = sharded.shard(tokens())
        model.loss_function = lambda logits, labels, **others: _own_loss(
            logits, labels, **others | {"shift_labels": None}
        )
        for call in (lambda: sharded.shard(tokens()), lambda: model(**inputs)):
            with pytest.raises(UnsupportedError, match=r"shifts its labels.*takes shift_labels and num_items_in_batch"):
                call()

    run_threads(2, work)


def test_loss_function_without_number_of_labels_raises():
    """It would ignore the number, and each rank would return the mean over its part of the labels."""
    whole, ids = make("llama"), tokens(1, 32)

    def mean_loss(logits, labels, vocab_size, shift_labels=None, **_):
        return _own_loss(logits, labels, vocab_size, shift_labels=shift_labels)

    def ignores(logits, labels, vocab_size, shift_labels=None, num_items_in_batch=None, **_):
        return mean_loss(logits, labels, vocab_size, shift_labels=shift_labels)

    whole.loss_function = mean_loss
    expected = whole(input_ids=ids, labels=ids).loss.item()

    def work(mesh: Mesh) -> float:
        model = make("llama")
        sharded = parallelize(model, mesh)
        inputs = sharded.shard(ids)
        model.loss_function = mean_loss
        for call in (lambda: sharded.shard(ids), lambda: model(**inputs)):
            with pytest.raises(UnsupportedError, match=r"no parameter num_items_in_batch.* add the parameter"):
                call()
        model.loss_function = ignores  # the same numbers
        with pytest.raises(UnsupportedError, match=r"does not divide by num_items_in_batch.*got.*ignores, \d"):
            model(**inputs)
        logits = model(**{name: x for name, x in inputs.items() if "label" not in name}).logits
        return all_reduce(ignores(logits, None, logits.shape[-1], inputs["shift_labels"]).detach(), mesh).item()

    assert run_threads(2, work)[0] == pytest.approx(2 * expected, rel=0.1)


class _Largest(TorchDispatchMode):
    """Record the number of elements of the largest float32 tensor that is created."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, torch.Tensor) and x.dtype is torch.float32:
                self.size = max(self.size, x.numel())
        return made


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_equals_one_device(reentrant: bool):
    model, ids = make("mistral"), tokens()
    expected = on_one_device(model, ids)
    checkpoint_activations(model, use_reentrant=reentrant)
    for answer in on_ranks(2, model, ids):
        assert_same(answer, expected)


def test_recomputation_uses_length_of_its_call():
    """Two calls of different lengths precede one backward."""
    model = make("llama")
    batches = [tokens(1, 31), tokens(1, 46, seed=2)]
    expected = [on_one_device(model, ids) for ids in batches]
    checkpoint_activations(model)
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> dict[str, torch.Tensor]:
        mine = models[mesh.rank]
        sharded = parallelize(mine, mesh)
        sum(mine(**sharded.shard(ids)).loss for ids in batches).backward()
        all_reduce_gradients(mine.parameters(), mesh)
        return gradients_of(mine)

    for gradients in run_threads(2, work):
        for name, gradient in gradients.items():
            whole = expected[0].gradients[name] + expected[1].gradients[name]
            assert (gradient - whole).norm() <= 1e-7 * whole.norm(), name


def test_packed_documents_do_not_see_each_other():
    model, ids, ends = make("mistral"), tokens(2), (0, 9, 10, 33, 47)
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("sdpa")
    logits = torch.cat([alone(input_ids=ids[:, a:b]).logits for a, b in pairwise(ends)], dim=1)

    def work(mesh: Mesh) -> float:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh, layout="document_zigzag")
        inputs = sharded.shard(ids, cu_seqlens=torch.tensor(ends))
        assert inputs["num_items_in_batch"] == 2 * (47 - 4)
        whole = mine(**inputs).logits
        where = sharded.layout_of(47, ends).positions(mesh.rank)
        return (whole - logits[:, where]).abs().max().item()

    assert max(run_threads(2, work)) < 1e-12


def test_two_models_on_two_meshes():
    first, second = make("llama"), make("mistral")
    ids = tokens()
    expected = on_one_device(first, ids), on_one_device(second, ids)

    def work(mesh: Mesh) -> list[float]:
        a, b = copy.deepcopy(first), copy.deepcopy(second)
        over_ranks, alone = parallelize(a, mesh), parallelize(b, Mesh.single(), layout="contiguous")
        a_logits, b_logits = a(**over_ranks.shard(ids)).logits, b(**alone.shard(ids)).logits
        where = over_ranks.layout_of(47, None).positions(mesh.rank)
        apart = (a_logits - expected[0].logits[:, where], b_logits - expected[1].logits)
        return [x.abs().max().item() for x in apart]

    assert max(max(one) for one in run_threads(2, work)) < 1e-12


def test_base_model_can_be_called_directly():
    """Users who compute the loss themselves call the decoder without its head."""
    model, ids = make("llama"), tokens()
    expected = copy.deepcopy(model).model(input_ids=ids).last_hidden_state

    def work(mesh: Mesh) -> float:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        inputs = sharded.shard(ids)
        rows = {name: inputs[name] for name in ("input_ids", "position_ids")}
        hidden = mine.model(**rows, seq_len=47).last_hidden_state
        return (hidden - expected[:, sharded.layout_of(47, None).positions(mesh.rank)]).abs().max().item()

    assert max(run_threads(2, work)) < 1e-12


@pytest.mark.parametrize("then", ["model", "its inner model"])
@pytest.mark.parametrize("called", ["model", "its inner model"])
def test_call_after_interrupted_call_uses_own_documents(called: str, then: str):
    """torch calls no hooks after a KeyboardInterrupt."""
    model, ids = make("llama"), tokens()

    def call(whole: Any, name: str, **options: Any) -> torch.Tensor:
        out = (whole if name == "model" else whole.model)(input_ids=ids, **options)
        return out.logits if name == "model" else out.last_hidden_state

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    expected = call(copy.deepcopy(model), then)
    parallelize(model, Mesh.single())
    ctrl_c = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:  # as sys.last_traceback does, this keeps the frames
        call(model, called, cu_seqlens=(0, 9, 47))
    ctrl_c.remove()
    torch.save(model, io.BytesIO())  # the state of that call is not saved
    assert (call(model, then) - expected).abs().max() < 1e-12
    assert kept.tb is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_model_is_as_accurate_as_one_device(dtype: torch.dtype):
    """Models then pass q and k in float32 and v in 16 bits; SDPA gets all in 16 bits."""
    model, ids = make("llama", torch.float32), tokens()
    with torch.autocast("cpu", dtype):
        expected = on_one_device(model, ids).logits
    exact = on_one_device(model, ids).logits
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> torch.Tensor:
        mine = models[mesh.rank]
        sharded = parallelize(mine, mesh)
        with torch.autocast("cpu", dtype):  # autocast of this thread, which is not a context variable
            out = mine(**sharded.shard(ids))
        out.loss.backward()
        return (out.logits - exact[:, sharded.layout_of(47, None).positions(mesh.rank)]).abs().max()

    # The error may not exceed that of one device under autocast by more than a factor for different rounding.
    allowed = 1.5 * (expected - exact).abs().max()
    assert max(run_threads(2, work)) <= allowed


def test_undo_restores_model():
    model, ids = make("llama"), tokens()
    before = model(input_ids=ids).logits
    with parallelize(model, Mesh.single()) as sharded:
        assert model.config._attn_implementation == "burst_portable"
        with pytest.raises(InputError, match="already"):
            parallelize(model, Mesh.single())
        copied = copy.deepcopy(model)
        torch.testing.assert_close(copied(**sharded.shard(ids)).logits, before)
    sharded.undo()
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, "_burst_portable") for module in model.modules())
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "layout"), [("llama", "zigzag"), ("mistral", "contiguous")])
def test_auto_layout_is_fastest_predicted(kind: str, layout: str):
    """Mistral's windows need neighbors only; documents need their own layouts."""
    model, ids = make(kind), tokens()
    expected = on_one_device(model, ids)
    for answer in on_ranks(2, model, ids, layout="auto"):
        assert_same(answer, expected)

    def work(mesh: Mesh) -> tuple[str, str]:
        slow_kernels = AutoStrategy(hardware=HardwareSpec(tflops=0.01, intra_node_bandwidth=10.0))
        sharded = parallelize(make(kind), mesh, layout="auto", strategy=slow_kernels)
        ends = [0, 1900, *range(2000, 4000, 130), 4096]
        return sharded.layout_of(4096).name, sharded.layout_of(4096, cu_seqlens=ends).name

    first, second = run_threads(2, work)
    assert first == second
    assert first[0] == layout
    assert first[1] in OF_DOCUMENTS


def test_auto_layout_of_meta_model_raises():
    """Weights are not loaded yet: a named layout works, but `auto` needs the device."""

    def work(mesh: Mesh) -> None:
        with torch.device("meta"):
            model = make("llama")
        with pytest.raises(InputError, match=r"model on meta; .*or name a layout"):
            parallelize(model, mesh, layout="auto")
        parallelize(model, mesh, layout="striped")

    run_threads(2, work)


def test_shard_accepts_batch_of_tokenizer():
    ids, labels = tokens(2), tokens(2)
    sharded = parallelize(make("llama"), Mesh.single())
    batch = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    found, expected = sharded.shard(batch), sharded.shard(ids, labels, attention_mask=torch.ones_like(ids))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in ("input_ids", "labels", "shift_labels"))
    assert torch.equal(sharded.shard({"input_ids": ids}, labels)["shift_labels"], found["shift_labels"])
    packed = sharded.shard({"input_ids": ids, "position_ids": torch.arange(40).repeat(2)[:LENGTH].expand(2, -1)})
    assert packed["cu_seqlens"] == (0, 40, LENGTH)
    for wrong, told in (
        ({"input_ids": ids, "token_type_ids": ids}, "got 'token_type_ids'; allowed: input_ids, labels"),
        ({"attention_mask": ids}, "the batch has no input_ids"),
    ):
        with pytest.raises(InputError, match=told):
            sharded.shard(wrong)
    with pytest.raises(InputError, match="labels is in the batch and was passed as an argument"):
        sharded.shard(batch, labels)


def test_repr_of_a_sharded_model_names_model_ranks_and_layout():
    sharded = parallelize(make("llama"), Mesh.single(), layout="zigzag")
    assert repr(sharded) == "ShardedModel(LlamaForCausalLM, rank 0 of 1, strategy='auto', layout='zigzag')"
    sharded.undo()
    assert repr(sharded).endswith(", undone)")
