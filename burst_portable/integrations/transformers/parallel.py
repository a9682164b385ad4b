"""`parallelize`: one model, told which mesh its sequence is spread over."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from burst_portable.errors import InputError, LayoutError, ShapeError, UnsupportedError, shown
from burst_portable.integrations.transformers.attention import ATTRIBUTE, CallSequence, attend
from burst_portable.integrations.transformers.batch_check import KEY, BatchCheck, checksum
from burst_portable.integrations.transformers.checks import (
    check_arguments,
    check_layerdrop,
    check_model,
    check_no_document_lengths,
    check_positions,
    checked_positions,
    drops_layers,
    parameters_of,
    takes,
)
from burst_portable.integrations.transformers.layouts import Layouts
from burst_portable.integrations.transformers.loss import (
    ShardedLoss,
    check_router,
    loss_of,
    sharded_loss,
    shifts_labels,
    with_router_loss,
)
from burst_portable.integrations.transformers.masks import check_padded_model, has_padding, wanted_mask
from burst_portable.layout import Layout
from burst_portable.mask import checked_cu_seqlens
from burst_portable.mesh import MeshLike, as_mesh
from burst_portable.runtime.validation import broadcast_error, check_tensor
from burst_portable.sharding import local_position_ids, shard, shard_batch
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import make_strategy
from burst_portable.utils.torch_modes import never_compiled
from burst_portable.utils.values import size

_BETWEEN = ("burst_portable.integrations.", "torch._dynamo.")
"""Modules whose frames stand between torch's call of a module and a hook's own, and end with the hook."""


class RunningCall:
    """A module's call, made in the hook before its forward."""

    def __init__(self, module: Any) -> None:
        self.module = module
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            frame = frame.f_back
        self._frame = frame

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # frames cannot be pickled, and in a copy elsewhere nothing runs

    def has(self, module: Any) -> bool:
        """Whether a call of `module` that begins now is a part of this one, which still runs."""
        return module is not self.module and any(module is part for part in self.module.modules()) and self._runs()

    def _runs(self) -> bool:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


NAME = "burst_portable"
"""The name of our attention and mask functions in transformers' interfaces."""


def parallelize(
    model: PreTrainedModel,
    mesh: MeshLike = None,
    *,
    strategy: Strategy | str = "auto",
    layout: str = "zigzag",
    seq_len: int | None = None,
    kernel: str = "auto",
) -> ShardedModel:
    """Run an unedited transformers model with its sequence sharded over the ranks of a mesh.

    Every rank calls the model with its own rows: ``model(**handle.shard(input_ids))``. Everything but attention works
    on rows alone; attention sees the whole sequence. What the model's masks mean is mapped to ours or refused.

    Args:
        model: a decoder of transformers; it is changed in place, and restored by `ShardedModel.undo`.
        mesh: as `attention` takes it; None is the default process group.
        strategy, layout, kernel: as `attention` takes them; the layout by name, or "auto": the one that is predicted to
            be the fastest for each sequence, with the strategy, on the device that the model is on now.
        seq_len: tokens of the unsharded sequence, for calls that do not name it. Default: each call must name it, as
            those with `ShardedModel.shard` do.

    Returns:
        A handle, which is also a context manager that undoes it.

    Raises:
        InputError: no transformers model, or one that is parallelized already, as a whole or in part; unknown names.
        UnsupportedError: a model that cannot be sharded, with the reason.
    """
    return ShardedModel(model, mesh, strategy=strategy, layout=layout, seq_len=seq_len, kernel=kernel)


