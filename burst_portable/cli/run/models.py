"""Models by what the command line names: tiny, a config, a checkpoint. Nothing in them is executed."""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burst_portable.errors import InputError, in_a_line, shown
from burst_portable.integrations.transformers.layouts import check_one_size

_LARGEST = 1 << 30  # bytes of a text: every rank holds it in memory


def tokens_of(text: str | None, checkpoint: Path | None) -> tuple[Tensor, str]:
    """All tokens of a text, int64 ``[n]``, and what they are.

    Args:
        text: a file of any kind; None takes the English text that comes with Python (`pydoc_data.topics`).
        checkpoint: a folder whose tokenizer.json is used if it has one; bytes are tokens otherwise.

    Raises:
        InputError: a file that is missing, empty, too large or unreadable; a tokenizer that is malformed.
    """
    content, name = _content(text)
    tokenizer = checkpoint / "tokenizer.json" if checkpoint else None
    if tokenizer is not None and tokenizer.is_file():
        return _tokenized(content, tokenizer), f"{name}, tokenizer of the checkpoint"
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long(), f"{name}, bytes as tokens"


def _content(text: str | None) -> tuple[bytes, str]:
    if text is None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        return "\n".join(topics[name] for name in sorted(topics)).encode(), "the help texts that come with Python"
    path = Path(text)
    try:
        if not text or not path.exists():
            raise InputError("the text is not there", got=repr(text), next_step="--text takes a file's path")
        size = path.stat().st_size
        if not path.is_file() or not 1 <= size <= _LARGEST:
            kind = "a folder" if path.is_dir() else f"{size:,} bytes" if path.is_file() else "no regular file"
            allowed = f"a file of 1 to {_LARGEST:,} bytes"
            raise InputError(f"the text {text} cannot be used", got=kind, allowed=allowed)
        return path.read_bytes(), path.name
    except OSError as error:
        raise InputError(f"the text {text} cannot be read", got=error.strerror) from error


def _tokenized(content: bytes, tokenizer: Path) -> Tensor:
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(tokenizer))
        return torch.tensor(made.encode(content.decode("utf-8", "replace")).ids, dtype=torch.int64)
    # The library raises plain Exceptions of its own.
    except Exception as error:
        raise InputError(f"{tokenizer} is not a tokenizer", got=in_a_line(error)) from error


def check_tokens(tokens: Tensor, seq_len: int, vocabulary: int) -> None:
    """Refuse a text that holds no whole sequence, or tokens that the model does not have."""
    if tokens.numel() < seq_len:
        raise InputError(
            "the text is shorter than one sequence",
            got=f"{tokens.numel()} tokens",
            allowed=f"at least --seq-len {seq_len}",
            next_step="name a longer one with --text",
        )
    if (largest := int(tokens.max())) >= vocabulary:
        raise InputError(
            "the text has tokens that the model does not know",
            got=f"token {largest}",
            allowed=f"below its vocab_size {vocabulary}",
        )


def batches(tokens: Tensor, seq_len: int, batch: int, steps: int) -> Iterator[Tensor]:
    """`steps` batches ``[B, N]`` of whole sequences, one after the other, from the start again at the end."""
    whole = tokens[: tokens.numel() // seq_len * seq_len].view(-1, seq_len)
    return (whole[torch.arange(i * batch, (i + 1) * batch) % whole.shape[0]] for i in range(steps))


TINY = "tiny"
_LARGEST_CONFIG = 1 << 20
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), (1, 1 << 40)),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), (1, 1 << 14)),
    "sliding_window": (0, 1 << 40),
}
"""Fields of a config that we or its model compute with: the least and the most that makes sense."""
_LISTED = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), (1, 1 << 14)),
    "num_labels": (0, 1 << 20),
}
"""Fields that transformers makes a list or a dict of so many from, while it reads the config."""


def checkpoint_of(name: str) -> Path | None:
    """The folder, where a model's name is one."""
    return Path(name) if name not in ("", TINY) and Path(name).is_dir() else None


def config_of(name: str, seq_len: int) -> Any:
    """The transformers config of a model.

    Raises `InputError` for what is not a causal language model that transformers knows, or one for shorter sequences;
    `UnsupportedError` for one whose attention has no one size.
    """
    config = _tiny(seq_len) if name == TINY else _from_file(name)
    check_one_size(config)
    _check_sizes({name: getattr(config, name, None) for name in _SIZES}, _SIZES)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise InputError(
            "the sequence is longer than the model's positions", got=f"--seq-len {seq_len}", allowed=longest
        )
    return config


def build(
    name: str, config: Any, dtype: torch.dtype, seed: int, device: torch.device | str = "cpu"
) -> tuple[Any, list[str]]:
    """The model with its weights, on a device, and what there is to say about them.

    The weights are those of the checkpoint, or random ones, drawn on the device, that the seed decides; never a
    mixture. Raises `InputError` for a checkpoint that cannot be loaded, or lacks some.
    """
    from transformers import AutoModelForCausalLM

    checkpoint = checkpoint_of(name)
    if checkpoint is None:
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=plain_attention(config)).to(dtype)
        return _with_experts(model, dtype), []
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
    # Files that are cut off, weights of other shapes: each library on the way raises its own.
    except Exception as error:
        raise InputError(f"the checkpoint {name} cannot be loaded", got=in_a_line(error)) from error
    _check_kinds(checkpoint, model)
    return _with_experts(model, dtype).to(device), _check_weights(name, information)


