"""Run attention inside graphs of torch.compile: as two torch operators, which the compiler does not look into.

::

    attention        ->   _in_graph, during tracing               puts the operator `attend` into the graph
    graph, forward   ->   attend           out, LSE, ticket       agree, plan, send, compute: as without a graph
    graph, backward  ->   attend_backward  dq, dk, dv, dsinks     the same, with the saved state of the ticket

Operators take only tensors, numbers and text. All other arguments (mesh, mask, strategy ...) are stored in this module
under a name, and the graph contains the name. State that only the backward pass needs is stored here too, as long as
its ticket exists: a tensor with one number, which the graph saves for backward.

A compiler may reorder operators that do not depend on each other, differently on ranks of different sizes. Ranks would
then wait for each other in different calls. So each call of a graph takes the turn of the call before it, an empty
tensor. Passes then keep the order of the program, which is also the order of a rank that runs it uncompiled.

Importing this module registers the operators, so `api` imports it when it is first compiled.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from burst_portable.errors import BurstError, UnsupportedError
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh, as_mesh, position_ids
from burst_portable.numerics import accumulation_dtype
from burst_portable.runtime.autograd import begin, run_backward, wrapped_call
from burst_portable.runtime.prepare import choose, describe, prepare
from burst_portable.runtime.prepared_call import PreparedCall
from burst_portable.runtime.request import Request
from burst_portable.runtime.validation import broadcast_error, check_rows, usable_device
from burst_portable.strategies.planner import layout_of, mask_of
from burst_portable.utils.torch_modes import cast_for_autocast, disable_autocast, disable_selective_checkpointing
from burst_portable.utils.values import size


class CallArguments(NamedTuple):
    """Arguments of a call that are no tensors. The sequence length is not in the request: it may be a symbol."""

    mesh: Any  # as `attention` takes it
    request: Request


class SavedPass(NamedTuple):
    """State of a forward pass for its backward pass: its number, and tensors that are not in the graph."""

    prepared: PreparedCall
    number: int
    saved: tuple[Tensor, ...]


class _Nothing:
    """Placeholder for None, which cannot be passed to a function that is not traced."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return 0


_NOTHING = _Nothing()
# These belong to the process, as torch's operators do. Arguments are never deleted, saved passes with their tickets.
_arguments: dict[str, CallArguments] = {}
_saved_passes: dict[int, SavedPass] = {}
_tickets = itertools.count(1)
_lock = threading.Lock()
# For each graph that is being traced: the turns of its last call and of its last backward pass.
_turns: weakref.WeakKeyDictionary[Any, dict[str, Tensor]] = weakref.WeakKeyDictionary()

pytree.register_constant(_Nothing)
pytree.register_constant(Mesh)


def as_text(request: Request) -> Request:
    """Return the request with the short form of its mask, if it has one."""
    return request._replace(mask=request.mask.text or request.mask) if isinstance(request.mask, Mask) else request


