"""Test batches of collators, and errors of SequenceTrainer. tests/integration/test_data_parallel.py tests losses."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, LlamaForSequenceClassification, Trainer, TrainingArguments

from burst_portable import Mesh, run_threads
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.compute_loss import warn_about_counts
from burst_portable.integrations.trainer import SequenceTrainer
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.batches.packed_rows import documents_of
from tests.support.models import make
from tests.support.trainer_cases import (
    OlderSequenceTrainer,
    OlderTrainer,
    forget_accelerator,
    model_of,
    pad,
    predicted_labels,
    rows,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_trainer.py"
EXAMPLES = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (9, 4, 12)]


def test_shard_turns_position_ids_of_collator_into_documents():
    batch = DataCollatorWithFlattening()(EXAMPLES)

    def work(mesh: Mesh) -> dict[str, Any]:
        return parallelize(make("llama"), mesh).shard(batch)

    whole, *parts = (shard for ranks in (1, 3) for shard in run_threads(ranks, work))
    assert whole["cu_seqlens"] == (0, 9, 13, 25)
    held = [(part["shift_labels"] != -100).sum() for part in (whole, *parts)]
    assert held[0] == 25 - 3 == sum(held[1:])
    assert sum(part["input_ids"].shape[1] for part in parts) == 25


@pytest.mark.parametrize("examples", [EXAMPLES, EXAMPLES[:1]], ids=["three", "one"])
def test_flash_attention_kwargs_of_collator_change_nothing(examples: list[dict[str, Any]]):
    """These arguments repeat the documents, which position ids already describe."""
    named = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"} < set(named(examples))

    def work(mesh: Mesh) -> tuple[dict[str, Any], ...]:
        sharded = parallelize(make("llama"), mesh)
        return tuple(sharded.shard(collator(examples)) for collator in (named, DataCollatorWithFlattening()))

    for found, expected in run_threads(2, work):
        del found["attention_mask"], expected["attention_mask"]  # no tensors
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("batch", "error", "told"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, InputError, "labels on padding"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, UnsupportedError, "padding before a token"),
        ({"pixel_values": torch.zeros(1, 3)}, InputError, "pixel_values"),
        (
            {"position_ids": torch.tensor([[0, 2, 1]])},
            UnsupportedError,
            r"count up.*got 2 at token 1 of row 0.*leave out position_ids",
        ),
        ({"position_ids": torch.tensor([[1, 2, 3]])}, UnsupportedError, "count up"),
        (
            {"position_ids": torch.zeros(3, 1, 3, dtype=torch.int64)},
            UnsupportedError,
            r"\[batch, tokens\]; got \(3, 1, 3",
        ),
        ({"position_ids": [0, 1, 2]}, UnsupportedError, r"\[batch, tokens\]; got list"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 3])}, InputError, r"cu_seq_lens_q and position_ids .*\[0, 3\]"),
        ({"max_length_k": 2}, InputError, "max_length_k and position_ids .*got 2; allowed: 3"),
        ({"seq_idx": torch.tensor([[0, 0, 1]])}, InputError, "seq_idx and position_ids"),
        ({"cu_seqlens": (0, 2, 3)}, InputError, "cu_seqlens and position_ids"),
    ],
)
def test_shard_rejects_invalid_batches(batch: dict[str, Any], error: type[Exception], told: str):
    ids = torch.tensor([[5, 6, 7]])
    sharded = parallelize(make("llama"), Mesh.single())
    assert sharded.shard({"input_ids": ids, "labels": ids})["labels"].tolist() == [[6, 7, -100]]
    with pytest.raises(error, match=told):
        sharded.shard({"input_ids": ids, "labels": ids, "position_ids": torch.arange(3)[None]} | batch)


def test_documents_of_reads_position_ids():
    assert documents_of(torch.arange(5).unsqueeze(0)) == ((0, 5),)
    assert documents_of(torch.tensor([[0, 1, 0, 0, 1, 2]])) == ((0, 2, 3, 6),)
    packed = torch.tensor([[0, 1, 0]])
    with torch.device("meta"):  # any default device
        assert documents_of(packed) == ((0, 2, 3),)
    rows = torch.tensor([[0, 1, 0], [0, 1, 2]])
    assert documents_of(rows) == ((0, 2, 3), (0, 3))
    assert documents_of(rows[1:].expand(2, 3)) == ((0, 3),)


def arguments(folder: Path, parallelism: Any = None, **settings: Any) -> TrainingArguments:
    forget_accelerator()
    usual = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2}
    return TrainingArguments(str(folder), parallelism_config=parallelism, **usual, **settings)


def test_trainer_rejects_unsupported_settings(tmp_path: Path):
    def trainer(parallelism: Any = None, model: Any = None, **settings: Any) -> SequenceTrainer:
        return SequenceTrainer(model or make("llama"), arguments(tmp_path, parallelism, **settings))

    with pytest.raises(
        InputError, match=r"no SequenceParallelism; got NoneType; TrainingArguments\(parallelism_config="
    ):
        trainer()
    with pytest.raises(InputError, match="got ParallelismConfig"):
        trainer(ParallelismConfig())
    with pytest.raises(InputError, match=r"number of processes.*cp_size=2, dp_replicate_size=1.*for 1 processes"):
        trainer(SequenceParallelism(cp_size=2))
    with pytest.raises(UnsupportedError, match="dispatch_batches"):
        trainer(SequenceParallelism(), accelerator_config={"dispatch_batches": True})
    several = arguments(tmp_path, SequenceParallelism())
    several._n_gpu = 2  # as on a machine with two GPUs
    with pytest.raises(InputError, match="DataParallel in one process; got 2 devices; start with torchrun"):
        SequenceTrainer(make("llama"), several)
    with pytest.raises(InputError, match="SequenceParallelism needs a model of Transformers; got Linear"):
        trainer(SequenceParallelism(), torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="cp_size must be positive; got 0"):
        SequenceParallelism(cp_size=0)


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        (DistributedType.NO, {}, "part of the processes; got 1; allowed: 2; without accelerators, pass use_cpu=True"),
        (DistributedType.DEEPSPEED, {}, "needs DDP or FSDP2; got DEEPSPEED"),
        (DistributedType.FSDP, {}, "needs DDP or FSDP2; got FSDP version 1"),
        (DistributedType.MULTI_GPU, {"tp_size": 2}, "another model parallelism; got tp_size=2"),
    ],
)
def test_configuration_rejects_accelerators(kind: DistributedType, sizes: dict[str, int], words: str):
    config = SequenceParallelism(cp_size=2)
    for name, value in sizes.items():
        setattr(config, name, value)  # as Trainer does for a model that was loaded with tensor parallelism
    accelerator: Any = SimpleNamespace(distributed_type=kind, num_processes=1, is_fsdp2=False)
    with pytest.raises((InputError, UnsupportedError), match=words):
        config._validate_accelerator(accelerator)


def test_second_accelerator_needs_its_own_model():
    """A plain Trainer makes one, and would gather the outputs of a row from each rank of the sequence."""
    config = SequenceParallelism(cp_size=2)
    config.device_mesh, config.has_model = object(), True  # after `parallelize` for another accelerator
    assert not config.cp_enabled
    accelerator = Mock(distributed_type=DistributedType.MULTI_CPU, num_processes=2)
    config._validate_accelerator(accelerator)
    with pytest.raises(InputError, match="no model is sharded by this SequenceParallelism; use SequenceTrainer"):
        _ = config.cp_enabled


def test_trainer_rejects_other_trainers_of_trl_by_name():
    """Their samplers and groups of completions count each rank as other rows."""
    of_trl = type("RLOOTrainer", (Trainer,), {"__module__": "trl.trainer.rloo_trainer"})
    derived = type("Mine", (SequenceTrainer, of_trl), {})
    with pytest.raises(UnsupportedError, match=r"TRL .*got RLOOTrainer; allowed: SFTTrainer"):
        derived()


def test_trainer_rejects_losses_behind_it_by_order():
    """It divides the loss of Trainer by the ranks, and would also divide a mean that is right already."""

    class Their(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            return (torch.tensor(3.0), None) if return_outputs else torch.tensor(3.0)

    def loss(*bases: type[Any]) -> float:
        trainer = (derived := type("Mine", bases, {})).__new__(derived)
        trainer.args = SimpleNamespace(average_tokens_across_devices=True)
        ranks = SimpleNamespace(non_data_parallel_size=2)
        trainer.accelerator = SimpleNamespace(parallelism_config=ranks)
        assert trainer.compute_loss(None, {}, True, num_items_in_batch=8)[0] == trainer.compute_loss(
            None, {}, num_items_in_batch=8
        )
        return trainer.compute_loss(None, {}, num_items_in_batch=8).item()

    assert loss(Their, SequenceTrainer) == 3
    assert loss(SequenceTrainer, Their) == 1.5
    with pytest.raises(UnsupportedError, match=r"got Their.compute_loss in Mine; .*Mine\(Their, SequenceTrainer\)"):
        type("Mine", (SequenceTrainer, Their), {})()
    known = type("Mine", (SequenceTrainer, Their), {"known_losses": (Their,)})
    for allowed in (known, type("Mine", (Their, SequenceTrainer), {})):
        with pytest.raises(TypeError, match="unknown"):  # of Trainer, after the check of the order
            allowed(unknown=0)


class Divides:
    def compute_loss(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return model(**inputs).logits.sum() / num_items_in_batch


class Multiplies:
    def compute_loss(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return model(**inputs).logits.sum() / num_items_in_batch * self.accelerator.num_processes


class Passes:
    def compute_loss(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        parent: Any = super()
        return parent.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


class Ignores:
    def compute_loss(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return model(**inputs).logits.mean()


@pytest.mark.parametrize("base", [Divides, Multiplies, Passes, Ignores])
def test_loss_divided_by_the_count_of_processes_warns(base: type[Any], recwarn: pytest.WarningsRecorder):
    """On two ranks of one sequence, gradients of `Divides` were half of those of one device, without a word."""
    warn_about_counts(type("Mine", (base, SequenceTrainer), {}), SequenceTrainer, 2)
    found = [str(warning.message) for warning in recwarn]
    assert len(found) == (base is Divides)
    if found:
        assert "got Divides.compute_loss" in found[0]
        assert "return loss * self.accelerator.num_processes" in found[0]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT reads it
def test_trainer_shards_base_model_of_classifier(tmp_path: Path):
    """Its head gets the states of all tokens. Adapters are known to the outer model, so they are checked first."""
    model = LlamaForSequenceClassification(make("llama").config)
    trainer = SequenceTrainer(model, arguments(tmp_path, SequenceParallelism()))
    assert trainer.sharded is not None
    assert trainer.sharded.model is model.model
    lily = peft.get_peft_model(model, peft.LilyConfig(task_type="SEQ_CLS", target_modules=["q_proj"], r=4))
    trainer.accelerator.parallelism_config.sequence_size = 2
    with pytest.raises(UnsupportedError, match="averages its router"):
        trainer._shard_model(lily)


def test_trainer_rejects_noise_that_depends_on_the_length(tmp_path: Path):
    trainer = SequenceTrainer(make("llama"), arguments(tmp_path, SequenceParallelism(), neftune_noise_alpha=5.0))
    trainer.accelerator.parallelism_config.sequence_size = 2
    with pytest.raises(UnsupportedError, match="NEFTune"):
        trainer._shard_model(make("llama"))


def test_trainer_rejects_configuration_of_an_earlier_accelerator(tmp_path: Path):
    """Accelerate keeps the first one of a process."""
    kept, later = [arguments(tmp_path, SequenceParallelism(strategy=name)) for name in ("ring", "ulysses")]
    trainer = SequenceTrainer(make("llama"), kept)
    assert trainer.sharded is not None
    assert trainer.sharded.strategy == "ring"
    with pytest.raises(InputError, match="another parallelism_config"):
        SequenceTrainer(make("llama"), later)


def test_second_trainer_takes_the_model_of_the_first(tmp_path: Path):
    """As in fine-tuning by stages. A model that was parallelized otherwise raises an error."""
    model = make("llama")
    first = SequenceTrainer(model, arguments(tmp_path, SequenceParallelism(strategy="ring")))
    second = SequenceTrainer(model, arguments(tmp_path, SequenceParallelism(strategy="burst")))
    assert first.sharded is not None
    assert second.sharded is not None
    assert "undone" in repr(first.sharded)
    assert second.sharded.strategy == "burst"
    second.sharded.undo()
    parallelize(model, Mesh.single())
    with pytest.raises(InputError, match="parallelized already"):
        SequenceTrainer(model, arguments(tmp_path, SequenceParallelism()))


def test_trainer_shards_models_of_model_init(tmp_path: Path):
    """Trainer makes a model at the beginning, and another one for each call of train()."""
    made = []

    def model_init() -> Any:
        made.append(make("llama", torch.float32))
        return made[-1]

    data = {"data_collator": pad, "train_dataset": rows(4)}
    trainer = SequenceTrainer(args=arguments(tmp_path, SequenceParallelism()), model_init=model_init, **data)
    trainer.train()
    assert len(made) == 2
    assert trainer.sharded is not None
    assert trainer.sharded.model is trainer.model is made[-1]


def test_trainer_reads_datasets_without_a_length_on_each_rank(tmp_path: Path):
    """Accelerate's dispatcher, its default for these, would send the ranks of a sequence different rows."""

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(rows(4))

    trainer = SequenceTrainer(make("llama"), arguments(tmp_path, SequenceParallelism()), train_dataset=Stream())
    assert type(trainer.get_train_dataloader()).__name__ == "DataLoaderShard"


