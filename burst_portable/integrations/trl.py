"""TRL's trainers for ranks that share sequences.

TRL computes a log-probability per label by a fused head, and its losses and metrics from these. The sharded model
returns those of all tokens on every rank, so that losses, means and metrics are those of one device.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.trainer import SequenceTrainer
from burst_portable.integrations.versions import importing

with importing("trl", "burst-portable[trl]"):
    from accelerate.utils import set_seed
    from trl import DPOTrainer, GRPOTrainer, SFTTrainer
    from trl.trainer.utils import nanstd


class _Counted(SequenceTrainer):
    """Counts the tokens of rows that several ranks have once, and all ranks in means."""

    serves: ClassVar[tuple[str, ...]] = ("SFTTrainer", "DPOTrainer")
    _total_train_tokens: int  # of TRL
    _metrics: Any
    router_aux_loss_coef: float

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        before, is_training = self._total_train_tokens, self.model.training
        weight = self.router_aux_loss_coef
        loader = self.accelerator.gradient_state.active_dataloader
        rows = 0 if loader is None else loader.remainder
        try:
            if loader is not None:
                loader.remainder = 0  # a remainder would cut the counts of other ranks from the means
            # SequenceTrainer divides the loss by the ranks of a sequence. TRL multiplies all but the router loss by
            # the number of processes.
            self.router_aux_loss_coef = weight * self._loss_divisor(num_items_in_batch)
            loss = super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        finally:
            self.router_aux_loss_coef = weight
            if loader is not None:
                loader.remainder = rows
        if is_training:
            mask = inputs.get("attention_mask")
            count = inputs["position_ids"].new_tensor(inputs["position_ids"].shape[1]) if mask is None else mask.sum()
            self._total_train_tokens = before + self.accelerator.gather(count).sum().item() // self._ranks
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss


class SequenceSFTTrainer(_Counted, SFTTrainer):  # type: ignore[misc]  # TRL's names are Any, see pyproject.toml
    """TRL's `SFTTrainer` with ``SFTConfig(parallelism_config=SequenceParallelism(...))``.

    Packing gives one row per batch.
    """


class SequenceDPOTrainer(_Counted, DPOTrainer):  # type: ignore[misc]
    """TRL's `DPOTrainer` with ``DPOConfig(parallelism_config=SequenceParallelism(...))``.

    The sequences of a reference model are sharded as well.

    Raises:
        UnsupportedError: For `precompute_ref_log_probs`, which would gather each row once per rank.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        args = named.get("args", arguments[2] if len(arguments) > 2 else None)
        if args is not None and args.precompute_ref_log_probs:
            next_step = "remove it: the reference model then computes them in each step, sharded as well"
            raise UnsupportedError(
                "precompute_ref_log_probs on ranks that share sequences", got=True, allowed=False, next_step=next_step
            )
        super().__init__(*arguments, **named)
        if self.ref_model is not None:
            self.accelerator.parallelism_config.parallelize(self.accelerator.unwrap_model(self.ref_model))


class SequenceGRPOTrainer(SequenceTrainer, GRPOTrainer):  # type: ignore[misc]
    """TRL's `GRPOTrainer` with ``GRPOConfig(parallelism_config=SequenceParallelism(...))``.

    Each rank generates with the unsharded model, and takes the completions of the first rank of its sequence. Then the
    sequences of prompts and completions are sharded, also in a reference model.

    Raises:
        InputError: If completions of one prompt would be on several data-parallel ranks.
        UnsupportedError: For generation by other means than Transformers, and statistics over all rows of the ranks.
    """

    serves: ClassVar[tuple[str, ...]] = ("GRPOTrainer",)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        args = self.args
        unsupported = {
            "use_vllm": args.use_vllm,
            "use_transformers_continuous_batching": args.use_transformers_continuous_batching,
            "rollout_func": self.rollout_func is not None,
            "scale_rewards='batch'": args.scale_rewards == "batch",
            "normalize_then_sum": args.multi_objective_aggregation != "sum_then_normalize",
            "top_entropy_quantile": args.top_entropy_quantile < 1,
        }
        if found := [name for name, is_set in unsupported.items() if is_set]:
            next_step = "remove it from the arguments; scale_rewards may be 'group' or 'none'"
            raise UnsupportedError("GRPO on ranks that share sequences", got=", ".join(found), next_step=next_step)
        _check_rows(
            "num_generations", args.per_device_train_batch_size * args.steps_per_generation, self.num_generations
        )
        _check_rows("num_generations_eval", args.per_device_eval_batch_size, self.num_generations_eval)
        if self.ref_model is not None:
            self.accelerator.parallelism_config.parallelize(self.accelerator.unwrap_model(self.ref_model))
        set_seed(args.seed + self.accelerator.process_index // self._ranks)  # TRL gives each rank its own

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        sequences = self.args.world_size // self._ranks
        rows = self.args.per_device_train_batch_size * self.args.steps_per_generation
        self.args.generation_batch_size = rows * sequences  # TRL counts the rows of all ranks

    def _generate(self, prompts: list[Any]) -> Any:
        mode, before = "train" if self.model.training else "eval", self.state.num_input_tokens_seen
        generated = super()._generate(prompts)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._ranks
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        return generated

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        assert self.sharded is not None
        with self.sharded.paused():
            generated = [super()._generate_single_turn(*arguments, **named)]
        mesh = self.sharded.mesh
        if mesh.size > 1:
            dist.broadcast_object_list(generated, mesh.global_ranks[0], group=mesh.group)
        return generated[0]

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Tensor:
        """Return the rewards of all ranks, ``[rows, functions]``: those of the first rank of each sequence."""
        rewards: Tensor = super()._calculate_rewards(*arguments, **named)
        rows = rewards.shape[0] // self.accelerator.num_processes
        of_sequences: Tensor = rewards.unflatten(0, (-1, self._ranks, rows))
        self._rewards = of_sequences[:, 0].flatten(0, 1)
        return of_sequences[:, :1].expand_as(of_sequences).reshape(rewards.shape)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        # A standard deviation depends on how often each row is counted.
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, rewards in zip(self.reward_func_names, self._rewards.unbind(1), strict=True):
            metrics[f"rewards/{name}/std"][-1] = nanstd(rewards).item()
        total = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        total[self._rewards.isnan().all(dim=1)] = float("nan")
        metrics["reward_std"][-1] = nanstd(total).item()
        return found


def _check_rows(name: str, rows: int, generations: int) -> None:
    """Raise `InputError` if the completions of a prompt would be on several ranks of different sequences."""
    if rows % generations:
        what = f"the rows per sequence must be a multiple of {name}={generations}"
        raise InputError(what, got=rows, next_step="change the batch size per device, or steps_per_generation")
