"""Test recurrent layers, whose states go from rank to rank: Mamba, Gated DeltaNet and short convolutions."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import transformers

from burst_portable import Mesh, run_threads
from burst_portable.errors import MismatchError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.layers.recurrent_states import LABEL
from burst_portable.integrations.transformers.models.recurrent_layers import cache_argument, recurrent_layers
from tests.support.models import (
    EXPERTS,
    SIZES,
    assert_same,
    checkpoint_activations,
    gradients_of,
    mesh_without_peer,
    on_one_device,
    on_ranks,
    tokens,
)
from tests.support.planted_transports import TransportWrapper

LINEAR, FULL = "linear_attention", "full_attention"
SMALL = {**SIZES, "num_hidden_layers": 3}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}


def _qwen3_next():
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    config = transformers.Qwen3NextConfig(
        **SMALL, **EXPERTS, **linear, linear_value_head_dim=8, head_dim=16, num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=[LINEAR, LINEAR, FULL],
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def _bamba():
    return transformers.BambaForCausalLM(transformers.BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[2]))


def _granite():
    options = {"num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": [LINEAR, FULL, LINEAR]}
    return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**SMALL, **MAMBA, **options))


def _lfm2():
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SMALL, layer_types=["conv", "conv", FULL]))


def _jamba(**options):
    experts = {**EXPERTS, "num_experts": 4, "expert_layer_offset": 0}
    attention = {"attn_layer_period": 3, "attn_layer_offset": 2}
    config = transformers.JambaConfig(**SMALL, **experts, **attention, mamba_d_state=8, **options)
    return transformers.JambaForCausalLM(config)


def _zamba():
    config = transformers.ZambaConfig(**SMALL, layers_block_type=[LINEAR, "hybrid", "hybrid"], mamba_d_state=8)
    return transformers.ZambaForCausalLM(config)


KINDS = {
    "qwen3_next": _qwen3_next,
    "bamba": _bamba,
    "granite": _granite,
    "lfm2": _lfm2,
    "jamba": _jamba,
    "zamba": _zamba,
}


def make(kind):
    """Return a model whose states decay slowly, so that tokens of other ranks count."""
    torch.manual_seed(0)
    model = KINDS[kind]().double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.rand(parameter.shape) - 4)
            elif parameter.dim() > 1 or name.endswith("dt_bias"):
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return model


def assert_near(answer, expected):
    """Compare with one device. Transformers computes states in float32."""
    assert_same(answer, expected, exact=2e-5, gradients=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_model_equals_one_device(kind):
    model = make(kind)
    for ranks, length in ((2, 47), (3, 31), (3, 7)):  # 7: a rank with fewer tokens than the convolution reads
        ids = tokens(length=length)
        expected = on_one_device(model, ids)
        for answer in on_ranks(ranks, model, ids):
            assert_near(answer, expected)


def _name_cache(layer, name):
    """Give the forward of a layer another name for its cache."""
    kind = type(layer)
    old = cache_argument(layer)

    def of_cache(self, hidden_states, cache=None, attention_mask=None, **others):
        return kind.forward(self, hidden_states, attention_mask=attention_mask, **others | {old: cache})

    def of_memory(self, hidden_states, memory=None, attention_mask=None, **others):
        return kind.forward(self, hidden_states, attention_mask=attention_mask, **others | {old: memory})

    forward = {"cache": of_cache, "memory": of_memory}[name]
    layer.__class__ = type(kind.__name__, (kind,), {"forward": forward})


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_recurrent_layer_may_name_its_cache_as_in_5_24(kind):
    model, ids = make(kind), tokens()
    expected = on_one_device(model, ids)
    for layer in recurrent_layers(model):
        _name_cache(layer, "cache")
    for answer in on_ranks(2, model, ids):
        assert_near(answer, expected)


def test_recurrent_layer_without_known_cache_is_rejected():
    model = make("lfm2")
    for layer in recurrent_layers(model):
        _name_cache(layer, "memory")
    with pytest.raises(UnsupportedError, match="Lfm2ForCausalLM cannot be sharded"):
        parallelize(model, mesh_without_peer())


class LosesStates(TransportWrapper):
    """Send zeros in place of recurrent states."""

    def post(self, sends, receives, label=""):
        if label == LABEL:
            for message in sends:
                message.buffer.zero_()
        return super().post(sends, receives, label)


class LosesGradients(LosesStates):
    """Send zeros in place of the gradients of recurrent states, which go to the previous rank."""

    def post(self, sends, receives, label=""):
        return super().post(sends, receives, label if any(m.peer < self.rank for m in sends) else "")


@pytest.mark.parametrize("bug", [LosesStates, LosesGradients])
@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "lfm2", "jamba", "zamba"])
def test_recurrent_model_without_handed_states_differs(kind, bug):
    model, ids = make(kind), tokens()
    expected = on_one_device(model, ids)
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh):
        wrong = bug(mesh.transport("cpu"))
        mesh, mine = Mesh(mesh.rank, 2, lambda device_type: wrong), models[mesh.rank]
        out = mine(**parallelize(mine, mesh).shard(ids))
        out.loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        return all_reduce(out.loss.detach().reshape(1), mesh).item(), gradients_of(mine)

    loss, gradients = run_threads(2, work)[0]
    apart = [((gradients[name] - x).norm() / x.norm()).item() for name, x in expected.gradients.items()]
    assert max(apart) > 1e-3
    assert (abs(loss - expected.loss) > 1e-5) == (bug is LosesStates)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "jamba", "zamba"])
def test_recomputed_recurrent_layers_equal_one_device(kind, use_reentrant):
    model, ids = make(kind), tokens()
    expected = on_one_device(model, ids)

    def wrap(mine):
        checkpoint_activations(mine, use_reentrant=use_reentrant)
        return mine

    for answer in on_ranks(3, model, ids, wrap=wrap):
        assert_near(answer, expected)


def test_recurrent_layers_recomputed_alone_equal_one_device():
    model, ids = make("bamba"), tokens()
    expected = on_one_device(model, ids)

    def wrap(mine):
        for layer in mine.model.layers[:2]:
            layer.register_module("mamba", Recomputed(layer.mamba))
        return mine

    for answer in on_ranks(2, model, ids, wrap=wrap):
        answer.gradients = {name.replace("mamba.layer", "mamba"): x for name, x in answer.gradients.items()}
        assert_near(answer, expected)


class Recomputed(torch.nn.Module):
    """A layer that is computed again in the backward pass, up to its last saved tensor."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **options):
        return torch.utils.checkpoint.checkpoint(self.layer, hidden_states, use_reentrant=False, **options)


