"""Test vision-language models: losses, logits and gradients of one device, also of the vision tower."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from burst_portable import Mask, Mesh, run_threads
from burst_portable.errors import BurstError, InputError, MismatchError, ShapeError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.bands import masks_of, read_mask
from burst_portable.integrations.transformers.call_sequence import CallSequence
from burst_portable.integrations.transformers.full_batches import text_model
from burst_portable.layout import make_layout
from tests.support.image_models import models, trials
from tests.support.models import checkpoint_activations, gradients_of

TOLERANCE = 1e-6  # transformers computes losses, norms and RoPE in float32


@pytest.mark.parametrize(
    ("name", "options"), [("qwen3_vl", {"padding": "left"}), ("gemma3", {}), ("gemma3", {"with_images": False})]
)
def test_images_give_results_of_one_device(name: str, options: dict[str, Any]) -> None:
    model = models.make(name)
    assert trials.compare(model, models.batch(name, model, **options), ranks=2) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("name", models.FAMILIES)
def test_all_families_give_results_of_one_device(name: str) -> None:
    model = models.make(name)
    for options in models.FAMILIES[name].batches:
        inputs = models.batch(name, model, **options)
        for ranks in (1, 2, 3):
            assert trials.compare(model, inputs, ranks, models.FAMILIES[name].reference) <= TOLERANCE


@pytest.mark.parametrize("name", ["paligemma"])
def test_layers_marked_as_not_causal_equal_one_device(name: str) -> None:
    """Their mask has groups, so that one device never leaves it out."""
    model = models.make(name)
    assert any(getattr(module, "is_causal", None) is False for module in trials.text_model_of(model).modules())
    assert trials.try_images(name).verdict == "equal"


@pytest.mark.full
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "all_gather"])
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_strategies_and_layouts_with_images_equal_one_device(name: str, strategy: str, layout: str) -> None:
    model = models.make(name)
    inputs = models.batch(name, model, padding="left")
    assert trials.compare(model, inputs, 2, strategy=strategy, layout=layout) <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.full)])
def test_recomputed_layers_with_images_equal_one_device(name: str) -> None:
    model = models.make(name)
    checkpoint_activations(model)
    assert trials.compare(model, models.batch(name, model), ranks=2) <= TOLERANCE


def test_router_loss_with_images_equals_one_device() -> None:
    model = models.make("qwen3_vl_moe")
    inputs = models.batch("qwen3_vl_moe", model) | {"output_router_logits": True}
    assert trials.compare(model, inputs, ranks=2) <= TOLERANCE


@pytest.mark.full
def test_video_beside_images_equals_one_device() -> None:
    """Qwen3-VL then adds to the tokens of both in its first layers."""
    model = models.make("qwen3_vl")
    inputs = models.batch("qwen3_vl", model)
    ids, types = inputs["input_ids"], inputs["mm_token_type_ids"]
    ids[1], types[1] = ids[1].masked_fill(ids[1] == models.IMAGE, 9), 0
    for start in (5, 12):  # two frames
        ids[1, start : start + 4], types[1, start : start + 4] = 61, 2
    inputs |= {
        "pixel_values": inputs["pixel_values"][:48],
        "image_grid_thw": inputs["image_grid_thw"][:2],
        "pixel_values_videos": torch.randn(32, 96, dtype=torch.float64),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
    }
    assert trials.compare(model, inputs, ranks=3) <= TOLERANCE


@pytest.mark.parametrize("planted", ["positions", "deepstack", "blocks"])
def test_planted_faults_of_images_differ_from_one_device(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions counted on the shard, visual features of other tokens, and images without a view of themselves."""
    divide = text_model.divide

    def wrong(kwargs: dict[str, Any], *others: Any) -> dict[str, Any]:
        divided = divide(kwargs, *others)
        if planted == "positions":
            divided["position_ids"] = torch.arange(divided["inputs_embeds"].shape[1]).expand(3, 1, -1)
        elif planted == "deepstack":
            divided["deepstack_visual_embeds"] = [x.roll(1, 0) for x in divided["deepstack_visual_embeds"]]
        else:
            divided["attention_mask"] = None
        return divided

    monkeypatch.setattr("burst_portable.integrations.transformers.model_calls.divide", wrong)
    name = "gemma3" if planted == "blocks" else "qwen3_vl"
    model = models.make(name)
    assert trials.compare(model, models.batch(name, model), ranks=2) > 1e-3


