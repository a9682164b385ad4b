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
from burst_portable.utils.values import as_int

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Transfer = Literal["ring", "direct"]
"""How blocks are sent: from neighbor to neighbor, or from their owners."""
GradientCommDtype = Literal["float32", "input"]
"""How gradients of 16-bit inputs are sent: in float32, in which they are summed, or in the dtype of the inputs."""
LocalBlockOrder = Literal["first", "last", "split"]
"""When a rank computes with its local block: before all remote blocks, after them, or one part before and one after."""
RESERVED_FLAGS = frozenset((
    "ablate", "backend", "batch", "check", "check_all", "deep", "dropout", "dtype", "eval",
    "gradient_checkpointing", "hardware_file", "hardware_spec", "head_dim", "heads", "help", "inter_node_bandwidth",
    "intra_node_bandwidth", "json", "json_name", "kv_heads", "layout", "lr", "mask", "model", "no_check", "options",
    "picture", "profile", "rank", "ranks", "ranks_per_node", "report", "scoring", "seed", "seq_len", "show_steps",
    "steps", "strategy", "text", "tflops", "v_head_dim",
))  # fmt: skip
"""Names that an option with a flag cannot have, because `plan` or `run` has a parameter or flag of that name."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: a word of `choices`, or an integer if there are none."""

    default: object  # if it is None, None is also an allowed value
    noun: str  # for error messages: "unknown NOUN", or "OPTION is not NOUN" for an integer
    choices: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None
    # (another option, its required value, error text), unless this option has its default.
    requires: tuple[str, object, str] | None = None
    flag: bool = False  # whether the commands have a flag for it, named after the option
    help: str = ""  # of the flag

    def check(self, name: str, value: object) -> None:
        """Raise `InputError` if the option `name` cannot have this value.

        2.0 and True are no integers here: as keys of the plan cache they equal 2 and 1.
        """
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                raise unknown_name(self.noun, value, self.choices)
        elif value is None and self.default is None:
            return
        elif as_int(value) is None or type(value) is not int or not self.least <= value <= (self.most or value):
            limits = f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            allowed = f"an int {limits}{', or None' if self.default is None else ''}"
            raise InputError(f"{name} is not {self.noun}", got=shown(value), allowed=allowed)


def option(declared: Option, **changes: Any) -> Any:
    """Return the dataclass field of an option. `changes`: attributes that this strategy changes, as `default`."""
    declared = replace(declared, **changes)
    return field(default=declared.default, metadata={"option": declared})


def options_of(strategy: DataclassInstance | type[DataclassInstance]) -> Iterator[tuple[str, Option]]:
    """Yield (name, declaration) of each option of a strategy."""
    for one in fields(strategy):
        if "option" in one.metadata:
            yield one.name, one.metadata["option"]


def check_options(strategy: DataclassInstance) -> None:
    """Raise `InputError` if an option has an invalid value, or one that its other options do not allow."""
    for name, declared in options_of(strategy):
        value = getattr(strategy, name)
        declared.check(name, value)
        if declared.requires is None or value == declared.default:
            continue
        other, required, reason = declared.requires
        if getattr(strategy, other) != required:
            next_step = f'{other}="{required}"' if isinstance(required, str) else f"{other}={required!r}"
            raise InputError(reason, got=f"{name}={value!r}", next_step=next_step)


_DIRECT = ("transfer", "direct")
# Options of several strategies.
TRANSFER = Option(
    "ring",
    "way to transfer blocks",
    choices=("ring", "direct"),
    flag=True,
    help="Send blocks from rank to rank (ring) or from their owners (direct); auto tries both.",
)
PREFETCH_STEPS = Option(1, "a number of steps", help="Steps before its computation at which a block is sent.")
BLOCKS_PER_LAUNCH = Option(
    1,
    "a number of blocks",
    requires=(*_DIRECT, "a ring receives one block per step"),
    help="Remote blocks that one kernel launch computes with.",
)
LOCAL_BLOCK_ORDER = Option(
    "first",
    "order of the local block",
    choices=("first", "last", "split"),
    requires=(*_DIRECT, "a ring forwards the local block in step 0"),
    help="Backward order of the local block: first overlaps the first receive, last the last gradient send.",
)
GRADIENT_COMM_DTYPE = Option(
    "float32",
    "dtype of sent gradients",
    choices=("float32", "input"),
    help="Send gradients in float32, or rounded to the dtype of the inputs (input).",
)
BACKWARD_CIRCULATES = Option(
    "q", "side to circulate", choices=("kv", "q"), flag=True, help="Side that is sent in the backward pass."
)
RANKS_PER_NODE = Option(None, "a size", help="Ranks per node.")
