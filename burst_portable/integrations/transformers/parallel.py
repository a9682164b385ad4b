"""Shard the input sequence of a Transformers model over the ranks of a mesh: `parallelize`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from burst_portable.errors import InputError, LayoutError, UnsupportedError, shown
from burst_portable.integrations.transformers.adapters import check_adapters
from burst_portable.integrations.transformers.attention import (
    ATTRIBUTE,
    CallSequence,
    attend,
    create_mask,
)
from burst_portable.integrations.transformers.batch_check import (
    KEY,
    BatchCheck,
    checksum_of_call,
    has_all_labels,
    rows_checksum,
    shard_checksum,
)
from burst_portable.integrations.transformers.call_errors import (
    no_attention,
    unknown_labels,
    unknown_order,
    wrong_tokens,
)
from burst_portable.integrations.transformers.checks import (
    PositionCheck,
    check_arguments,
    check_cache,
    check_layerdrop,
    check_model,
    check_no_document_lengths,
    check_positions,
    checked_positions,
    drops_layers,
    has_head,
    keeps_activations,
    longer_than_trained,
    parameters_of,
    takes,
    text_model_of,
)
from burst_portable.integrations.transformers.dropout_streams import DropoutStreams
from burst_portable.integrations.transformers.full_batches import (
    Outputs,
    batch_of,
    check_averaging,
    full_output,
    requested_outputs,
)
from burst_portable.integrations.transformers.global_positions import restore_positions, watch_positions
from burst_portable.integrations.transformers.gradient_checks import LossScaleCheck, watch_gradient
from burst_portable.integrations.transformers.layouts import Layouts
from burst_portable.integrations.transformers.left_padding import move_left_padding, roll_rows
from burst_portable.integrations.transformers.loss import (
    ShardedLoss,
    check_router,
    loss_of,
    sharded_loss,
    shifts_labels,
    with_router_loss,
)
from burst_portable.integrations.transformers.masked_loss import has_masked_loss, with_masked_loss
from burst_portable.integrations.transformers.outer_model import check_outer_models
from burst_portable.integrations.transformers.packed_rows import (
    check_counted,
)
from burst_portable.integrations.transformers.recurrent_layers import recurrent_layers
from burst_portable.integrations.transformers.recurrent_states import LAYOUT, StateExchange, check_recurrent_sequence
from burst_portable.integrations.transformers.running_call import RunningCall
from burst_portable.integrations.transformers.shard_mark import ShardMark
from burst_portable.integrations.transformers.shards import BatchDivider, batch_arguments, on_device
from burst_portable.integrations.transformers.text_model import (
    checksum_of,
    divide,
    lengths_of,
    rolled,
    take_undivided,
)
from burst_portable.layout import Layout
from burst_portable.mask import checked_cu_seqlens
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.runtime.validation import broadcast_error
from burst_portable.sharding import local_position_ids, shard
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import make_strategy
from burst_portable.utils.torch_modes import never_compiled
from burst_portable.utils.values import size

_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
"""Arguments of `ShardedModel.shard` that a call without labels does not have."""
NAME = "burst_portable"
"""Name of our attention and mask functions in Transformers' interfaces."""


