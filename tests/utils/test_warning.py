"""Test that warnings have the line of the program that called the package, and appear once per line."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from burst_portable.utils.warning import warn_caller


def test_warn_caller_names_innermost_line_of_program():
    """torch calls a hook of this package, and this test calls torch."""
    names = {"__name__": "burst_portable.hooks", "warn_caller": warn_caller}
    exec("def hook(*_): warn_caller('of a hook')", names)
    module = torch.nn.Identity()
    module.register_forward_pre_hook(torch.no_grad()(names["hook"]))
    with pytest.warns(UserWarning, match="of a hook") as found:
        module(torch.zeros(1))
    line = sys._getframe().f_lineno - 1
    assert [(one.filename, one.lineno) for one in found] == [(__file__, line)]


def test_warn_caller_warns_once_per_line():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            warn_caller("in a loop")
    assert len(found) == 1
