"""Check the list of public names: to add, rename or remove one, change this file too."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import types

import pytest

import burst_portable

PUBLIC = [
    "BurstError",
    "Layout",
    "Mask",
    "Mesh",
    "Region",
    "Segment",
    "__version__",
    "all_reduce",
    "all_reduce_gradients",
    "attention",
    "explain",
    "local_position_ids",
    "make_layout",
    "make_strategy",
    "merge_attention_states",
    "partial_attention",
    "plan",
    "plan_for_mesh",
    "profile",
    "run_threads",
    "shard",
    "shard_batch",
    "unshard",
]


def test_all_equals_public_names():
    assert sorted(burst_portable.__all__) == PUBLIC


def test_dir_lists_public_names():
    assert set(PUBLIC) <= set(dir(burst_portable))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_not_a_module(name):
    """Importing a submodule would replace a lazy public name with the same spelling."""
    for module in pkgutil.iter_modules(burst_portable.__path__):
        if module.name == name:
            importlib.import_module(f"burst_portable.{name}")
    assert not isinstance(getattr(burst_portable, name), types.ModuleType)


def test_submodule_is_an_attribute_without_import(forked_python):
    code = "import burst_portable as bp; assert bp.nn.SelfAttention"
    subprocess.run([forked_python, "-c", code], check=True)


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="atention"):
        burst_portable.atention  # noqa: B018  # the access is what is tested
