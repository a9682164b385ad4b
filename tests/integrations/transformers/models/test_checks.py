"""Test that calls which shards would compute wrongly raise before any computation, and that the model stays usable."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    DynamicCache,
    FNetConfig,
    FNetForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MobileBertConfig,
    MobileBertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_overlay

from burst_portable import Mesh, run_threads, unshard
from burst_portable.comm.local import LocalTransport, run_transports
from burst_portable.config import Config
from burst_portable.errors import (
    BurstError,
    CommunicationError,
    InputError,
    LayoutError,
    MismatchError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.bands import Band, read_mask
from burst_portable.integrations.transformers.deferred_mask import DeferredMask
from burst_portable.integrations.transformers.loss import ShardedLoss
from burst_portable.integrations.transformers.models.position_limits import check_positions
from tests.support.models import SIZES, checkpoint_activations, make, mesh_without_peer, tokens

ENCODER = BertConfig(**{**SIZES, "pad_token_id": 0}, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"attention_mask": torch.tensor([[1] * 23 + [0]])}, UnsupportedError, "padding"),
        ({"attention_mask": torch.ones(1, 1, 24, 24)}, UnsupportedError, "attention_mask"),
        ({"attention_mask": {"full_attention": None}}, UnsupportedError, "attention_mask"),
        ({"use_cache": True}, UnsupportedError, "use_cache"),
        ({"past_key_values": DynamicCache()}, UnsupportedError, "no KV cache"),
        ({"cache": DynamicCache()}, UnsupportedError, "no KV cache"),  # its name since 5.24
        ({"logits_to_keep": 1}, UnsupportedError, "logits_to_keep"),
        ({"output_attentions": True}, UnsupportedError, "output_attentions"),
        ({"shift_labels": None}, InputError, "shift_labels"),
        ({"num_items_in_batch": None}, InputError, "num_items_in_batch"),
        ({"position_ids": torch.arange(24).unsqueeze(0)}, InputError, "position_ids"),
        ({"position_ids": torch.arange(23).unsqueeze(0)}, InputError, "position_ids"),
        ({"input_ids": tokens(1, 20)}, LayoutError, "wrong number"),
        ({"seq_len": None}, InputError, "number of tokens of the unsharded sequence"),
        ({"seq_len": 47.5}, InputError, r"seq_len is not a size; got 47\.5"),
        ({"seq_len": "long"}, InputError, "seq_len is not a size"),
        ({"cu_seqlens": (0, 12)}, InputError, "cu_seqlens end before"),
        ({"cu_seqlens": (0, 12.5, 47)}, InputError, "takes whole numbers"),
        ({"cu_seq_lens_q": torch.tensor([0, 24])}, UnsupportedError, "cu_seq_lens_q"),
    ],
)
def test_call_rejects_invalid_arguments(change: dict[str, Any], error: type[BurstError], told: str):
    model = make("llama")
    with parallelize(model, mesh_without_peer()) as sharded:
        inputs = sharded.shard(tokens(1, 47)) | change
        with pytest.raises(error, match=told):
            model(**inputs)
        assert sharded.call is None
    assert model(input_ids=tokens(1, 8)).logits.shape == (1, 8, 64)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"input_ids": tokens(1, 15)}, LayoutError),
        ({"position_ids": torch.arange(16).unsqueeze(0)}, InputError),
        ({"attention_mask": torch.zeros(1, 16)}, UnsupportedError),
        ({"an_option": torch.tensor([0, 16])}, UnsupportedError),  # raised by the first layer's attention
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_rank_with_invalid_batch_raises_on_all_ranks(change: dict[str, Any], error: type[BurstError]):
    """Otherwise the other ranks would compute the batch with the rows of the rank's next one."""
    first, second = tokens(1, 32), tokens(1, 32).flip(1)
    whole = make("llama")
    alone = whole(input_ids=second).logits.detach()

    def work(mesh: Mesh) -> torch.Tensor:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        odd = change if mesh.rank == 1 else {}
        with pytest.raises(error if mesh.rank == 1 else MismatchError) as caught:
            model(**sharded.shard(first) | odd)
        assert mesh.rank == 1 or "rank 1 refused: " in str(caught.value)
        logits = model(**sharded.shard(second)).logits.detach()
        return unshard(logits, mesh, seq_len=32)

    for logits in run_threads(2, work):
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize(
    ("where", "waited_for"), [("model.embed_tokens", True), ("model.layers.0.mlp", True), ("lm_head", False)]
)
def test_rank_failing_between_attentions_notifies_waiting_ranks(where: str, waited_for: bool, calls_before: int):
    """Otherwise, without gradients, the next batch would be matched with the failed one."""
    first, second = tokens(1, 32), tokens(1, 32).flip(1)
    whole = make("llama")
    alone = whole(input_ids=second).logits.detach()

    @torch.no_grad()
    def work(mesh: Mesh) -> torch.Tensor:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        for _ in range(calls_before):
            model(**sharded.shard(first))
        failing = model.get_submodule(where).register_forward_pre_hook(lambda *_: 1 // (1 - mesh.rank) and None)
        if mesh.rank == 1:
            with pytest.raises(ZeroDivisionError):
                model(**sharded.shard(first))
        elif waited_for:
            with pytest.raises(MismatchError, match="rank 1 refused: ZeroDivisionError"):
                model(**sharded.shard(first))
        else:
            model(**sharded.shard(first))
        failing.remove()
        return unshard(model(**sharded.shard(second)).logits, mesh, seq_len=32)

    for logits in run_threads(2, work, timeout=20):
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


class Apart(LocalTransport):
    """A transport for device messages: known calls are not compared again."""

    host = False

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        with self.between_passes():
            return super().share(data, label, timeout)


@pytest.mark.parametrize(
    ("transport", "error"),
    [(Apart, ZeroDivisionError), (Apart, KeyboardInterrupt), (LocalTransport, KeyboardInterrupt)],
)
def test_rank_interrupted_between_attentions_cannot_call_again(
    transport: type[LocalTransport], error: type[BaseException]
):
    """torch calls no hook after a KeyboardInterrupt."""
    whole, ids = make("llama"), tokens(1, 32)

    def fail(*_: Any) -> None:
        raise error

    @torch.no_grad()
    def work(local: LocalTransport) -> None:
        connected = transport(local.fabric, local.rank)
        mesh = Mesh(local.rank, 2, lambda device_type: connected, config=Config(timeout=0.3))
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        model(**sharded.shard(ids))
        if mesh.rank == 1:
            failing = model.model.layers[0].mlp.register_forward_pre_hook(fail)
            with pytest.raises(error):
                model(**sharded.shard(ids))
            failing.remove()
        told = "rank 1: the last exchange" if mesh.rank else "rank 0, (checking|forward step)"
        with pytest.raises(CommunicationError, match=told):
            model(**sharded.shard(ids.flip(1) if mesh.rank else ids))

    run_transports(2, work, timeout=1.0)


def test_error_of_all_ranks_leaves_model_usable():
    whole, ids = make("llama"), tokens(1, 32)
    alone = whole(input_ids=ids).logits.detach()

    def work(mesh: Mesh) -> torch.Tensor:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        failing = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(**sharded.shard(ids))
        failing.remove()
        return unshard(model(**sharded.shard(ids)).logits.detach(), mesh, seq_len=32)

    for logits in run_threads(2, work, timeout=20):
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


def test_mask_of_ones_is_not_padding():
    model = make("llama")
    with parallelize(model, Mesh.single()) as sharded:
        inputs = sharded.shard(tokens(1, 8))
        with_mask = model(**inputs, attention_mask=torch.ones(1, 8, dtype=torch.long)).logits
        torch.testing.assert_close(with_mask, model(**inputs).logits, rtol=0, atol=0)


def test_attention_dropout_with_divided_heads_raises():
    """Parts of the heads would drop the same weights. A config of more heads looks like tensor parallelism."""
    model = make("llama", attention_dropout=0.1)
    with parallelize(model, Mesh.single()) as sharded:
        model.config.num_attention_heads *= 2
        with pytest.raises(UnsupportedError, match="attention dropout with tensor parallelism"):
            model(**sharded.shard(tokens(1, 8)))
        model.eval()
        assert model(**sharded.shard(tokens(1, 8))).loss > 0


def test_layerdrop_in_training_raises():
    """Ranks would drop different layers, and attention would mix layers without an error."""
    whole = OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.5))

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        with parallelize(model, mesh) as sharded:
            with pytest.raises(UnsupportedError, match=r"layerdrop=0\.5; allowed: 0; set layerdrop=0"):
                model.train()(**sharded.shard(tokens(1, 8)))
            assert model.eval()(**sharded.shard(tokens(1, 8))).loss > 0

    run_threads(2, work)


