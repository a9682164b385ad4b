"""Test rows that own loops of accelerate gather. tests/integration/test_data_parallel.py gathers them on ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from burst_portable.errors import InputError
from burst_portable.integrations import gathering
from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.gathering import gather_rows
from tests.support.models import make
from tests.support.trainer_cases import forget_accelerator, pad, rows

ROWS = torch.tensor([[10, 11], [10, 11], [20, 21], [20, 21]])  # of four processes, of which two share a sequence


def accelerator_of(remainder: int, *, is_end: bool) -> Any:
    state = SimpleNamespace(end_of_dataloader=is_end, remainder=remainder)
    # Process 0 has the first row of `ROWS`, or the first of other tensors.
    return SimpleNamespace(
        num_processes=4,
        gradient_state=state,
        gather=lambda x: ROWS.flatten() if x.dim() else ROWS[:, 0],
    )


@pytest.mark.parametrize(
    ("remainder", "is_end", "batch_rows", "expected"),
    [
        (3, False, None, [10, 11, 20, 21]),
        (0, True, None, [10, 11, 20, 21]),
        (3, True, None, [10, 11, 20]),  # the last row repeats one of the first, to fill the batch
        (-1, True, None, [10, 11, 20, 21]),  # without a length, as accelerate
        (-1, True, 1, [10, 11]),
    ],
)
def test_gather_rows_returns_rows_of_two_sequences_once(
    remainder: int, is_end: bool, batch_rows: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = accelerator_of(remainder, is_end=is_end)
    given = {"nested": (ROWS[0],)}
    assert gather_rows(accelerator, given, 2, batch_rows=batch_rows)["nested"][0].tolist() == expected
    monkeypatch.setattr(gathering, "gather_object", lambda parts: [row.tolist() for row in ROWS])
    assert gather_rows(accelerator, ["any object"], 2, batch_rows=batch_rows) == expected
    assert gather_rows(accelerator, ROWS[0, 0], 2).tolist() == [10, 20]  # a number of each sequence


def test_gather_rows_of_one_sequence_cuts_nothing_off() -> None:
    """Every process has all rows. The remainder counts those of one rank, of which accelerate gathers four times."""
    accelerator = accelerator_of(1, is_end=True)
    assert gather_rows(accelerator, (ROWS[0, :1],), 4)[0].tolist() == [10]
    assert gather_rows(accelerator, ["a"], 4) == ["a"]
    of_tokens, losses = torch.zeros(6, 2), torch.zeros(2)  # of one row; of a full batch, as Trainer repeats them
    found = gather_rows(accelerator, (of_tokens, losses), 4, batch_rows=1)
    assert [len(x) for x in found] == [6, 1]


def test_gather_for_metrics_needs_an_accelerator() -> None:
    with pytest.raises(InputError, match=r"no accelerator has this .*create Accelerator\(parallelism_config"):
        SequenceParallelism().gather_for_metrics(torch.zeros(2))


@pytest.mark.parametrize("case", ["own loop", "short loop", "gathered", "no loader", "training", "one rank"])
def test_evaluation_that_gathers_ranks_warns(case: str, recwarn: pytest.WarningsRecorder) -> None:
    """accelerate's own function returns each row once per rank. Its use is not visible, so calls of the model are."""
    forget_accelerator()
    parallelism, model = SequenceParallelism(), make("llama", torch.float32)
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism)
    parallelism.parallelize(model)
    count = 3 if case == "short loop" else 8  # of "short loop", only the last batch is evaluated
    loader = accelerator.prepare(DataLoader(rows(count), batch_size=4, collate_fn=pad))  # type: ignore[arg-type]
    if case != "one rank":
        parallelism.sequence_size = 2  # as on two processes
    with torch.set_grad_enabled(case == "training"):
        for batch in (pad(rows(2)), pad(rows(2))) if case == "no loader" else loader:
            loss = model(**batch).loss
            if case == "gathered":
                parallelism.sequence_size = 1  # there is no process to gather from
                assert parallelism.gather_for_metrics(loss).dim() == 0
                parallelism.sequence_size = 2
    found = [str(warning.message) for warning in recwarn if "gather_for_metrics" in str(warning.message)]
    assert len(found) == (case in ("own loop", "short loop"))
    if found:
        assert "call accelerator.parallelism_config.gather_for_metrics" in found[0]