@pytest.mark.filterwarnings("error:the last batch of a dataset without a length")  # for several sequences only
def test_trainer_weights_last_batch_of_dataset_without_a_length(tmp_path: Path):
    """Accelerate does not know how many rows the last batch has, and would count its loss as that of a full batch."""

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(rows(7))

    model, found = make("llama", torch.float32), []
    for trainer_class, parallelism in ((Trainer, None), (SequenceTrainer, SequenceParallelism())):
        given = arguments(tmp_path, parallelism, per_device_eval_batch_size=3)
        trainer = trainer_class(model, given, data_collator=pad, compute_metrics=predicted_labels)
        found.append([trainer.evaluate(Stream())[f"eval_{name}"] for name in ("loss", "labels", "logit")])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    with torch.no_grad():
        losses = [float(model(**pad(rows(7)[start : start + 3])).loss) for start in (0, 3, 6)]
    of_rows = (3 * losses[0] + 3 * losses[1] + losses[2]) / 7
    assert found[1][0] == pytest.approx(of_rows, rel=1e-6)
    assert abs(sum(losses) / 3 - of_rows) > 1e-3  # the mean over batches is another number


def test_trainer_warns_of_repeated_rows_without_a_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = SequenceTrainer(make("llama"), arguments(tmp_path, SequenceParallelism()), eval_dataset=rows(4))
    evaluated = SimpleNamespace(num_samples=4)
    monkeypatch.setattr(Trainer, "evaluation_loop", lambda *_, **__: evaluated)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.warns(UserWarning, match="without a length repeats rows.*got 2 sequences .*a multiple of 16"):
        assert trainer.evaluation_loop(iter(()), "evaluation") is evaluated