def test_generate_raises():
    model = make("llama")
    with parallelize(model, Mesh.single()), pytest.raises(UnsupportedError, match="cache"):
        model.generate(tokens(1, 8), max_new_tokens=2)


def test_dynamic_rope_without_max_length_raises():
    config = SimpleNamespace(rope_parameters={"rope_type": "dynamic"}, max_position_embeddings=None)
    with pytest.raises(UnsupportedError, match="dynamic"):
        check_positions(config, 8)


def test_parallelize_rejects_unsupported_models():
    with pytest.raises(InputError, match="transformers model"):
        parallelize(torch.nn.Linear(2, 2), Mesh.single())
    state_space = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedError, match="MambaForCausalLM cannot be sharded"):
        parallelize(state_space, Mesh.single())
    for model, told in (
        (LlamaForSequenceClassification(LlamaConfig(**SIZES)), "a head or a pooler"),
        (BertModel(ENCODER), "a head or a pooler"),
        (MobileBertForMaskedLM(MobileBertConfig(**SIZES, embedding_size=16)), "outside attention"),
    ):
        with pytest.raises(UnsupportedError, match=told):
            parallelize(model, Mesh.single())
    with pytest.raises(UnknownNameError, match="rng"):
        parallelize(make("llama"), Mesh.single(), strategy="rng")
    with pytest.raises(UnknownNameError, match="did you mean 'zigzag'"):
        parallelize(make("llama"), Mesh.single(), layout="zigzig")


