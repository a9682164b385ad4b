"""TRL's trainers for ranks that share sequences.

TRL computes a log-probability per label by a fused head, and its losses and metrics from these. The sharded model
returns those of all tokens on every rank, so that losses, means and metrics are those of one device.
"""

from __future__ import annotations

from typing import Any, ClassVar

from trl import DPOTrainer, SFTTrainer

from burst_portable.errors import UnsupportedError
from burst_portable.integrations.trainer import SequenceTrainer


class _TokenCount(SequenceTrainer):
    """Counts the tokens of rows that several ranks have once."""

    serves: ClassVar[tuple[str, ...]] = ("SFTTrainer", "DPOTrainer")
    _total_train_tokens: int  # of TRL
    _metrics: Any

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        before, is_training = self._total_train_tokens, self.model.training
        loss = super().compute_loss(model, inputs, *arguments, **named)
        if is_training:
            mask = inputs.get("attention_mask")
            count = inputs["position_ids"].new_tensor(inputs["position_ids"].shape[1]) if mask is None else mask.sum()
            self._total_train_tokens = before + self.accelerator.gather(count).sum().item() // self._ranks
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss


class SequenceSFTTrainer(_TokenCount, SFTTrainer):  # type: ignore[misc]  # TRL's names are Any, see pyproject.toml
    """TRL's `SFTTrainer` with ``SFTConfig(parallelism_config=SequenceParallelism(...))``.

    Packing must give one row per batch. A router loss raises `UnsupportedError`.
    """


class SequenceDPOTrainer(_TokenCount, DPOTrainer):  # type: ignore[misc]
    """TRL's `DPOTrainer` with ``DPOConfig(parallelism_config=SequenceParallelism(...))``.

    The sequences of a reference model are sharded as well.

    Raises:
        UnsupportedError: For `precompute_ref_log_probs`, which would gather each row once per rank, and router losses.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        args = named.get("args", arguments[2] if len(arguments) > 2 else None)
        if args is not None and args.precompute_ref_log_probs:
            raise UnsupportedError("precompute_ref_log_probs on ranks that share sequences", got=True, allowed=False)
        super().__init__(*arguments, **named)
        if self.ref_model is not None:
            self.accelerator.parallelism_config.parallelize(self.accelerator.unwrap_model(self.ref_model))