@pytest.mark.parametrize("trained", ["out_proj", "mlp", "feed_forward"])
def test_partly_frozen_recurrent_model_equals_one_device(trained):
    model, ids = make("qwen3_next" if trained == "mlp" else "bamba"), tokens()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    expected = on_one_device(model, ids)
    for answer in on_ranks(2, model, ids):
        assert_near(answer, expected)


@pytest.mark.parametrize("kind", ["bamba", "jamba", "zamba"])
def test_recurrent_model_with_full_batches_equals_one_device(kind):
    model, ids = make(kind), tokens()
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    padded = ids.masked_fill(mask == 0, 63)  # other padding
    models = [copy.deepcopy(model) for _ in range(2)]
    expected = model(input_ids=ids, labels=labels, attention_mask=mask).loss
    expected.backward()
    gradients = gradients_of(model)

    def work(mesh):
        mine = models[mesh.rank]
        sharded = parallelize(mine, mesh, full_batches=True)
        with torch.no_grad():
            other = mine(input_ids=padded, labels=labels, attention_mask=mask).loss.item()
            with pytest.raises(UnsupportedError, match=r"padding (at the beginning of rows|before a token)"):
                mine(input_ids=ids, attention_mask=mask.flip(1))
        loss = mine(input_ids=ids, labels=labels, attention_mask=mask).loss
        loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        return loss.item(), other, gradients_of(mine), sharded.layout

    for loss, other, found, layout in run_threads(2, work):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert other == pytest.approx(expected.item(), rel=1e-6)
        assert layout == "contiguous"
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() <= 2e-5 * gradient.norm(), name


def test_undo_restores_recurrent_layers():
    model, ids = make("qwen3_next"), tokens()
    expected = model(input_ids=ids).logits
    sharded = parallelize(model, mesh_without_peer())
    sharded.undo()
    assert torch.equal(model(input_ids=ids).logits, expected)


def _documents_alone(model, ids, ends):
    """Return the loss and the gradients of one device that computes documents one by one, in double precision."""
    alone = copy.deepcopy(model)
    losses, count = [], 0
    for start, stop in pairwise(ends):
        logits = alone(input_ids=ids[:, start:stop], use_cache=False).logits[:, :-1]
        labels = ids[:, start + 1 : stop]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        count += labels.numel()
    loss = sum(losses) / count
    loss.backward()
    return loss.detach(), gradients_of(alone)


# Documents of one token, parts of one token at the border of two ranks (23 or 24), and a border of documents there.
PACKED = [(0, 9, 10, 33, 47), (0, 24, 47), (0, 25, 47), (0, 23, 24, 47), (0, 1, 2, 46, 47), (0, 47)]


# Layers with a selective scan compute each document twice, and these take longest.
PACKED_KINDS = [
    pytest.param(kind, ends, marks=[pytest.mark.full] if kind in ("jamba", "zamba") and ends not in PACKED[::4] else [])
    for kind in KINDS
    for ends in PACKED
]


