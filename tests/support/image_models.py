"""Load the small vision-language models of `ci`, with which the page of tried models is made."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

_CI = str(Path(__file__).parents[2] / "ci")
sys.path.insert(0, _CI)
models, trials = (importlib.import_module(name) for name in ("image_models", "image_trials"))
sys.path.remove(_CI)
