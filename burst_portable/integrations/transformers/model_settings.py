"""Describe the settings of a model that ranks of one sequence must share, but whose weights do not show them.

Ranks with equal weights and different configs, for example of another version of a checkpoint, would each compute a
part of another model: its norm, RoPE or activation. The first call compares them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

from burst_portable.integrations.transformers.loss import loss_name

SETTINGS = "settings of the model"
"""Name of the fact that differs if any setting does."""
_NOT_OF_RESULTS = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_SHOWN, _LARGEST = 32, 3500  # characters of a value, and of all facts together


def settings_of(model: Any) -> dict[str, str]:
    """Return facts of a model that are equal on ranks with the same config and loss function, by name."""
    facts = {f"config.{name}": _short(value) for name, value in _entries(model.config.to_dict())}
    facts["loss function"] = loss_name(model)
    total = {SETTINGS: f"{zlib.crc32(json.dumps(facts, sort_keys=True).encode()):08x}"}
    return total | (facts if len(json.dumps(facts)) < _LARGEST else {})


def _entries(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the entries of a config, also of configs within it."""
    for name in sorted(config, key=str):
        value = config[name]
        if str(name).startswith("_") or name in _NOT_OF_RESULTS:
            continue
        if isinstance(value, dict):
            yield from _entries(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", _text(value)


def _text(value: Any) -> str:
    """Return a text of a value. Of objects, it is the type: their texts may contain an address."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value) if isinstance(value, str | int | float) else type(value).__name__


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({zlib.crc32(text.encode()):08x})"