def parallelize(
    model: PreTrainedModel,
    mesh: MeshLike = None,
    *,
    strategy: Strategy | str = "auto",
    layout: str | None = None,
    seq_len: int | None = None,
    kernel: str = "auto",
    full_batches: bool = False,
    gather_outputs: bool | None = None,
    averaged_gradients: bool = False,
) -> ShardedModel:
    """Shard the sequence of a Transformers model over the ranks of a mesh, without editing the model.

    Every rank calls the model with its own tokens: ``model(**sharded.shard(input_ids))``. All layers but attention
    process these tokens only; attention covers the unsharded sequence. A mask that `Mask` does not express raises an
    error.

    Args:
        model: A Transformers model, usually a decoder. It is changed in place; `ShardedModel.undo` restores it.
        mesh: A `Mesh`, a process group, a device mesh of one dimension, or None for the default process group.
        strategy: Name of a strategy, or a `Strategy`. "auto" selects the one with the shortest predicted time.
        layout: Name of a layout. "auto" selects, per sequence, the one with the shortest predicted time on the device
            that has the model now. Default: "zigzag", or "contiguous" for a model with recurrent layers, which need it.
        seq_len: Tokens of the unsharded sequence, for calls without `seq_len`. Default: each call must have it, as
            those with `ShardedModel.shard` do. Calls with tokens that you divided yourself also need `position_ids`,
            or a `layout` that is named here.
        kernel: Name of a kernel. "auto" selects one for each call.
        full_batches: Whether every rank calls ``model(**batch)`` with the same full batch, which is divided in the
            forward pass. The value of the loss is then one device's, and its backward pass computes this rank's part
            of the gradients. Default: the caller divides batches by `ShardedModel.shard`. Models with images need it.
        gather_outputs: Whether a call with `full_batches` returns the logits and hidden states of all tokens on every
            rank. Otherwise it returns losses only. Default: in calls without labels.
        averaged_gradients: Whether DDP, FSDP2 or a framework averages gradients over the ranks of the mesh, and no one
            else sums them. Gradients of a call with `full_batches` are then multiplied by the number of ranks, so that
            their average is one device's gradient.

    Returns:
        The sharded model. It is also a context manager that undoes the changes.

    Raises:
        InputError: If `model` is not a Transformers model, a part of it is parallelized already, or arguments
            contradict each other.
        UnknownNameError: If a name is unknown.
        UnsupportedError: If the model cannot be sharded; the message contains the reason.
    """
    check_model(model, full_batches=full_batches)
    _check_free(model)
    name = _checked_layout(model, layout)
    if isinstance(strategy, str):
        make_strategy(strategy)
    if full_batches and seq_len is not None:
        raise InputError("full_batches=True takes the length from each batch", got=f"seq_len={shown(seq_len)}")
    if gather_outputs is not None and not full_batches:
        raise InputError("gather_outputs is for calls with full batches", next_step="pass full_batches=True as well")
    if averaged_gradients and not full_batches:
        next_step = "pass full_batches=True as well, or multiply the loss by the number of ranks"
        raise InputError("averaged_gradients is for calls with full batches", next_step=next_step)
    is_order_known = layout not in (None, "auto") or name == LAYOUT
    options = (full_batches, gather_outputs, averaged_gradients, is_order_known)
    return ShardedModel(model, as_mesh(mesh), strategy, name, seq_len, kernel, *options)