class OwnLossForCausalLM(LlamaForCausalLM):
    """A model that computes its loss itself, as old ones do."""

    def forward(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None, **_: Any
    ) -> Any:
        out = super().forward(input_ids, attention_mask, position_ids, use_cache=False)
        if labels is not None:
            out["loss"] = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        return out


@pytest.mark.parametrize(
    ("full_batches", "told"), [(False, "from the logits"), (True, "Trainer has compute_loss_func")]
)
def test_loss_over_shard_only_raises(full_batches: bool, told: str):
    model, ids = OwnLossForCausalLM(LlamaConfig(**SIZES)).double(), tokens(2, 47)

    def work(mesh: Mesh) -> int:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh, full_batches=full_batches)
        inputs = {"input_ids": ids, "labels": ids} if full_batches else sharded.shard(ids)
        with pytest.raises(UnsupportedError, match=f"computes its loss from this rank's tokens only.*{told}"):
            mine(**inputs)
        return int(mine(**inputs | {"labels": None}).logits.shape[1])

    assert run_threads(2, work) == ([47, 47] if full_batches else [23, 24])


def test_sharded_loss_without_counts_raises():
    loss = ShardedLoss(ForCausalLMLoss)
    logits, labels = torch.randn(1, 4, 8), torch.ones(1, 4, dtype=torch.int64)
    for told in ({}, {"shift_labels": labels}, {"num_items_in_batch": 4}):
        with pytest.raises(UnsupportedError, match="does not pass the required arguments"):
            loss(logits, labels, 8, **told)


def test_attention_outside_transformers_raises():
    """FNet mixes tokens by a Fourier transform."""
    model = FNetForMaskedLM(FNetConfig(**{**SIZES, "hidden_dropout_prob": 0.0, "tpu_short_seq_length": 64}))

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        with pytest.raises(UnsupportedError, match="did not attend"):
            mine(**parallelize(mine, mesh).shard(tokens(1, 32)))

    run_threads(2, work)


def test_placeholder_mask_rejects_arithmetic():
    mask = DeferredMask(Band(lo=0))
    assert not hasattr(mask, "_dynamo_thing")
    with pytest.raises(UnsupportedError, match=r"mask\.dtype"):
        _ = mask.dtype


def test_shared_config_raises_in_other_model():
    config = LlamaConfig(**SIZES)
    one, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    with parallelize(one, Mesh.single()):
        copied = LlamaForCausalLM(copy.deepcopy(config))
        for model in (other, copied):
            with pytest.raises(
                InputError, match=r'its own copy of the config, or call set_attn_implementation\("sdpa"\)'
            ):
                model(input_ids=tokens(1, 8), use_cache=False)
        copied.set_attn_implementation("sdpa")
        copied(input_ids=tokens(1, 8), use_cache=False)


