"""Estimate the peak memory of a plan on a rank, by following the tensors of a pass through its steps.

What the runtime allocates is counted where it does so, until its last use::

    of the caller       q, k, v; backward also out and dO
    saved               out, LSE; under divided heads also all rows of a rank's heads of q, k, v and out
    of the executor     results while they are summed, and then in the dtype of the inputs
    messages            packed rows, receive buffers, gradients of remote blocks, until the last step that uses them

Tensors inside a kernel are not counted, nor is what an allocator adds. Receive buffers are those
of NCCL, gloo and threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from functools import lru_cache

from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.messages import PassMessages, StepMessages, exchanges
from burst_portable.planning.plans import PASSES, PassName, PassPlan, Plan
from burst_portable.planning.rank_order import keeps_rank_order, with_rank_order
from burst_portable.planning.routes import Move
from burst_portable.planning.schedule import Step, interleave_groups

_ORDINARY = KernelTraits()


def plan_memory(plan: Plan, ranks: Iterable[int], traits: KernelTraits = _ORDINARY) -> int:
    """Return the largest peak in bytes of both passes over these ranks. `traits`: those of the kernel."""
    return max(peak_memory(plan, name, rank, traits) for name in PASSES for rank in ranks)


@lru_cache(maxsize=512)
def peak_memory(plan: Plan, pass_name: PassName, rank: int, traits: KernelTraits = _ORDINARY) -> int:
    """Return the largest number of bytes that one rank holds at a time in a pass, including q, k and v."""
    backward = pass_name == "backward"
    sizes = _Sizes(plan.call, plan.call.layout.count(rank), plan.call.k_layout.count(rank))
    memory = _Memory(sizes.inputs + (2 * sizes.out if backward else 0))
    if plan.score_rows:
        run = _simulate_score_rows_backward if backward else _simulate_score_rows_forward
        run(plan, rank, sizes, memory)
    elif plan.heads:
        _simulate_divided_heads(plan, pass_name, rank, sizes, memory, traits)
    elif plan.head_groups > 1:
        memory.hold("lse", sizes.lse if backward else 0)
        _simulate_groups(plan, pass_name, rank, sizes, memory, traits)
    else:
        memory.hold("lse", sizes.lse if backward else 0)
        is_rounded = _simulate_rows(plan.pass_plan(pass_name), rank, sizes, memory, traits)
        memory.hold("rounded", 0 if is_rounded else sizes.inputs if backward else sizes.out)
    return memory.peak


class _Sizes:
    """Bytes of the tensors of some rows of queries and of keys, for the heads of a call."""

    def __init__(self, call: AttentionCall, rows: int, keys: int) -> None:
        data, wide = call.itemsize, max(call.itemsize, 4)
        queries, keys = call.batch * rows * call.heads, call.batch * keys * call.kv_heads
        self.widened = wide / data
        self.q, self.out, self.lse = data * queries * call.head_dim, data * queries * call.v_head_dim, wide * queries
        self.k, self.v = data * keys * call.head_dim, data * keys * call.v_head_dim
        self.inputs = self.q + self.k + self.v

    def wide(self, size: int) -> int:
        """Return the bytes of a tensor in the accumulation dtype."""
        return round(size * self.widened)

    def rounded(self, size: int) -> int:
        """Return the bytes of a copy in the dtype of the inputs; 0 if the accumulation dtype is the same."""
        return size if self.widened > 1 else 0


class _Memory:
    """Bytes that are held, by the tensor that holds them, and the largest sum so far."""

    def __init__(self, base: int) -> None:
        self.peak = self._now = base
        self._held: dict[Hashable, int] = {}

    def hold(self, name: Hashable, size: int) -> None:
        """Add `size` bytes to what a name holds."""
        self._held[name] = self._held.get(name, 0) + size
        self._now += size
        self.peak = max(self.peak, self._now)

    def held(self, name: Hashable) -> int:
        """Return the bytes under a name."""
        return self._held.get(name, 0)

    def free(self, *names: Hashable) -> None:
        """Release what these names hold."""
        for name in names:
            self._now -= self._held.pop(name, 0)

    def free_group(self, group: Hashable) -> None:
        """Release everything under names (group, ...)."""
        self.free(*[name for name in self._held if isinstance(name, tuple) and name[0] == group])


class _Steps:
    """The messages of one pass of one group of heads, as `runtime.blocks` and `runtime.block_gradients` hold them."""

    def __init__(
        self, pass_plan: PassPlan, rank: int, memory: _Memory, group: Hashable, tensor: int | None = None
    ) -> None:
        self.messages = PassMessages(pass_plan, rank, tensor)
        self.at = {step.index: messages for step, messages in self.messages.steps}
        self._memory, self._group, self._rank = memory, group, rank
        self._call, self._backward, self._side = pass_plan.call, pass_plan.name == "backward", pass_plan.side
        self._rounds = pass_plan.rounds_gradients
        self._receive_buffers: dict[Move, Hashable] = {}
        self._remote: dict[int, Hashable] = {}  # by owner
        self._uses: dict[Hashable, int] = defaultdict(int)  # by buffer: what keeps it
        self._sent: list[tuple[int, Hashable]] = []
        self._sums: dict[int, Hashable] = {}

    def begin(self, step: Step, messages: StepMessages) -> None:
        """Receive the blocks of this step, pack and send blocks, and post receives."""
        for move in step.arrivals:
            self._remote[move.owner] = self._receive_buffers.pop(move)
        for side, rows, size in messages.packs:
            self._take(("pack", side, rows), size)
        for move, part_of, _, _ in messages.sends:
            self._send(move, self._remote[move.owner] if part_of is None else self._key("pack", move.side, part_of))
        self._receive(messages)

    def sums(self, step: Step, messages: StepMessages) -> None:
        """Add the gradients of remote blocks with which this step computes."""
        if self._backward and messages.side is not None:
            key = self._take(("sums", step.index), sum(messages.sums), uses=0)
            for owner in (*(move.owner for move in step.arrivals), *([self._rank] if messages.local else [])):
                self._sums[owner] = key
                self._uses[key] += 1

    def end(self, step: Step, messages: StepMessages) -> None:
        """Add results that arrived, send those that are complete, and release what no later step uses."""
        if messages.local and self._rank in self._sums:
            self._drop(self._sums.pop(self._rank))
        for move in step.result_arrivals:
            self._drop(self._receive_buffers.pop(move))
        for move, size in messages.result_sends:
            key = self._sums.pop(move.owner, None)
            if key is None or self._rounds:
                self._send(move, self._take(("result", move), size, uses=0))
            else:
                self._send(move, key)
            if key is not None:
                self._drop(key)
        self._receive(messages, results=True)
        self._wait_sent(step.index)
        self._drop(self._key("received", step.index))
        for owner in step.released:
            self._drop(self._remote.pop(owner))

    def finish(self) -> None:
        """Release everything."""
        self._memory.free_group(self._group)

    def _receive(self, messages: StepMessages, *, results: bool = False) -> None:
        for arrivals in messages.result_receives if results else messages.receives:
            first = arrivals.moves[0]
            name = ("results", first.post_step, first.wait_step) if results else ("received", first.wait_step)
            key = self._take(name, sum(arrivals.sizes), uses=0 if results else 1)
            for move in arrivals.moves:
                self._receive_buffers[move] = key
                self._uses[key] += 1

    def _key(self, *name: Hashable) -> Hashable:
        return (self._group, *name)

    def _take(self, name: tuple[Hashable, ...], size: int, uses: int = 1) -> Hashable:
        key = self._key(*name)
        self._memory.hold(key, size)
        self._uses[key] += uses
        return key

    def _drop(self, key: Hashable) -> None:
        self._uses[key] -= 1
        if self._uses[key] <= 0:
            self._memory.free(key)
            del self._uses[key]

    def _send(self, move: Move, key: Hashable) -> None:
        self._uses[key] += 1
        self._sent.append((move.wait_step, key))

    def _wait_sent(self, index: int) -> None:
        for wait_step, key in self._sent:
            if wait_step <= index:
                self._drop(key)
        self._sent = [one for one in self._sent if one[0] > index]


class _Pass(_Steps):
    """One pass of one group of heads: its messages and its results, as `executor.ForwardSteps` or `BackwardSteps`."""

    def __init__(
        self, pass_plan: PassPlan, rank: int, sizes: _Sizes, memory: _Memory, group: Hashable, traits: KernelTraits
    ) -> None:
        super().__init__(pass_plan, rank, memory, group)
        self._sizes, self._results = sizes, (group, "results of rows")
        self.computes_once = self.messages.parts == 1
        merges_few = traits.writes_into and not self._backward and pass_plan.merged_rows(rank) is not None
        if merges_few:
            memory.hold(self._results, sizes.rounded(sizes.out))
        self._started = False
        if self._backward:
            memory.hold(self._results, sum(map(sizes.wide, (sizes.q, sizes.k, sizes.v))))

    def run(self, step: Step, messages: StepMessages) -> None:
        """Run one step."""
        sizes, memory = self._sizes, self._memory
        self.begin(step, messages)
        partial = self._key("partial")
        if step.compute is not None:
            self.sums(step, messages)
            if self._backward and messages.side == "q":  # contiguous copies of LSE and delta
                memory.hold(partial, 2 * _Sizes(self._call, sum(move.num_rows for move in step.arrivals), 0).lse)
            elif messages.side == "q":
                rows = sum(move.num_rows for move in step.arrivals)
                part = _Sizes(self._call, rows, 0)
                memory.hold(partial, part.wide(part.out) + part.lse)
            elif not self._backward and not self._started:
                self._started = True
                memory.hold(self._results, (sizes.out if self.computes_once else sizes.wide(sizes.out)) + sizes.lse)
        self.end(step, messages)
        memory.free(partial)

    def finish(self) -> None:
        """Release the messages. The results stay, under the name of the group."""
        size = self._memory.held(self._results)
        super().finish()
        self._memory.hold(self._group, size)


def _simulate_rows(
    pass_plan: PassPlan, rank: int, sizes: _Sizes, memory: _Memory, traits: KernelTraits, name: Hashable = "results"
) -> bool:
    """Simulate `executor.forward_rows` or `backward_rows`. Return whether results have the dtype of inputs."""
    backward = pass_plan.name == "backward"
    gradients = (sizes.q, sizes.k, sizes.v)
    if pass_plan.single_compute(rank):
        memory.hold(name, sum(map(sizes.wide, gradients)) if backward else sizes.out + sizes.lse)
        once = not backward
    else:
        if backward and not (traits.splits_tiles and pass_plan.sides == ("kv",)):
            memory.hold((name, "delta"), sizes.lse)
        steps = _Pass(pass_plan, rank, sizes, memory, name, traits)
        for step, messages in steps.messages.steps:
            steps.run(step, messages)
        once = steps.computes_once and not backward
        steps.finish()
    memory.free((name, "delta"))
    return once or sizes.widened == 1


def _simulate_groups(
    plan: Plan, pass_name: PassName, rank: int, sizes: _Sizes, memory: _Memory, traits: KernelTraits
) -> None:
    """Simulate `head_groups.GroupExecutor`: groups of heads run interleaved, and the last results stay for a step."""
    pass_plan, groups = plan.pass_plan(pass_name), plan.head_groups
    backward = pass_name == "backward"
    memory.hold("whole", sizes.inputs if backward else sizes.out + sizes.lse)
    if backward and not pass_plan.single_compute(rank):
        memory.hold("delta", sizes.lse)
    part = _Sizes(pass_plan.call, plan.call.layout.count(rank), plan.call.k_layout.count(rank))
    running: dict[int, _Pass] = {}
    steps = pass_plan.steps_of(rank)
    last: int | None = None
    for group, step in interleave_groups(steps, groups):
        if group not in running:
            running[group] = _Pass(pass_plan, rank, part, memory, group, traits)
            if backward:
                memory.hold((group, "contiguous LSE and delta"), 2 * part.lse)
        one = running[group]
        one.run(step, one.at[step.index])
        if step is steps[-1]:
            running.pop(group).finish()
            if last is not None:
                memory.free(last)
            last = group


def _simulate_divided_heads(
    plan: Plan, pass_name: PassName, rank: int, sizes: _Sizes, memory: _Memory, traits: KernelTraits
) -> None:
    """Simulate `head_parallel.HeadExecutor`: exchanges around the computation of each group of heads."""
    plan = with_rank_order(plan, traits)
    backward, call, part = pass_name == "backward", plan.call, plan.forward.call
    pass_plan, member = plan.pass_plan(pass_name), plan.forward.member(rank)
    rows, node_rows = call.layout.count(rank), part.layout.count(member)
    size = plan.head_parallel_size
    group_sizes = _Sizes(part, node_rows, part.k_layout.count(member))
    reorders, wide = not keeps_rank_order(plan, traits), max(call.itemsize, 4)
    found = exchanges(plan, pass_name)
    if backward:
        saved = len(found) * (group_sizes.q + group_sizes.out + group_sizes.lse)
        groups = plan.split_heads()
        saved += sum(group.brings_kv for group in groups) * (group_sizes.k + group_sizes.v)
        memory.hold("saved", saved)
    for index, (to_heads, _) in enumerate(found):
        row = sum(field.size(call.batch) for field in to_heads)
        memory.hold(("packed", index), size * rows * row)
        memory.hold(("received", index), node_rows * row)
    memory.hold("whole", sizes.inputs if backward else sizes.out)
    for index, (to_heads, to_sequence) in enumerate(found):
        if reorders:
            memory.hold(("ordered", index), node_rows * sum(field.size(call.batch) for field in to_heads))
        name = ("rows", index)
        is_rounded = _simulate_rows(pass_plan, rank, group_sizes, memory, traits, name)
        if not backward and not is_rounded:
            memory.hold((name, "rounded"), group_sizes.out + group_sizes.lse)
            memory.free(name)
        for field in to_sequence:  # rows first, in the dtype that is sent, and in the order of ranks
            sent, converts = node_rows * field.bytes(call.batch), backward and field.itemsize < wide and not is_rounded
            copies = (call.batch > 1 or converts) + reorders
            memory.hold("first copy", sent if copies > 1 else 0)
            memory.hold(("sent", index), sent if copies else 0)
            memory.free("first copy")
            memory.hold(("back", index), size * rows * field.bytes(call.batch))
        memory.free(("packed", index))
        if backward:  # those of the group before it are overwritten
            memory.free(("rows", index - 1))


def _simulate_score_rows_forward(plan: Plan, rank: int, sizes: _Sizes, memory: _Memory) -> None:
    """Simulate the forward pass of `score_rows.ScoreRowExecutor`."""
    memory.hold("weights", score_bytes(plan.call, "forward", rank))
    memory.hold("out", sizes.wide(sizes.out))
    for tensor in plan.tensors:
        steps = _Steps(plan.forward, rank, memory, tensor, tensor)
        for step, messages in steps.messages.steps:
            steps.begin(step, messages)
            if step.compute is not None:
                scores, grouped = _block_of_scores(plan.call, rank, step)
                if tensor == 0:  # two of product, scaled and masked scores, and the mask
                    hidden = 2 * scores // (max(plan.call.itemsize, 4) * plan.call.batch * plan.call.heads)
                    memory.hold("product", 2 * scores + hidden + sizes.wide(sizes.q) * (grouped or sizes.widened > 1))
                else:
                    memory.hold("product", grouped * scores + sizes.wide(sizes.out))
            steps.end(step, messages)
            memory.free("product")
        steps.finish()
        memory.hold("lse", 0 if tensor else sizes.lse)
    memory.hold("rounded", sizes.out)


def _simulate_score_rows_backward(plan: Plan, rank: int, sizes: _Sizes, memory: _Memory) -> None:
    """Simulate the backward pass of `score_rows.ScoreRowExecutor`."""
    memory.hold("weights and scores", score_bytes(plan.call, "backward", rank))
    memory.hold("lse and delta", 2 * sizes.lse)
    memory.hold("queries and dO", sizes.rounded(1) * (sizes.wide(sizes.q) + sizes.wide(sizes.out)))
    memory.hold("gradients", sum(map(sizes.wide, (sizes.q, sizes.k, sizes.v))))
    copied = sizes.wide(sizes.out) if plan.call.batch > 1 else 0  # for a product of matrices in batches
    for tensor in reversed([t for t in plan.tensors if t is not None]):
        steps = _Steps(plan.backward, rank, memory, tensor, tensor)
        for step, messages in steps.messages.steps:
            steps.begin(step, messages)
            if step.compute is not None:
                steps.sums(step, messages)
                scores, grouped = _block_of_scores(plan.call, rank, step)
                rows = sizes.wide(sizes.out if tensor else sizes.q)
                summed = grouped * (scores + rows) + sizes.wide(sizes.v if tensor else sizes.k)
                memory.hold("product", max(summed, scores if tensor else grouped * scores + rows) + copied)
            steps.end(step, messages)
            memory.free("product")
        steps.finish()
        if tensor and plan.call.softcap is not None:
            scores = score_bytes(plan.call, "forward", rank)
            memory.hold("capped", 3 * scores)
            memory.free("capped")
    memory.hold("rounded", sizes.q + sizes.rounded(sizes.k + sizes.v))


def _block_of_scores(call: AttentionCall, rank: int, step: Step) -> tuple[int, bool]:
    """Return the bytes of a step's scores, and whether query heads share K/V heads, which copies slices of scores."""
    assert step.compute is not None, "the caller has checked"
    (owner,) = step.compute.k_owners
    pairs = call.layout.count(rank) * call.k_layout.count(owner)
    return max(call.itemsize, 4) * call.batch * call.heads * pairs, call.heads != call.kv_heads


def score_bytes(call: AttentionCall, pass_name: PassName, rank: int) -> int:
    """Return the bytes of a rank's rows of scores, in the accumulation dtype; backward, with their gradients."""
    scores = call.batch * call.heads * call.layout.count(rank) * call.k_layout.length
    return (1 if pass_name == "forward" else 2) * scores * max(call.itemsize, 4)