class ShardedModel:
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
        attending: Whether an attention runs. After a failed call: whether the call failed in an attention.
        dropout: The random numbers of calls.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        strategy: Strategy | str,
        layout: str,
        seq_len: int | None,
        kernel: str,
        full_batches: bool = False,
        gather_outputs: bool | None = None,
        averaged_gradients: bool = False,
        is_order_known: bool = True,
    ) -> None:
        self._text = text_model_of(model)  # the model itself, or the part whose sequence is sharded
        self._layouts = Layouts(layout, self._text, mesh, strategy, kernel)
        self.model, self.mesh, self.strategy, self.layout = model, mesh, strategy, layout
        self.seq_len, self.kernel = seq_len, kernel
        self.full_batches, self.gather_outputs = full_batches, gather_outputs
        self.averaged_gradients, self._is_order_known = averaged_gradients, is_order_known
        self._outputs: Outputs | None = None  # of the running call, with full batches
        self.call: CallSequence | None = None
        self.attended, self.attending = 0, False
        self._running: RunningCall | None = None
        self._batch, self._position_check, self._loss_scale = BatchCheck(), PositionCheck(), LossScaleCheck()
        self._has_all_labels: Tensor | None = None  # of the running call
        self._warned_about_length, self._warned_about_activations = False, False
        # Attentions of the last successful call.
        self._attentions: int = getattr(self._text.config, "num_hidden_layers", 0)
        self._before = self._text.config._attn_implementation
        self._hooks: list[Any] = []
        self._drops_layers, self._has_masked_loss = drops_layers(model), has_masked_loss(model)
        self._install()

    def __repr__(self) -> str:
        state = "" if self._hooks else ", undone"
        of = f"{type(self.model).__name__}, rank {self.mesh.rank} of {self.mesh.size}"
        return f"ShardedModel({of}, strategy={self.strategy!r}, layout={self.layout!r}{state})"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise `InputError`: calls go to the model."""
        batch = "batch" if self.full_batches else "sharded.shard(batch)"
        raise InputError("a ShardedModel is not called itself", next_step=f"call the model: model(**{batch})")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        """Return the same object: process groups and transports cannot be copied."""
        return self

    def _install(self) -> None:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, create_mask)
        self._set_attention(NAME)
        self._watch_loss(self.model)
        for module in self._text.modules():
            setattr(module, ATTRIBUTE, self)
        for module in self._called_models():
            setattr(module, ATTRIBUTE, self)
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        if self._has_parts:
            self._hooks.append(self._text.register_forward_pre_hook(self._enter_text, with_kwargs=True))
            self._hooks.append(self._text.register_forward_hook(self._leave_text, always_call=True))
        self.dropout = DropoutStreams(self._text, self.mesh.rank)
        self._has_recurrent_layers = bool(recurrent_layers(self._text))
        if self.mesh.size > 1:
            self._hooks += StateExchange(self.mesh).hooks(self._text)
        hooks, scaled = watch_positions(self._text)
        self._hooks += hooks
        self._watches_gradient = False
        self._watches_positions, self._scales_by_row = bool(hooks or scaled), bool(scaled)
        if self.averaged_gradients and self.mesh.size > 1:
            self.mesh.averaged.add(self.model)

    def _called_models(self) -> list[PreTrainedModel]:
        """Return the models that may be called. Callers that compute a loss themselves call the inner model."""
        models = [module for module in self.model.modules() if isinstance(module, PreTrainedModel)]
        if self._has_parts:
            around = (model for model in models if model is not self._text)
            return [model for model in around if any(part is self._text for part in model.modules())]
        return [model for model in models if "position_ids" in parameters_of(model)]

    def _watch_loss(self, model: PreTrainedModel) -> None:
        """Install the sharded loss, also if the model's loss function was replaced since."""
        if self.mesh.size > 1 and has_head(model) and sharded_loss(model) is None:
            model.loss_function = ShardedLoss(loss_of(model), full_batches=self.full_batches)

    def undo(self) -> None:
        """Restore the model. A second call does nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.mesh.averaged.discard(self.model)
        for module in self.model.modules():
            if hasattr(module, ATTRIBUTE):
                delattr(module, ATTRIBUTE)
        self.dropout.remove()
        restore_positions(self._text)
        if loss := sharded_loss(self.model):
            self.model.loss_function = loss.function
        self._set_attention(self._before)

    def _set_attention(self, name: str) -> None:
        """Set the attention of all layers. Copied layers, as those of PEFT's layer replication, have copied configs."""
        self._text.set_attn_implementation(name)
        for module in self._text.modules():
            if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
                config._attn_implementation = name

    @contextmanager
    def paused(self) -> Iterator[PreTrainedModel]:
        """Restore the model in a `with` block, for example to generate, and shard it again afterwards."""
        was_sharded = bool(self._hooks)
        self.undo()
        try:
            yield self.model
        finally:
            if was_sharded:
                self._install()

    @property
    def _has_parts(self) -> bool:
        """Return whether the model has a text model among several parts, which divides its rows itself."""
        return self._text is not self.model

    @property
    def shifts_labels(self) -> bool:
        """Return whether a token is compared with the label of the next one: true for all models but encoders."""
        return shifts_labels(loss_of(self.model))

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
                `input_ids` and, if it has them, `labels`, `attention_mask`, `cu_seqlens` and `position_ids`. Position
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
            true for it. With several ranks also batch_checksum, and an attention_mask that only parallelized models
            take.

        Raises:
            InputError: If arguments contradict each other, after `undo`, or with `full_batches`.
        """
        if self.full_batches:
            what = "full_batches=True divides batches in the forward pass"
            raise InputError(what, next_step="call model(**batch) with the full batch on every rank")
        if not self._hooks:
            raise InputError(
                "undo() has restored the model, which would treat this shard as the full sequence; parallelize it again"
            )
        given = {"labels": labels, "cu_seqlens": cu_seqlens, "attention_mask": attention_mask}
        batch = (
            batch_arguments(input_ids, given) if isinstance(input_ids, Mapping) else {"input_ids": input_ids} | given
        )
        inputs = self._divider.divide(**batch)
        if self.mesh.size == 1:
            return inputs
        labels = inputs.get("shift_labels", inputs.get("labels"))
        key = shard_checksum(inputs[KEY], inputs["input_ids"], labels, inputs.get("num_items_in_batch"))
        return inputs | {KEY: key, "attention_mask": ShardMark()}

    @property
    def _divider(self) -> BatchDivider:
        """Return the divider of a batch. Its fields may change between calls, as the model's loss function."""
        options = {"shifts_labels": self.shifts_labels, "scales_by_row": self._scales_by_row}
        return BatchDivider(self.mesh, self._layouts, self._position_check, **options)

    def layout_of(self, seq_len: int, cu_seqlens: Any = None) -> Layout:
        """Return the layout of a sequence, which `unshard` needs to gather outputs.

        Args:
            seq_len: Tokens of the unsharded sequence.
            cu_seqlens: Cumulative lengths of packed documents, as in `shard`.
        """
        cu_seqlens = None if cu_seqlens is None else tuple(checked_cu_seqlens("cu_seqlens", cu_seqlens))
        return self._layouts.of(seq_len, cu_seqlens)

    # ------------------------------------------------------------------------------------------------ the hooks

    @never_compiled("plans, transports and hooks are not graphs")
    def _enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Validate the arguments of a forward call and fill in the position ids of this rank's tokens (pre-hook)."""
        if self._running is not None and self._running.contains(module):
            return args, kwargs  # an inner model of the running call
        if self._running is not None and self._has_pending_attentions and self.mesh.size > 1:
            # The previous call ended without its hook, for example by Ctrl-C, so this rank skips its remaining part.
            self.mesh.transport(next(self.model.parameters()).device.type).mark_out_of_sync()
        kwargs = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}
        undivided: dict[str, Any] = {}
        try:
            check_adapters(self.model, ranks=self.mesh.size, full_batches=self.full_batches)
            if self.full_batches:
                kwargs, undivided = self._divide(module, kwargs)
            lengths = kwargs.pop("lengths", None)
            sequence, running = self._prepare(module, kwargs)
            sequence = sequence._replace(lengths=lengths)
        except Exception as error:
            # Otherwise the other ranks would match this rank's next call with the current one.
            broadcast_error(self.mesh, error, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            raise
        if not self._has_parts:
            sequence = sequence._replace(dropout_seed=self.dropout.begin())
        self.call, self._running, self.attended, self.attending = sequence, running, 0, False
        return (), kwargs | undivided

    @never_compiled("plans, transports and hooks are not graphs")
    def _enter_text(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Divide the arguments of the text model within a model of several parts (pre-hook)."""
        if self.call is None or self._running is None or not self._running.contains(module):
            what, got = "the text model ran outside the model that was parallelized", type(module).__name__
            raise InputError(what, got=got, next_step=f"call the {type(self.model).__name__}")
        kwargs = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}
        if self._watches_positions and kwargs.get("position_ids") is not None:
            what = "RoPE that depends on the longest position, with position_ids"
            raise UnsupportedError(what, got=type(module).__name__, next_step="leave out position_ids")
        device = next(x.device for x in kwargs.values() if isinstance(x, Tensor))
        positions = self._positions(self.call, device).unsqueeze(0)
        divided = divide(kwargs, module, positions, self.mesh, self.call.layout)
        self.call = self.call._replace(dropout_seed=self.dropout.begin())
        return (), divided | ({"use_cache": False} if takes(module, "use_cache") else {})

    @never_compiled("a pair of `_enter_text`")
    def _leave_text(self, module: Any, args: Any, output: Any) -> None:
        """End the random numbers of this rank's tokens (forward hook)."""
        self.dropout.end()

    def _divide(self, module: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return this rank's arguments of a call with a full batch, and those that replace them in the end.

        The latter are the undivided arguments of a model of several parts. They include the rows, without padding mask:
        padding is at the end.
        """
        check_cache(kwargs)
        check_averaging(self.model, self.mesh, averaged=self.averaged_gradients)
        labels = kwargs.get("labels")
        if self._has_masked_loss:
            kwargs.pop("num_items_in_batch", None)  # as on one device, where the model takes the mean of each call
        self._outputs = requested_outputs(
            module, self.model, kwargs, gather=self.gather_outputs, averaged=self.averaged_gradients
        )
        kwargs = dict(kwargs)
        undivided = take_undivided(kwargs) if self._has_parts else {}
        batch, embeddings = batch_of(kwargs)
        if not isinstance(batch.get("input_ids"), Tensor):
            raise wrong_tokens(batch.get("input_ids", kwargs.get("inputs_embeds")))
        if (padding := move_left_padding(batch, module.config.get_text_config())) is not None:
            if self._has_recurrent_layers:
                what = "padding at the beginning of rows in a model with recurrent layers"
                raise UnsupportedError(what, next_step="pad at the end of rows (padding_side='right')")
            self._outputs = self._outputs._replace(padding=padding)
            embeddings = None if embeddings is None else roll_rows(embeddings, padding)
            undivided = rolled(undivided, padding, batch["input_ids"].shape[1])
        given = {"labels": None, "cu_seqlens": None, "attention_mask": None}  # all of them are in the batch
        arguments = batch_arguments(batch, given)
        inputs = self._divider.divide(**arguments)
        rows, length = batch["input_ids"].shape
        if inputs["seq_len"] != length:
            self._outputs = self._outputs._replace(joined_rows=rows)
            embeddings = None if embeddings is None else embeddings.flatten(0, 1).unsqueeze(0)
        if labels is None:
            inputs = {name: x for name, x in inputs.items() if name not in _OF_LOSS}
        elif kwargs.get("num_items_in_batch") is not None:
            if "shift_labels" in inputs and inputs["cu_seqlens"] and not arguments.get("predicts_first"):
                check_counted(batch["labels"], inputs["num_items_in_batch"])
            del inputs["num_items_in_batch"]
        if self._has_parts:
            if KEY in inputs:
                inputs[KEY] = inputs[KEY] + checksum_of(undivided, inputs[KEY].device)
            if "padded" in inputs:
                inputs["lengths"] = lengths_of(batch["attention_mask"])
            full = {"input_ids": batch["input_ids"]} if embeddings is None else {"inputs_embeds": embeddings}
            kwargs.pop("inputs_embeds", None)
            undivided = {"position_ids": None, "input_ids": None, **undivided, **full}
        elif embeddings is not None:
            del inputs["input_ids"]
            layout = self._layouts.of(inputs["seq_len"], inputs["cu_seqlens"])
            kwargs["inputs_embeds"] = shard(embeddings, self.mesh, layout=layout)
        return kwargs | inputs, undivided

    def _prepare(self, module: Any, kwargs: dict[str, Any]) -> tuple[CallSequence, RunningCall]:
        """Return a call and its sequence, and change its arguments to those of a shard. Raise for unsupported ones."""
        seq_len, cu_seqlens, padded, batch_checksum = (
            kwargs.pop(name, None) for name in ("seq_len", "cu_seqlens", "padded", KEY)
        )
        tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise wrong_tokens(tokens)
        check_cache(kwargs)
        is_padded = isinstance(padded, Tensor)  # also a shard without padding, of a batch that has some
        sequence = self._sequence(tokens.shape[1], seq_len, cu_seqlens, is_padded)
        if self._has_recurrent_layers:
            check_recurrent_sequence(sequence.layout, sequence.cu_seqlens)
        config = module.config.get_text_config()
        check_positions(config, sequence.seq_len, watched=self._watches_positions)
        self._warn_about_length(config, sequence)
        self._warn_about_activations()
        is_shard = batch_checksum is not None or isinstance(kwargs.get("attention_mask"), ShardMark)
        if isinstance(kwargs.get("attention_mask"), ShardMark):
            kwargs["attention_mask"] = None
        check_arguments(kwargs)
        check_no_document_lengths(kwargs)
        check_router(config, kwargs, self.mesh, is_inner=module is not self.model)
        is_whole = self._outputs is not None and self._outputs.gather  # the outer model gets the states of all tokens
        if self.mesh.size > 1 and not is_whole and not has_head(self.model):
            check_outer_models(module)
        given = kwargs.get("position_ids")
        is_unordered = self.mesh.size > 1 and not is_shard and given is None
        if is_unordered and not self._is_order_known:
            raise unknown_order(sequence.layout.name)
        if not self._position_check.is_known(given, sequence.seq_len, sequence.cu_seqlens):
            kwargs["position_ids"] = checked_positions(given, self._positions(sequence, tokens.device), tokens)
        kwargs["attention_mask"] = None
        if takes(module, "use_cache"):
            kwargs["use_cache"] = False
        if (count := kwargs.get("num_items_in_batch")) is not None:
            # A batch without labels has the loss 0, not 0 / 0. Not in `shard`: callers may sum its counts.
            kwargs["num_items_in_batch"] = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        if self.mesh.size > 1:
            if self._drops_layers:
                check_layerdrop(module)
            self._watch_loss(module)
            if loss := sharded_loss(module):
                loss.expect(kwargs)
                if not is_shard and kwargs.get("labels") is not None:
                    raise unknown_labels()
            if torch.is_grad_enabled():
                self._begin_training(batch_checksum, kwargs.get("num_items_in_batch"))
            if batch_checksum is not None:
                labels = kwargs.get("shift_labels", kwargs.get("labels"))
                batch_checksum = checksum_of_call(batch_checksum, kwargs.get("input_ids"), labels, tokens.device)
            count = kwargs.get("num_items_in_batch")
            outputs = self._outputs.text if self._outputs else ""
            rows = rows_checksum(tokens, self.mesh.rank) if is_unordered else None
            self._batch.compare(batch_checksum, count, self.model.parameters(), self.mesh, tokens.device, outputs, rows)
        labels = self._take_masked_labels(module, kwargs) if self.mesh.size > 1 else None
        return sequence, RunningCall(module, padded if is_padded else None, labels)

    def _take_masked_labels(self, module: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Remove the labels and their number from the arguments of a model that would divide by its own labels."""
        if module is not self.model or not self._has_masked_loss or kwargs.get("labels") is None:
            return None
        if loss := sharded_loss(module):
            loss.is_pending = False
        return kwargs.pop("labels"), kwargs.pop("num_items_in_batch")

    def _begin_training(self, batch_checksum: Tensor | None, count: Any) -> None:
        """Check the training step of the last call, and prepare the checks of this one's."""
        if not self._watches_gradient:
            self._watches_gradient = True
            self._hooks += watch_gradient(self.model, self.mesh)
        if not self.full_batches:
            self._loss_scale.begin(self.model, self.mesh)
            self._has_all_labels = has_all_labels(batch_checksum, count)

    @never_compiled("plans, transports and hooks are not graphs")
    def _leave(self, module: Any, args: Any, output: Any) -> Any:
        """Check the call and replace its router loss (forward hook). A failed call has no output."""
        running = self._running
        if running is None or running.module is not module:
            if running is not None and getattr(output, "router_logits", None) is not None:
                running.router_logits = output.router_logits
            return None
        self.dropout.end()
        sequence, self.call, self._running = self.call, None, None
        outputs, self._outputs = self._outputs, None
        if output is None or (self.mesh.size == 1 and outputs is None and running.padding is None):
            error = sys.exc_info()[1]
            if isinstance(error, Exception) and self._has_pending_attentions:
                # Other ranks expect attentions of this call, and would match this rank's next call with them. Process
                # groups that launch kernels do not receive the error (see `comm.agreement`); the next call raises one.
                broadcast_error(self.mesh, error, next(self.model.parameters()))
            return None
        self._attentions = self.attended
        if not self.attended:
            raise no_attention(self._text if self._has_parts else module, NAME)
        if loss := sharded_loss(module):
            loss.check_called(module)
        if outputs is not None:
            # Ranks that requested different outputs would wait for each other below.
            self._batch.confirm()
        if running.masked_labels is not None:
            output = with_masked_loss(output, *running.masked_labels)
        output = with_router_loss(
            module, output, self.mesh, padding=running.padding, router_logits=running.router_logits
        )
        self._loss_scale.watch(getattr(output, "loss", None), self._has_all_labels, self.mesh)
        self._has_all_labels = None
        if outputs is not None and sequence is not None:
            scale = self.mesh.size if self.averaged_gradients else 1
            return full_output(output, self.mesh, sequence.layout, outputs, scale)
        return output

    @property
    def _has_pending_attentions(self) -> bool:
        """Return whether other ranks expect attentions of this call that did not begin on this rank."""
        return self.attended < self._attentions and not self.attending

    def _sequence(self, rows: int, seq_len: int | None, cu_seqlens: Any, padded: bool) -> CallSequence:
        seq_len = self.seq_len if seq_len is None else seq_len
        if seq_len is None and self.mesh.size > 1:
            # Tokens of an unsharded sequence look like a shard: each rank would attend to them as its own part.
            raise InputError(
                "the number of tokens of the unsharded sequence is unknown",
                got=f"{rows} tokens on rank {self.mesh.rank}, no seq_len",
                next_step="call model(**sharded.shard(batch)), or pass full_batches=True to parallelize() and call "
                "model(**batch); for tokens that you divided yourself, pass seq_len= to the model or to parallelize(); "
                "call generate() within sharded.paused()",
            )
        length = rows if seq_len is None else size("seq_len", seq_len)
        cu_seqlens = None if cu_seqlens is None else tuple(checked_cu_seqlens("cu_seqlens", cu_seqlens))
        layout = self._layouts.of(length, cu_seqlens)
        if (expected := layout.count(self.mesh.rank)) != rows:
            allowed = f"{expected} of {length} (layout {self.layout!r}, {self.mesh.size} ranks)"
            next_step = "call model(**sharded.shard(input_ids)), or pass seq_len"
            if rows > expected:
                next_step += "; for prompts of PEFT, which add tokens, parallelize with full_batches=True"
            what = f"wrong number of tokens on rank {self.mesh.rank}"
            raise LayoutError(what, got=rows, allowed=allowed, next_step=next_step)
        return CallSequence(length, layout, cu_seqlens, padded)

    def _warn_about_length(self, config: Any, sequence: CallSequence) -> None:
        """Warn on rank 0, once per model, if a document has more tokens than the positions of the config."""
        ends = sequence.cu_seqlens or (0, sequence.seq_len)
        if self.mesh.rank or self._warned_about_length:
            return
        if message := longer_than_trained(config, max(b - a for a, b in pairwise(ends))):
            self._warned_about_length = True
            warnings.warn(message, stacklevel=2)

    def _warn_about_activations(self) -> None:
        """Warn on rank 0, once per model, if gradient checkpointing is enabled and has no effect."""
        if self.mesh.rank or self._warned_about_activations or not torch.is_grad_enabled():
            return
        if message := keeps_activations(self.model):
            self._warned_about_activations = True
            warnings.warn(message, stacklevel=2)

    def _positions(self, sequence: CallSequence, device: torch.device) -> Tensor:
        """Return the position ids of this rank's tokens, ``[S]``, counted from the start of their document."""
        positions = local_position_ids(self.mesh, seq_len=sequence.seq_len, layout=sequence.layout, device=device)
        if sequence.cu_seqlens is None:
            return positions
        starts = on_device(sequence.cu_seqlens[:-1], device)
        return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


def sharded_model_of(model: PreTrainedModel) -> ShardedModel | None:
    """Return the `ShardedModel` of which this is the model, or None."""
    found: ShardedModel | None = vars(model).get(ATTRIBUTE)
    return None if found is None or found.model is not model else found


def _checked_layout(model: PreTrainedModel, layout: str | None) -> str:
    """Return the name of the layout. Raise `UnsupportedError` if recurrent layers need another one."""
    if not recurrent_layers(model):
        return "zigzag" if layout is None else layout
    if layout not in (None, LAYOUT):
        what = "recurrent layers continue from one rank to the next, so each rank needs one part of the sequence"
        raise UnsupportedError(what, got=f"layout={layout!r}", allowed=f"layout={LAYOUT!r}, or none")
    return LAYOUT


def _check_free(model: PreTrainedModel) -> None:
    """Raise `InputError` if a module is already part of a sharded model."""
    if used := next(((name, module) for name, module in model.named_modules() if hasattr(module, ATTRIBUTE)), None):
        name, module = used
        got = f"its part {name} ({type(module).__name__})" if name else type(model).__name__
        next_step = "call undo() of its ShardedModel first"
        raise InputError("the model is parallelized already", got=got, next_step=next_step)
