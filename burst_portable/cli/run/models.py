"""Load models that the command line names. No code of a config or checkpoint is executed."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from burst_portable.errors import InputError, in_a_line, shown
from burst_portable.integrations.transformers.layouts import check_one_size

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


TINY = "tiny"
_LARGEST_CONFIG = 1 << 20
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), (1, 1 << 40)),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), (1, 1 << 14)),
    "sliding_window": (0, 1 << 40),
}
"""Smallest and largest values of the sizes in a config."""
_LIST_LENGTHS = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), (1, 1 << 14)),
    "num_labels": (0, 1 << 20),
}
"""Smallest and largest values of fields from which transformers builds a list while it reads the config."""


def checkpoint_of(name: str) -> Path | None:
    """Return a model's folder, or None if its name is not a folder."""
    return Path(name) if name not in ("", TINY) and Path(name).is_dir() else None


def local_model(name: str) -> str:
    """Return a model's name; for a Hub ID, the folder of its copy in the cache of huggingface_hub.

    An existing file or folder of this name comes first. Nothing is downloaded.

    Raises:
        InputError: If the copy has no weights.
    """
    if name == TINY or not _HUB_ID.fullmatch(name) or os.path.exists(name):
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return name  # `config_of` raises an error
    if not _has_weights(Path(folder)):
        next_step = f"run `hf download {name}`"
        raise InputError(f"the copy of {name} is incomplete", got=f"no *.safetensors in {folder}", next_step=next_step)
    return folder


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def config_of(name: str, seq_len: int) -> Any:
    """Return the transformers config of a model.

    Raises:
        InputError: If it is not a causal language model of transformers, or supports only shorter sequences.
        UnsupportedError: If its attention layers differ in size.
    """
    config = _tiny(seq_len) if name == TINY else _from_file(name)
    check_one_size(config)
    _check_sizes({name: getattr(config, name, None) for name in _SIZES}, _SIZES)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        from burst_portable.integrations.transformers.models.position_limits import LONGER_CONTEXT

        what = "the sequence is longer than the model's max_position_embeddings"
        raise InputError(what, got=f"--seq-len {seq_len}", allowed=f"at most {longest}", next_step=LONGER_CONTEXT)
    return config


def build(
    name: str, config: Any, dtype: torch.dtype, seed: int, device: torch.device | str = "cpu"
) -> tuple[Any, list[str]]:
    """Return a model on a device, and notes about its weights. Parameters have float32 for a 16-bit `dtype`.

    The weights are those of the checkpoint. Without any, they are drawn on the device from the seed.

    Raises:
        InputError: If a checkpoint cannot be loaded, or lacks weights.
    """
    from transformers import AutoModelForCausalLM

    # AdamW's small updates vanish in 16 bits, and its epsilon in float16.
    dtype, checkpoint = torch.promote_types(dtype, torch.float32), checkpoint_of(name)
    if checkpoint is None or not _has_weights(checkpoint):
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=plain_attention(config)).to(dtype)
        notes = [] if checkpoint is None else [f"{name} has no weights; they are random"]
        return _with_experts(model, dtype), notes
    try:
        model, information = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=plain_attention(config),
            dtype=dtype,
            output_loading_info=True,
        )
    # Truncated files, weights of other shapes: several libraries are involved, and each raises its own errors.
    except Exception as error:
        raise InputError(f"the checkpoint {name} cannot be loaded", got=in_a_line(error)) from error
    _check_dtypes(checkpoint, model)
    return _with_experts(model, dtype).to(device), _check_weights(name, information)


def plain_attention(config: Any) -> str:
    """Return the attention for one device: torch's SDPA, or transformers' eager one for a softcap or sinks."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    softcap = getattr(config, "attn_logit_softcapping", None)
    return "sdpa" if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa and softcap is None else "eager"


def _with_experts(model: Any, dtype: torch.dtype) -> Any:
    """Select transformers' eager experts for float64, which its fast experts do not support."""
    if dtype is torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def enable_gradient_checkpointing(model: Any) -> None:
    """Save only the input of each layer, and recompute the layer in the backward pass.

    Raises:
        InputError: If the model does not support it.
    """
    # Releases of transformers differ in the name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise InputError("the model does not support gradient checkpointing", got=in_a_line(error)) from error