def test_parallelize_without_accelerator_names_it(monkeypatch: pytest.MonkeyPatch):
    """Before `Accelerator`, there is no process group either: its error would name the wrong step."""
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does
    with pytest.raises(InputError, match=r"no accelerator has this .*create Accelerator\(parallelism_config=\.\.\.\)"):
        SequenceParallelism().parallelize(make("llama"))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT reads it
def test_accelerate_takes_models_of_peft():
    forget_accelerator()
    Accelerator(cpu=True, parallelism_config=(parallelism := SequenceParallelism()))
    model = model_of("lora")
    sharded = parallelism.parallelize(model)
    assert sharded.model is model.get_base_model()
    assert parallelism.parallelize(model) is not sharded  # as of a second trainer
    with pytest.raises(InputError, match=r"got PeftModelForCausalLM; .* of PEFT, pass model.get_base_model\(\)"):
        parallelize(model)


@pytest.mark.parametrize("case", ["loader", "one sequence", "split_batches", "not prepared", "no gradients"])
def test_prepared_scheduler_warns(case: str, recwarn: pytest.WarningsRecorder):
    """Ten steps of a schedule that is as long as the loader take five optimizer steps on two processes."""
    forget_accelerator()
    loading = DataLoaderConfiguration(split_batches=case == "split_batches")
    parallelism, model = SequenceParallelism(), make("llama", torch.float32)
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism, dataloader_config=loading)
    parallelism.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters())
    prepared = [model, optimizer]
    if case != "not prepared":
        prepared.append(torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10))
    model, *_ = accelerator.prepare(*prepared)
    if case != "one sequence":
        parallelism.sequence_size = 2  # as on two processes
    with torch.set_grad_enabled(case != "no gradients"):
        for _ in range(2):
            model(**pad(rows(2)))
    found = [str(warning.message) for warning in recwarn if "scheduler" in str(warning.message)]
    if case == "loader":
        assert len(found) == 1
        assert "got 2 steps per optimizer step, and 1 data-parallel ranks; allowed: a schedule with 2 times" in found[0]
    else:
        assert not found


