"""Test sequence parallelism within torch's data parallelism. Four processes are started once for all cases."""

from __future__ import annotations

import json
import pydoc_data.topics
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from tests.support.fork_server import run_program
from tests.support.trainer_cases import FULL, USUAL, accelerate_loop, drawn_numbers, results, resumed_alone

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_with_trainer.py"
FSDP_EXAMPLE = ROOT / "examples" / "train_hugging_face_with_fsdp.py"
RANKS = 4


def run_ranks(module: str, folder: Path, *case: str) -> None:
    done = run_program(f"tests.support.{module}", folder, *case, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of each rank."""
    made = tmp_path_factory.mktemp("data_parallel")
    run_ranks("data_parallel_ranks", made)
    return made


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    """Return the results of each rank, by case."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning"),  # PEFT reads it
]


@pytest.mark.parametrize(
    "case",
    [
        "ddp_gradients",
        "fsdp_gradients",
        "fsdp_accumulated_gradients",
        "fsdp_over_data_gradients",
        "fsdp_of_accelerate_gradients",
    ],
)
def test_data_parallel_gradients_equal_one_device(case: str, answers: list[dict[str, Any]]):
    assert max(found[case] for found in answers) < 1e-7


@pytest.mark.parametrize(("case", "batch", "held_out"), [("one_sequence", 3, 11), ("two_sequences", 6, 12)])
def test_trainer_losses_equal_one_device(case: str, batch: int, held_out: int, answers: list[dict[str, Any]]):
    """Three steps of two batches, and an evaluation with a smaller last batch."""
    alone = runpy.run_path(str(EXAMPLE))["train"](None, batch=batch, held_out=held_out)
    assert len(alone) == 4
    for found in answers:
        assert found[case] == pytest.approx(alone, rel=2e-6)


def assert_same(folder: Path, name: str, options: dict[str, Any]) -> None:
    """Check that every rank has the results of Transformers' Trainer on one device."""
    expected = results(folder / "alone" / name, alone=True, **options)
    for rank in range(options.get("ranks", RANKS)):
        found = torch.load(folder / f"{name} {rank}.pt")
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(found["loaded"], found["resumed"], rtol=0, atol=0)


@pytest.mark.parametrize("name", USUAL)
def test_trainer_equals_one_device(name: str, folder: Path) -> None:
    """Train, accumulate, evaluate, predict, save, resume and load."""
    assert_same(folder, name, USUAL[name])


def test_checkpoint_of_ranks_resumes_on_one_device(folder: Path) -> None:
    found = torch.load(folder / "two sequences 0.pt")["weights"]
    resumed = resumed_alone(folder / "two sequences", batch=4, held_out=12)
    torch.testing.assert_close(resumed, found, rtol=2e-5, atol=2e-6)


def test_ranks_of_sequence_restore_equal_generators(answers: list[dict[str, Any]]) -> None:
    """A checkpoint of fewer ranks has no state for some: rank 1 went on with its own, and drew other dropout."""
    expected = []
    for sequence in range(2):
        set_seed(100 + sequence)
        expected += 2 * [drawn_numbers()]
    assert [found["restored draws"] for found in answers] == expected


def test_loop_of_accelerate_equals_one_device(folder: Path) -> None:
    expected = accelerate_loop(None)
    for rank in range(RANKS):
        found = torch.load(folder / f"accelerate {rank}.pt")
        theirs = found.pop("as of accelerate")
        assert found.pop("row names") == expected["row names"]
        torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=2e-5, atol=2e-6)
        assert len(expected["row losses"]) == 7
        # The rows that a user of accelerate's own function would count.
        assert len(theirs) == 3 * 2 * RANKS + 1
        assert abs(theirs.mean() / expected["row losses"].mean() - 1) > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_trainer_with_options_equals_one_device(name: str, tmp_path: Path) -> None:
    run_ranks("trainer_ranks", tmp_path, name)
    assert_same(tmp_path, name, FULL[name])


def test_fsdp_example_equals_one_device_on_any_number_of_ranks(tmp_path: Path):
    """One device has the model's own loss. With chunks of 100 rows, the last one of each rank is shorter."""

    def losses(ranks: int) -> list[float]:
        options = ["--loss-rows", "100", "--save", tmp_path / str(ranks)]
        done = run_program("tests.support.ranks_of", ranks, "examples.train_hugging_face_with_fsdp", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return [float(loss) for loss in done.stdout.split()[1:]]

    model, expected = fsdp_example_on_one_device()
    assert expected[-1] < expected[0] - 0.2
    ids = torch.arange(200).unsqueeze(0)
    trained = model(input_ids=ids, labels=ids).loss.item()
    for ranks in (1, 2):
        assert losses(ranks) == pytest.approx(expected, rel=1e-5)
        saved = LlamaForCausalLM.from_pretrained(tmp_path / str(ranks))
        assert saved(input_ids=ids, labels=ids).loss.item() == pytest.approx(trained, rel=1e-5)


def fsdp_example_on_one_device() -> tuple[LlamaForCausalLM, list[float]]:
    """Return the model and the losses of the example's steps with transformers alone."""
    tokens = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()[: 3 * 509]))
    model = runpy.run_path(str(FSDP_EXAMPLE))["load"](None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for input_ids in tokens.view(3, 1, 509):
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def test_fsdp_example_checks_lengths_before_loading(tmp_path: Path):
    """The folder has a config and no tokenizer or weights, so reading them would fail."""
    LlamaConfig(max_position_embeddings=64).save_pretrained(tmp_path)
    read_tokens = runpy.run_path(str(FSDP_EXAMPLE))["read_tokens"]
    with pytest.raises(SystemExit, match=r"--seq-len is 65, but max_position_embeddings is 64; edit .*config\.json"):
        read_tokens(str(tmp_path), "text", 65, 1)
    with pytest.raises(SystemExit, match="the text has 10 tokens; 2 steps of 6 need 12"):
        read_tokens(None, "0123456789", 6, 2)
    assert read_tokens(None, "0123456789", 5, 2).tolist() == list(b"0123456789")
