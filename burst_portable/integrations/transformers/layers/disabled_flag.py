"""Disable a flag of modules while this package does the work that it enables."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class DisabledFlag:
    """A flag that is True in some modules of a model, and False while the model is sharded.

    Attributes:
        name: Name of the flag, an attribute of a module.
        mark: Attribute of the modules whose flag was disabled.
    """

    name: str
    mark: str

    def disable(self, module: nn.Module) -> None:
        """Disable the flag of a module, and mark the module."""
        setattr(module, self.name, False)
        setattr(module, self.mark, True)

    def restore(self, model: nn.Module) -> None:
        """Enable the flag again in all marked modules of a model, and remove the marks."""
        for module in model.modules():
            if hasattr(module, self.mark):
                delattr(module, self.mark)
                setattr(module, self.name, True)
