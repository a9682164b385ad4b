"""Declare the options of strategies: each once, with its check, its command-line flag and its help.

An option is a field of a strategy's dataclass::

    transfer: Transfer = option(TRANSFER)
    prefetch_steps: int = option(PREFETCH_STEPS)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from burst_portable.errors import InputError, shown, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Transfer = Literal["ring", "direct"]
"""How blocks travel: from neighbor to neighbor, or straight from their owners."""
GradientCommDtype = Literal["float32", "input"]
"""How gradients of 16-bit inputs travel: in float32, as they are added up, or rounded to the dtype of the inputs."""
LocalBlockOrder = Literal["first", "last", "split"]
"""When a rank computes with its own block: before all others, after them, or a part before and the rest after."""
RESERVED_FLAGS = frozenset((
    "ablate", "ablated", "backend", "batch", "check", "check_all", "checked", "deep", "dtype", "eval", "hardware_spec",
    "hardware_file", "head_dim", "heads", "help", "inter_node_bandwidth", "intra_node_bandwidth", "json",
    "json_name", "kv_heads", "layout", "lr", "mask", "model", "no_check", "options", "profile", "profiled", "rank",
    "ranks", "ranks_per_node", "recompute", "report", "scoring", "seed", "seq_len", "steps", "strategy", "text",
    "tflops", "v_head_dim",
))  # fmt: skip
"""Names that no option with a flag may have: `plan` and `run` have parameters or flags of these names."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: a word of `choices`, or an integer if there are none.

    Attributes:
        default: The value of a strategy that does not set it. None also allows None.
        what: The noun in error messages: "unknown WHAT", or "OPTION is not WHAT" for an integer.
        choices: Allowed words.
        least: Smallest integer.
        most: Largest integer; None for no limit.
        needs: (another option, the value that it must have unless this option has its default, the reason).
        flag: Whether the commands have a flag for it, named after the option.
        help: What it decides, for the flag's help.
    """

    default: object
    what: str
    choices: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None
    needs: tuple[str, object, str] | None = None
    flag: bool = False
    help: str = ""

    def check(self, name: str, value: object) -> None:
        """Raise `InputError` if the option `name` cannot have this value.

        2.0 and True are no integers here: as keys of plans they equal 2 and 1.
        """
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                raise unknown_name(self.what, value, self.choices)
        elif value is None and self.default is None:
            return
        elif type(value) is not int or value < self.least or (self.most is not None and value > self.most):
            limits = f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            allowed = f"an int {limits}{', or None' if self.default is None else ''}"
            raise InputError(f"{name} is not {self.what}", got=shown(value), allowed=allowed)


def option(declared: Option, **changes: Any) -> Any:
    """Return the dataclass field of an option. `changes`: what this strategy declares otherwise, as its default."""
    declared = replace(declared, **changes)
    return field(default=declared.default, metadata={"option": declared})


def options_of(strategy: DataclassInstance | type[DataclassInstance]) -> Iterator[tuple[str, Option]]:
    """Yield (name, declaration) of each option of a strategy."""
    for one in fields(strategy):
        if "option" in one.metadata:
            yield one.name, one.metadata["option"]


def check_options(strategy: DataclassInstance) -> None:
    """Raise `InputError` if an option of a strategy has a value that it cannot have, alone or beside the others."""
    for name, declared in options_of(strategy):
        value = getattr(strategy, name)
        declared.check(name, value)
        if declared.needs is None or value == declared.default:
            continue
        other, needed, reason = declared.needs
        if getattr(strategy, other) != needed:
            next_step = f'{other}="{needed}"' if isinstance(needed, str) else f"{other}={needed!r}"
            raise InputError(reason, got=f"{name}={value!r}", next_step=next_step)


_DIRECT = ("transfer", "direct")
# Those that several strategies have.
TRANSFER = Option(
    "ring",
    "way to transfer blocks",
    choices=("ring", "direct"),
    flag=True,
    help="ring (from rank to rank) or direct (straight from the owner).",
)
PREFETCH_STEPS = Option(1, "a number of steps", help="Steps before it is needed that a block is fetched.")
BLOCKS_PER_LAUNCH = Option(
    1,
    "a number of blocks",
    needs=(*_DIRECT, "blocks from a neighbour come one by one"),
    help="Fetched blocks per launch.",
)
LOCAL_BLOCK_ORDER = Option(
    "first",
    "order of the local block",
    choices=("first", "last", "split"),
    needs=(*_DIRECT, "a block that is handed on begins with its owner"),
    help="When backward computes with the local block: first hides the block that comes, last gradients.",
)
GRADIENT_COMM_DTYPE = Option(
    "float32",
    "dtype for gradients to travel in",
    choices=("float32", "input"),
    help="float32 (as gradients are added up) or input (rounded to the dtype of the inputs).",
)
BACKWARD_CIRCULATES = Option(
    "q", "side to circulate", choices=("kv", "q"), flag=True, help="kv or q, what goes round in the backward pass."
)
RANKS_PER_NODE = Option(None, "a size", help="Ranks per node.")
