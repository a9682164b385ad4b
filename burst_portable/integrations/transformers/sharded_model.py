"""The result of `parallelize`: installs the hooks of a sharded model, removes them, and divides batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from burst_portable.errors import InputError
from burst_portable.integrations.transformers.attention import ATTRIBUTE, NAME, attend
from burst_portable.integrations.transformers.batches.divider import batch_arguments, token_inputs_of
from burst_portable.integrations.transformers.deferred_mask import create_mask
from burst_portable.integrations.transformers.layers.dropout_streams import DropoutStreams
from burst_portable.integrations.transformers.layers.entry_modules import entries_to_call, watch_entries
from burst_portable.integrations.transformers.layers.global_positions import restore_positions, watch_positions
from burst_portable.integrations.transformers.layers.recurrent_states import StateExchange
from burst_portable.integrations.transformers.layers.token_dropout import restore_token_dropout, watch_token_dropout
from burst_portable.integrations.transformers.loss import remove_loss
from burst_portable.integrations.transformers.model_calls import ModelCalls
from burst_portable.integrations.transformers.shard_mark import ShardMark
from burst_portable.integrations.transformers.training.batch_check import KEY, shard_checksum
from burst_portable.layout import Layout
from burst_portable.mask import checked_cu_seqlens


class ShardedModel(ModelCalls):
    """A model whose sequence is sharded over a mesh, and the state that its modules need. See `parallelize`.

    Attributes:
        model: The Transformers model, changed in place.
        mesh: The ranks that share a sequence.
        strategy: Name of the strategy, or the strategy itself.
        layout: Name of the layout, or "auto".
        kernel: Name of the kernel, or "auto".
        seq_len: Tokens of the unsharded sequence, for calls without `seq_len`. May be set between calls.
        full_batches: Whether calls take full batches.
        gather_outputs: Whether such calls return the outputs of all tokens. None: in calls without labels. May be set
            between calls, equally on all ranks.
        averaged_gradients: Whether gradients of such calls will be averaged over the mesh, instead of summed.
        call: The sequence of the running call.
        attended: Number of finished attentions in that call.
        plain_attention: Name of the attention that the model has without us.
        tokens_of_call: Rows and tokens of this rank in the last call. None: the text model was not called.
        called_entries: Names of convolutions and the like whose inputs were checked (`layers.entry_modules`).
        attending: Whether an attention runs. After a failed call: whether the call failed in an attention.
        dropout: The random numbers of calls.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plain_attention = self._facts.text.config._attn_implementation
        self._is_copy = False  # of a sharded model: the caller has no `ShardedModel` of it yet
        self._install()

    def __repr__(self) -> str:
        state = "" if self.is_sharded else ", undone"
        of = f"{type(self.model).__name__}, rank {self.mesh.rank} of {self.mesh.size}"
        return f"ShardedModel({of}, strategy={self.strategy!r}, layout={self.layout!r}{state})"

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded now: not after `undo`, nor within `paused`."""
        return bool(self._hooks)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise `InputError`: calls go to the model."""
        batch = "batch" if self.full_batches else "sharded.shard(batch)"
        raise InputError("a ShardedModel is not called itself", next_step=f"call the model: model(**{batch})")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        """Return the sharded model of a copy of the model, on the same mesh.

        If only a part of the model is copied, return this object. The copied part then belongs to this model.
        """
        if id(self.model) not in memo:
            return self
        copied = memo[id(self)] = copy.copy(self)
        copied._is_copy = True
        copied.model, copied._facts = (copy.deepcopy(x, memo) for x in (self.model, self._facts))
        copied.dropout = copy.deepcopy(self.dropout, memo)
        copied._hooks = copy.deepcopy(self._hooks, memo)
        copied._forget_calls()
        if self.model in self.mesh.gradient_records.averaged:
            self.mesh.gradient_records.averaged.add(copied.model)
        return copied

    def _install(self) -> None:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, create_mask)
        self._set_attention(NAME)
        self._watch_loss(self.model)
        for module in self._facts.text.modules():
            setattr(module, ATTRIBUTE, self)
        for module in self._facts.called_models():
            setattr(module, ATTRIBUTE, self)
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        if self._facts.has_parts:
            self._hooks.append(self._facts.text.register_forward_pre_hook(self._enter_text, with_kwargs=True))
            self._hooks.append(self._facts.text.register_forward_hook(self._leave_text, always_call=True))
        self.dropout = DropoutStreams(self._facts.text, self.mesh.rank)
        self._hooks += StateExchange(self.mesh).hooks(self._facts.text)
        hooks, scaled = watch_positions(self._facts.text)
        self._hooks += hooks
        self._hooks += watch_token_dropout(self._facts.text)
        self._hooks += watch_entries(self._facts.text)
        self._entries = entries_to_call(self._facts.text)
        self._depends_on_length, self._scales_by_row = bool(hooks), bool(scaled)
        if self.averaged_gradients and self.mesh.size > 1:
            self.mesh.gradient_records.averaged.add(self.model)

    def undo(self) -> None:
        """Restore the model. A second call does nothing."""
        if not self.is_sharded:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._agreement.remove_hooks()
        self.mesh.gradient_records.averaged.discard(self.model)
        self.mesh.gradient_records.averaged_by_ddp.discard(self.model)
        for module in self.model.modules():
            if hasattr(module, ATTRIBUTE):
                delattr(module, ATTRIBUTE)
        self.dropout.remove()
        restore_positions(self._facts.text)
        restore_token_dropout(self._facts.text)
        remove_loss(self.model)
        self._set_attention(self.plain_attention)

    def _set_attention(self, name: str) -> None:
        """Set the attention of all layers. Copied layers, as those of PEFT's layer replication, have copied configs."""
        self._facts.text.set_attn_implementation(name)
        for module in self._facts.text.modules():
            if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
                config._attn_implementation = name

    @contextmanager
    def paused(self) -> Iterator[PreTrainedModel]:
        """Restore the model in a `with` block, for example to generate, and shard it again afterwards."""
        was_sharded = self.is_sharded
        self.undo()
        try:
            yield self.model
        finally:
            if was_sharded:
                self._install()

    def __enter__(self) -> ShardedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    # ------------------------------------------------------------------------------------------ inputs of a call

    def shard(
        self,
        input_ids: Tensor | Mapping[str, Any],
        labels: Tensor | None = None,
        *,
        cu_seqlens: Any = None,
        attention_mask: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return this rank's arguments for the model, from a batch that every rank has in full.

        The loss of a rank is its part of the mean over all tokens. The sum over ranks equals one device's loss, and
        the summed gradients equal one device's gradients. With `full_batches`, the model divides batches itself.

        Args:
            input_ids: Token ids of shape ``[B, N]``, equal on every rank. Or a tokenizer's or collator's batch with
                `input_ids` and, if it has them, `labels`, `attention_mask`, `cu_seqlens` and `position_ids`. Other
                inputs of the model with values for each token, such as `token_type_ids`, are divided as well. Position
                ids that restart at 0 are packed documents, as `DataCollatorWithFlattening` makes them. As on one
                device, the last token of a document then predicts the first label of the next one, unless it is -100.
            labels: Shape ``[B, N]``, as for the model on one device; -100 for tokens without a label. Default:
                `input_ids`, without the first token of each document; or no labels for models that do not shift them
                (encoders).
            cu_seqlens: Cumulative lengths of packed documents, starting with 0 and equal for all rows of the batch: a
                sequence of ints, an array or a tensor. Or a sequence of them, one for each row. If they differ, as
                those of position ids may, the rows are joined to one of ``B * N`` tokens. No label of a first token is
                predicted.
            attention_mask: Shape ``[B, N]``, 0 for padding, which must be at the end of its row and have the label
                -100. Outputs of padding are undefined.

        Returns:
            input_ids, position_ids, labels and, if labels are shifted, shift_labels, each ``[B, S]``, or ``[1, S]`` for
            joined rows. Also num_items_in_batch, seq_len, cu_seqlens; and, if the batch has padding, padded, which is
            true for it. If RoPE depends on the length of padded rows, longest. With several ranks also batch_checksum,
            and an attention_mask that only parallelized models take.

        Raises:
            InputError: If arguments contradict each other, after `undo`, or with `full_batches`.
        """
        if self.full_batches:
            what = "full_batches=True divides batches in the forward pass"
            raise InputError(what, next_step="call model(**batch) with the full batch on every rank")
        if not self.is_sharded:
            raise InputError(
                "undo() has restored the model, which would treat this shard as the full sequence; parallelize it again"
            )
        given = {"labels": labels, "cu_seqlens": cu_seqlens, "attention_mask": attention_mask}
        batch = {"input_ids": input_ids} | given
        if isinstance(input_ids, Mapping):
            batch = batch_arguments(input_ids, given, token_inputs_of(self.model), self._facts.padding_idx)
        inputs = self._divider.divide(**batch)
        if self.mesh.size == 1:
            return inputs
        labels = inputs.get("shift_labels", inputs.get("labels"))
        key = shard_checksum(inputs[KEY], inputs["input_ids"], labels, inputs.get("num_items_in_batch"))
        return inputs | {KEY: key, "attention_mask": ShardMark()}

    def layout_of(self, seq_len: int, cu_seqlens: Any = None) -> Layout:
        """Return the layout of a sequence, which `unshard` needs to gather outputs.

        Args:
            seq_len: Tokens of the unsharded sequence.
            cu_seqlens: Cumulative lengths of packed documents, as in `shard`.
        """
        cu_seqlens = None if cu_seqlens is None else tuple(checked_cu_seqlens("cu_seqlens", cu_seqlens))
        return self._layouts.of(seq_len, cu_seqlens)


def sharded_model_of(model: PreTrainedModel) -> ShardedModel | None:
    """Return the `ShardedModel` of which this is the model, or None."""
    found: ShardedModel | None = vars(model).get(ATTRIBUTE)
    return None if found is None or found.model is not model else found


def release_copy(model: PreTrainedModel) -> None:
    """Restore a model that is a copy of a sharded one, whose `ShardedModel` no caller has."""
    found = sharded_model_of(model)
    if found is not None and found._is_copy:
        found.undo()
