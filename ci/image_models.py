"""Make small vision-language models of Transformers with random weights, and batches with images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

LENGTH, VOCABULARY, PADDING = 47, 64, 9
IMAGE = 60
"""Token id of images."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


BATCHES: tuple[dict[str, Any], ...] = ({}, {"padding": "right"}, {"padding": "left"}, {"with_images": False})
"""Options of `batch` with which a family is tried."""


@dataclass
class Images:
    """Two images of the first row of a batch, and one of the second.

    Attributes:
        arguments: Tensors for the model.
        tokens: Tokens of each image. Empty: the model computes it.
        types: Argument that marks tokens of images by 1. "prefix": images begin their row, and `token_type_ids` mark
            tokens after the prompt.
    """

    arguments: dict[str, Tensor]
    tokens: list[int] = field(default_factory=list)
    types: str = ""


@dataclass(frozen=True)
class Family:
    """A small vision-language model: model type, options of its configs, and a function that makes its images.

    Attributes:
        kind: Model type.
        text: Options of the text config.
        vision: Options of the vision config.
        images: Function that makes the images of a batch.
        options: Other options of the config.
        reference: Attention of the text model on one device.
        counts_tokens: Whether positions count from the first token of a row that begins with padding. RoPE in float32
            rounds differently at other positions, and Gemma 4 does not scale scores.
        batches: Options of batches that the family supports.
    """

    kind: str
    text: dict[str, Any]
    vision: dict[str, Any]
    images: Callable[[], Images]
    options: dict[str, Any] = field(default_factory=dict)
    reference: str = "sdpa"
    counts_tokens: bool = False
    batches: tuple[dict[str, Any], ...] = BATCHES


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _grids(numbers: int = 2 * 3 * 4 * 4) -> Images:
    """Return images of 4, 8 and 6 tokens, each of 2 x 2 patches of `numbers`."""
    grids = torch.tensor([(1, 4, 4), (1, 4, 8), (1, 6, 4)])
    patches = int(grids.prod(dim=1).sum())
    tokens = (grids.prod(dim=1) // 4).tolist()
    arguments = {"pixel_values": _noise(patches, numbers), "image_grid_thw": grids}
    return Images(arguments, tokens, "mm_token_type_ids")


def _squares(size: int = 16, types: str = "") -> Callable[[], Images]:
    """Return images of one size that the model has, of four tokens each."""
    return lambda: Images({"pixel_values": _noise(3, 3, size, size)}, [4, 4, 4], types)


def _sizes() -> Images:
    """Return images of several sizes, padded to the largest one."""
    sizes = torch.tensor([[16, 16], [16, 32], [24, 16]])
    return Images({"pixel_values": _noise(3, 3, 24, 32), "image_sizes": sizes}, [4, 8, 6])


def _by_row() -> Images:
    """Return images by row; a row with fewer images has empty ones."""
    pixels = _noise(2, 2, 3, 16, 16)
    pixels[1, 1] = 0
    return Images({"pixel_values": pixels}, [4, 4, 4])


def _patches() -> Images:
    """Return the 16 patches of each image, with their places."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(3, 16, 2)
    return Images(
        {"pixel_values": _noise(3, 16, 3 * 4 * 4), "image_position_ids": places}, [4] * 3, "mm_token_type_ids"
    )


def _parts() -> Images:
    """Return images of several sizes as a small copy and parts of the size of the tower."""
    sizes = torch.tensor([[8, 8], [8, 16], [16, 6]])
    return Images({"pixel_values": _noise(3, 3, 3, 8, 8), "image_sizes": sizes})


_LLAMA = TEXT | {"model_type": "llama"}
_QWEN = TEXT | {"model_type": "qwen2"}
_CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 16, "image_size": 8}
_SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_GRID = {"depth": 2, "patch_size": 4, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
_DEEPSTACK = _GRID | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
_PINPOINTS = {"image_grid_pinpoints": [[8, 16], [16, 8]]}

FAMILIES: dict[str, Family] = {
    "aria": Family(
        "aria",
        TEXT | {"moe_num_experts": 4, "moe_topk": 2},
        TOWER | {"model_type": "idefics3_vision"},
        _squares(),
        {"projector_patch_to_query_dict": {16: 4}},
    ),
    "aya_vision": Family("aya_vision", TEXT | {"model_type": "cohere"}, _SIGLIP, _squares()),
    "blip-2": Family(
        "blip-2",
        {
            "model_type": "opt",
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "dropout": 0.0,
        },
        TOWER | {"attention_dropout": 0.0},
        _squares(),
        {
            "qformer_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "encoder_hidden_size": 16,
                "vocab_size": 64,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            "num_query_tokens": 4,
        },
        batches=BATCHES[:2],
    ),
    "cohere2_vision": Family(
        "cohere2_vision",
        TEXT | {"model_type": "cohere2"} | _WINDOWED,
        _SIGLIP,
        _squares(),
        {"alignment_intermediate_size": 48},
    ),
    "deepseek_vl": Family("deepseek_vl", _LLAMA, _SIGLIP | {"image_size": 8}, _squares(8)),
    "ernie4_5_vl_moe": Family(
        "ernie4_5_vl_moe",
        TEXT
        | {"rope_parameters": _MROPE["rope_parameters"] | {"mrope_section": [1, 1, 2]}}
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 16], "mlp_layer_types": ["dense", "sparse"]},
        {"depth": 2, "patch_size": 4, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24},
        lambda: _grids(3 * 4 * 4),
    ),
    "gemma3": Family("gemma3", TEXT | _WINDOWED, _SIGLIP, _squares(types="token_type_ids"), {"mm_tokens_per_image": 4}),
    "gemma4": Family(
        "gemma4",
        TEXT
        | _WINDOWED
        | {
            "pad_token_id": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 8,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_bidirectional_attention": "vision",
        },
        TOWER | {"head_dim": 8, "pooling_kernel_size": 2, "num_key_value_heads": 2},
        _patches,
        {"audio_config": None},
        counts_tokens=True,
    ),
    "glm4v": Family("glm4v", TEXT | _MROPE, _GRID | {"image_size": 16}, _grids),
    "glm4v_moe": Family(
        "glm4v_moe",
        TEXT | _MROPE | {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        _GRID | {"image_size": 16},
        _grids,
    ),
    "glm_ocr": Family("glm_ocr", TEXT | _MROPE, _GRID | {"image_size": 16}, _grids),
    "idefics2": Family(
        "idefics2",
        TEXT | {"model_type": "mistral"},
        TOWER,
        _by_row,
        {
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_n_heads": 2,
                "num_key_value_heads": 2,
            }
        },
    ),
    "idefics3": Family("idefics3", _LLAMA, TOWER, _by_row),
    "internvl": Family("internvl", _QWEN, TOWER | {"image_size": [16, 16], "patch_size": [4, 4]}, _squares()),
    "janus": Family(
        "janus",
        _LLAMA,
        TOWER | {"image_size": 8, "projection_dim": 32},
        _squares(8),
        {
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 16,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "projection_dim": 32,
                "image_token_embed_dim": 32,
            }
        },
    ),
    "lighton_ocr": Family(
        "lighton_ocr",
        TEXT | {"model_type": "qwen3"},
        TOWER | {"model_type": "pixtral", "image_size": 32, "head_dim": 8},
        _sizes,
    ),
    "llama4": Family(
        "llama4",
        TEXT
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 11,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "attn_temperature_tuning": True,
        },
        TOWER
        | {
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "pixel_shuffle_ratio": 0.5,
        },
        _squares(),
        batches=BATCHES[:2] + BATCHES[3:],
    ),
    "llava": Family("llava", _LLAMA, _CLIP, _squares(8)),
    "llava_next": Family("llava_next", _LLAMA, _CLIP, _parts, _PINPOINTS),
    "llava_onevision": Family("llava_onevision", _QWEN, _SIGLIP | {"image_size": 8}, _parts, _PINPOINTS),
    "mistral3": Family(
        "mistral3",
        TEXT | {"model_type": "mistral", "sliding_window": None},
        TOWER | {"model_type": "pixtral", "image_size": 32, "head_dim": 8},
        _sizes,
    ),
    "paligemma": Family(
        "paligemma",
        TEXT | {"model_type": "gemma"},
        _SIGLIP | {"image_size": 8},
        _squares(8, "prefix"),
        {"projection_dim": 32},
    ),
    "paligemma2": Family(
        "paligemma",
        TEXT | {"model_type": "gemma2", "sliding_window": 9},
        _SIGLIP | {"image_size": 8},
        _squares(8, "prefix"),
        {"projection_dim": 32},
        reference="eager",
    ),
    "qianfan_ocr": Family(
        "qianfan_ocr",
        TEXT | {"model_type": "qwen3"},
        TOWER | {"drop_path_rate": 0.0, "image_size": [16, 16], "patch_size": [4, 4]},
        _squares(),
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl", TEXT | _MROPE, _GRID | {"window_size": 16, "fullatt_block_indexes": [1]}, _grids
    ),
    "qwen2_vl": Family(
        "qwen2_vl",
        TEXT | _MROPE,
        {"depth": 2, "patch_size": 4, "num_heads": 2, "embed_dim": 16, "hidden_size": 32},
        _grids,
    ),
    "qwen3_vl": Family("qwen3_vl", TEXT | _MROPE, _DEEPSTACK, _grids),
    "qwen3_vl_moe": Family("qwen3_vl_moe", TEXT | _MROPE | _MOE, _DEEPSTACK, _grids),
    "smolvlm": Family("smolvlm", _LLAMA, TOWER, _by_row),
    "vipllava": Family("vipllava", _LLAMA, _CLIP, _squares(8), {"vision_feature_layers": [-1, -2]}),
}
"""The families that are tried, by name."""


def class_of(name: str) -> Any:
    """Return the class of a family's models."""
    return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[FAMILIES[name].kind])