def test_parallelize_rejects_parallelized_parts():
    model = make("llama")
    inner = parallelize(model.model, Mesh.single())
    with pytest.raises(InputError, match=r"parallelized already; got its part model \(LlamaModel\); call undo\(\)"):
        parallelize(model, Mesh.single())
    inner.undo()
    with parallelize(model, Mesh.single()), pytest.raises(InputError, match="already; got LlamaModel"):
        parallelize(model.model, Mesh.single())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["input_ids", "labels", "attention_mask"])
def test_shard_rejects_lists(name: str):
    with parallelize(make("llama"), Mesh.single()) as sharded:
        batch = {"input_ids": tokens(), name: tokens().tolist()}
        with pytest.raises(InputError, match=rf"{name} is not a tensor; .*torch\.as_tensor"):
            sharded.shard(**batch)


def test_shard_after_undo_raises():
    """The model would compute the loss of the shard as that of the full sequence."""
    with parallelize(make("llama"), mesh_without_peer()) as sharded:
        assert sharded.shard(tokens())["input_ids"].shape == (2, 23)
    with pytest.raises(InputError, match=r"undo\(\) has restored the model.*parallelize it again"):
        sharded.shard(tokens())


def test_read_mask_accepts_windows_only():
    window = and_masks(sliding_window_overlay(5), causal_mask_function)
    assert read_mask(window) == Band(lo=0, hi=4)

    def custom(batch: int, head: int, q: int, k: int) -> bool:
        return q - k < 7

    for function in (custom, and_masks(causal_mask_function, custom), or_masks(causal_mask_function, custom)):
        with pytest.raises(UnsupportedError, match="mask function"):
            read_mask(function)


@pytest.mark.parametrize(
    "name",
    [
        "AlignText",
        "CLIPSegText",
        "CLIPText",
        "ChineseCLIPText",
        "MetaClip2Text",
        "Siglip2Text",
        "SiglipText",
        "XCLIPText",
    ],
)
def test_parallelize_rejects_text_towers_that_pool_tokens(name: str) -> None:
    """Each rank pooled its own tokens: the end-of-text token is on one rank, and pooler_output was wrong on others."""
    cls = getattr(transformers, f"{name}Model")
    with torch.device("meta"):
        model = cls(cls.config_class(num_hidden_layers=1))
    with pytest.raises(UnsupportedError, match="a head or a pooler that reads single tokens"):
        parallelize(model, Mesh.single())


def test_pooled_output_of_shard_differs_from_sequence() -> None:
    """The error of a text tower prevents this result."""
    config = CLIPTextConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, eos_token_id=63)
    model, ids = CLIPTextModel(config).eval(), torch.randint(0, 63, (1, 32))
    ids[:, -1] = 63
    hidden = model(ids).last_hidden_state
    right, wrong = hidden[:, -1], hidden[:, :16][:, ids[:, :16].argmax(dim=-1)[0]]
    assert torch.equal(model(ids).pooler_output, right)
    assert (wrong - right).norm() > 0.1 * right.norm()


def test_longer_sequence_warns_once_per_model():
    model = make("llama")
    model.config.max_position_embeddings = 32
    with parallelize(model, Mesh.single()) as sharded:
        warning = r"max_position_emb.* got 40 tokens; allowed: at most 32; .*scaling"
        with pytest.warns(UserWarning, match=warning) as found:
            model(**sharded.shard(tokens(1, 40)))
        assert [one.filename for one in found] == [__file__], "the line that calls the model"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**sharded.shard(tokens(1, 48)))


def test_checkpointing_in_evaluation_mode_warns_once_per_model():
    """The warning is true: the same call stores more bytes than in training mode."""
    model = make("llama")
    checkpoint_activations(model)
    model.eval()

    def stored_bytes() -> int:
        sizes = []

        def keep(x: torch.Tensor) -> torch.Tensor:
            sizes.append(x.nbytes)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(**inputs)
        return sum(sizes)

    with parallelize(model, Mesh.single()) as sharded, warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = sharded.shard(tokens(1, 40))
        with torch.no_grad():
            model(**inputs)
        model.train()
        few = stored_bytes()
        with pytest.warns(UserWarning, match=r"checkpointing has no effect in evaluation mode.* call model\.train\(\)"):
            model.eval()(**inputs)
        assert stored_bytes() > 1.5 * few


@pytest.mark.parametrize("full_batches", [False, True])
def test_call_of_sharded_model_itself_advises_call_of_model(full_batches: bool):
    with parallelize(make("llama"), Mesh.single(), full_batches=full_batches) as sharded:
        advice = r"model\(\*\*batch\)" if full_batches else r"model\(\*\*sharded.shard\(batch\)\)"
        with pytest.raises(InputError, match=f"call the model: {advice}"):
            sharded(tokens(1, 8))


