"""axolotl's training on ranks that share sequences: a plugin for its configuration file.

The plugin returns a trainer that is `SequenceTrainer` and axolotl's own, and a `SequenceParallelism` for its arguments.
The ranks of a sequence read the same rows, and the model divides them in its forward pass. The context parallelism of
axolotl replaces functions of accelerate and of Transformers, so it stays off.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict

from burst_portable.errors import InputError, UnsupportedError, shown
from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.trainer import SequenceTrainer
from burst_portable.integrations.versions import check_version, importing

with importing("axolotl", "axolotl>=0.19,<0.22"):
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.integrations.base import BasePlugin

_OWN_SIZES = (
    *("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "expert_parallel_size"),
    *("dp_shard_size", "dp_replicate_size"),
)
_OWN_TRAINERS = ("rl", "reward_model", "process_reward_model", "trainer_cls", "orpo_alpha", "deepspeed")
_COUNTED = ("labels", "input_ids")
_NEXT = "leave it out; `sequence_parallelism` has cp_size, dp_shard_size and dp_replicate_size"


class SequenceOptions(BaseModel):
    """The entry `sequence_parallelism` of the file: arguments of `SequenceParallelism`."""

    model_config = ConfigDict(extra="forbid")
    cp_size: int | None = None
    dp_shard_size: int = 1
    dp_replicate_size: int | None = None
    strategy: str = "auto"
    layout: str | None = None
    kernel: str = "auto"


class SequenceArguments(BaseModel):
    """The entries that the plugin adds to axolotl's file."""

    sequence_parallelism: SequenceOptions | None = None


class SequencePlugin(BasePlugin):  # type: ignore[misc]  # axolotl's names are Any, see pyproject.toml
    """The entry of `plugins` in axolotl's file: ``burst_portable.integrations.axolotl.SequencePlugin``.

    Without the entry `sequence_parallelism`, all ranks share each sequence.
    """

    def register(self, cfg: Any) -> None:
        """Check the version of axolotl and the entries that are not supported. axolotl calls it first.

        Raises:
            InputError: If the entry `sequence_parallelism` is not a mapping.
            UnsupportedError: For another version, other trainers, and axolotl's own parallelism of models.
        """
        check_version("axolotl", "0.19", "0.22")
        options = cfg.get("sequence_parallelism")
        if options is not None and not hasattr(options, "keys"):
            raise InputError("sequence_parallelism must have entries", got=shown(options), allowed="cp_size: 8")
        _check(cfg)

    def get_input_args(self) -> str:
        return f"{__name__}.{SequenceArguments.__name__}"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Set the rows of an optimizer step, of which axolotl computes the number of steps and of warm-up steps.

        axolotl counts the rows of each rank, and would end before the last epoch: with `cp_size: 4`, after a quarter.
        """
        ranks = int(cfg.get("world_size") or 1)
        size = (cfg.get("sequence_parallelism") or {}).get("cp_size") or ranks
        rows = int(cfg["micro_batch_size"]) * int(cfg["gradient_accumulation_steps"])
        cfg["batch_size"] = rows * max(1, ranks // size)

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return the argument that groups the ranks. Raise as `register`: other plugins may have changed entries."""
        _check(cfg)
        given = cfg.get("sequence_parallelism") or {}
        options = SequenceOptions(**{name: value for name, value in dict(given).items() if value is not None})
        return {"parallelism_config": SequenceParallelism(**options.model_dump())}

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        _check(cfg)
        return sequence_trainer(AxolotlTrainer)


def _check(cfg: Any) -> None:
    """Raise `UnsupportedError` for entries of a file with which ranks cannot share sequences."""
    for name in _OWN_SIZES:
        if (size := cfg.get(name)) is not None and int(size) > 1:
            what = "axolotl's own parallelism on ranks that share sequences"
            raise UnsupportedError(what, got=f"{name}: {size}", next_step=_NEXT)
    for name in _OWN_TRAINERS:
        if value := cfg.get(name):
            got = f"{name}: {shown(value)}"
            raise UnsupportedError("axolotl's other trainers on ranks that share sequences", got=got)


@lru_cache
def sequence_trainer(base: type[Any]) -> type[Any]:
    """Return a trainer that is axolotl's `base`, and shards the sequences of its model."""

    class SequenceAxolotlTrainer(SequenceTrainer, base):  # type: ignore[misc]
        """axolotl's trainer, which counts the tokens of rows that several ranks have once."""

        known_losses = base.__mro__

        def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
            before = dict(getattr(self.state, "tokens", {}))
            loss = super().compute_loss(model, inputs, *arguments, **named)
            for name, total in getattr(self.state, "tokens", {}).items():
                earlier = before.get(name, 0)
                self.state.tokens[name] = earlier + (total - earlier) / self._ranks
            return loss

        def _accumulate_token_counts(self, inputs: dict[str, Any]) -> None:
            """Count tokens on the first rank of each sequence. Since axolotl 0.21, sums of all ranks are logged."""
            is_first = self.accelerator.process_index % self._ranks == 0
            counted = inputs if is_first else {name: x[:0] for name, x in inputs.items() if name in _COUNTED}
            super()._accumulate_token_counts(counted)

    return SequenceAxolotlTrainer
