"""Test batches of a text: the first sequence follows the last one."""

from __future__ import annotations

import torch

from burst_portable.cli.run.texts import batches


def test_batches_repeat_text_at_its_end():
    made = batches(torch.arange(10), 3, 2, 3)
    assert [x.tolist() for x in made] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [0, 1, 2]], [[3, 4, 5], [6, 7, 8]]]