def plain_attention(config: Any) -> str:
    """One device's attention: torch's SDPA, or transformers' eager one, which alone has a softcap and sinks."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    softcap = getattr(config, "attn_logit_softcapping", None)
    return "sdpa" if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa and softcap is None else "eager"


def _with_experts(model: Any, dtype: torch.dtype) -> Any:
    """The model; with experts that take float64, where it has some: transformers' fast ones do not."""
    if dtype is torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def enable_gradient_checkpointing(model: Any) -> None:
    """Keep of each layer its input alone, and compute the layer again in the backward pass.

    Raises `InputError` for a model that cannot.
    """
    # The name of releases of transformers before it was renamed.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise InputError("the model does not support gradient checkpointing", got=in_a_line(error)) from error


def _check_kinds(checkpoint: Path, model: Any) -> None:
    """Refuse parameters that are stored as anything but floating-point numbers of 16 bits or more: transformers casts
    them without a word."""
    from safetensors import safe_open

    parameters = {name for name, _ in model.named_parameters()}
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            kinds = {name: weights.get_slice(name).get_dtype() for name in parameters.intersection(weights.keys())}
        if packed := {name: kind for name, kind in kinds.items() if kind not in ("F64", "F32", "F16", "BF16")}:
            raise InputError(
                f"{path} holds parameters that are not plain numbers",
                got=f"{', '.join(sorted(set(packed.values())))}: {_few(sorted(packed))}",
                allowed="F64, F32, F16, BF16",
                next_step="take the checkpoint that was not quantized",
            )


def _check_weights(name: str, information: dict[str, Any]) -> list[str]:
    """Refuse a checkpoint without some of the model's weights, which transformers would draw at random; tell of those
    that no part of the model takes."""
    missing, unused = sorted(information["missing_keys"]), sorted(information["unexpected_keys"])
    extra = f"no part of the model takes {len(unused)} of its weights: {_few(unused)}" if unused else ""
    if missing:
        raise InputError(
            f"the checkpoint {name} lacks weights of the model",
            got=f"{len(missing)} missing: {_few(missing)}" + (f"; {extra}" if extra else ""),
            next_step="check that config.json and the weights belong together",
        )
    return [f"the checkpoint {name} is loaded, but {extra}"] if extra else []


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def outline(config: Any) -> Any:
    """The model without memory for its weights: for checks and sizes."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=plain_attention(config))
    # Whatever a config's numbers break in a model that is built from them.
    except Exception as error:
        raise InputError(f"no {config.model_type} model can be built from its config", got=in_a_line(error)) from error


def quiet() -> None:
    """Keep transformers' bars and notes out of ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _tiny(seq_len: int) -> Any:
    """A Llama of bytes: 4 layers, 8 heads, 2 K/V heads, some 3 million parameters."""
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
    except OSError as error:  # a folder that may not be searched, a name that is too long
        raise InputError("the model cannot be read", got=f"{shown(name)}: {error.strerror}") from error
    return _made(path, _json(path))


def _config_file(name: str) -> Path:
    """The file of a model's config, which exists. Raises OSError, and `InputError` if this is not a model."""
    path = Path(name)
    if name and path.is_dir():
        if not any(path.glob("*.safetensors")):
            raise InputError(
                f"the checkpoint {name} has no weights that are safe to load",
                allowed="*.safetensors",
                next_step="pickled weights (*.bin, *.pt) can run code and are not read; convert them",
            )
        path = path / "config.json"
    if not name or not path.is_file():
        raise InputError(
            "no such model",
            got=repr(name),
            allowed=f"{TINY}, a config's JSON file, or a folder with config.json and *.safetensors",
        )
    return path


def _made(path: Path, fields: dict[str, Any]) -> Any:
    """The config that a file's fields make."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    if fields.get("quantization_config"):
        raise InputError(
            f"the model of {path} is quantized, and would be trained or scored as if it were not",
            got="quantization_config",
            next_step="take the checkpoint that was not quantized, or remove the entry if the weights are plain",
        )
    kind = fields.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING))
        raise InputError(
            f"{path} names no model of transformers",
            got=f"model_type {kind!r}"[:60],
            next_step=f"did you mean {' or '.join(near)}?" if near else 'such as "model_type": "llama"',
        )
    _check_sizes(fields, _LISTED)
    try:
        config = AutoConfig.for_model(kind, **fields)
    # transformers checks configs with several libraries, and each raises its own.
    except Exception as error:
        raise InputError(f"transformers cannot read the config {path}", got=in_a_line(error)) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError("the model is not a causal language model of transformers", got=kind)
    return config


def _check_sizes(fields: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]]) -> None:
    """transformers takes numbers of any kind, and breaks on them later in ways of its own."""
    for name, (least, most) in sizes.items():
        size = fields.get(name)
        whole = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (whole and least <= size <= most):
            allowed = f"an int from {least} to {most:,}"
            raise InputError(f"{name} of the config is not a size", got=repr(size)[:40], allowed=allowed)


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
        raise InputError(f"{path} holds no config", got=type(fields).__name__, allowed="a JSON object")
    return fields