def test_replaced_attention_raises_and_names_it():
    def work(mesh: Mesh) -> None:
        model = make("llama")
        sharded = parallelize(model, mesh)
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedError, match=r"was replaced; got sdpa; .* omit model.set_attn_implementation"):
            model(**sharded.shard(tokens(1, 32)))

    run_threads(2, work)


def test_packed_documents_within_positions_do_not_warn():
    model = make("llama")
    model.config.max_position_embeddings = 32
    with parallelize(model, Mesh.single()) as sharded, warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**sharded.shard(tokens(1, 40), cu_seqlens=(0, 20, 40)))


def test_dynamic_rope_error_advises_fixed_scaling():
    config = SimpleNamespace(rope_parameters={"rope_type": "dynamic"}, max_position_embeddings=32)
    with pytest.raises(UnsupportedError, match=r"at most 32; set a larger max_position_embeddings .* fixed RoPE"):
        check_positions(config, 33)


@pytest.mark.parametrize("arguments", [{}, {"use_cache": False}])
def test_generate_on_two_ranks_advises_paused(arguments):
    with parallelize(make("llama"), mesh_without_peer()) as sharded:
        with pytest.raises((InputError, UnsupportedError), match=r"call generate.*sharded.paused") as raised:
            sharded.model.generate(tokens(1, 8), max_new_tokens=2, **arguments)
        assert isinstance(raised.value, InputError if arguments else UnsupportedError)


@pytest.mark.parametrize(
    ("batch", "advice"),
    [
        ({"input_ids": tokens(1, 8)}, r"got dict; add \*\* to the call: model\(\*\*sharded.shard\(batch\)\)"),
        (tokens(1, 8)[0], r"got \(8,\); add the batch dimension: input_ids.unsqueeze\(0\)"),
    ],
)
def test_call_with_wrong_first_argument_advises(batch, advice):
    with parallelize(make("llama"), Mesh.single()) as sharded, pytest.raises(ShapeError, match=advice):
        sharded.model(batch)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (tokens(1, 8)[0], r"must be \[batch, tokens\]; got \(8,\); .*unsqueeze\(0\)"),
        (tokens(1, 8)[:, :0], r"the batch has no tokens; got \(1, 0\)"),
    ],
)
def test_shard_with_wrong_shape_advises(ids, message):
    with parallelize(make("llama"), Mesh.single()) as sharded, pytest.raises(ShapeError, match=message):
        sharded.shard(ids)


def test_parallelize_recognizes_swapped_arguments():
    with pytest.raises(InputError, match=r"pass the model first: parallelize\(model, mesh\)"):
        parallelize(Mesh.single(), make("llama"))


@pytest.mark.parametrize("planted", ["changed in place", "of another sequence", "of other documents", "copied"])
def test_positions_of_shard_are_compared_unless_unchanged(planted: str) -> None:
    """Only the tensor that `shard` returned last, unchanged and for its sequence, needs no comparison."""
    model, ids = make("llama"), tokens(1, 32)
    sharded = parallelize(model, Mesh.single())
    model(**sharded.shard(ids))
    inputs = sharded.shard(ids)
    if planted == "changed in place":
        inputs["position_ids"][0, 7] = 3
    elif planted == "of another sequence":
        inputs = sharded.shard(tokens(1, 30)) | {"position_ids": inputs["position_ids"]}
    elif planted == "of other documents":
        inputs["cu_seqlens"] = (0, 12, 32)
    else:
        inputs["position_ids"] = inputs["position_ids"].clone()
        assert model(**inputs).logits.shape[1] == 32
        return
    with pytest.raises(InputError, match="position_ids are not those of this rank's tokens"):
        model(**inputs)


class Reads(TorchDispatchMode):
    """Count the values that the host reads from the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_known_positions_are_not_read() -> None:
    """A comparison makes the host wait for the device before each step."""
    model, ids = make("llama"), tokens(1, 32)
    sharded = parallelize(model, Mesh.single())
    inputs = sharded.shard(ids, cu_seqlens=(0, 20, 32))
    known = sharded.shard(ids, cu_seqlens=(0, 20, 32))

    def reads(batch: dict[str, Any]) -> int:
        with Reads() as mode:
            model(**batch)
        return mode.count

    assert reads(inputs) == reads(known) + 1
