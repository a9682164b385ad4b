"""Test that descriptors are kept, and that inputs which TMA cannot address are copied."""

import pytest
import torch

from burst_portable.backends.cuda.hopper import descriptors
from burst_portable.backends.cuda.hopper.descriptors import Descriptors
from burst_portable.errors import UnsupportedError


def test_descriptors_copy_inputs_that_tma_cannot_address(monkeypatch):
    monkeypatch.setattr(
        descriptors, "kernel_driver", lambda: None
    )  # an installed driver has no initialized device here
    kept = Descriptors()
    x = torch.randn(2, 8, 3, 64).bfloat16()
    same, (described, _) = kept.aligned_panels("q", x, 4, (64, 0))
    assert same is x
    assert kept.aligned_panels("q", x, 4, (64, 0)) == (x, (described, described))
    assert kept.aligned_panels("q", x, 8, (64, 0))[1][0] is not described
    odd = torch.randn(2, 8, 3, 65).bfloat16()[..., :64]
    for _ in range(2):  # the cached descriptor is of the copy, never of `odd` itself
        copy, (described, _) = kept.aligned_panels("q", odd, 4, (64, 0))
        assert copy is not odd
        assert torch.equal(copy, odd)
        assert described is kept.rows("q", copy, 4, 64)
    with pytest.raises(UnsupportedError, match="cannot address q"):
        kept.rows("q", odd, 4, 64)
