"""Transformers' `Trainer` for ranks that share sequences.

`SequenceParallelism` makes these ranks replicas of one data-parallel rank: they read the same rows, and the model
divides them in its forward pass. Trainer's own loop then counts tokens, accumulates, clips and logs as with fewer
devices. This class shards the model, and keeps one copy of the outputs of each row in evaluation.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from burst_portable.errors import InputError, UnsupportedError, format_error
from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.compute_loss import check_order, warn_about_counts
from burst_portable.integrations.gathering import gather_rows
from burst_portable.integrations.rng_states import take_state_of_first_rank
from burst_portable.integrations.transformers.sharded_model import ShardedModel
from burst_portable.integrations.versions import importing
from burst_portable.utils.warning import warn_caller

with importing("accelerate", "burst-portable[transformers]"):
    from transformers import Trainer
    from transformers.trainer_pt_utils import find_batch_size
    from transformers.trainer_utils import has_length


class SequenceTrainer(Trainer):  # type: ignore[misc]  # transformers' names are Any, see pyproject.toml
    """`Trainer` with ``TrainingArguments(parallelism_config=SequenceParallelism(...))``.

    Arguments are those of `Trainer`. The model may be one with adapters of PEFT. For a subclass of Trainer from another
    library, derive from both: ``class Mine(TheirTrainer, SequenceTrainer)``. Its `compute_loss` then comes first.

    Attributes:
        known_losses: Classes behind this one that override `compute_loss` and use `num_items_in_batch` as Trainer does.
        serves: Names of TRL's trainers that a subclass is for.
        sharded: The result of `parallelize`, for the current model.

    Raises:
        InputError: If the arguments have no `SequenceParallelism`, or the model is not one of Transformers.
        UnsupportedError: If the model cannot be sharded, or for NEFTune and dispatch_batches. If a class behind this
            one overrides `compute_loss`.
    """

    known_losses: ClassVar[tuple[type[Any], ...]] = ()
    serves: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        of_trl = next((base.__name__ for base in type(self).__mro__ if base.__module__.startswith("trl.")), None)
        if of_trl not in (None, *self.serves):
            allowed = "SFTTrainer, DPOTrainer and GRPOTrainer, by the classes of burst_portable.integrations.trl"
            raise UnsupportedError("this trainer of TRL on ranks that share sequences", got=of_trl, allowed=allowed)
        check_order(type(self), SequenceTrainer, self.known_losses)
        self.sharded: ShardedModel | None = None
        self._batch_rows: int | None = None  # of the last batch of an evaluation
        self._evaluated_rows: int | None = None  # in the last evaluation, until its speed was set
        super().__init__(*arguments, **named)
        if self.sharded is None:
            self._shard_model(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        config = self.args.accelerator_config
        if config.dispatch_batches:
            next_step = "accelerator_config={'dispatch_batches': False}"
            raise UnsupportedError("dispatch_batches gives the ranks of a sequence other rows", next_step=next_step)
        if self.args.n_gpu > 1:
            next_step = "start with torchrun or accelerate launch, or set CUDA_VISIBLE_DEVICES"
            raise InputError(
                "Trainer would use DataParallel in one process", got=f"{self.args.n_gpu} devices", next_step=next_step
            )
        config.dispatch_batches = False  # the default, None, is True for a dataset without a length
        super().create_accelerator_and_postprocess()
        parallelism = self.accelerator.parallelism_config
        if not isinstance(parallelism, SequenceParallelism):
            what, next_step = "no SequenceParallelism", "TrainingArguments(parallelism_config=SequenceParallelism(...))"
            raise InputError(what, got=type(parallelism).__name__, next_step=next_step)
        if parallelism is not self.args.parallelism_config:
            what = "accelerate keeps the configuration of an earlier Accelerator"
            next_step = "use one SequenceParallelism, or create each TrainingArguments right before its trainer"
            raise InputError(what, got="another parallelism_config", next_step=next_step)
        if self.args.average_tokens_across_devices and self._ranks > 1 and self.accelerator.is_main_process:
            warn_about_counts(type(self), SequenceTrainer, self.accelerator.num_processes)
        parallelism.has_model = True  # below, after the constructors of subclasses of Trainer
        parallelism.gathers_rows = True

    def call_model_init(self, trial: Any = None) -> Any:
        return self._shard_model(super().call_model_init(trial))

    def _shard_model(self, model: Any) -> Any:
        """Shard the sequences of a model in place, and return it."""
        if self.args.neftune_noise_alpha is not None and self._ranks > 1:
            raise UnsupportedError(
                "NEFTune scales its noise by the tokens of a row, and a shard has fewer",
                got=f"neftune_noise_alpha={self.args.neftune_noise_alpha}",
                next_step="remove it",
            )
        self.sharded = self.accelerator.parallelism_config.parallelize(model)
        return model

    def _wrap_model(self, model: Any, training: bool = True, **named: Any) -> Any:
        """Return the model, wrapped if Trainer does it. Accelerate wraps it in DDP afterwards, if it is not prepared.

        `evaluate` and `predict` before `train` prepare the model without DDP, so that each rank would train alone.
        """
        is_wrapped = isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel | FSDPModule)
        if training and self.accelerator.num_processes > 1 and not is_wrapped:
            model = self.model
            self.accelerator._models = [x for x in self.accelerator._models if getattr(x, "_orig_mod", x) is not model]
            vars(model).pop("_is_accelerate_prepared", None)
        return super()._wrap_model(model, training=training, **named)

    @property
    def _ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return int(self.accelerator.parallelism_config.non_data_parallel_size)

    def _get_num_items_in_batch(self, *arguments: Any, **named: Any) -> Any:
        """Return the count of labels of all processes or, without `average_tokens_across_devices`, of this one.

        Transformers before 5.19 divides it by the number of ranks that share a sequence, and rounds down. Newer
        versions do not. `compute_loss` divides it exactly.
        """
        with self.accelerator.parallelism_config.counting_every_rank():
            return super()._get_num_items_in_batch(*arguments, **named)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of Trainer for as many processes as there are sequences.

        Trainer counts the labels of each rank, and multiplies the loss by the number of ranks. That cancels out in the
        loss of labels, but not in a router loss.
        """
        if (divisor := self._loss_divisor(num_items_in_batch)) == 1:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        count = num_items_in_batch / divisor
        found = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=count)
        return (found[0] / divisor, *found[1:]) if return_outputs else found / divisor

    def _loss_divisor(self, num_items_in_batch: Any) -> int:
        """Return by how much Trainer's count and loss are too large."""
        is_counted = num_items_in_batch is not None and self.args.average_tokens_across_devices
        return self._ranks if is_counted else 1

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the generators, equally on the ranks of a sequence. A checkpoint of fewer ranks lacks states."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and self.sharded is not None:
            take_state_of_first_rank(self.sharded.mesh, self.args.device)

    # --------------------------------------------------------------------------------------------------- evaluation

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss, and the logits of all tokens unless `prediction_loss_only`.

        Router logits have as many rows as the batch has tokens. Those of several sequences cannot be joined.
        """
        assert self.sharded is not None
        if self.accelerator.num_processes > self._ranks:
            if ignore_keys is None:
                ignore_keys = getattr(model.config, "keys_to_ignore_at_inference", None)
            ignore_keys = [*(ignore_keys or ()), "router_logits"]
        self._batch_rows = find_batch_size(inputs)
        before = self.sharded.gather_outputs
        self.sharded.gather_outputs = before if prediction_loss_only else True
        try:
            found: tuple[Tensor | None, Any, Any] = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
            return found
        finally:
            self.sharded.gather_outputs = before

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **named: Any) -> Any:
        sequences = self.accelerator.num_processes // self._ranks
        if sequences > 1 and not has_length(dataloader) and self.accelerator.is_main_process:
            message = format_error(
                "the last batch of a dataset without a length repeats rows, which the evaluation counts again",
                got=f"{sequences} sequences at a time",
                next_step="evaluate a dataset with a length; or ignore this if the number of rows is a multiple of "
                f"{sequences * self.args.eval_batch_size}",
            )
            warn_caller(message)
        self.gather_function = self._gather_rows
        found = super().evaluation_loop(dataloader, *arguments, **named)
        self._evaluated_rows = found.num_samples
        return found

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        self._set_speed(logs)
        super().log(logs, *arguments, **named)

    def predict(self, *arguments: Any, **named: Any) -> Any:
        found = super().predict(*arguments, **named)
        self._set_speed(found.metrics or {})
        return found

    def _set_speed(self, metrics: dict[str, float]) -> None:
        """Set the steps per second of an evaluation, of which Trainer divides the rows among all ranks."""
        rows, self._evaluated_rows = self._evaluated_rows, None
        name = next((x for x in metrics if x.endswith("_steps_per_second")), None)
        if rows is None or name is None or self._ranks == 1:
            return
        seconds = metrics[name.replace("_steps_per_second", "_runtime")]
        if seconds > 0:
            of_all = self.args.eval_batch_size * self.accelerator.num_processes // self._ranks
            metrics[name] = round(math.ceil(rows / of_all) / seconds, 3)

    def _gather_rows(self, data: Any) -> Any:
        return gather_rows(self.accelerator, data, self._ranks, batch_rows=self._batch_rows)

    def _get_train_sampler(self, *arguments: Any) -> Any:
        if self._ranks > 1 and getattr(self.args, "train_sampling_strategy", None) == "batch_rebalance":
            raise UnsupportedError(
                "batch_rebalance divides rows among all ranks, also those of a sequence",
                got="train_sampling_strategy='batch_rebalance'",
                allowed="'random', 'sequential' or 'group_by_length'",
            )
        return super()._get_train_sampler(*arguments)

    # ------------------------------------------------------------------------------------- numbers of equal batches

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of a step, of which ranks that share a sequence have the same ones."""
        return int(super().get_total_train_batch_size(args)) // self._ranks

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return this rank's part of the floating-point operations."""
        return int(super().floating_point_ops(inputs)) // self._ranks

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._ranks
