"""Test SequenceTrainer in one process: shards and errors. tests/integration/test_data_parallel.py tests its losses."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import ParallelismConfig
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments, default_data_collator

from burst_portable import Mesh, run_threads
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.parallel import documents_of
from burst_portable.integrations.transformers.trainer import SequenceTrainer, ShardingCollator
from tests.support.models import make

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_with_trainer.py"
EXAMPLES = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (9, 4, 12)]


def test_collator_shards_and_turns_examples_into_documents():
    def work(mesh: Mesh) -> dict[str, Any]:
        return ShardingCollator(parallelize(make("llama"), mesh), DataCollatorWithFlattening())(EXAMPLES)

    whole, *parts = (batch for ranks in (1, 3) for batch in run_threads(ranks, work))
    assert whole["cu_seqlens"] == (0, 9, 13, 25)
    assert "num_items_in_batch" not in whole  # the Trainer counts the items
    held = [(part["shift_labels"] != -100).sum() for part in (whole, *parts)]
    assert held[0] == 25 - 3 == sum(held[1:])
    assert sum(part["input_ids"].shape[1] for part in parts) == 25


@pytest.mark.parametrize("examples", [EXAMPLES, EXAMPLES[:1]], ids=["three", "one"])
def test_flash_attention_kwargs_of_collator_change_nothing(examples: list[dict[str, Any]]):
    """These arguments repeat the documents, which position ids already describe."""
    told = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"} < set(told(examples))

    def work(mesh: Mesh) -> tuple[dict[str, Any], ...]:
        handle = parallelize(make("llama"), mesh)
        return tuple(ShardingCollator(handle, collator)(examples) for collator in (told, DataCollatorWithFlattening()))

    for found, expected in run_threads(2, work):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("batch", "error", "told"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, InputError, "labels on padding"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, UnsupportedError, "padding before a token"),
        ({"pixel_values": torch.zeros(1, 3)}, InputError, "pixel_values"),
        ({"position_ids": torch.tensor([[0, 2, 1]])}, UnsupportedError, "count up"),
        ({"position_ids": torch.tensor([[1, 2, 3]])}, UnsupportedError, "count up"),
        ({"labels": None}, InputError, "no labels"),
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
def test_collator_rejects_invalid_batches(batch: dict[str, Any], error: type[Exception], told: str):
    ids = torch.tensor([[5, 6, 7]])
    collator = ShardingCollator(parallelize(make("llama"), Mesh.single()), dict)
    assert collator({"input_ids": ids, "labels": ids})["labels"].tolist() == [[6, 7, -100]]
    with pytest.raises(error, match=told):
        collator({"input_ids": ids, "labels": ids, "position_ids": torch.arange(3)[None]} | batch)


def test_documents_of_reads_position_ids():
    assert documents_of(torch.arange(5).unsqueeze(0)) == (0, 5)
    assert documents_of(torch.tensor([[0, 1, 0, 0, 1, 2]])) == (0, 2, 3, 6)
    packed = torch.tensor([[0, 1, 0]])
    with torch.device("meta"):  # any default device
        assert documents_of(packed) == (0, 2, 3)


def test_trainer_rejects_unsupported_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def trainer(mesh: Mesh | None = None, loss: Any = None, **settings: Any) -> SequenceTrainer:
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, **settings)
        handle = parallelize(make("llama", torch.float32), mesh or Mesh.single())
        mine = {"args": arguments, "data_collator": default_data_collator, "eval_dataset": EXAMPLES[:1]}
        return SequenceTrainer(handle, compute_loss_func=loss, **mine)

    with pytest.raises(InputError, match=r"got LlamaForCausalLM; SequenceTrainer\(parallelize\(model, mesh\)"):
        SequenceTrainer(make("llama"))
    with pytest.raises(InputError, match="average_tokens_across_devices"):
        trainer(average_tokens_across_devices=False)
    with pytest.raises(UnsupportedError, match="logits"):
        trainer().predict(EXAMPLES[:1])
    # With labels that are already shifted, these once computed another loss without an error.
    with pytest.raises(
        UnsupportedError, match=r"shifts its labels itself.*label_smoothing_factor.*override compute_loss"
    ):
        trainer(label_smoothing_factor=0.1)
    with pytest.raises(UnsupportedError, match="compute_loss_func"):
        trainer(loss=lambda outputs, labels, num_items_in_batch: outputs.logits.sum())
    for name in ("cp_size", "sp_size"):
        with pytest.raises(UnsupportedError, match=f"shard the sequence a second time.*{name}=2.*remove {name}"):
            trainer(parallelism_config=ParallelismConfig(**{name: 2}))
    trainer(neftune_noise_alpha=5.0)
    noisy = Mesh(0, 2, lambda device_type: pytest.fail("nothing is sent"))
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match="NEFTune"):
        trainer(noisy, neftune_noise_alpha=5.0)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT reads it
def test_trainer_saves_adapters_of_peft(tmp_path: Path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1)
    handle = parallelize(make("llama", torch.float32), Mesh.single())
    adapted = peft.get_peft_model(handle.model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    usual = {"args": arguments, "data_collator": default_data_collator, "train_dataset": EXAMPLES[:1]}
    with pytest.raises(InputError, match=r"adapters of PEFT.*SequenceTrainer\(sharded, model=peft_model"):
        SequenceTrainer(handle, **usual)
    with pytest.raises(InputError, match="does not contain the parallelized model; got LlamaForCausalLM"):
        SequenceTrainer(handle, model=make("llama"), **usual)
    trainer = SequenceTrainer(handle, model=adapted, **usual)
    trainer.train()
    trainer.save_model()
    saved = peft.PeftModel.from_pretrained(make("llama", torch.float32), tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    weights = [dict(one.named_parameters()) for one in (adapted, saved)]
    torch.testing.assert_close(weights[1], {name: weights[0][name] for name in weights[1]}, rtol=0, atol=0)
    assert any("lora_B" in name and x.abs().max() > 0 for name, x in weights[1].items())


def test_trainer_on_one_process_equals_plain_trainer():
    train = runpy.run_path(str(EXAMPLE))["train"]
    assert train(mesh=Mesh.single()) == pytest.approx(train(Trainer), rel=2e-6)
