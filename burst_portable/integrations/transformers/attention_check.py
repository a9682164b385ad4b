"""Find attentions of a program, which `parallelize` would replace or leave as they are.

A program may register an attention function under an own name, which computes something else than ours. Or it replaces
the attention of some layers by a module that calls `scaled_dot_product_attention` itself. That would attend to the
tokens of a shard only.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from burst_portable.errors import UnsupportedError

_NAMES = ("self_attn", "attn", "attention", "self_attention")
"""Names of attention modules in the layers of Transformers' models."""


def check_functions(model: Any) -> None:
    """Raise `UnsupportedError` if the attention function or the mask function of a model is one of a program.

    Kernels of the Hub, whose names contain a slash, compute the attention of Transformers. A model of another package
    has an eager attention of that package.
    """
    name = getattr(model.config, "_attn_implementation", None) or "eager"
    if "/" in name:
        return
    found = [("attention", AttentionInterface().get(name)), ("mask", AttentionMaskInterface().get(name))]
    if name == "eager":
        kinds = {type(module) for module in model.modules()}
        forwards = {inspect.unwrap(kind.forward) for kind in kinds if callable(getattr(kind, "forward", None))}
        of_transformers = [x for x in forwards if inspect.isfunction(x) and x.__module__.startswith("transformers.")]
        found += [("attention", x.__globals__.get("eager_attention_forward")) for x in of_transformers]
    for kind, function in found:
        while hasattr(function, "func"):  # a partial function
            function = function.func
        module = getattr(function, "__module__", None) or type(function).__module__
        if function is not None and not module.startswith(("transformers.", "burst_portable.")):
            raise UnsupportedError(
                f"the model has the {kind} function of a program, which a sharded model would not call",
                got=f"attn_implementation={name!r}, {module}.{getattr(function, '__name__', type(function).__name__)}",
                allowed="functions of transformers",
                next_step='if it computes what these do, call model.set_attn_implementation("sdpa") first; for windows '
                "and packed documents, see docs/hugging_face.md",
            )


class AttentionCheck:
    """Finds layers whose attention is not ours.

    It looks again after a call with another number of attentions, or if the attention of a layer is another module or
    has another forward. A layer that a call skips is not found, if its attention was ours in an earlier call.
    """

    def __init__(self) -> None:
        # Attention modules of layers that were ours, and their forward.
        self._known = WeakKeyDictionary[nn.Module, Any]()
        self._count = 0  # attentions of the last call that was checked
        self._layers: list[tuple[str, str, list[Any]]] = []  # its lists of layers that have attention (`_found_in`)

    def __reduce__(self) -> tuple[Any, ...]:
        return AttentionCheck, ()  # weak references cannot be pickled

    def run(self, model: nn.Module, attended: set[int], count: int) -> None:
        """Raise `UnsupportedError` if the attention of a layer did not call our function, but that of another one did.

        Args:
            model: The model whose sequence is sharded, after a call.
            attended: Identities of the modules that called our function in this call.
            count: How often they did.
        """
        if count == self._count and self._has_same_layers(model):
            return
        self._count, self._layers = 0, []
        found = []
        for path, layers in model.named_modules():
            if isinstance(layers, nn.ModuleList):
                for name in _NAMES:
                    attentions = _found_in(layers, name)
                    if any(part is not None for part, _ in attentions):
                        self._check(f"{path}.{{}}.{name}", [part for part, _ in attentions], attended)
                        found.append((path, name, attentions))
        self._count, self._layers = count, found

    def _has_same_layers(self, model: nn.Module) -> bool:
        """Return whether lists of layers have the attention modules of the last check. 80 layers take 0.1 ms."""
        for path, name, attentions in self._layers:
            try:
                layers = model.get_submodule(path)
            except AttributeError:
                return False
            if not isinstance(layers, nn.ModuleList) or _found_in(layers, name) != attentions:
                return False
        return True

    def _check(self, path: str, attentions: list[Any], attended: set[int]) -> None:
        """Check the attention modules of a list of layers; None for a layer that has none of this name."""
        found = {i: part for i, part in enumerate(attentions) if part is not None}
        ours = [part for part in found.values() if any(id(m) in attended for m in part.modules())]
        self._known.update((part, _forward_of(part)) for part in ours)
        outside = [i for i, part in found.items() if self._known.get(part) != _forward_of(part)]
        if outside and len(outside) < len(found):
            raise UnsupportedError(
                "the attention of a layer does not go through transformers' AttentionInterface",
                got=f"{path.format(outside[0])}: {type(found[outside[0]]).__name__}",
                next_step="keep the attention of Transformers; or call "
                'ALL_ATTENTION_FUNCTIONS["burst_portable"] with this module and the mask that the layer gets',
            )


def _found_in(layers: nn.ModuleList, name: str) -> list[Any]:
    """Return the attention module of that name of each layer, and its forward; None for a layer that has none."""
    attentions = (getattr(layer, name, None) for layer in layers)
    return [(part, _forward_of(part)) if isinstance(part, nn.Module) else (None, None) for part in attentions]


def _forward_of(module: nn.Module) -> Any:
    """Return the forward of a module, which a program may replace. FSDP2 replaces the class, which inherits it."""
    return vars(module).get("forward", type(module).forward)
