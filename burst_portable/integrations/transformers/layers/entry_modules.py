"""Check the inputs of modules of torch that mix the numbers of an entry, but not those of different entries.

These are convolutions, pooling and group norms. A layer may call one token by token, with an input such as
``[B * S, C]``, or along the tokens, as with ``[B, C, S]``. Only the shape of the input shows which.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

from torch import Tensor, nn

from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers.attention import ATTRIBUTE
from burst_portable.integrations.transformers.models.recurrent_layers import recurrent_layers
from burst_portable.utils.torch_modes import never_compiled

_POOLING = "torch.nn.modules.pooling"
"""Module of torch's pooling layers, whose names end with their number of dimensions, as in MaxPool1d."""


def entry_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules, but not those of recurrent layers that continue from rank to rank."""
    known = {id(part) for layer in recurrent_layers(model) for part in layer.modules()}
    for name, module in model.named_modules():
        if id(module) not in known and (_is_convolution(module) or _pooled_dims(module) or _is_norm(module)):
            yield name, module


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd) and set(module.kernel_size) != {1}


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.GroupNorm)


def _pooled_dims(module: nn.Module) -> int:
    """Return how many dimensions a pooling layer reduces; 0 for other modules."""
    names = [base.__name__ for base in type(module).__mro__ if base.__module__ == _POOLING]
    return next((int(name[-2]) for name in names if name[-2].isdigit()), 0)


def watch_entries(model: nn.Module) -> list[Any]:
    """Install the checks of inputs. Return the hooks."""
    modules = entry_modules(model)
    return [module.register_forward_pre_hook(partial(_check, name), with_kwargs=True) for name, module in modules]


def entries_to_call(model: nn.Module) -> dict[str, str]:
    """Return the names and classes of modules whose weights layers may use without a call of the module.

    These are convolutions of sequences: `causal_conv1d` takes their weights.
    """
    return {name: type(module).__name__ for name, module in entry_modules(model) if isinstance(module, nn.Conv1d)}


@never_compiled("it reads the running call")
def _check(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `UnsupportedError` if the entries of an input have several tokens (pre-hook)."""
    state: Any = getattr(module, ATTRIBUTE)
    if state.tokens_of_call is None or (state.call is None and name in state.called_entries):
        return  # the module is computed again in the backward pass
    x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if x is None or mixes_tokens(module, tuple(x.shape), *state.tokens_of_call):
        rows, tokens = state.tokens_of_call
        shape = None if x is None else list(x.shape)
        raise UnsupportedError(
            f"tokens that interact outside attention, in {name} ({type(module).__name__})",
            got=f"an input of shape {shape}, with {rows} rows of {tokens} tokens on this rank",
            allowed=f"[{rows * tokens}, ...] with one token in each entry, and no other dimension of {tokens}",
            next_step="if the module works token by token, flatten rows and tokens before it",
        )
    state.called_entries.add(name)


def mixes_tokens(module: nn.Module, shape: tuple[int, ...], rows: int, tokens: int) -> bool:
    """Return whether entries of an input may have several tokens.

    They have one each if the first dimensions are those of the tokens. A mixed dimension of the size of the tokens may
    still be one of tokens, if the first one is one of features that are equally many. Only the number of channels is
    fixed by the module, so that it is none of tokens.
    """
    if pooled := _pooled_dims(module):
        first, mixed = shape[: len(shape) - pooled], shape[len(shape) - pooled :]
    elif _is_norm(module):
        first, mixed = shape[:1], shape[2:]
    else:
        is_batch = isinstance(module, nn.modules.conv._ConvNd) and len(shape) == len(module.kernel_size) + 2
        first, mixed = (shape[:1], shape[2:]) if is_batch else ((), shape)
    if first[:1] != (rows * tokens,) and first[:2] != (rows, tokens):
        return True
    return any(tokens in accumulate(mixed[i:], mul) for i in range(len(mixed)))


def check_called(modules: dict[str, str], called: set[str]) -> None:
    """Raise `UnsupportedError` if no call of the model has called one of these modules (see `entries_to_call`)."""
    for name, kind in modules.items():
        if name not in called:
            raise UnsupportedError(
                f"tokens that interact outside attention, in {name} ({kind})",
                got="a module that was not called, so that a function may have used its weights",
                next_step="call the module; or remove it, if it has no effect",
            )