def make(name: str) -> Any:
    """Return a model in float64 and training mode, whose weights are all random."""
    family = FAMILIES[name]
    config_class = class_of(name).config_class
    ids = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    ids |= {"image_token_index": IMAGE, "video_token_index": 61}
    known = {key: token for key, token in ids.items() if key in config_class.__dataclass_fields__}
    parts = {"text_config": family.text, "vision_config": family.vision} | family.options
    config = config_class(**copy.deepcopy(parts), **known)  # configs change their arguments
    config.get_text_config()._experts_implementation = "eager"  # other implementations do not support float64
    torch.manual_seed(0)
    model = class_of(name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    return model.double().train()


def batch(name: str, model: Any, *, padding: str = "", with_images: bool = True) -> dict[str, Tensor]:
    """Return a full batch of two rows, with two images in the first and one in the second.

    Args:
        name: The family.
        model: A model of this family.
        padding: "left" or "right": where the second row is padded. Default: no padding.
        with_images: Whether the batch has images.
    """
    images = FAMILIES[name].images()
    tokens = images.tokens or _counted(model, images)
    has_prefix = images.types == "prefix"
    ids, labels = (torch.randint(8, 56, (2, LENGTH), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    types = torch.zeros_like(ids)
    start = 0 if has_prefix else 3
    second = start + tokens[0] + (0 if has_prefix else 5)
    places = zip((0, 0, 1), (start, second, start), tokens, strict=True) if with_images else ()
    for row, begin, count in places:
        ids[row, begin : begin + count] = IMAGE
        labels[row, begin : begin + count] = -100
        types[row, begin : begin + count] = 1
    labels[:, 0] = -100
    if has_prefix:
        prompts = torch.tensor([[second + tokens[1] + 3], [tokens[2] + 5]])
        types = (torch.arange(LENGTH) >= prompts).long()
    result = {"input_ids": ids, "labels": labels}
    if images.types:
        result["token_type_ids" if has_prefix else images.types] = types
    if padding:
        mask = torch.ones_like(ids)
        mask[1, -PADDING:] = ids[1, -PADDING:] = types[1, -PADDING:] = 0
        labels[1, -PADDING:] = -100
        result["attention_mask"] = mask
        if padding == "left":
            for x in (ids, labels, types, mask):
                x[1] = x[1].roll(PADDING)
            if FAMILIES[name].counts_tokens:
                result["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return result | (images.arguments if with_images else {})


def _counted(model: Any, images: Images) -> list[int]:
    with torch.no_grad():
        return [len(x) for x in model.model.get_image_features(**images.arguments, return_dict=True).pooler_output]