def _call(change: Any, ranks: int = 1) -> list[Any]:
    """Call a model on all ranks with a batch after `change(batch, rank)`."""
    model = models.make("qwen3_vl")

    def on_a_rank(mesh: Mesh) -> Any:
        part, inputs = copy.deepcopy(model), models.batch("qwen3_vl", model)
        parallelize(part, mesh, full_batches=True)
        return part(**(change(inputs, mesh.rank) or inputs))

    return run_threads(ranks, on_a_rank)


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "mm_token_type_ids"])
def test_ranks_with_different_images_raise(name: str) -> None:
    def change(inputs: dict[str, Tensor], rank: int) -> None:
        inputs[name].view(-1)[-1] += rank

    with pytest.raises(MismatchError, match="rows of the batch"):
        _call(change, ranks=2)


def packed_row(name: str, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a batch of two rows with images, and one row of two documents, with the positions of the rows."""
    inputs = models.batch(name, model)
    rows, length = inputs["input_ids"].shape
    packed = {key: x.reshape(1, -1) if x.shape[:2] == (rows, length) else x for key, x in inputs.items()}
    positions = torch.arange(length).repeat(rows).unsqueeze(0)
    if hasattr(model.model, "compute_3d_position_ids"):
        given = {"input_ids", "image_grid_thw", "mm_token_type_ids"}.intersection(inputs)
        names = {"video_grid_thw", "attention_mask", "past_key_values", "cache"}  # of 5.23 and earlier, of 5.24
        missing = dict.fromkeys(names.intersection(signature(model.model.compute_3d_position_ids).parameters))
        options = {key: inputs[key] for key in given} | missing | {"inputs_embeds": torch.zeros(rows, length, 1)}
        planes = model.model.compute_3d_position_ids(**options)
        positions = torch.cat([positions.unsqueeze(0), planes.reshape(3, 1, -1)])
    return inputs, packed | {"position_ids": positions, "use_cache": False}


@pytest.mark.parametrize(
    "name",
    [
        *("llava", "qwen3_vl"),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("qwen2_5_vl", "internvl", "mistral3", "glm4v", "aria")
        ),
    ],
)
def test_packed_documents_with_images_equal_rows_of_one_device(name: str) -> None:
    """No token attends to the other document, and the first token of it has no label."""
    model = models.make(name)
    inputs, packed = packed_row(name, model)
    alone = copy.deepcopy(model)
    expected = alone(**inputs)
    expected.loss.backward()

    def on_a_rank(mesh: Mesh) -> tuple[float, Tensor, dict[str, Tensor]]:
        part = copies[mesh.rank]
        parallelize(part, mesh, full_batches=True, gather_outputs=True)
        out = part(**packed)
        out.loss.backward()
        all_reduce_gradients(part.parameters(), mesh)
        return out.loss.item(), out.logits.detach(), gradients_of(part)

    copies = [copy.deepcopy(model) for _ in range(2)]
    for loss, logits, gradients in run_threads(2, on_a_rank):
        assert loss == pytest.approx(expected.loss.item(), rel=TOLERANCE)
        wanted = expected.logits.detach().reshape(logits.shape)
        assert (logits - wanted).norm() <= TOLERANCE * wanted.norm()
        torch.testing.assert_close(logits, wanted, rtol=TOLERANCE, atol=1e-7)
        for key, gradient in gradients_of(alone).items():
            assert (gradients[key] - gradient).norm() <= TOLERANCE * gradient.norm().clamp(min=1e-3), key


PACKED = torch.stack([torch.cat([torch.arange(20), torch.arange(27)]), torch.arange(47)])


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"position_ids": PACKED}, UnsupportedError, "differ between rows.*got 2 rows; pass one row per batch"),
        ({"position_ids": PACKED.expand(4, 2, 47)}, UnsupportedError, "differ between rows"),
        ({"cu_seq_lens_q": torch.tensor([0, 20, 47])}, UnsupportedError, "without position_ids.*got cu_seq_lens_q"),
        ({"router_state": torch.ones(2, 47)}, UnsupportedError, "unknown tensors .*router_state"),
        ({"logits_to_keep": 1}, UnsupportedError, "logits_to_keep"),
        ({"use_cache": True}, UnsupportedError, "no KV cache"),
    ],
    ids=["positions", "text_positions", "cu_seqlens", "unknown", "logits_to_keep", "cache"],
)
def test_call_with_images_rejects(change: dict[str, Any], error: type[BurstError], told: str) -> None:
    with pytest.raises(error, match=told):
        _call(lambda inputs, rank: inputs | change)


def test_packed_documents_with_blocks_of_images_raise() -> None:
    """Tokens of an image of Gemma 3 see each other: such masks are not combined with documents."""
    model = models.make("gemma3")
    _, packed = packed_row("gemma3", model)

    def on_a_rank(mesh: Mesh) -> None:
        part = copy.deepcopy(model)
        parallelize(part, mesh, full_batches=True)
        with pytest.raises(UnsupportedError, match="packed documents with images that see themselves"):
            part(**packed)

    run_threads(2, on_a_rank)


def test_parallelize_rejects_parts_of_vision_language_models() -> None:
    model = models.make("qwen3_vl")
    with pytest.raises(UnsupportedError, match="pass full_batches=True, or its language model"):
        parallelize(model, Mesh.single())
    with pytest.raises(UnsupportedError, match=r"several parts .* pass its language model"):
        parallelize(model.model, Mesh.single(), full_batches=True)
    parallelize(model, Mesh.single(), full_batches=True)
    with pytest.raises(InputError, match="the text model ran outside"):
        model.model.language_model(input_ids=torch.ones(1, 4, dtype=torch.int64))


def test_undo_restores_vision_language_model() -> None:
    model = models.make("gemma3")
    inputs = models.batch("gemma3", model)
    expected = model(**inputs).loss
    with parallelize(model, Mesh.single(), full_batches=True) as sharded:
        with sharded.paused():
            assert torch.equal(model(**inputs).loss, expected)
        assert model.model.language_model.config._attn_implementation != "sdpa"
    assert torch.equal(model(**inputs).loss, expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_divide_rejects_changed_number_of_tokens() -> None:
    layout, mesh = make_layout("zigzag", 8, 1), Mesh.single()
    embeddings, positions = torch.ones(1, 9, 4), torch.arange(8).unsqueeze(0)
    with pytest.raises(ShapeError, match="changes the number of tokens"):
        text_model.divide({"inputs_embeds": embeddings}, torch.nn.Identity(), positions, mesh, layout)
    four = {"inputs_embeds": embeddings[:, :8], "attention_mask": torch.ones(1, 1, 8, 8)}
    with pytest.raises(UnsupportedError, match="a mask that the model around it makes"):
        text_model.divide(four, torch.nn.Identity(), positions, mesh, layout)


def _dense(mask: Mask, length: int) -> Tensor:
    q, k = torch.arange(length).unsqueeze(1), torch.arange(length)
    seen = torch.zeros(length, length, dtype=torch.int64)
    for r in mask.regions:
        box = (q >= r.q_start) & (q < r.q_stop) & (k >= r.k_start) & (k < r.k_stop)
        seen += box & (q - k >= r.lo) & (q - k <= r.hi)
    assert seen.max() == 1
    return seen == 1


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("window_first", [True, False])
def test_masks_of_images_equal_those_of_transformers(window: int | None, window_first: bool) -> None:
    """Groups of one and of several runs, shorter and longer than the window, inside or outside of it."""
    length, m = 20, masking_utils
    groups = torch.tensor([[-1, -1, 0, 0, 0, 0, 0, -1, 1, -1, 2, 2, -1, -1, 2, 2, 2, -1, -1, -1], [-1] * 5 + [3] * 15])
    of_window = [] if window is None else [m.sliding_window_overlay(window)]
    causal, blocks = m.causal_mask_function, m.blockwise_overlay(groups)
    if window_first:  # PaliGemma 2
        function = m.or_masks(m.and_masks(*of_window, causal), blocks)
    else:  # Gemma 3
        function = m.and_masks(m.or_masks(causal, blocks), *of_window)
    sequence = CallSequence(length, make_layout("zigzag", length, 2), None, True, (length, 17))
    masks = masks_of(read_mask(function), sequence, 2)
    q, k = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    for row, mask in enumerate(masks):
        real = sequence.lengths[row]
        expected = function(torch.tensor(row), torch.tensor(0), q, k)
        assert torch.equal(_dense(mask, length)[:real, :real], expected[:real, :real])
        assert not _dense(mask, length)[:real, real:].any()  # padding
