"""Test contexts and calls that leave torch's modes and transforms out."""

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from burst_portable.utils.torch_modes import apply_untransformed, disable_caller_modes


class Scaled(torch.autograd.Function):
    """Compute x * y, and read the memory of both as a kernel does."""

    @staticmethod
    def forward(ctx, x, y, name):
        assert x.data_ptr(), name
        assert y.data_ptr(), name
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, dout):
        x, y = ctx.saved_tensors
        return dout * y, dout * x, None


def left_a_transform(x):
    """Return x as a tensor that torch.func.grad has wrapped and that is used after it."""
    kept = []
    torch.func.grad(lambda inside: kept.append(inside) or inside.sum())(x)
    return kept[0]


def test_apply_untransformed_computes_gradients():
    x, y = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = apply_untransformed(Scaled, x, y, "plain")
    dx, dy = torch.autograd.grad(out.sum(), (x, y))
    assert torch.equal(out, x * y)
    assert torch.equal(dx, y)
    assert torch.equal(dy, x)


def test_apply_untransformed_unwraps_tensors_of_transforms():
    """Without it, the function gets a tensor without memory: `data_ptr` raises."""
    x, y = torch.randn(5, requires_grad=True), torch.randn(5)
    wrapped = left_a_transform(y)
    assert torch._C._functorch.is_functorch_wrapped_tensor(wrapped)
    assert torch.equal(apply_untransformed(Scaled, x, wrapped, "wrapped"), x * y)


def test_disable_caller_modes_ends_autocast_and_policies():
    x, seen = torch.randn(4, 4), []

    def policy(_, operator, *args, **options):
        seen.append(operator)
        return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    first, _ = create_selective_checkpoint_contexts(policy)
    with first, torch.autocast("cpu", torch.bfloat16):
        with disable_caller_modes(x.device):
            assert (x @ x).dtype == torch.float32
            assert not seen, "the policy got an operator"
        assert (x @ x).dtype == torch.bfloat16
        assert seen
    with disable_caller_modes(x.device):
        assert (x @ x).dtype == torch.float32
