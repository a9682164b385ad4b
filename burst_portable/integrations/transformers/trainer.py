"""Transformers' `Trainer` for a model whose sequence is sharded over ranks.

Three hooks of Trainer are used. The data collator shards each batch; Trainer, which counts the labels of all processes
and averages over them, then computes one device's loss and gradients. The data loaders give the ranks of one sequence
the same examples. The evaluation step returns the loss of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor, nn
from transformers import Trainer

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.parallel import ShardedModel


class ShardingCollator:
    """Shards the batch of another collator: this rank's tokens, with labels shifted before sharding.

    Position ids that restart at 0 are packed documents, as `DataCollatorWithFlattening` makes them. Padding must be at
    the end of rows.
    """

    def __init__(self, sharded: ShardedModel, collator: Any) -> None:
        self.sharded, self.collator = sharded, collator

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        batch = dict(self.collator(examples))
        if batch.get("labels") is None:
            raise InputError("the collator returns no labels; use DataCollatorForLanguageModeling(mlm=False)")
        inputs = self.sharded.shard(batch)
        del inputs["num_items_in_batch"]  # Trainer counts over all ranks and all batches of a step
        return {name: x for name, x in inputs.items() if x is not None}


class SequenceTrainer(Trainer):  # type: ignore[misc]  # transformers' names are Any, see pyproject.toml
    """`Trainer` for ranks that share sequences.

    Args:
        sharded: The result of `parallelize`. Ranks of its mesh share one sequence. If there are more processes, each
            group of ranks gets different examples.
        model: The model to train, which contains the parallelized one. Pass PEFT's model here, so that checkpoints
            contain adapters. Default: the parallelized model.
        arguments: Further arguments of `Trainer`.

    Raises:
        InputError: If `sharded` is a model, or `model` does not contain its model. If the number of processes is
            not a multiple of the mesh's ranks, or average_tokens_across_devices is off.
        UnsupportedError: For a dataset without a length, metrics of logits, a loss other than the model's, NEFTune, or
            a parallelism_config that shards the sequence.
    """

    def __init__(self, sharded: ShardedModel, *, model: nn.Module | None = None, **arguments: Any) -> None:
        if not isinstance(sharded, ShardedModel):
            next_step = "SequenceTrainer(parallelize(model, mesh), args=...)"
            raise InputError(
                "the first argument must be the result of parallelize", got=type(sharded).__name__, next_step=next_step
            )
        _check_parallelism(arguments.get("args"))
        super().__init__(model=_model_to_train(sharded, model), **arguments)
        ranks, processes = sharded.mesh.size, self.args.world_size
        if processes % ranks or (ranks > 1 and processes != dist.get_world_size()):
            raise InputError("Trainer has a wrong number of processes", got=processes, allowed=f"a multiple of {ranks}")
        if not self.args.average_tokens_across_devices:
            raise InputError(
                "the loss must be divided by the tokens of all ranks; set average_tokens_across_devices=True"
            )
        self.sharded = sharded
        self._check_loss()
        self.data_collator: Any = ShardingCollator(sharded, self.data_collator)
        self._sequences, self._sequence = _count_sequences(sharded)

    def _check_loss(self) -> None:
        """Raise `UnsupportedError` for losses that shift labels again and noise that depends on the length of a row."""
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise UnsupportedError(
                "a loss that shifts its labels itself; those of a shard are already shifted",
                got="compute_loss_func" if self.compute_loss_func else "label_smoothing_factor",
                allowed="the model's own loss",
                next_step="override compute_loss, and use inputs['shift_labels'] (see docs/hugging_face.md)",
            )
        if self.neftune_noise_alpha is not None and self.sharded.mesh.size > 1:
            raise UnsupportedError(
                "NEFTune scales its noise by the tokens of a row, and a shard has fewer",
                got=f"neftune_noise_alpha={self.neftune_noise_alpha}",
                next_step="remove it",
            )

    def get_train_dataloader(self) -> Any:
        return self._share_examples(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._share_examples(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._share_examples(super().get_test_dataloader(test_dataset))

    def _share_examples(self, loader: Any) -> Any:
        if self.args.world_size == 1:
            return loader
        sampler = loader.batch_sampler
        if not isinstance(sampler, BatchSamplerShard):
            raise UnsupportedError(
                "a dataset without a length and dispatch_batches are not supported: every rank would get other examples"
            )
        sampler.num_processes, sampler.process_index = self._sequences, self._sequence
        if self._sequences == 1:
            sampler.even_batches = False  # as on one device: the last batch is not filled up
        return loader

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        self.gather_function = self._repeat_loss
        return super().evaluation_loop(*arguments, **named)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        """Return the loss of all ranks, equal on each."""
        if not prediction_loss_only:
            raise UnsupportedError("each rank has only a part of the logits; evaluate with prediction_loss_only=True")
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        return self.accelerator.reduce(loss, "mean"), None, None

    def _repeat_loss(self, losses: Tensor) -> Tensor:
        """Return a batch's loss once per example, instead of gathering. The last batch may be smaller."""
        every, state = losses.repeat(self._sequences), self.accelerator.gradient_state
        return every[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else every


def _model_to_train(sharded: ShardedModel, given: nn.Module | None) -> nn.Module:
    """Return the model of Trainer. Raise `InputError` if it is not that of `sharded`, or if PEFT's is missing."""
    model: nn.Module = sharded.model if given is None else given
    if sharded.model not in list(model.modules()):
        raise InputError("model does not contain the parallelized model", got=type(model).__name__)
    if given is None and any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise InputError(
            "the model has adapters of PEFT, and checkpoints would contain all of its weights under other names",
            next_step="SequenceTrainer(sharded, model=peft_model, args=...)",
        )
    return model


def _check_parallelism(arguments: Any) -> None:
    """Raise `UnsupportedError` if `TrainingArguments` shard the sequence too."""
    config = getattr(arguments, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        if config is not None and getattr(config, name, 1) > 1:
            raise UnsupportedError(
                "Trainer's own context parallelism would shard the sequence a second time",
                got=f"parallelism_config with {name}={getattr(config, name)}",
                next_step=f"remove {name}: the mesh of parallelize(model, mesh) shards the sequence",
            )


def _count_sequences(sharded: ShardedModel) -> tuple[int, int]:
    """Return the number of concurrent sequences, and the index of this rank's."""
    if not dist.is_initialized():
        return 1, 0
    group = sharded.mesh.group
    first: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(first, dist.get_rank() if group is None else min(dist.get_process_group_ranks(group)))
    sequences = sorted(set(first))
    return len(sequences), sequences.index(first[dist.get_rank()])
