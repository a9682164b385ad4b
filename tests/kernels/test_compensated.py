"""Merging in float32 alone: as good as in float64, however many parts there are."""

from __future__ import annotations

import pytest
import torch

from burst_portable import numerics


def parts(count: int, spread: float) -> tuple[list[numerics.State], numerics.State]:
    """Partial results in float32 over so many sets of keys, and the whole in float64."""
    scores = torch.randn(2, 3, 5, count, 16, dtype=torch.float64) * spread + 9.0
    values = torch.randn(2, 3, count, 16, 4, dtype=torch.float64)
    p = torch.softmax(scores.flatten(-2), -1)
    whole = torch.einsum("bhsc,bhcd->bshd", p, values.flatten(2, 3)), scores.flatten(-2).logsumexp(-1)
    made = []
    for i in range(count):
        part = torch.softmax(scores[..., i, :], -1)
        out = torch.einsum("bhsc,bhcd->bshd", part, values[:, :, i])
        made.append((out.float(), scores[..., i, :].logsumexp(-1)))
    return made, whole


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_many_parts_lose_little(spread: float) -> None:
    """64 parts stay within a few roundings of float32; merging in plain float32 does not, so this can fail."""
    torch.manual_seed(0)
    made, (out, lse) = parts(64, spread)
    q = torch.empty(2, 5, 3, 4)
    state, plain = numerics.Compensated.empty(q, 4), (torch.zeros(2, 5, 3, 4), torch.full((2, 3, 5), -torch.inf))
    for part, wide in made:
        narrow = wide.float()
        state.merge(part, narrow, (wide - narrow.double()).float())
        numerics.merge_into(plain, part, narrow)
    assert float((state[0] - out).norm() / out.norm()) < 2e-7
    assert float((plain[0] - out).norm() / out.norm()) > 1e-6
    assert float((state[1] - lse).abs().max()) <= 2.0**-23 * float(lse.abs().max())


def test_rows_that_saw_nothing() -> None:
    """Stay 0 and -inf until there is a part for them; a part that saw nothing changes nothing, to the bit."""
    q = torch.empty(1, 3, 2, 4)
    state = numerics.Compensated.empty(q, 4)
    assert not state[0].any()
    assert (state[1] == -torch.inf).all()
    made, _ = parts(1, 1.0)
    out, lse = made[0][0][:1, :3, :2], made[0][1].float()[:1, :2, :3].clone()
    lse[:, :, 1] = -torch.inf
    out[:, 1] = 0.0
    state.merge(out, lse)
    assert torch.equal(state[0], out)
    assert torch.equal(state[1], lse)
    state.merge(torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    assert torch.equal(state[0], out)
    assert torch.equal(state[1], lse)
    assert all(not x.isnan().any() for x in state.lost)


def test_agrees_with_merge_into() -> None:
    made, _ = parts(5, 3.0)
    narrow = numerics.Compensated.empty(torch.empty(2, 5, 3, 4), 4)
    wide = numerics.empty_state(torch.empty(2, 5, 3, 4), 4)
    for out, lse in made:
        narrow.merge(out, lse.float())
        numerics.merge_into(wide, out, lse.float())
    torch.testing.assert_close(narrow[0].double(), wide[0], rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(narrow[1].double(), wide[1], rtol=1e-7, atol=1e-7)
