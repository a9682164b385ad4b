"""Hooks around the calls of a sharded model, which check arguments, divide batches and complete losses."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.attention import NAME
from burst_portable.integrations.transformers.attention_check import AttentionCheck
from burst_portable.integrations.transformers.batches.divider import BatchDivider, token_inputs_of
from burst_portable.integrations.transformers.call_arguments import (
    PositionCheck,
    check_arguments,
    check_cache,
    check_no_document_lengths,
)
from burst_portable.integrations.transformers.call_errors import no_attention, unknown_labels, unknown_order
from burst_portable.integrations.transformers.call_sequence import (
    CallSequence,
    CallWarnings,
    positions_of,
    sequence_of_call,
)
from burst_portable.integrations.transformers.full_batches.division import divide_full_batch
from burst_portable.integrations.transformers.full_batches.outputs import Outputs, full_output, requested_outputs
from burst_portable.integrations.transformers.full_batches.text_model import divide
from burst_portable.integrations.transformers.layers.dropout_streams import DropoutStreams
from burst_portable.integrations.transformers.layers.entry_modules import check_called
from burst_portable.integrations.transformers.layouts import Layouts
from burst_portable.integrations.transformers.loss import (
    RouterCheck,
    ShardedLoss,
    check_router,
    install_loss,
    sharded_loss,
    with_router_loss,
)
from burst_portable.integrations.transformers.masked_loss import with_masked_loss
from burst_portable.integrations.transformers.model_facts import ModelFacts
from burst_portable.integrations.transformers.models.adapters import check_adapters
from burst_portable.integrations.transformers.models.checks import check_layerdrop
from burst_portable.integrations.transformers.models.model_parts import has_head
from burst_portable.integrations.transformers.models.outer_model import (
    check_forward,
    check_outer_models,
    check_padding_below_heads,
)
from burst_portable.integrations.transformers.models.position_limits import check_positions
from burst_portable.integrations.transformers.models.signatures import parameters_of, takes
from burst_portable.integrations.transformers.rank_agreement import RankAgreement
from burst_portable.integrations.transformers.running_call import RunningCall
from burst_portable.integrations.transformers.shard_arguments import (
    ShardArguments,
    complete_arguments,
    recurrent_arguments,
    shard_positions,
    take_shard_arguments,
)
from burst_portable.integrations.transformers.training.averaging import check_averaging
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
        self._facts = ModelFacts(model)
        self._layouts = Layouts(layout, self._facts.text, mesh, strategy, kernel)
        self.model, self.mesh, self.strategy, self.layout = model, mesh, strategy, layout
        self.seq_len, self.kernel = seq_len, kernel
        self.full_batches, self.gather_outputs = full_batches, gather_outputs
        self.averaged_gradients, self._is_order_known = averaged_gradients, is_order_known
        # Attentions of the last successful call.
        self._attentions: int = getattr(self._facts.text.config, "num_hidden_layers", 0)
        self._hooks: list[Any] = []
        self._entries: dict[str, str] = {}  # see `entries_to_call`
        self._depends_on_length, self._scales_by_row = False, False  # see `ShardedModel`
        self.dropout = DropoutStreams(self._facts.text, mesh.rank)
        self._forget_calls()

    def _forget_calls(self) -> None:
        """Set the state of calls to that of a model that was not called yet."""
        self._outputs: Outputs | None = None  # of the running call, with full batches
        self.call: CallSequence | None = None
        self.attended, self.attending = 0, False
        self.tokens_of_call: tuple[int, int] | None = None  # rows and tokens of this rank in the last call
        self.called_entries: set[str] = set()  # see `entry_modules`: those whose inputs were checked
        self.attention_modules: set[int] = set()  # identities of those that attended in the running call
        self._attention_check = AttentionCheck()
        self._running: RunningCall | None = None
        self._agreement = RankAgreement(self.model, self.mesh, full_batches=self.full_batches)
        self._position_check, self._warnings = PositionCheck(), CallWarnings(self.model, self.mesh.rank)
        self._router_check = RouterCheck()

    @property
    def _watches_positions(self) -> bool:
        """Return whether modules depend on positions of other ranks, and were changed for that."""
        return self._depends_on_length or self._scales_by_row

    @property
    def _divider(self) -> BatchDivider:
        """Return the divider of a batch. Its fields may change between calls, as the model's loss function."""
        return BatchDivider(
            self.mesh,
            self._layouts,
            self._position_check,
            shifts_labels=self._facts.shifts_labels,
            scales_by_row=self._scales_by_row,
            depends_on_length=self._depends_on_length,
            separates_padding=self._facts.separates_padding,
            token_inputs=token_inputs_of(self.model),
            padding_idx=self._facts.padding_idx,
        )

    def _watch_loss(self, model: PreTrainedModel) -> None:
        """Install the sharded loss, also if the model's loss function was replaced since."""
        if self.mesh.size > 1 and has_head(model):
            install_loss(model, full_batches=self.full_batches)

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
                    takes_labels=not self._facts.has_masked_loss,
                )
            if self.full_batches:
                kwargs, undivided = self._divide(module, kwargs)
            sequence, running = self._prepare(module, kwargs)
        except Exception as error:
            # Otherwise the other ranks would match this rank's next call with the current one.
            broadcast_error(self.mesh, error, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            raise
        if not self._facts.has_parts:
            sequence = sequence._replace(dropout_seed=self.dropout.begin())
            self.tokens_of_call = _tokens_of(kwargs)
        self.call, self._running, self.attended, self.attending = sequence, running, 0, False
        self.attention_modules.clear()
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
            what = "RoPE by the longest position, or queries scaled by their row, with position_ids"
            raise UnsupportedError(what, got=type(module).__name__, next_step="leave out position_ids")
        device = next(x.device for x in kwargs.values() if isinstance(x, Tensor))
        positions = positions_of(self.call, self.mesh, device).unsqueeze(0)
        if self._outputs is not None and (padding := self._outputs.padding) is not None:
            # Places in the rows of the caller, as on one device.
            positions = (positions + padding.to(device).unsqueeze(1)) % self.call.seq_len
        divided = divide(kwargs, module, positions, self.mesh, self.call.layout)
        self.call = self.call._replace(dropout_seed=self.dropout.begin())
        self.tokens_of_call = _tokens_of(divided)
        return (), divided | ({"use_cache": False} if takes(module, "use_cache") else {})

    @never_compiled("a pair of `_enter_text`")
    def _leave_text(self, module: Any, args: Any, output: Any) -> None:
        """End the random numbers of this rank's tokens (forward hook)."""
        self.dropout.end()

    def _divide(self, module: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return this rank's arguments of a call with a full batch, and those that replace them in the end."""
        check_cache(kwargs)
        check_averaging(self.model, self.mesh, averaged=self.averaged_gradients)
        facts = self._facts
        if facts.ignores_count:
            kwargs.pop("num_items_in_batch", None)  # as on one device, where the model takes the mean of each call
        outputs = requested_outputs(
            module, self.model, kwargs, gather=self.gather_outputs, averaged=self.averaged_gradients
        )
        divided = divide_full_batch(
            dict(kwargs),
            module.config.get_text_config(),
            self._divider,
            has_parts=facts.has_parts,
            has_recurrent_layers=facts.has_recurrent_layers,
            averaged=self.averaged_gradients,
        )
        if outputs.gather and not has_head(self.model) and "padded" in divided.kwargs:
            check_padding_below_heads(module, reads_first=facts.separates_padding and divided.padding is not None)
        self._outputs = outputs._replace(
            padding=divided.padding, joined_rows=divided.joined_rows, is_padding=divided.is_padding
        )
        return divided.kwargs, divided.undivided

    def _prepare(self, module: Any, kwargs: dict[str, Any]) -> tuple[CallSequence, RunningCall]:
        """Return a call and its sequence, and change its arguments to those of a shard. Raise for unsupported ones."""
        shard = take_shard_arguments(kwargs)
        check_cache(kwargs)
        sequence = self._sequence_of(shard)
        if self._facts.has_recurrent_layers:
            kwargs |= recurrent_arguments(sequence, self.mesh.rank)
        self._check(module, kwargs, sequence)
        is_unordered = self.mesh.size > 1 and shard.is_divided_by_caller and kwargs.get("position_ids") is None
        if is_unordered and not self._is_order_known:
            raise unknown_order(sequence.layout.name)
        given = kwargs.get("position_ids")
        # The divider made those of full batches. They count from the padding of rows that began with it.
        is_divided = self.full_batches and given is not None
        if not (is_divided or self._position_check.is_known(given, sequence.seq_len, sequence.cu_seqlens)):
            kwargs["position_ids"] = shard_positions(kwargs, sequence, self.mesh, self._facts.padding_idx)
        complete_arguments(module, kwargs)
        labels, loss = None, None
        if self.mesh.size > 1:
            loss = self._expect_loss(module, kwargs, shard)
            outputs = self._outputs.text if self._outputs else ""
            self._agreement.begin(shard, kwargs, outputs=outputs, is_unordered=is_unordered)
            labels = self._take_masked_labels(module, kwargs)
        return sequence, RunningCall(module, shard.padding, labels, loss)

    def _sequence_of(self, shard: ShardArguments) -> CallSequence:
        is_document = self._facts.separates_padding and shard.cu_seqlens is not None
        sequence = sequence_of_call(
            shard.tokens.shape[1],
            self.mesh,
            self._layouts,
            seq_len=self.seq_len if shard.seq_len is None else shard.seq_len,
            cu_seqlens=shard.cu_seqlens,
            padded=shard.padding is not None and not is_document,
        )
        return sequence._replace(lengths=shard.lengths, longest=shard.longest)

    def _check(self, module: Any, kwargs: dict[str, Any], sequence: CallSequence) -> None:
        """Raise an error for arguments with which the model would not compute the results of one device."""
        config = module.config.get_text_config()
        check_positions(config, sequence.seq_len, watched=self._watches_positions)
        self._warnings.check(config, sequence)
        check_arguments(kwargs)
        check_no_document_lengths(kwargs)
        check_router(config, kwargs, self.mesh, is_inner=module is not self.model)
        if self.mesh.size > 1:
            if not has_head(self.model) and not (self._outputs is not None and self._outputs.gather):
                check_outer_models(module)  # which would get the states of a shard
            if self._facts.drops_layers:
                check_layerdrop(module)

    def _expect_loss(self, module: Any, kwargs: dict[str, Any], shard: ShardArguments) -> ShardedLoss | None:
        """Prepare the loss function of a call, and return it. Raise an error for labels that may be other ones."""
        for called in (module, self.model):  # `model.forward` calls the loss function of the model too
            self._watch_loss(called)
        if loss := sharded_loss(module):
            facts = self._facts
            loss.expect(kwargs, calls_it=not facts.has_masked_loss, passes_count=not facts.ignores_count)
            if shard.is_divided_by_caller and kwargs.get("labels") is not None:
                raise unknown_labels()
        return loss

    def _take_masked_labels(self, module: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Remove the labels and their number from the arguments of a model that would divide by its own labels."""
        if module is not self.model or not self._facts.has_masked_loss or kwargs.get("labels") is None:
            return None
        if loss := sharded_loss(module):
            loss.is_pending = False
        return kwargs.pop("labels"), kwargs.pop("num_items_in_batch")

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
            self._share_failure()
            return None
        self._check_finished(running, output)
        if outputs is not None:
            # Ranks that requested different outputs would wait for each other below.
            self._agreement.confirm()
        if running.masked_labels is not None:
            output = with_masked_loss(output, *running.masked_labels)
        output = with_router_loss(
            module,
            output,
            self.mesh,
            padding=running.padding,
            router_logits=running.router_logits,
            check=self._router_check,
        )
        self._agreement.end(getattr(output, "loss", None))
        if outputs is not None and sequence is not None:
            scale = self.mesh.size if self.averaged_gradients else 1
            output = full_output(output, self.mesh, sequence.layout, outputs, scale)
            return self._agreement.watch_outputs(output, outputs.is_padding)
        return output

    def _share_failure(self) -> None:
        """Send the error of a failed call to ranks that expect attentions of it.

        They would match this rank's next call with them. Process groups that launch kernels do not receive the error
        (see `comm.agreement`); the next call raises one.
        """
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and self._has_pending_attentions:
            broadcast_error(self.mesh, error, next(self.model.parameters()))

    def _check_finished(self, running: RunningCall, output: Any) -> None:
        """Raise an error if the call that ended had no attention of ours, or did not use its sharded loss alone."""
        module = running.module
        self._attentions = self.attended
        if not self.attended:
            raise no_attention(self._facts.text if self._facts.has_parts else module, NAME)
        check_called(self._entries, self.called_entries)
        self._attention_check.run(self._facts.text, self.attention_modules, self.attended)
        if loss := running.loss:
            loss.check_called(module)
            try:
                loss.check_unchanged(module, output)
            except UnsupportedError as error:
                broadcast_error(self.mesh, error, next(self.model.parameters()))  # a term may be 0 on another rank
                raise

    @property
    def _has_pending_attentions(self) -> bool:
        """Return whether other ranks expect attentions of this call that did not begin on this rank."""
        return self.attended < self._attentions and not self.attending


def _tokens_of(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of rows and of tokens of this rank in the arguments of a text model."""
    rows, tokens = next(x for x in map(kwargs.get, ("input_ids", "inputs_embeds")) if x is not None).shape[:2]
    return rows, tokens