def can_trace(mesh: Any, request: Request) -> bool:
    """Return whether a call can be part of the graph that is being traced.

    There may be a new layout object or a new mask of positions for each batch of documents, and each would need a new
    graph. So would each seed of dropout. Numbers are read during tracing, when tensors have no data.
    """
    mask, strategy, layout, seq_len, scale, softcap, kernel, _, _, dropout_p, _ = request
    return (
        isinstance(dropout_p, int | float)
        and dropout_p == 0.0
        and all(isinstance(x, str) for x in (mask, strategy, layout, kernel))
        and (mesh is None or isinstance(mesh, Mesh))
        and (seq_len is None or (isinstance(seq_len, int) and not isinstance(seq_len, bool)))
        and all(x is None or isinstance(x, int | float) for x in (scale, softcap))
        and not _exporting_or_transformed()
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def _exporting_or_transformed() -> bool:
    """Return whether other processes may run the graph, or an unsupported transform traces it.

    Dynamo of torch 2.11 takes `is_exporting` as always true, so it does not trace this function.
    """
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return transformed or torch.compiler.is_exporting()


def attention_in_graph(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: Any, request: Request) -> Any:
    """Run `attention` during tracing. The compiler traces this function, but not the body of `_in_graph`."""
    mask, strategy, layout, seq_len, *numbers = request
    rest = [_NOTHING if x is None else x for x in (sinks, seq_len, mesh, mask, strategy, layout, *numbers)]
    out, lse = _in_graph(q, k, v, *rest)
    return (out, lse) if request.return_lse else out


@torch._dynamo.nonstrict_trace
def _in_graph(q: Tensor, k: Tensor, v: Tensor, sinks: Any, seq_len: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """Put `attend` into the graph. Raises no errors: the operator does when all ranks run it."""
    sinks = None if isinstance(sinks, _Nothing) else sinks
    seq_len = None if seq_len == _NOTHING else seq_len  # maybe a symbol: one graph for all lengths
    mesh, mask, strategy, layout, *numbers = map(_as_value, rest)
    arguments = CallArguments(mesh, Request(mask, strategy, layout, None, *numbers))
    q, k, v = cast_for_autocast(q, k, v)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    lean = keep and _keeps_copies(q, k, v, sinks, seq_len, arguments)
    turns = _turns_of_graph()
    operator = torch.ops.burst_portable.attend
    out, lse, _, turns["forward"] = operator(
        q, k, v, sinks, turns.get("forward"), seq_len, named(arguments), keep, lean
    )
    return out, lse.detach()


def _turns_of_graph() -> dict[str, Tensor]:
    mode = get_proxy_mode()
    return {} if mode is None else _turns.setdefault(mode.tracer, {})


def _as_value(x: Any) -> Any:
    """Convert a traced argument to a Python value. A symbolic number becomes a constant, with its own graph."""
    if isinstance(x, torch.SymInt):
        return int(x)
    if isinstance(x, torch.SymFloat):
        return float(x)
    return None if x == _NOTHING else x


def _keeps_copies(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seq_len: int | None, arguments: CallArguments
) -> bool:
    """Return whether a forward pass saves the rows that it received. The graph then need not save q, k, v and out."""
    if any(isinstance(n, torch.SymInt) for n in (seq_len, *q.shape, *k.shape, *v.shape)):
        return False
    try:
        mesh, request = as_mesh(arguments.mesh), arguments.request._replace(seq_len=seq_len).checked()
        plan, *_ = choose(describe(q, k, v, sinks, mesh, request), mesh, request)
        return plan.saves_more
    except BurstError:
        return False


def named(arguments: CallArguments) -> str:
    """Store arguments, and return their name. It is equal in every process, so that graphs cached on disk are found."""
    with _lock:
        meshes = list({id(one.mesh): None for one in (*_arguments.values(), arguments)})
        name = sha256(repr((meshes.index(id(arguments.mesh)), arguments)).encode()).hexdigest()[:16]
        _arguments[name] = arguments
    return name


def find_arguments(name: str) -> CallArguments:
    """Return the arguments of a name."""
    if name not in _arguments:
        raise UnsupportedError(
            "a graph calls attention with arguments that this process did not trace",
            got=name,
            next_step="let the process that runs a graph compile it",
        )
    return _arguments[name]


# ---------------------------------------------------------------------------------------- the operators

# CUDA graphs (mode="reduce-overhead") would not record the checks between ranks, and plans hold tensors between calls.
NOT_RECORDED = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("burst_portable::attend", mutates_args=(), tags=NOT_RECORDED)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    after: Tensor | None,
    seq_len: int | None,
    name: str,
    keep: bool,
    lean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run a forward pass, and return (out, LSE, ticket, turn).

    Args:
        after: The turn of the pass before this one.
        name: The name of the arguments that are not here: see `named`.
        keep: Whether a backward pass may follow. If not, the ticket is 0, and LSE is valid only if requested.
        lean: Whether the graph saves only the ticket for backward.
    """
    arguments = find_arguments(name)
    mesh = as_mesh(arguments.mesh)
    prepared, q_, k_, v_ = prepare(q, k, v, sinks, mesh, arguments.request._replace(seq_len=seq_len))
    prepared = wrapped_call(prepared, mesh)
    with disable_autocast(q.device), disable_selective_checkpointing():
        begin(prepared, q.device, v=v_)
        out, lse, saved = prepared.executor.forward(prepared, q_, k_, v_, sinks, keep=keep)
        prepared.transport.end()
    if not keep:
        saved = ()
    elif not prepared.plan.saves_more:
        lse, saved = saved[-1], saved if lean else ()
    out, lse = _separate((out, _lse_like(q) if lse is None else lse), (q, k, v))
    ticket = torch.zeros(1, dtype=torch.int64, device="cpu")
    if keep:
        saved = _without_aliases(saved, (q, k, v, out, lse))
        _keep(ticket, SavedPass(prepared, prepared.transport.state.passes, saved))
    return out, lse, ticket, _turn()


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ticket = torch.empty(1, dtype=torch.int64, device="cpu")
    if q.dim() != 4 or v.dim() != 4:  # the operator will raise an error
        return q.new_empty(0), q.new_empty(0), ticket, _turn()
    return q.new_empty((*q.shape[:3], v.shape[3])), _lse_like(q), ticket, _turn()


@torch.library.custom_op("burst_portable::attend_backward", mutates_args=(), tags=NOT_RECORDED)
def attend_backward(
    dout: Tensor,
    ticket: Tensor,
    sinks: Tensor | None,
    after: Tensor | None,
    kept: list[Tensor],
    kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run a backward pass, and return (dq, dk, dv, dsinks, turn). dsinks is empty without sinks.

    `kept`: q, k, v, out and LSE, or an empty list.
    """
    number = int(ticket[0])
    if number not in _saved_passes:
        raise UnsupportedError(
            "the saved state of a forward pass no longer exists",
            got=f"ticket {number}",
            next_step="let hooks on saved tensors return the tensors that they received, not copies",
        )
    prepared, forward_pass, saved = _saved_passes[number]
    gradients = run_backward(prepared, forward_pass, (*(saved or kept), sinks), dout)
    empty = dout.new_empty(0)
    dq, dk, dv, dsinks = _separate([empty if x is None else x for x in gradients], (dout, *kept))
    return dq, dk, dv, dsinks, _turn()


@attend_backward.register_fake
def _(
    dout: Tensor, ticket: Any, sinks: Tensor | None, after: Any, kept: Any, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, rows, heads, v_head_dim = dout.shape
    sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim)
    dq, dk, dv = (dout.new_empty((batch, rows, *size)) for size in sizes)
    return dq, dk, dv, dout.new_empty(0) if sinks is None else torch.empty_like(sinks), _turn()


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, *_, lean = inputs
    out, lse, ticket, _ = output
    ctx.kv_heads, ctx.head_dim, ctx.has_sinks = k.shape[2], q.shape[3], sinks is not None
    ctx.save_for_backward(ticket, sinks, *(() if lean else (q, k, v, out, lse)))


def _backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    ticket, sinks, *kept = ctx.saved_tensors
    turns = _turns_of_graph()
    operator = torch.ops.burst_portable.attend_backward
    *gradients, turns["backward"] = operator(
        dout, ticket, sinks, turns.get("backward"), kept, ctx.kv_heads, ctx.head_dim
    )
    return *gradients[:3], gradients[3] if ctx.has_sinks else None, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_keep_for_backward)


def _keep(ticket: Tensor, kept: SavedPass) -> None:
    number = next(_tickets)
    _saved_passes[number] = kept
    ticket[0] = number
    weakref.finalize(ticket, _saved_passes.pop, number, None)


def _turn() -> Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


def _lse_like(q: Tensor) -> Tensor:
    batch, rows, heads, _ = q.shape
    return q.new_empty((batch, heads, rows), dtype=accumulation_dtype(q.dtype))


def _separate(made: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return contiguous tensors with separate memory, as torch operators must return them."""
    found: list[Tensor] = []
    for x in made:
        found += _without_aliases([x.contiguous()], (*others, *found))
    return tuple(found)


def _without_aliases(kept: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors that share no memory with `others`, whose memory a graph may reuse. Copies those that do."""
    used = {x.untyped_storage().data_ptr() for x in others}
    return tuple(x.clone() if x.untyped_storage().data_ptr() in used else x for x in kept)


def positions_in_graph(rows: int, seq_len: int, mesh: Mesh, layout: str, mask: str, device: torch.device) -> Tensor:
    """Return `local_position_ids` of a rank with `rows` rows during tracing. The compiler traces this function."""
    found: Tensor = torch.ops.burst_portable.positions(rows, seq_len, device, _name(mesh, layout, mask))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def _name(mesh: Mesh, layout: str, mask: str) -> str:
    return named(CallArguments(mesh, Request(mask=mask, layout=layout)))


@torch.library.custom_op("burst_portable::positions", mutates_args=(), tags=NOT_RECORDED)
def positions_(rows: int, seq_len: int, device: torch.device, name: str) -> Tensor:
    """Return the global positions of this rank's rows: int64 of shape [rows]."""
    arguments = find_arguments(name)
    mesh, mask, layout = as_mesh(arguments.mesh), arguments.request.mask, arguments.request.layout
    try:
        seq_len = size("seq_len", seq_len)
        made_layout = layout_of(layout, seq_len, mesh.size, mask_of(mask, seq_len))
        check_rows(made_layout, rows, mesh)
        return position_ids(made_layout, mesh.rank, usable_device(device))
    except Exception as error:
        broadcast_error(mesh, error, torch.empty(0, device=device))
        raise


@positions_.register_fake
def _(rows: int, seq_len: int, device: torch.device, name: str) -> Tensor:
    return torch.empty(rows, dtype=torch.int64, device=device)
