"""Models by what the command line names: tiny, a config, a checkpoint. Nothing in them is executed."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import torch

from burst_portable.errors import InputError, explain

TINY = "tiny"
_LARGEST_CONFIG = 1 << 20


def checkpoint_of(name: str) -> Path | None:
    """The folder, where a model's name is one."""
    return Path(name) if name != TINY and Path(name).is_dir() else None


def config_of(name: str, seq_len: int) -> Any:
    """The transformers config of a model.

    Raises `InputError` for what is no causal language model that transformers knows, or one for shorter sequences.
    """
    config = _tiny(seq_len) if name == TINY else _from_file(name)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise InputError(
            explain("the sequence is longer than the model's positions", got=f"--seq-len {seq_len}", allowed=longest)
        )
    return config


def build(name: str, config: Any, dtype: torch.dtype, seed: int) -> Any:
    """The model with its weights, on the CPU: those of the checkpoint, or random ones that the seed decides."""
    from transformers import AutoModelForCausalLM

    checkpoint = checkpoint_of(name)
    if checkpoint is None:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    return AutoModelForCausalLM.from_pretrained(
        checkpoint,
        config=config,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="sdpa",
        dtype=dtype,
    )


def outline(config: Any) -> Any:
    """The model without memory for its weights: for checks and sizes."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    # Whatever a config's numbers break in a model that is built from them.
    except Exception as error:
        told = " ".join(str(error).split())[:300]
        raise InputError(explain(f"no {config.model_type} model can be built from its config", got=told)) from error


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
    path = Path(name)
    if path.is_dir():
        if not any(path.glob("*.safetensors")):
            raise InputError(
                explain(
                    f"the checkpoint {name} has no weights that are safe to load",
                    allowed="*.safetensors",
                    next_step="pickled weights (*.bin, *.pt) can run code and are not read; convert them",
                )
            )
        path = path / "config.json"
    fields = _json(path, name)
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING))
        raise InputError(
            explain(
                f"{path} names no model of transformers",
                got=f"model_type {kind!r}",
                next_step=f"did you mean {' or '.join(near)}?" if near else None,
            )
        )
    try:
        config = AutoConfig.for_model(kind, **fields)
    # transformers checks configs with several libraries, and each raises its own.
    except Exception as error:
        told = " ".join(str(error).split())[:300]
        raise InputError(explain(f"transformers cannot read the config {path}", got=told)) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(explain("the model is no causal language model of transformers", got=kind))
    return config


def _json(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(
            explain(
                "no such model",
                got=repr(name),
                allowed=f"{TINY}, a config's JSON file, or a folder with config.json and *.safetensors",
            )
        )
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise InputError(explain(f"{path} is too large for a config", allowed=f"{_LARGEST_CONFIG} bytes"))
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(explain(f"{path} cannot be read as JSON", got=str(error).splitlines()[0])) from error
    if not isinstance(fields, dict):
        raise InputError(explain(f"{path} holds no config", got=type(fields).__name__, allowed="a JSON object"))
    return fields
