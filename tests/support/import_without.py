"""Import integrations as if their package was not installed: ``MODULE:PACKAGE ...``. Print the error of each."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    for argument in sys.argv[1:]:
        module, package = argument.split(":")
        before = dict(sys.modules)
        for name in list(sys.modules):
            if name.partition(".")[0] == package or name.startswith(f"burst_portable.integrations.{module}"):
                del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]  # Python then finds no such package
        try:
            importlib.import_module(f"burst_portable.integrations.{module}")
        except ImportError as error:
            print(type(error).__name__, error)
        sys.modules.pop(package)
        sys.modules.update(before)


if __name__ == "__main__":
    main()
