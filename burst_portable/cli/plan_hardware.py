"""Find the hardware for which `burst-portable plan` predicts times: rates, a file, or a known machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from burst_portable.backends.selection import machines
from burst_portable.cli.strategy_flags import flag
from burst_portable.config import from_environment
from burst_portable.errors import InputError
from burst_portable.planning.hardware import NEXT_STEP, HardwareSpec, MeasuredHardware, read_hardware_spec

DEFAULT_TFLOPS = 400.0
DEFAULT_BANDWIDTH = 100.0  # GB/s between ranks of a node
_DEVICES_PER_NODE = 8  # usual largest number of devices of a server
_MIN, _MAX = 1e-6, 1e6  # TFLOP/s and GB/s: outside, predicted times may be infinite or nan


@dataclass(frozen=True)
class HardwareOptions:
    """The options about hardware, None where they were not given. Raise `InputError` for a rate out of range.

    Attributes:
        file: A file that `measure` wrote, or the name of a known machine.
        tflops: TFLOP/s per rank.
        intra_node_bandwidth: GB/s between ranks of a node.
        inter_node_bandwidth: GB/s per rank between nodes.
        ranks_per_node: Ranks per node.
    """

    file: str | None
    tflops: float | None
    intra_node_bandwidth: float | None
    inter_node_bandwidth: float | None
    ranks_per_node: int | None

    def __post_init__(self) -> None:
        for name in ("tflops", "intra_node_bandwidth", "inter_node_bandwidth"):
            rate = getattr(self, name)
            if rate is not None and not _MIN <= rate <= _MAX:  # the comparison is False for nan
                raise InputError(f"{flag(name)} is out of range", got=rate, allowed=f"{_MIN:g} to {_MAX:g}")

    def hardware(self, ranks: int, dtype: str, head_dim: int) -> HardwareSpec:
        """Return the hardware for calls of these ranks, dtype and head size.

        Raises:
            InputError: If options exclude each other, or the file is neither a file nor a known machine.
        """
        found = self._of_one_node(ranks, dtype, head_dim)
        if self.inter_node_bandwidth is not None and not (self.ranks_per_node or found.ranks_per_node):
            raise InputError(
                "--inter-node-bandwidth requires several nodes",
                got="one node",
                next_step="add --ranks-per-node, the ranks per node",
            )
        return found.with_nodes(self.ranks_per_node or 0, self.inter_node_bandwidth)

    def _of_one_node(self, ranks: int, dtype: str, head_dim: int) -> HardwareSpec:
        """Return the hardware of a file, a known machine, or the rates. Each may lack the rate between nodes."""
        if self.file is None:
            return HardwareSpec(
                tflops=DEFAULT_TFLOPS if self.tflops is None else self.tflops,
                intra_node_bandwidth=(
                    DEFAULT_BANDWIDTH if self.intra_node_bandwidth is None else self.intra_node_bandwidth
                ),
            )
        for name in ("tflops", "intra_node_bandwidth"):
            if (rate := getattr(self, name)) is not None:
                got = f"{self.file} and {rate:g}"
                raise InputError(f"--hardware-spec and {flag(name)} exclude each other", got=got)
        return _measured(self.file, ranks).hardware_for(ranks, dtype=dtype, head_dim=head_dim)

    def notes(self, hardware: HardwareSpec, ranks: int) -> list[str]:
        """Return a note if the default bandwidth is used for more ranks than one node usually has."""
        uses_defaults = self.file is None and self.intra_node_bandwidth is None
        if not uses_defaults or hardware.ranks_per_node or ranks <= _DEVICES_PER_NODE:
            return []
        value = _DEVICES_PER_NODE if ranks % _DEVICES_PER_NODE == 0 else "RANKS"
        return [
            f"all links have the same bandwidth; --ranks-per-node {value} predicts {ranks:,} ranks on several nodes"
        ]

    def setting_notes(self) -> list[str]:
        """Return a note if the settings of the process name a file, which this command does not read."""
        file = from_environment().hardware_spec
        if self.file is not None or not file:
            return []
        return [f"plan does not read BURST_HARDWARE_SPEC; --hardware-spec {file} uses its rates"]


def _measured(file: str, ranks: int) -> MeasuredHardware:
    """Return the hardware of a file, or of a machine that a backend lists by this name."""
    if Path(file).exists():
        return read_hardware_spec(file)
    names = machines(ranks)
    if file.lower() in names:
        return names[file.lower()]
    what = f"{file} is not a hardware spec file, and no known machine"
    raise InputError(what, got="no such file", allowed=f"a file, or {', '.join(names)}", next_step=NEXT_STEP)
