"""Hooks around the calls of a sharded model, which check arguments, divide batches and complete losses."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.adapters import check_adapters
from burst_portable.integrations.transformers.attention import DOCUMENTS, NAME
from burst_portable.integrations.transformers.batch_check import (
    KEY,
    BatchCheck,
    checksum_of_call,
    has_all_labels,
    rows_checksum,
)
from burst_portable.integrations.transformers.batch_division import divide_full_batch
from burst_portable.integrations.transformers.call_errors import (
    no_attention,
    padding_first,
    unknown_labels,
    unknown_order,
    wrong_tokens,
)
from burst_portable.integrations.transformers.call_sequence import (
    CallSequence,
    CallWarnings,
    positions_of,
    sequence_of_call,
)
from burst_portable.integrations.transformers.checks import (
    PositionCheck,
    check_arguments,
    check_cache,
    check_layerdrop,
    check_no_document_lengths,
    check_positions,
    checked_positions,
    drops_layers,
    has_head,
    parameters_of,
    takes,
    text_model_of,
)
from burst_portable.integrations.transformers.dropout_streams import DropoutStreams
from burst_portable.integrations.transformers.full_batches import (
    Outputs,
    check_averaging,
    full_output,
    requested_outputs,
)
from burst_portable.integrations.transformers.gradient_checks import LossScaleCheck, watch_gradient
from burst_portable.integrations.transformers.layouts import Layouts
from burst_portable.integrations.transformers.loss import (
    ShardedLoss,
    check_router,
    loss_of,
    sharded_loss,
    shifts_labels,
    with_router_loss,
)
from burst_portable.integrations.transformers.masked_loss import (
    has_masked_loss,
    has_masked_tokens,
    ignores_count,
    with_masked_loss,
)
from burst_portable.integrations.transformers.outer_model import (
    check_forward,
    check_outer_models,
    check_padded_outer_models,
)
from burst_portable.integrations.transformers.padding import is_encoder
from burst_portable.integrations.transformers.padding_positions import (
    checked_shard_positions,
    padding_index,
    positions_of_rows,
)
from burst_portable.integrations.transformers.recurrent_layers import recurrent_layers
from burst_portable.integrations.transformers.recurrent_states import (
    check_recurrent_sequence,
    local_documents,
)
from burst_portable.integrations.transformers.running_call import RunningCall
from burst_portable.integrations.transformers.shard_mark import ShardMark
from burst_portable.integrations.transformers.shards import BatchDivider, token_inputs_of
from burst_portable.integrations.transformers.text_model import (
    divide,
)
from burst_portable.mesh import Mesh
from burst_portable.runtime.validation import broadcast_error
from burst_portable.strategies.base import Strategy
from burst_portable.utils.torch_modes import never_compiled


class ModelCalls:
    """The hooks of a model whose sequence is sharded over a mesh, and the state that its modules need in a call.

    Attributes are those of `ShardedModel`.
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
        # Attentions of the last successful call.
        self._attentions: int = getattr(self._text.config, "num_hidden_layers", 0)
        self._hooks: list[Any] = []
        self._drops_layers, self._has_masked_loss = drops_layers(model), has_masked_loss(model)
        self._ignores_count = ignores_count(model)
        self._has_recurrent_layers = bool(recurrent_layers(self._text))
        self._watches_positions, self._scales_by_row = False, False  # see `ShardedModel`
        self.dropout = DropoutStreams(self._text, mesh.rank)
        self._is_encoder, self._padding_idx = is_encoder(model), padding_index(self._text)
        self._forget_calls()

    def _forget_calls(self) -> None:
        """Set the state of calls to that of a model that was not called yet."""
        self._outputs: Outputs | None = None  # of the running call, with full batches
        self.call: CallSequence | None = None
        self.attended, self.attending = 0, False
        self._running: RunningCall | None = None
        self._batch = BatchCheck(has_masked_tokens=has_masked_tokens(self.model))
        self._position_check, self._loss_scale = PositionCheck(), LossScaleCheck()
        self._has_all_labels: Tensor | None = None  # of the running call
        self._watches_gradient = False
        self._warnings = CallWarnings(self.model, self.mesh.rank)

    @property
    def _has_parts(self) -> bool:
        """Return whether the model has a text model among several parts, which divides its rows itself."""
        return self._text is not self.model

    @property
    def shifts_labels(self) -> bool:
        """Return whether a token is compared with the label of the next one: true for all models but encoders."""
        if self._separates_padding and self.model.base_model is self.model:
            return False  # an encoder without a head, which names no loss
        return shifts_labels(loss_of(self.model))

    @property
    def _separates_padding(self) -> bool:
        """Return whether padding of batches becomes a document. Models of several parts have causal text models."""
        config: Any = self.model.config
        return not self._has_parts and (self._is_encoder or getattr(config, "is_causal", None) is False)

    @property
    def _divider(self) -> BatchDivider:
        """Return the divider of a batch. Its fields may change between calls, as the model's loss function."""
        return BatchDivider(
            self.mesh,
            self._layouts,
            self._position_check,
            shifts_labels=self.shifts_labels,
            scales_by_row=self._scales_by_row,
            separates_padding=self._separates_padding,
            token_inputs=token_inputs_of(self.model),
            padding_idx=self._padding_idx,
        )

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
            if module is not self.model and (self.mesh.size > 1 or self.full_batches):
                check_forward(
                    self.model,
                    full_batches=self.full_batches,
                    averaged=self.averaged_gradients,
                    takes_labels=not self._has_masked_loss,
                )
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
        positions = positions_of(self.call, self.mesh, device).unsqueeze(0)
        divided = divide(kwargs, module, positions, self.mesh, self.call.layout)
        self.call = self.call._replace(dropout_seed=self.dropout.begin())
        return (), divided | ({"use_cache": False} if takes(module, "use_cache") else {})

    @never_compiled("a pair of `_enter_text`")
    def _leave_text(self, module: Any, args: Any, output: Any) -> None:
        """End the random numbers of this rank's tokens (forward hook)."""
        self.dropout.end()

    def _divide(self, module: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return this rank's arguments of a call with a full batch, and those that replace them in the end."""
        check_cache(kwargs)
        check_averaging(self.model, self.mesh, averaged=self.averaged_gradients)
        if self._ignores_count:
            kwargs.pop("num_items_in_batch", None)  # as on one device, where the model takes the mean of each call
        self._outputs = requested_outputs(
            module, self.model, kwargs, gather=self.gather_outputs, averaged=self.averaged_gradients
        )
        divided = divide_full_batch(
            dict(kwargs),
            module.config.get_text_config(),
            self._divider,
            has_parts=self._has_parts,
            has_recurrent_layers=self._has_recurrent_layers,
        )
        if divided.padding is not None and self._separates_padding and not has_head(self.model):
            raise padding_first()
        self._outputs = self._outputs._replace(padding=divided.padding, joined_rows=divided.joined_rows)
        return divided.kwargs, divided.undivided

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
        sequence = sequence_of_call(
            tokens.shape[1],
            self.mesh,
            self._layouts,
            seq_len=self.seq_len if seq_len is None else seq_len,
            cu_seqlens=cu_seqlens,
            padded=is_padded and not (self._separates_padding and cu_seqlens is not None),
        )
        if self._has_recurrent_layers:
            check_recurrent_sequence(sequence.layout)
            if sequence.cu_seqlens is not None and len(sequence.cu_seqlens) > 2:
                kwargs[DOCUMENTS] = local_documents(sequence.layout, self.mesh.rank, sequence.cu_seqlens)
        config = module.config.get_text_config()
        check_positions(config, sequence.seq_len, watched=self._watches_positions)
        self._warnings.check(config, sequence)
        is_shard = batch_checksum is not None or isinstance(kwargs.get("attention_mask"), ShardMark)
        if isinstance(kwargs.get("attention_mask"), ShardMark):
            kwargs["attention_mask"] = None
        check_arguments(kwargs)
        check_no_document_lengths(kwargs)
        check_router(config, kwargs, self.mesh, is_inner=module is not self.model)
        is_whole = self._outputs is not None and self._outputs.gather  # the outer model gets the states of all tokens
        if self.mesh.size > 1 and not has_head(self.model):
            if not is_whole:
                check_outer_models(module)
            elif is_padded:
                check_padded_outer_models(module)
        given = kwargs.get("position_ids")
        is_unordered = self.mesh.size > 1 and not is_shard and given is None
        if is_unordered and not self._is_order_known:
            raise unknown_order(sequence.layout.name)
        if not self._position_check.is_known(given, sequence.seq_len, sequence.cu_seqlens):
            kwargs["position_ids"] = self._checked_positions(kwargs, sequence, tokens)
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
                loss.expect(kwargs, passes_count=not self._ignores_count)
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

    def _checked_positions(self, kwargs: dict[str, Any], sequence: CallSequence, tokens: Tensor) -> Tensor:
        """Return the position ids of a call. Raise `InputError` if given ones are not those of this rank."""
        given, ids = kwargs.get("position_ids"), kwargs.get("input_ids")
        places = positions_of(sequence, self.mesh, tokens.device)
        if self._padding_idx is None:
            return checked_positions(given, places, tokens)
        if given is None and self.mesh.size == 1:
            return positions_of_rows(ids, places, self._padding_idx, sequence.cu_seqlens)
        return checked_shard_positions(given, ids, places, self._padding_idx)

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