@pytest.mark.parametrize("trainer_class", [SequenceTrainer, OlderSequenceTrainer])
def test_labels_are_counted_exactly_in_each_version(trainer_class: type[Trainer], tmp_path: Path):
    """Before 5.19, Trainer divides the count by the ranks of a sequence, which `compute_loss` would do again."""
    trainer = trainer_class(make("llama"), arguments(tmp_path, SequenceParallelism()))
    trainer.accelerator.parallelism_config.sequence_size = 2
    batches, device = [pad(rows(1)), pad(rows(2))], torch.device("cpu")
    labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    assert labels % 2 == 1
    assert trainer._get_num_items_in_batch(batches, device) == labels
    assert trainer.accelerator.parallelism_config.non_data_parallel_size == 2
    if trainer_class is OlderSequenceTrainer:  # without the method of SequenceTrainer
        assert OlderTrainer._get_num_items_in_batch(trainer, batches, device) == labels // 2


def test_trainer_on_one_process_equals_plain_trainer():
    train = runpy.run_path(str(EXAMPLE))["train"]
    forget_accelerator()
    alone = train(None)
    forget_accelerator()
    assert train(SequenceParallelism()) == pytest.approx(alone, rel=2e-6)


@pytest.mark.parametrize("counted", [7, 6])
def test_predictions_contain_router_logits_of_all_tokens(counted: int, tmp_path: Path):
    """The last batch has one row or two. Router logits have a row per token, of which none is left out."""

    def predicted(trainer: Any, parallelism: Any) -> Any:
        model = make("mixtral", output_router_logits=True)
        args = arguments(tmp_path, parallelism, per_device_eval_batch_size=2)
        return trainer(model, args, data_collator=pad, eval_dataset=rows(counted)).predict(rows(counted))

    expected, found = predicted(Trainer, None), predicted(SequenceTrainer, SequenceParallelism())
    aux, logits, routed = found.predictions
    assert (aux.shape, logits.shape) == tuple(x.shape for x in expected.predictions[:2])
    assert [x.shape for x in routed] == [x.shape for x in expected.predictions[2]]
    assert routed[0].shape[1] == 4
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)


def test_trainer_rejects_batch_rebalance_of_all_ranks(tmp_path: Path):
    def trainer_of(ranks: int) -> SequenceTrainer:
        parallelism = SequenceParallelism()
        args = arguments(tmp_path, parallelism, train_sampling_strategy="batch_rebalance")
        trainer = SequenceTrainer(make("llama"), args, data_collator=pad, train_dataset=rows(8))
        parallelism.sequence_size = ranks
        return trainer

    trainer_of(1).get_train_dataloader()
    with pytest.raises(UnsupportedError, match="batch_rebalance divides rows among all ranks"):
        trainer_of(2).get_train_dataloader()
