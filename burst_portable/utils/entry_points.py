"""Read what packages register under an entry point group."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points


def registered_targets(group: str, ours: Mapping[str, str]) -> dict[str, list[str]]:
    """Return each name of a group with all its targets (``module:attribute``): those in `ours` first."""
    targets = {name: [target] for name, target in ours.items()}
    for point in entry_points(group=group):
        found = targets.setdefault(point.name, [])
        if point.value not in found:
            found.append(point.value)
    return targets