@pytest.mark.parametrize(("kind", "ends"), PACKED_KINDS, ids=str)
def test_packed_documents_equal_documents_alone(kind, ends):
    model, ids = make(kind), tokens()
    expected, gradients = _documents_alone(model, ids, ends)
    labels = ids.index_fill(1, torch.tensor(ends[:-1]), -100)

    def work(mesh):
        full_batches = mesh.size == 3
        mine = copy.deepcopy(model)
        if mesh.size == 2:
            checkpoint_activations(mine)
        sharded = parallelize(mine, mesh, full_batches=full_batches)
        batch = {"input_ids": ids, "labels": labels, "cu_seqlens": ends}
        loss = mine(**batch if full_batches else sharded.shard(batch)).loss
        loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        total = loss.detach() if full_batches else all_reduce(loss.detach(), mesh)
        torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
        found = gradients_of(mine)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() <= 2e-5 * gradient.norm(), name

    for ranks in (1, 2, 3):
        run_threads(ranks, work)


def test_documents_that_continue_states_change_the_loss():
    """States that are not reset at a border count."""
    model, ids, ends = make("bamba"), tokens(), (0, 9, 10, 33, 47)
    expected, _ = _documents_alone(model, ids, ends)
    with torch.no_grad():
        labels = ids.index_fill(1, torch.tensor(ends[:-1]), -100)
        assert abs(model(input_ids=ids, labels=labels).loss - expected) > 1e-2 * expected


def test_rows_with_different_documents_and_recurrent_layers():
    model, ids, rows = make("qwen3_next"), tokens(), ((0, 20, 47), (0, 5, 31, 47))
    alone = [_documents_alone(model, ids[i : i + 1], ends) for i, ends in enumerate(rows)]
    weights = [47 - 2, 47 - 3]  # labels
    expected = sum(w * loss for w, (loss, _) in zip(weights, alone, strict=True)) / sum(weights)

    def work(mesh):
        mine = copy.deepcopy(model)
        inputs = parallelize(mine, mesh).shard(ids, cu_seqlens=rows)
        return all_reduce(mine(**inputs).loss.detach(), mesh)

    for loss in run_threads(2, work):
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def _drop_documents(layer, args, kwargs):
    kwargs.pop("recurrent_documents")
    return args, kwargs


def test_unsupported_sequences_of_recurrent_models_raise():
    model, ids = make("bamba"), tokens()
    for layout in ("zigzag", "auto"):
        with pytest.raises(UnsupportedError, match=r"recurrent layers continue.*contiguous"):
            parallelize(model, mesh_without_peer(), layout=layout)
    with parallelize(model, Mesh.single()) as sharded:
        for layer in model.model.layers:  # as a model that does not pass on the arguments of its call
            layer.register_forward_pre_hook(_drop_documents, with_kwargs=True)
        with pytest.raises(UnsupportedError, match=r"packed documents in BambaMixer.*pass one document per row"):
            model(**sharded.shard(ids, cu_seqlens=(0, 20, 47)))
    with (
        parallelize(model, mesh_without_peer()) as sharded,
        pytest.raises(UnsupportedError, match="a rank with 1 tokens"),
    ):
        model(**sharded.shard(ids[:, :3]))


def test_left_padding_of_recurrent_models_names_the_right_side():
    model, ids = make("jamba"), tokens()  # no RoPE: other models without it take position_ids, this one does not
    mask = (torch.arange(47) >= torch.tensor([[9], [0]])).long()
    sharded = parallelize(model, mesh_without_peer(), full_batches=True)
    with sharded, pytest.raises(UnsupportedError, match=r"recurrent layers; pad at the end of rows"):
        model(input_ids=ids, attention_mask=mask)


def test_recurrent_layers_with_different_batches_raise():
    models = [make("bamba"), make("bamba")]

    def work(mesh):
        model = models[mesh.rank]
        with parallelize(model, mesh) as sharded, torch.no_grad():
            inputs = sharded.shard(tokens(batch=1 + mesh.rank))
            for name in ("batch_checksum", "labels", "shift_labels", "num_items_in_batch"):
                del inputs[name]  # their comparison would find it first
            with pytest.raises(MismatchError, match="recurrent states"):
                model(**inputs)

    run_threads(2, work)


class RaisesInBackward(torch.autograd.Function):
    """Identity whose backward pass raises, as that of an operator of fla that has no gradients on a device."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("please upgrade Triton to >= 3.7.1")


def test_error_of_operator_in_backward_pass_is_raised():
    """The error is raised as it is. The first rank, which waits for gradients of its states, ends too."""
    models = [make("qwen3_next") for _ in range(2)]

    def work(mesh):
        mine = models[mesh.rank]
        if mesh.rank == 1:
            projection = mine.model.layers[1].linear_attn.out_proj
            projection.register_forward_pre_hook(lambda _, args: (RaisesInBackward.apply(args[0]),))
        mine(**parallelize(mine, mesh).shard(tokens())).loss.backward()

    with pytest.raises(RuntimeError, match=r"^please upgrade Triton to >= 3\.7\.1$"):
        run_threads(2, work)