class ShardedModel:
    """A parallelized model's handle, and what its modules know. See `parallelize`.

    Attributes:
        model, mesh, strategy, layout, kernel: as given.
        seq_len: tokens of the whole sequence, for calls that name none. May be set between calls.
        call: the sequence of the call that runs now.
        attended: how many attentions of that call came to us.
        attending: whether one of them has begun and not ended; after a call that failed: whether it failed there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: MeshLike,
        *,
        strategy: Strategy | str,
        layout: str,
        seq_len: int | None,
        kernel: str,
    ) -> None:
        check_model(model)
        _check_free(model)
        if isinstance(strategy, str):
            make_strategy(strategy)
        self._layouts = Layouts(layout, model, as_mesh(mesh), strategy, kernel)
        self.model, self.mesh, self.strategy, self.layout = model, as_mesh(mesh), strategy, layout
        self.seq_len, self.kernel = seq_len, kernel
        self.call: CallSequence | None = None
        self.attended, self.attending = 0, False
        self._running: RunningCall | None = None
        self._batch = BatchCheck()
        # Of the last call that ended well.
        self._attentions: int = getattr(model.config, "num_hidden_layers", 0)
        self._before = model.config._attn_implementation
        self._hooks: list[Any] = []
        self._drops_layers = drops_layers(model)
        self._install()

    def __repr__(self) -> str:
        state = "" if self._hooks else ", undone"
        of = f"{type(self.model).__name__}, rank {self.mesh.rank} of {self.mesh.size}"
        return f"ShardedModel({of}, strategy={self.strategy!r}, layout={self.layout!r}{state})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        """A copied model works on the same mesh; groups and transports cannot be copied."""
        return self

    def _install(self) -> None:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, wanted_mask)
        self.model.set_attn_implementation(NAME)
        self._watch_loss(self.model)
        for module in self.model.modules():
            setattr(module, ATTRIBUTE, self)
            # Inner models are called on their own as well, by those who compute a loss themselves.
            if isinstance(module, PreTrainedModel) and "position_ids" in parameters_of(module):
                self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def _watch_loss(self, model: PreTrainedModel) -> None:
        """Also for a function that was put in its place since."""
        if self.mesh.size > 1 and model.base_model is not model and sharded_loss(model) is None:
            model.loss_function = ShardedLoss(loss_of(model))

    def undo(self) -> None:
        """Give the model back as it was. Calling it again does nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module in self.model.modules():
            if hasattr(module, ATTRIBUTE):
                delattr(module, ATTRIBUTE)
        if loss := sharded_loss(self.model):
            self.model.loss_function = loss.function
        self.model.set_attn_implementation(self._before)

    @property
    def shifted(self) -> bool:
        """Whether labels are shifted, so that a token is held to the next one: in all but encoders."""
        return shifts_labels(loss_of(self.model))

    def __enter__(self) -> ShardedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """This rank's arguments for the model, from a batch that every rank has whole.

        The loss of a rank is its part of the mean over all tokens: summed over ranks, the losses are one device's
        loss, and the gradients one device's gradients.

        Args:
            input_ids: ``[B, N]``, the same on every rank; or a tokenizer's or collator's batch with `input_ids` and,
                if it has them, `labels`, `attention_mask` and `cu_seqlens`.
            labels: ``[B, N]``, as the model takes them on one device, -100 where there is none. None takes
                `input_ids`, or no labels where the model does not shift them (encoders).
            cu_seqlens: cumulative lengths of packed documents, the same for each row of the batch: a sequence of ints,
                an array or a tensor.
            attention_mask: ``[B, N]``, 0 where there is padding, which must be at the end of its row and have the
                label -100. Outputs are one device's where there is a token.

        Returns:
            input_ids, position_ids, labels and (where labels are shifted) shift_labels ``[B, S]``,
            num_items_in_batch, seq_len, cu_seqlens, batch_checksum, and padded, if there is padding.

        Raises `InputError` for what does not go together, and after `undo`: the model would take its rows for all.
        """
        if not self._hooks:
            raise InputError(
                "the model was given back by undo(), and would take these rows for all; parallelize it again"
            )
        if isinstance(input_ids, Mapping):
            given = {"labels": labels, "cu_seqlens": cu_seqlens, "attention_mask": attention_mask}
            return self.shard(**_batch_arguments(input_ids, given))
        for name, x in (("input_ids", input_ids), ("labels", labels), ("attention_mask", attention_mask)):
            if x is not None or name == "input_ids":
                check_tensor(name, x)
        cu_seqlens = None if cu_seqlens is None else tuple(checked_cu_seqlens("cu_seqlens", cu_seqlens))
        where = self._cut(input_ids, cu_seqlens)
        inputs: dict[str, Any] = {"seq_len": input_ids.shape[1], "cu_seqlens": cu_seqlens}
        if self.mesh.size > 1:
            ends = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=input_ids.device)
            inputs[KEY] = checksum(input_ids, labels, attention_mask, ends)
        if has_padding(attention_mask, input_ids, labels):
            inputs["padded"] = True
        batch = shard_batch(input_ids, labels, cu_seqlens=cu_seqlens, mesh=self.mesh, layout=where)
        if self.shifted:
            held = (input_ids if labels is None else labels) != -100
            # The first token of a document is nobody's next one.
            first = torch.tensor((cu_seqlens or (0, input_ids.shape[1]))[:-1], device=held.device)
            count = held.sum() - held[:, first].sum()
            inputs["shift_labels"] = batch["labels"]
        elif labels is not None:
            batch["labels"] = shard(labels, self.mesh, layout=where)
            count = (labels != -100).sum()
        else:
            del batch["labels"]
            return batch | inputs
        return batch | inputs | {"num_items_in_batch": count}

    def _cut(self, input_ids: Tensor, cu_seqlens: tuple[int, ...] | None) -> Layout:
        if input_ids.dim() != 2:
            raise ShapeError("input_ids must be [batch, tokens]", got=tuple(input_ids.shape))
        return self.layout_of(input_ids.shape[1], cu_seqlens)

    def layout_of(self, seq_len: int, cu_seqlens: Any = None) -> Layout:
        """Which rows of a sequence each rank holds; what `unshard` puts outputs together by.

        Args:
            seq_len, cu_seqlens: of the sequence, as `shard` is given it.
        """
        return self._layouts.of(
            seq_len, None if cu_seqlens is None else tuple(checked_cu_seqlens("cu_seqlens", cu_seqlens))
        )

    # ------------------------------------------------------------------------------------------------ the hooks

    @never_compiled("plans, transports and hooks are not graphs")
    def _enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a model's forward: which sequence this is; its position ids; what cannot be taken, refused."""
        if self._running is not None and self._running.has(module):
            return args, kwargs  # a model inside the one that was called
        if self._running is not None and self._waited_for and self.mesh.size > 1:
            # That call ended without a hook, as by Ctrl-C, and its rest is left out here.
            self.mesh.transport(next(self.model.parameters()).device.type).mark_out_of_sync()
        kwargs = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}
        try:
            sequence = self._prepare(module, kwargs)
        except Exception as refusal:
            # Else the others would take what this rank does next for its part of this call.
            broadcast_error(self.mesh, refusal, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            raise
        self.call, self._running, self.attended, self.attending = sequence, RunningCall(module), 0, False
        return (), kwargs

    def _prepare(self, module: Any, kwargs: dict[str, Any]) -> CallSequence:
        """The sequence of a call with these arguments, which become those of a shard. Raises for what is refused."""
        seq_len, cu_seqlens, padded, mine = (
            kwargs.pop(name, None) for name in ("seq_len", "cu_seqlens", "padded", KEY)
        )
        tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise ShapeError("a sharded model takes input_ids [batch, rows] or inputs_embeds", got=type(tokens))
        sequence = self._sequence(tokens.shape[1], seq_len, cu_seqlens, bool(padded))
        check_positions(module.config, sequence.seq_len)
        check_arguments(kwargs)
        check_no_document_lengths(kwargs)
        if padded:
            check_padded_model(module.config, kwargs)
        kwargs["position_ids"] = checked_positions(
            kwargs.get("position_ids"), self._positions(sequence, tokens.device), tokens
        )
        kwargs["attention_mask"] = None
        if takes(module, "use_cache"):
            kwargs["use_cache"] = False
        if (count := kwargs.get("num_items_in_batch")) is not None:
            # Here and not in `shard`, whose counts may be summed: a batch without any label has the loss 0, not 0 / 0.
            kwargs["num_items_in_batch"] = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        if self.mesh.size > 1:
            if self._drops_layers:
                check_layerdrop(module)
            check_router(module.config, kwargs)
            self._watch_loss(module)
            if loss := sharded_loss(module):
                loss.expect(kwargs)
            self._batch.compare(mine, self.model.parameters(), self.mesh, tokens.device)
        return sequence

    @never_compiled("plans, transports and hooks are not graphs")
    def _leave(self, module: Any, args: Any, output: Any) -> Any:
        """After a model's forward, also one that failed and has no output."""
        if self._running is None or self._running.module is not module:
            return None
        self.call = self._running = None
        if output is None or self.mesh.size == 1:
            self._tell_of(sys.exc_info()[1])
            return None
        self._attentions = self.attended
        if not self.attended:
            raise UnsupportedError(f"{type(module).__name__} did not attend through transformers' AttentionInterface")
        if loss := sharded_loss(module):
            loss.check_called(module)
        return with_router_loss(module, output, self.mesh)

    def _tell_of(self, error: BaseException | None) -> None:
        """Tell the others of an error outside of attention, if they have attentions of this call before them.

        They would take this rank's next call for the rest of this one. If they do not hear it, as where groups launch
        kernels, see `comm.agreement`, that call is refused.
        """
        if isinstance(error, Exception) and self._waited_for:
            broadcast_error(self.mesh, error, next(self.model.parameters()))

    @property
    def _waited_for(self) -> bool:
        """Whether the others have attentions of this call before them that did not begin here."""
        return self.attended < self._attentions and not self.attending

    def _sequence(self, rows: int, seq_len: int | None, cu_seqlens: Any, padded: bool) -> CallSequence:
        seq_len = self.seq_len if seq_len is None else seq_len
        if seq_len is None and self.mesh.size > 1:
            # Rows of an unsharded sequence look like those of a shard: each rank would attend to them as its own part.
            raise InputError(
                "this call does not say how many tokens the unsharded sequence has",
                got=f"{rows} tokens on rank {self.mesh.rank}, no seq_len",
                next_step="call model(**handle.shard(batch)); for rows that you divided yourself, pass seq_len= to the "
                "model or to parallelize()",
            )
        length = rows if seq_len is None else size("seq_len", seq_len)
        cu_seqlens = None if cu_seqlens is None else tuple(checked_cu_seqlens("cu_seqlens", cu_seqlens))
        layout = self.layout_of(length, cu_seqlens)
        if layout.count(self.mesh.rank) != rows:
            raise LayoutError(
                f"rank {self.mesh.rank} got another number of tokens than the layout {self.layout!r} gives it",
                got=rows,
                allowed=f"{layout.count(self.mesh.rank)} of {length} on {self.mesh.size} ranks",
                next_step="call the model with handle.shard(input_ids), or name seq_len",
            )
        return CallSequence(length, layout, cu_seqlens, padded)

    def _positions(self, sequence: CallSequence, device: torch.device) -> Tensor:
        """Position ids of this rank's rows, ``[S]``, counted from the start of the document if there are documents."""
        where = local_position_ids(self.mesh, seq_len=sequence.seq_len, layout=sequence.layout, device=device)
        if sequence.cu_seqlens is None:
            return where
        starts = torch.tensor(sequence.cu_seqlens[:-1], device=device)
        return where - starts[torch.searchsorted(starts, where, right=True) - 1]


def _check_free(model: PreTrainedModel) -> None:
    """Refuse a second handle for any module: it would be told of two sequences, and undone by one of two."""
    if taken := next(((name, module) for name, module in model.named_modules() if hasattr(module, ATTRIBUTE)), None):
        name, module = taken
        what = f"its part {name} ({type(module).__name__})" if name else type(model).__name__
        raise InputError("the model is parallelized already", got=what, next_step="undo() the handle of that first")


def _batch_arguments(batch: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `ShardedModel.shard` from a batch and from those that were passed beside it."""
    allowed = ("input_ids", *given)
    if unknown := sorted(set(batch) - set(allowed)):
        raise InputError(
            "shard() cannot divide every tensor of this batch",
            got=", ".join(map(shown, unknown)),
            allowed=", ".join(allowed),
            next_step="remove the others from the batch",
        )
    if twice := [name for name, value in given.items() if value is not None and name in batch]:
        raise InputError(f"{twice[0]} is in the batch and was passed as an argument", next_step="pass it once")
    if "input_ids" not in batch:
        raise InputError("the batch has no input_ids", got=", ".join(map(shown, batch)) or "an empty batch")
    return {**given, **batch}
