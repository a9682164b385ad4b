"""Attention inside the graphs of torch.compile: two operators of torch, which the compiler takes as they are.

::

    attention        ->   _in_graph, while a graph is made        the operator `attend`, and what it is called with
    graph, forward   ->   attend           out, LSE, ticket       agree, plan, send, compute: as without a graph
    graph, backward  ->   attend_backward  dq, dk, dv, dsinks     the same, by the ticket

An operator is given tensors, numbers and text alone. What else a call was given (its mesh, mask, strategy ...) stays
here under a name, which stands in the graph. What only a backward pass of that call can use stays here too, as long as
its ticket: a tensor of one number, kept by the graph among what it keeps for backward.

A compiler may reorder what does not depend on each other, as the sizes of a rank suggest. Ranks would then meet in
different calls. So each call of a graph is given the turn of the one before it, a tensor without numbers: passes keep
the order of the program, which is also that of a rank that runs it uncompiled.

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
from burst_portable.runtime.autograd import begin, observed, run_backward
from burst_portable.runtime.prepare import Request, choose, describe, prepare
from burst_portable.runtime.prepared_call import PreparedCall
from burst_portable.runtime.validation import broadcast_error, check_rows, device_here
from burst_portable.strategies.planner import layout_of, mask_of
from burst_portable.utils.torch_modes import as_autocast_would, hidden_from_checkpoints, own_precision
from burst_portable.utils.values import size


class Given(NamedTuple):
    """What a call was given besides tensors. The sequence length is not in the request: it may be a symbol."""

    mesh: Any  # as `attention` takes it
    request: Request


class Kept(NamedTuple):
    """Of a forward pass, for its backward pass: its number, and tensors that no graph knows of."""

    prepared: PreparedCall
    number: int
    saved: tuple[Tensor, ...]


class _Nothing:
    """Stands for None, which a function that is not traced cannot be given."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return 0


_NOTHING = _Nothing()
# Of the process, as torch's operators are. What a graph names lasts as long; what it keeps, as long as its ticket.
_given: dict[str, Given] = {}
_kept: dict[int, Kept] = {}
_tickets = itertools.count(1)
_lock = threading.Lock()
# Of each graph that is being made: the turns of its last call, and of its last backward pass.
_turns: weakref.WeakKeyDictionary[Any, dict[str, Tensor]] = weakref.WeakKeyDictionary()

pytree.register_constant(_Nothing)
pytree.register_constant(Mesh)


def as_text(request: Request) -> Request:
    """Return the request with a mask's short form in place of a `Mask` that has one."""
    return request._replace(mask=request.mask.text or request.mask) if isinstance(request.mask, Mask) else request


