"""Test axolotl's plugin with stand-ins: tests/integration/test_axolotl.py runs axolotl where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel, ValidationError
from transformers import Trainer, TrainingArguments

import burst_portable as bp
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.trainer import SequenceTrainer
from tests.support import stand_in_axolotl as axolotl
from tests.support.models import make
from tests.support.trainer_cases import forget_accelerator, pad, rows

FILE = Path(bp.__file__).parent / "integrations" / "axolotl.py"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_with_axolotl.yaml"


def installed(folder: Path, version: str) -> str:
    """Write the description of an installed axolotl to a folder, and return the folder."""
    found = folder / f"axolotl-{version}.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Name: axolotl\nVersion: {version}\n", encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the integration, imported with stand-ins for axolotl."""
    spec = importlib.util.spec_from_file_location("axolotl_with_stand_ins", FILE)
    assert spec is not None
    assert spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(installed(tmp_path_factory.mktemp("site"), "0.19.0"))
        for name, stand_in in axolotl.modules().items():
            patch.setitem(sys.modules, name, stand_in)
        found = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, found)
        spec.loader.exec_module(found)
        yield found


def test_example_configures_ranks(module: Any) -> None:
    cfg = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    plugin = module.SequencePlugin()
    assert cfg["plugins"] == ["burst_portable.integrations.axolotl.SequencePlugin"]
    plugin.register(cfg)
    checked = module.SequenceArguments(sequence_parallelism=cfg["sequence_parallelism"])
    parallelism = plugin.get_training_args(checked.model_dump(exclude_none=True))["parallelism_config"]
    assert (parallelism.sequence_size, parallelism.cp_size) == (4, 1)
    assert plugin.get_training_args({})["parallelism_config"].sequence_size is None
    trainer = plugin.get_trainer_cls(cfg)
    assert issubclass(trainer, SequenceTrainer)
    assert issubclass(trainer, axolotl.AxolotlTrainer)
    assert trainer is plugin.get_trainer_cls(cfg)
    place, _, name = plugin.get_input_args().rpartition(".")
    assert issubclass(getattr(sys.modules[place], name), BaseModel)


def test_trainer_of_plugin_equals_trainer_of_axolotl(module: Any, tmp_path: Path) -> None:
    """On one process: losses, and tokens that two ranks of a sequence would count twice."""

    def losses(cls: type[Trainer], **options: Any) -> tuple[list[float], dict[str, Any]]:
        forget_accelerator()
        args = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            average_tokens_across_devices=False,  # as axolotl sets it
            logging_steps=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            **options,
        )
        torch.manual_seed(0)
        trainer: Any = cls(make("llama", torch.float32), args=args, train_dataset=rows(12), data_collator=pad)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.state.tokens

    plugin = module.SequencePlugin()
    options = plugin.get_training_args({})
    expected, tokens = losses(axolotl.AxolotlTrainer)
    found, counted = losses(plugin.get_trainer_cls({}), **options)
    assert found == pytest.approx(expected, rel=1e-6)
    assert counted == tokens

    class OfTwoRanks(plugin.get_trainer_cls({})):  # type: ignore[misc]
        _ranks = 2

    _, counted = losses(OfTwoRanks, **plugin.get_training_args({}))
    assert {name: 2 * x for name, x in counted.items()} == tokens


@pytest.mark.parametrize(("options", "groups"), [({"cp_size": 4}, 2), ({}, 1), (None, 1)], ids=["four", "all", "none"])
def test_plugin_counts_rows_of_a_step_once_per_sequence(module: Any, options: Any, groups: int) -> None:
    """axolotl computes the number of steps from batch_size, which counts the rows of 8 ranks."""
    cfg = {"micro_batch_size": 3, "gradient_accumulation_steps": 5, "world_size": 8, "batch_size": 3 * 5 * 8}
    cfg |= {"sequence_parallelism": options}
    for _ in range(2):
        assert module.SequencePlugin().load_datasets(cfg, preprocess=False) is None  # axolotl loads them itself
        assert cfg["batch_size"] == 3 * 5 * groups


def test_first_rank_of_a_sequence_counts_its_tokens(module: Any) -> None:
    """As axolotl 0.21 counts: tokens of each rank, whose sum over all ranks is logged."""

    class Counting(axolotl.AxolotlTrainer):
        def _accumulate_token_counts(self, inputs: dict[str, Any]) -> None:
            self.counted = (int((inputs["labels"] != -100).sum()), inputs["labels"].numel())

    class OfTwoRanks(module.sequence_trainer(Counting)):  # type: ignore[misc]
        _ranks = 2

    batch = {"input_ids": torch.ones(2, 5), "labels": torch.tensor([[-100, 1, 1, 1, 1], [-100, -100, 1, 1, 1]])}
    for process, expected in enumerate([(7, 10), (0, 0), (7, 10), (0, 0)]):
        trainer = object.__new__(OfTwoRanks)
        trainer.accelerator = SimpleNamespace(process_index=process)
        trainer._accumulate_token_counts(batch)
        assert trainer.counted == expected


@pytest.mark.parametrize("name", ["context_parallel_size", "tensor_parallel_size", "dp_shard_size"])
def test_plugin_rejects_parallelism_of_axolotl(module: Any, name: str) -> None:
    plugin = module.SequencePlugin()
    plugin.register({name: 1})
    for call in (plugin.register, plugin.get_training_args, plugin.get_trainer_cls):
        with pytest.raises(UnsupportedError, match=rf"axolotl's own parallelism.* got {name}: 2; leave it out"):
            call({name: 2})


@pytest.mark.parametrize("entry", [{"rl": "dpo"}, {"reward_model": True}, {"trainer_cls": "a.B"}, {"deepspeed": "x"}])
def test_plugin_rejects_other_trainers(module: Any, entry: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"other trainers.* got {next(iter(entry))}: "):
        module.SequencePlugin().register(entry)


def test_plugin_rejects_unknown_options(module: Any) -> None:
    with pytest.raises(InputError, match="sequence_parallelism must have entries"):
        module.SequencePlugin().register({"sequence_parallelism": 8})
    with pytest.raises(ValidationError, match="cp_sise"):
        module.SequenceArguments(sequence_parallelism={"cp_sise": 8})


def test_plugin_rejects_other_versions(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, "0.22.0"))
    with pytest.raises(UnsupportedError, match=r"unsupported version of axolotl; got 0\.22\.0; allowed: >=0\.19"):
        module.SequencePlugin().register({})
