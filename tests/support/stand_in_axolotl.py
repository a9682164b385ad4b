"""Stand in for axolotl 0.19, which `make setup` does not install: the two classes that its integration imports.

tests/integration/test_axolotl.py runs the integration with the real ones where axolotl is installed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from transformers import Trainer


class BasePlugin:
    """The methods that the integration overrides. axolotl calls all of them with the configuration."""

    def register(self, cfg: Any) -> None: ...

    def get_input_args(self) -> str | None: ...

    def get_training_args(self, cfg: Any) -> Any: ...

    def get_trainer_cls(self, cfg: Any) -> Any: ...


class AxolotlTrainer(Trainer):
    """A Trainer that takes two more collators, and adds up tokens of all ranks in its state."""

    def __init__(self, *arguments: Any, eval_data_collator: Any = None, bench_data_collator: Any = None, **named: Any):
        super().__init__(*arguments, **named)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not hasattr(self.state, "tokens"):
            self.state.tokens = {"trainable": torch.zeros(1), "total": torch.zeros(1)}
        counts = {"trainable": (inputs["labels"] != -100).sum(), "total": torch.tensor(inputs["labels"].numel())}
        for name, count in counts.items():
            self.state.tokens[name] = self.state.tokens[name] + self.accelerator.gather(count).sum().cpu()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def modules() -> dict[str, ModuleType]:
    """Return the modules to import from, packages included."""
    names = ("", ".core", ".core.trainers", ".core.trainers.base", ".integrations", ".integrations.base")
    found = {f"axolotl{name}": ModuleType(f"axolotl{name}") for name in names}
    found["axolotl.core.trainers.base"].AxolotlTrainer = AxolotlTrainer  # type: ignore[attr-defined]
    found["axolotl.integrations.base"].BasePlugin = BasePlugin  # type: ignore[attr-defined]
    return found