def fits(mesh: Any, request: Request) -> bool:
    """Whether a call can stand in the graph that is being made.

    Layouts as objects, and masks that list positions, are many, one for each batch's documents: each would be a graph
    of its own. Numbers are read while a graph is made, where tensors hold none.
    """
    mask, strategy, layout, seq_len, scale, softcap, kernel, _, _ = request
    return (
        all(isinstance(x, str) for x in (mask, strategy, layout, kernel))
        and (mesh is None or isinstance(mesh, Mesh))
        and (seq_len is None or (isinstance(seq_len, int) and not isinstance(seq_len, bool)))
        and all(x is None or isinstance(x, int | float) for x in (scale, softcap))
        and not _exporting_or_transformed()
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def _exporting_or_transformed() -> bool:
    """Whether other processes may run the graph, or a transform that attention refuses looks at what is in it.

    Dynamo of torch 2.11 believes that `is_exporting` is always true, so it does not read this function.
    """
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return transformed or torch.compiler.is_exporting()


def attention_in_graph(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: Any, request: Request) -> Any:
    """`attention` while the compiler looks: it reads this function, and not what `_in_graph` calls."""
    mask, strategy, layout, seq_len, *numbers = request
    rest = [_NOTHING if x is None else x for x in (seq_len, mesh, mask, strategy, layout, *numbers)]
    if sinks is None:
        out, lse = _in_graph(q, k, v, *rest)
    else:
        out, lse = _in_graph_with_sinks(q, k, v, sinks, *rest)
    return (out, lse) if request.return_lse else out


@torch._dynamo.nonstrict_trace
def _in_graph(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _traced(q, k, v, None, *rest)


@torch._dynamo.nonstrict_trace
def _in_graph_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _traced(q, k, v, sinks, *rest)


def _traced(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seq_len: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """Puts `attend` into the graph. Refuses nothing: the operator does, when all ranks run, in words of its own."""
    seq_len = None if seq_len == _NOTHING else seq_len  # maybe a symbol: one graph for all lengths
    mesh, mask, strategy, layout, *numbers = map(_settled, rest)
    given = Given(mesh, Request(mask, strategy, layout, None, *numbers))
    q, k, v = as_autocast_would(q, k, v)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    lean = keep and _keeps_copies(q, k, v, sinks, seq_len, given)
    turns = _turns_of_graph()
    operator = torch.ops.burst_portable.attend
    out, lse, _, turns["forward"] = operator(q, k, v, sinks, turns.get("forward"), seq_len, named(given), keep, lean)
    return out, lse.detach()


def _turns_of_graph() -> dict[str, Tensor]:
    mode = get_proxy_mode()
    return {} if mode is None else _turns.setdefault(mode.tracer, {})


def _settled(x: Any) -> Any:
    """What an argument was. A number that changed from call to call is a symbol: here each has a graph of its own."""
    if isinstance(x, torch.SymInt):
        return int(x)
    if isinstance(x, torch.SymFloat):
        return float(x)
    return None if x == _NOTHING else x


def _keeps_copies(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seq_len: int | None, given: Given) -> bool:
    """Whether a forward pass keeps rows that it brought here, so that the graph need not keep q, k, v and out."""
    if any(isinstance(n, torch.SymInt) for n in (seq_len, *q.shape, *k.shape, *v.shape)):
        return False
    try:
        mesh, request = as_mesh(given.mesh), given.request._replace(seq_len=seq_len).checked()
        plan, *_ = choose(describe(q, k, v, sinks, mesh, request), mesh, request)
        return plan.heads is not None
    except BurstError:
        return False


def named(given: Given) -> str:
    """The same text for the same arguments in every process, so that graphs that are kept on disk are found again."""
    with _lock:
        meshes = list({id(one.mesh): None for one in (*_given.values(), given)})
        name = sha256(repr((meshes.index(id(given.mesh)), given)).encode()).hexdigest()[:16]
        _given[name] = given
    return name


def given_as(name: str) -> Given:
    if name not in _given:
        raise UnsupportedError(
            "a graph calls attention as nobody did in this process",
            got=name,
            next_step="let the process that runs a graph compile it",
        )
    return _given[name]


# ---------------------------------------------------------------------------------------- the operators

# By mode="reduce-overhead": a recording would miss what ranks tell each other; plans keep tensors from call to call.
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
    """A forward pass: (out, LSE, ticket, turn).

    Args:
        after: the turn of the pass before this one.
        seq_len: as `attention` takes it.
        keep: whether a backward pass may come; else the ticket is 0, and LSE means nothing unless asked for.
        lean: whether the graph keeps nothing for it but the ticket.
    """
    given = given_as(name)
    mesh = as_mesh(given.mesh)
    prepared, q_, k_, v_ = prepare(q, k, v, sinks, mesh, given.request._replace(seq_len=seq_len))
    prepared = observed(prepared, mesh)
    with own_precision(q.device), hidden_from_checkpoints():
        begin(prepared, q.device)
        out, lse, saved = prepared.executor.forward(prepared, q_, k_, v_, sinks, keep=keep)
        prepared.transport.end()
    if not keep:
        saved = ()
    elif not prepared.plan.heads:
        lse, saved = saved[-1], saved if lean else ()
    out, lse = _apart((out, _lse_like(q) if lse is None else lse), (q, k, v))
    ticket = torch.zeros(1, dtype=torch.int64, device="cpu")
    if keep:
        saved = _not_of(saved, (q, k, v, out, lse))
        _keep(ticket, Kept(prepared, prepared.transport.state.passes, saved))
    return out, lse, ticket, _turn()


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ticket = torch.empty(1, dtype=torch.int64, device="cpu")
    if q.dim() != 4 or v.dim() != 4:  # which will be refused
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
    """A backward pass: (dq, dk, dv, dsinks, turn), dsinks empty without sinks.

    kept: q, k, v, out and LSE, or nothing.
    """
    number = int(ticket[0])
    if number not in _kept:
        raise UnsupportedError(
            "what a forward pass kept for its backward pass is gone",
            got=f"ticket {number}",
            next_step="let hooks on saved tensors give back the tensors that they were given, not copies",
        )
    prepared, forward_pass, saved = _kept[number]
    gradients = run_backward(prepared, forward_pass, (*(saved or kept), sinks), dout)
    empty = dout.new_empty(0)
    dq, dk, dv, dsinks = _apart([empty if x is None else x for x in gradients], (dout, *kept))
    return dq, dk, dv, dsinks, _turn()


@attend_backward.register_fake
def _(
    dout: Tensor,
    ticket: Tensor,
    sinks: Tensor | None,
    after: Tensor | None,
    kept: list[Tensor],
    kv_heads: int,
    head_dim: int,
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


def _keep(ticket: Tensor, kept: Kept) -> None:
    number = next(_tickets)
    _kept[number] = kept
    ticket[0] = number
    weakref.finalize(ticket, _kept.pop, number, None)


def _turn() -> Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


def _lse_like(q: Tensor) -> Tensor:
    batch, rows, heads, _ = q.shape
    return q.new_empty((batch, heads, rows), dtype=accumulation_dtype(q.dtype))


def _apart(made: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What was made, each contiguous and in memory of its own, as operators of torch have to give it."""
    found: list[Tensor] = []
    for x in made:
        found += _not_of([x.contiguous()], (*others, *found))
    return tuple(found)


def _not_of(kept: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same numbers outside of the memory of other tensors, which a graph uses again when it needs them no more."""
    taken = {x.untyped_storage().data_ptr() for x in others}
    return tuple(x.clone() if x.untyped_storage().data_ptr() in taken else x for x in kept)


def positions_in_graph(rows: int, seq_len: int, mesh: Mesh, layout: str, mask: str, device: torch.device) -> Tensor:
    """`positions` of a rank that holds `rows` rows, while the compiler looks; it reads this function."""
    found: Tensor = torch.ops.burst_portable.positions(rows, seq_len, device, _name(mesh, layout, mask))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def _name(mesh: Mesh, layout: str, mask: str) -> str:
    return named(Given(mesh, Request(mask=mask, layout=layout)))


@torch.library.custom_op("burst_portable::positions", mutates_args=(), tags=NOT_RECORDED)
def positions_(rows: int, seq_len: int, device: torch.device, name: str) -> Tensor:
    """The global positions of this rank's rows: int64 ``[rows]``."""
    given = given_as(name)
    mesh, mask, layout = as_mesh(given.mesh), given.request.mask, given.request.layout
    try:
        seq_len = size("seq_len", seq_len)
        where = layout_of(layout, seq_len, mesh.size, mask_of(mask, seq_len))
        check_rows(where, rows, mesh)
        return position_ids(where, mesh.rank, device_here(device))
    except Exception as refusal:
        broadcast_error(mesh, refusal, torch.empty(0, device=device))
        raise


@positions_.register_fake
def _(rows: int, seq_len: int, device: torch.device, name: str) -> Tensor:
    return torch.empty(rows, dtype=torch.int64, device=device)