def _check_dtypes(checkpoint: Path, model: Any) -> None:
    """Raise `InputError` for parameters that are not 16-bit or wider floats, which transformers would cast silently."""
    from safetensors import safe_open

    parameters = {name for name, _ in model.named_parameters()}
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            dtypes = {name: weights.get_slice(name).get_dtype() for name in parameters.intersection(weights.keys())}
        if packed := {name: dtype for name, dtype in dtypes.items() if dtype not in ("F64", "F32", "F16", "BF16")}:
            raise InputError(
                f"{path} contains parameters that are not floats",
                got=f"{', '.join(sorted(set(packed.values())))}: {_first_names(sorted(packed))}",
                allowed="F64, F32, F16, BF16",
                next_step="use the checkpoint before quantization",
            )


def _check_weights(name: str, information: dict[str, Any]) -> list[str]:
    """Return a note about unused weights. Raise `InputError` for missing ones, which would be random."""
    missing, unused = sorted(information["missing_keys"]), sorted(information["unexpected_keys"])
    extra = f"{len(unused)} of its weights are not in the model: {_first_names(unused)}" if unused else ""
    if missing:
        raise InputError(
            f"the checkpoint {name} lacks weights of the model",
            got=f"{len(missing)} missing: {_first_names(missing)}" + (f"; {extra}" if extra else ""),
            next_step="check that config.json and the weights belong together",
        )
    return [f"the checkpoint {name} is loaded, but {extra}"] if extra else []


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def outline(config: Any) -> Any:
    """Return the model without memory for its weights, for checks and sizes."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=plain_attention(config))
    # A config's numbers may raise any exception in the constructor of a model.
    except Exception as error:
        raise InputError(f"no {config.model_type} model can be built from its config", got=in_a_line(error)) from error


def silence_transformers() -> None:
    """Disable progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _tiny(seq_len: int) -> Any:
    """Return a Llama over bytes with 4 layers, 8 heads, 2 K/V heads and about 3 million parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=max(seq_len, 2048),
        bos_token_id=None,
        eos_token_id=None,
    )


def _from_file(name: str) -> Any:
    try:
        path = _config_file(name)
    except OSError as error:  # a folder without permission, a name that is too long
        raise InputError("the model cannot be read", got=f"{shown(name)}: {error.strerror}") from error
    return _parse_config(path, _json(path))


def _config_file(name: str) -> Path:
    """Return the existing config file of a model. Raises OSError, and `InputError` if it is not a model."""
    path = Path(name)
    if name and path.is_dir():
        if not _has_weights(path) and any(file.suffix in _PICKLED for file in path.iterdir()):
            raise InputError(
                f"the checkpoint {name} has no weights that are safe to load",
                allowed="*.safetensors",
                next_step="convert pickled weights (*.bin, *.pt), which can run code, to safetensors",
            )
        path = path / "config.json"
    if not name or not path.is_file():
        command = f"run `hf download {name}`, or " if _HUB_ID.fullmatch(name) and "/" in name else ""
        raise InputError(
            "no such model",
            got=repr(name),
            allowed=f"{TINY}, a JSON config file, a folder with config.json, or the Hub ID of a downloaded model",
            next_step=f"models are not downloaded; {command}download it and pass its folder",
        )
    return path


def _parse_config(path: Path, fields: dict[str, Any]) -> Any:
    """Return the config of a file's fields."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    if fields.get("quantization_config"):
        raise InputError(
            f"the model of {path} is quantized, which is not supported",
            got="quantization_config",
            next_step="use the checkpoint before quantization, or remove the entry if the weights are floats",
        )
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        matches = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING))
        raise InputError(
            f"{path} names no model of transformers",
            got=f"model_type {model_type!r}"[:60],
            next_step=f"did you mean {' or '.join(matches)}?" if matches else 'such as "model_type": "llama"',
        )
    _check_sizes(fields, _LIST_LENGTHS)
    try:
        config = AutoConfig.for_model(model_type, **fields)
    # transformers checks configs with several libraries, and each raises its own errors.
    except Exception as error:
        raise InputError(f"transformers cannot read the config {path}", got=in_a_line(error)) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError("the model is not a causal language model of transformers", got=model_type)
    return config


def _check_sizes(fields: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]]) -> None:
    """Raise `InputError` for sizes out of range, on which transformers fails later with unclear errors."""
    for name, (smallest, largest) in sizes.items():
        size = fields.get(name)
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (is_int and smallest <= size <= largest):
            allowed = f"an int from {smallest} to {largest:,}"
            raise InputError(f"{name} of the config is out of range", got=repr(size)[:40], allowed=allowed)


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise InputError(f"{path} is too large for a config", allowed=f"{_LARGEST_CONFIG} bytes")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON", got=in_a_line(error)) from error
    if not isinstance(fields, dict):
        raise InputError(f"{path} contains no config", got=type(fields).__name__, allowed="a JSON object")
    return fields
