"""Test strategies by name: built-in ones, and arbitrary ones of other packages."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch

import burst_portable as bp
from burst_portable.bench.benchmark import Benchmark
from burst_portable.bench.entries import Entry
from burst_portable.bench.task import Setting
from burst_portable.cli import main
from burst_portable.cli.plan import plan as plan_command
from burst_portable.cli.run.command import run as run_command
from burst_portable.cli.strategy_flags import flag, make_named_strategy, strategy_flags
from burst_portable.conformance import check_backend, oracle
from burst_portable.errors import BurstError, InputError, StrategyError, UnknownNameError, UnsupportedError
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import RingRoute
from burst_portable.planning.verify import verify
from burst_portable.strategies import registry
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.base import Strategy, ring_plan
from burst_portable.strategies.options import RESERVED_FLAGS
from burst_portable.strategies.registry import OURS, known, load, make_strategy, strategy_of
from burst_portable.strategies.ring import RingStrategy
from tests.support.plugins import install

THEIRS = """
from dataclasses import dataclass, replace
from typing import ClassVar
import torch.distributed as dist
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.layout import contiguous
from burst_portable.mask import Mask
from burst_portable.planning.plans import make_pass_plan
from burst_portable.planning.routes import RingRoute
from burst_portable.strategies.base import Strategy, ring_plan
from burst_portable.strategies.options import PREFETCH_STEPS, Option, option
from burst_portable.strategies.registry import make_strategy
from burst_portable.strategies.ring import RingStrategy

@dataclass(frozen=True)
class Theirs(RingStrategy):
    name = "theirs"
    title = "a ring of another package"
    exact = EXACT
    suggested = ("theirs(transfer=direct)",)

    @classmethod
    def candidates(cls, call, machine):
        yield cls()

    @classmethod
    def trials(cls):
        yield cls()
        yield cls("direct")

class NoDataclass(Strategy):
    name = "theirs"
    title = "not decorated"

    def plan(self, call):
        return None

@dataclass(frozen=True)
class NoPlan(Strategy):
    name = "theirs"
    title = "without a plan"

@dataclass(frozen=True)
class NoTitle(RingStrategy):
    name = "theirs"

@dataclass(frozen=True)
class Base(Strategy):
    name = "theirs"
    title = "a mistake each"

    def plan(self, call):
        return ring_plan(call, "theirs", side="kv", route=RingRoute(call.ranks))

@dataclass(frozen=True)
class NoReturn(Base):
    name, title = "theirs", "forgets to return"

    def plan(self, call):
        super().plan(call)

@dataclass(frozen=True)
class Unstable(Base):
    name = "theirs"
    title = "another plan each time"

    def plan(self, call):
        self.transfers.reverse()
        return replace(make_strategy("ring", transfer=self.transfers[0]).plan(call), strategy=self.name)

    transfers: ClassVar[list[str]] = ["ring", "direct"]

@dataclass(frozen=True)
class OtherName(Base):
    name, title = "theirs", "a plan of another name"

    def plan(self, call):
        return ring_plan(call, "their", side="kv", route=RingRoute(call.ranks))

@dataclass(frozen=True)
class OtherMask(Base):
    name, title = "theirs", "a plan of another mask"

    def plan(self, call):
        return super().plan(replace(call, mask=Mask.full()))

@dataclass(frozen=True)
class Inexact(Strategy):
    name, title = "inexact", "the full mask instead of any other"
    exact = False

    def plan(self, call):
        return ring_plan(replace(call, mask=Mask.full()), self.name, side="kv", route=RingRoute(call.ranks))

    def computes(self, mask):
        return Mask.full()

@dataclass(frozen=True)
class InexactWrong(Inexact):
    name, title = "inexact", "another mask than it states"

    def computes(self, mask):
        return Mask.causal()

@dataclass(frozen=True)
class OtherScale(Base):
    name, title = "theirs", "a plan of another scale"

    def plan(self, call):
        return super().plan(replace(call, scale=2 * call.scale))

@dataclass(frozen=True)
class OtherForward(Base):
    name, title = "theirs", "a forward pass of another scale"

    def plan(self, call):
        return replace(super().plan(call), forward=super().plan(replace(call, scale=2.0)).forward)

@dataclass(frozen=True)
class Exits(Base):
    name, title = "theirs", "an exit of the process"

    def plan(self, call):
        raise SystemExit(3)

@dataclass(frozen=True)
class OtherBackward(Base):
    name, title = "theirs", "a backward pass of another mask"

    def plan(self, call):
        return replace(super().plan(call), backward=super().plan(replace(call, mask=Mask.full())).backward)

@dataclass(frozen=True)
class OtherRows(Base):
    name, title = "theirs", "a backward pass over other rows"

    def plan(self, call):
        plan = super().plan(call)
        rows = replace(plan.call, layout=contiguous(call.layout.length, call.ranks))
        return replace(plan, backward=make_pass_plan(rows, "kv", RingRoute(call.ranks), RingRoute(call.ranks)))

@dataclass(frozen=True)
class WrongRoute(Base):
    name, title = "theirs", "sends blocks in the wrong order"

    def plan(self, call):
        return ring_plan(call, "theirs", side="kv", route=Backwards(call.ranks))

@dataclass(frozen=True)
class Backwards(RingRoute):
    def block_source(self, dependencies, owner, rank):
        found = super().block_source(dependencies, owner, rank)
        return found and ((rank + 1) % self.ranks, found[1])

@dataclass(frozen=True)
class Faulty(Base):
    name, title = "theirs", "fails in plan"

    def plan(self, call):
        raise KeyError("axis")

@dataclass(frozen=True)
class Refusing(Base):
    name, title = "theirs", "refuses with InputError"

    def plan(self, call):
        raise InputError("theirs takes 3 ranks")

@dataclass
class Unhashable:
    ranks: int

@dataclass(frozen=True)
class BadRoute(Base):
    name, title = "theirs", "a route that is not frozen"

    def plan(self, call):
        return ring_plan(call, "theirs", side="kv", route=Unhashable(call.ranks))

@dataclass(frozen=True)
class ByProcess(Base):
    name = "by_process"
    title = "another plan in each process"

    def plan(self, call):
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        plan = make_strategy("ring", transfer="ring" if is_first else "direct").plan(call)
        return replace(plan, strategy=self.name)

@dataclass(frozen=True)
class Nothing(Base):
    name = "nothing"
    title = "no plan"

    def plan(self, call):
        return None

@dataclass(frozen=True)
class Lost(BadRoute):
    name = "lost"
    title = "a route without a hash"

@dataclass(frozen=True)
class Far(RingRoute):
    def targets(self, owner, rank):
        yield (rank + 2) % self.ranks

@dataclass(frozen=True)
class Farther(Base):
    name = "farther"
    title = "a wrong route"

    def plan(self, call):
        return ring_plan(call, self.name, side="kv", route=Far(call.ranks))

@dataclass(frozen=True)
class Undropped(Base):
    name = "theirs"
    title = "without dropout"

    def plan(self, call):
        if call.dropout is not None:
            raise UnsupportedError("theirs has no dropout")
        return ring_plan(call, self.name, side="kv", route=RingRoute(call.ranks))

@dataclass(frozen=True)
class LazyRoute(Base):
    name, title = "theirs", "a route that fails when it is asked"

    def plan(self, call):
        return ring_plan(call, "theirs", side="kv", route=Empty())

@dataclass(frozen=True)
class Empty:
    trims: bool = False

@dataclass(frozen=True)
class FaultyCandidates(Base):
    name, title = "theirs", "fails in candidates"

    @classmethod
    def candidates(cls, call, machine):
        yield cls()
        raise IndexError("none")

@dataclass(frozen=True)
class OurCandidate(Base):
    name, title = "theirs", "a candidate of our class"

    @classmethod
    def candidates(cls, call, machine):
        yield RingStrategy()

@dataclass(frozen=True)
class LabelCandidate(Base):
    name, title = "theirs", "a label instead of a candidate"

    @classmethod
    def candidates(cls, call, machine):
        yield "theirs"

@dataclass(frozen=True)
class OurTrial(Base):
    name, title = "theirs", "a trial of our class"

    @classmethod
    def trials(cls):
        yield RingStrategy()

@dataclass(frozen=True)
class FaultyTrials(Base):
    name, title = "theirs", "fails in trials"

    @classmethod
    def trials(cls):
        yield cls(1)

@dataclass(frozen=True)
class Suggesting(Base):
    name, title, suggested = "theirs", "suggests what it does not try", ("theirs(far=1)",)

@dataclass(frozen=True)
class PlainField(Base):
    name, title = "theirs", "a field that is no option"
    far: int = 1

@dataclass(frozen=True)
class TakenFlag(Base):
    name, title = "theirs", "a flag that the command has"
    batch: int = option(PREFETCH_STEPS, flag=True)

@dataclass(frozen=True)
class DeepRing(Base):
    name, title = "theirs", "a flag that is an integer"
    depth: int = option(Option(1, "a depth", flag=True))

@dataclass(frozen=True)
class WordRing(Base):
    name, title = "other", "a flag of that name that is a word"
    depth: str = option(Option("flat", "depth", choices=("flat", "deep"), flag=True))
"""


def forget():
    registry._loaded.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that installs a package with these entry points."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(points, module="their_strategies", exact=True):
        source = THEIRS.replace("EXACT", str(exact))
        install(tmp_path, f"package_{len(made)}", points, registry.GROUP, {f"{module}.py": source})
        made.append(module)
        forget()

    yield make
    forget()
    for module in made:
        sys.modules.pop(module, None)


def test_load_imports_built_in_strategies_by_name():
    assert tuple(known())[: len(OURS)] == OURS
    for name in OURS:
        assert load(name).name == name
        assert load(name).title


def test_strategy_of_another_package_is_available(package):
    package({"theirs": "their_strategies:Theirs"})
    assert "theirs" in known()
    assert make_strategy("theirs", transfer="direct").label == "theirs(transfer=direct)"
    plan = bp.plan(seq_len=64, ranks=4, heads=4, strategy="theirs")
    assert plan.strategy == "theirs"
    assert "theirs " in bp.plan(seq_len=64, ranks=4, heads=4).reason  # `auto` has compared it


def test_auto_never_chooses_inexact_strategy(package):
    package({"theirs": "their_strategies:Theirs"}, exact=False)
    assert bp.plan(seq_len=64, ranks=4, heads=4, strategy="theirs").strategy == "theirs"
    assert "theirs" not in bp.plan(seq_len=96, ranks=4, heads=4).reason


def test_inexact_strategy_computes_the_mask_that_it_states(package, capsys):
    package({"inexact": "their_strategies:Inexact"})
    plan = bp.plan(seq_len=64, ranks=4, heads=4, mask="causal", strategy="inexact")
    assert (plan.call.mask, plan.call.num_pairs, verify(plan)) == (bp.Mask.full(), 64 * 64, [])
    assert main(["conform", "--backend", "cpu", "--strategy", "inexact", "--quick"]) == 0
    assert main(["plan", "--seq-len", "64", "--ranks", "4", "--strategy", "all"]) == 0
    assert "compares inexact never: it computes another mask than asked for" in " ".join(
        capsys.readouterr().out.split()
    )


def test_inexact_strategy_with_another_mask_is_broken(package):
    package({"inexact": "their_strategies:InexactWrong"})
    with pytest.raises(StrategyError, match=r"its plan has another mask; got 'full'; allowed: causal"):
        bp.plan(seq_len=64, ranks=4, heads=4, mask="window:8:0", strategy="inexact")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("their_strategies:NoDataclass", "decorate it with @dataclass"),
        ("their_strategies:NoPlan", "lacks plan"),
        ("their_strategies:NoTitle", "has no title"),
        ("their_strategies:THEIRS", "fails to import.*THEIRS"),
        ("their_strategies:dataclass", "is no subclass of"),
        ("their_absent_module:Theirs", "fails to import.*their_absent_module"),
        ("burst_portable.strategies.ring:RingStrategy", "its name is 'ring'"),
        (
            "their_strategies:OurTrial",
            r"a trial of the strategy 'theirs' is not of its class; got RingStrategy\(",
        ),
        ("their_strategies:FaultyTrials", "its trials: it is broken: TypeError"),
        ("their_strategies:Suggesting", "suggests 'theirs.far=1.', which is not one of its trials: theirs"),
        ("their_strategies:PlainField", "its field 'far' is no option"),
        ("their_strategies:TakenFlag", "its option 'batch' has the name of a flag of the commands"),
    ],
)
def test_load_rejects_invalid_strategies(package, target, message):
    package({"theirs": target})
    with pytest.raises(StrategyError, match=message):
        make_strategy("theirs")
    reason = bp.plan(seq_len=128, ranks=4, heads=4).reason  # not named, so the remaining strategies still work
    assert "not theirs: the strategy 'theirs'" in reason


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("NoReturn", "is broken: its `plan` returned no Plan; got None"),
        ("OtherName", "is broken: its plan has another name; got 'their'; pass `self.name` to the plan"),
        ("OtherMask", "is broken: its plan has another mask; got 'full'; allowed: causal, the mask of the call"),
        ("OtherBackward", "is broken: its backward pass has another mask; got 'full'"),
        ("OtherScale", "is broken: its plan has another scale; got '0.17677669529663687'; allowed: 0.0883"),
        ("OtherForward", "is broken: its forward pass has another scale; got '2.0'"),
        ("Exits", "it is broken: SystemExit: 3"),
        ("Faulty", "it is broken: KeyError: 'axis'"),
        ("Refusing", "theirs takes 3 ranks"),
        ("BadRoute", "the route Unhashable cannot be hashed; make it a frozen dataclass"),
        ("LazyRoute", "forward: the steps of rank 0 cannot be made: AttributeError"),
        ("FaultyCandidates", "it is broken: IndexError: none"),
        ("OurCandidate", "a candidate of the strategy 'theirs' is not of its class; got RingStrategy("),
        ("LabelCandidate", "is not of its class; got 'theirs'; allowed: instances of LabelCandidate"),
        ("WrongRoute", "the strategy 'theirs' is broken: its plan is wrong: forward: 8 moves posted by only one"),
        ("Unstable", "the strategy 'theirs' is broken: two plans of this call differ"),
    ],
)
def test_auto_and_plan_all_skip_broken_strategy_of_package(package, capsys, target, reason):
    package({"theirs": f"their_strategies:{target}"})
    made = AutoStrategy().plan(bp.plan(seq_len=224, ranks=4, heads=4, strategy="ring").call)
    assert made.strategy in OURS
    (told,) = (part for part in made.reason.split("; not ")[1:] if part.startswith("theirs: "))
    assert reason in told
    assert main(["plan", "--seq-len", "224", "--ranks", "4", "--heads", "4", "--strategy", "all", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert reason in facts["unsupported"]["theirs"]
    assert "ring" in {one["label"] for one in facts["strategies"]}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("Faulty", r"'theirs' \(from their_strategies:Faulty\) is broken; got KeyError: 'axis'"),
        ("WrongRoute", "'theirs' is broken: its plan is wrong: forward: 8 moves"),
        ("OtherRows", "'theirs' is broken: its plan is wrong: backward: ranks compute with other rows, contiguous"),
    ],
)
def test_attention_refuses_broken_strategy_that_is_named(package, target, reason):
    """Without the check, the gradients of `OtherRows` differ from those of one device by more than their size."""
    package({"theirs": f"their_strategies:{target}"})
    q = torch.randn(1, 64, 4, 8)

    def run(mesh):
        with pytest.raises(StrategyError, match=reason):
            bp.attention(*(bp.shard(q, mesh) for _ in range(3)), mesh=mesh, strategy="theirs")

    bp.run_threads(4, run)
    if target == "Faulty":
        with pytest.raises(StrategyError, match=reason):
            bp.plan(seq_len=64, ranks=4, heads=4, strategy="theirs")


def test_plan_all_names_strategies_without_dropout(package, capsys):
    package({"theirs": "their_strategies:Undropped"})
    plan_all = ["plan", "--seq-len", "225", "--ranks", "4", "--heads", "4", "--strategy", "all", "--json"]
    assert main(plan_all) == 0
    assert "theirs" in {one["label"] for one in json.loads(capsys.readouterr().out)["strategies"]}
    assert main([*plan_all, "--dropout", "0.1"]) == 0
    assert json.loads(capsys.readouterr().out)["unsupported"]["theirs"] == "theirs has no dropout"
    with pytest.raises(UnsupportedError, match="theirs has no dropout"):
        bp.plan(seq_len=64, ranks=4, heads=4, strategy="theirs", dropout_p=0.1)


@pytest.mark.parametrize("target", ["NoReturn", "OtherName", "OtherMask", "OtherBackward", "BadRoute"])
def test_broken_named_strategy_raises_clear_error(package, target):
    package({"theirs": f"their_strategies:{target}"})
    with pytest.raises(BurstError, match=r"is broken: its|cannot be hashed"):
        bp.plan(seq_len=64, ranks=4, heads=4, strategy="theirs")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("WrongRoute", "its plan is wrong: forward: 3 moves posted by only one"),
        ("Faulty", "KeyError: 'axis'"),
        ("LazyRoute", "AttributeError"),
        ("NoReturn", "is broken: its `plan` returned no Plan; got None"),
    ],
)
def test_bench_shows_broken_strategy_and_measures_the_rest(package, target, reason):
    """Ranks would wait for messages that no rank sends."""
    package({"theirs": f"their_strategies:{target}"})
    setting = Setting(heads=4, kv_heads=2, head_dim=8, dtype="float32", layout="zigzag", rounds=1)

    def work(mesh):
        entries = [Entry("theirs"), Entry("ring")]
        return Benchmark(mesh, torch.device("cpu"), setting, entries).measure("full", 31, "auto", ["theirs", "ring"])

    for theirs, ring in bp.run_threads(3, work):
        assert theirs["status"] == "failed"
        assert reason in theirs["reason"]
        assert ring["status"] == "ok"


@pytest.mark.parametrize("output", [[], ["--json"]])
@pytest.mark.parametrize(("target", "error"), [("Faulty", "KeyError: 'axis'"), ("LazyRoute", "AttributeError: ")])
def test_plan_names_package_of_broken_strategy_in_a_line(package, capsys, target, error, output):
    """Faulty raises in `plan`, LazyRoute when its steps are made."""
    package({"theirs": f"their_strategies:{target}"})
    assert main(["plan", "--seq-len", "224", "--ranks", "4", "--heads", "4", "--strategy", "theirs", *output]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"the strategy 'theirs' (from their_strategies:{target}) is broken; got {error}" in err


def test_plan_blames_no_strategy_if_output_cannot_be_written(package, capsys, monkeypatch):
    package({"theirs": "their_strategies:Theirs"})
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "--seq-len", "64", "--ranks", "4", "--heads", "4", "--strategy", "theirs"]) == 1
    assert capsys.readouterr().err == "burst-portable: the output cannot be written: No space left on device\n"


@pytest.mark.slow
def test_run_names_package_of_broken_strategy_in_a_line(package, capsys):
    package({"theirs": "their_strategies:Faulty"})
    assert main(["run", "--ranks", "2", "--steps", "1", "--strategy", "theirs"]) == 2
    (line,) = (one for one in capsys.readouterr().err.splitlines() if "theirs" in one)
    assert "the strategy 'theirs' (from their_strategies:Faulty) is broken; got KeyError: 'axis'" in line


def test_strategy_flag_with_reserved_name_is_skipped(package, capsys):
    package({"theirs": "their_strategies:TakenFlag"})
    assert "batch" not in strategy_flags()
    assert main(["plan", "--seq-len", "64", "--ranks", "2", "--strategy", "all"]) == 0
    assert "theirs: the strategy 'theirs'" in capsys.readouterr().out


def test_reserved_flags_equal_command_flags():
    names = {"help", "options", "no_check"}
    for command in (plan_command, run_command):
        for name, one in inspect.signature(command).parameters.items():
            if name not in strategy_flags():
                (declared,) = (how for how in one.annotation.__metadata__)
                flags = [text for texts in (declared.default, *declared.param_decls) for text in str(texts).split("/")]
                names |= {name, *(text[2:].replace("-", "_") for text in flags if text.startswith("--"))}
    assert names == RESERVED_FLAGS


def test_load_rejects_name_of_two_packages(package):
    package({"theirs": "their_strategies:Theirs"})
    package({"theirs": "other_strategies:Theirs"}, module="other_strategies")
    with pytest.raises(UnsupportedError, match="several packages register the strategy 'theirs'"):
        load("theirs")


def test_package_cannot_replace_built_in_strategy(package):
    package({"ring": "their_strategies:Theirs"})
    assert load("ring") is RingStrategy
    assert "not ring of their_strategies:Theirs:" in bp.plan(seq_len=160, ranks=4, heads=4).reason


class Windowed(Strategy):
    """Compute a window instead of any mask. Its class is no dataclass, so all instances are equal."""

    name, title, exact = "windowed", "a window instead of any mask", False

    def __init__(self, left: int) -> None:
        object.__setattr__(self, "left", left)

    def computes(self, mask: bp.Mask) -> bp.Mask:
        return bp.Mask.window(self.left)

    def plan(self, call: AttentionCall) -> Plan:
        return ring_plan(
            replace(call, mask=self.computes(call.mask)), self.name, side="kv", route=RingRoute(call.ranks)
        )


@dataclass(frozen=True)
class WindowedOption(Windowed):
    """The same with an option, which equality compares."""

    left: int = 1


class WindowedByName(WindowedOption):
    """The same without an own attribute. What is derived from options may be kept."""

    @cached_property
    def twice(self) -> int:
        return 2 * self.left

    def plan(self, call: AttentionCall) -> Plan:
        assert self.twice == 2 * self.left
        return super().plan(call)


def test_strategy_with_attribute_that_equality_ignores_raises():
    """The second call took the plan of the first: its out was that of window:1, in each row from the third on."""
    q = torch.randn(1, 12, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mesh, seen = bp.Mesh.single(), oracle.dense_mask(bp.Mask.window(6), 12)
    exact = oracle.attention(q, q, q, torch.ones_like(q), seen, scale=0.5)
    for left in (1, 6):
        with pytest.raises(InputError, match=r"Windowed are equal even if an attribute differs.*got left; declare it"):
            bp.attention(q, q, q, strategy=Windowed(left), mesh=mesh)
    for kind in (WindowedOption, WindowedByName):
        bp.attention(q, q, q, strategy=kind(1), mesh=mesh)
        out = bp.attention(q, q, q, strategy=kind(6), mesh=mesh)
        torch.testing.assert_close(out, exact.out.to(out.dtype), rtol=1e-12, atol=1e-12)


def test_strategy_of_passes_ranks_per_node_only_if_supported():
    assert strategy_of("double_ring", 2).ranks_per_node == 2
    assert strategy_of("ring", 2) == RingStrategy()
    assert strategy_of("double_ring(ranks_per_node=4)", 2).ranks_per_node == 4
    with pytest.raises(UnknownNameError, match="unknown strategy"):
        strategy_of(object())


def test_ring_options_are_checked_together():
    with pytest.raises(
        InputError, match=r'forwards the local block in step 0; got local_block_order=.last.; transfer="direct"'
    ):
        RingStrategy(local_block_order="last")
    with pytest.raises(InputError, match="one block per step; got blocks_per_launch=2"):
        RingStrategy(blocks_per_launch=2)
    assert RingStrategy("direct", blocks_per_launch=2).blocks_per_launch == 2


def test_conform_names_reason_if_strategy_serves_no_case(package):
    package({"theirs": "their_strategies:Refusing"})
    with pytest.raises(
        UnsupportedError, match="'theirs' supports none of these cases; got theirs: theirs takes 3 ranks"
    ):
        check_backend("cpu", strategy="theirs", coverage="quick")


@pytest.mark.parametrize(("name", "cause"), [("nothing", "returned no Plan"), ("lost", "cannot be hashed")])
def test_conform_fails_for_broken_strategy(package, name, cause):
    """Only a strategy that refuses a case is skipped there."""
    package({name: f"their_strategies:{name.title()}"})
    report = check_backend("cpu", strategy=name, coverage="quick", ranks=2, fail_fast=True)
    assert not report.ok
    assert [cause in result.message for result in report.failures] == [True]
    assert not report.skipped


@pytest.mark.slow
def test_conform_finds_plans_that_differ_between_processes(package):
    """Threads have one process, so each of their cases passes."""
    package({"by_process": "their_strategies:ByProcess"})
    report = check_backend("cpu", strategy="by_process", cases=["attention:2-processes"], ranks=2)
    assert [result.name for result in report.failures] == ["2-processes"]
    differ = "by_process (transfer ring, backward kv) on rank 0 but by_process (transfer direct, backward kv) on rank 1"
    assert differ in report.failures[0].message
    assert report.failures[0].command.endswith("--strategy by_process --only attention")


def test_conform_shrinks_to_the_same_error_of_a_plan(package):
    """On one rank, this route sends to itself, which is another error; a named case has its plan checked, too."""
    package({"farther": "their_strategies:Farther"})
    report = check_backend("cpu", strategy="farther", coverage="quick", ranks=3)
    assert "ranks=3" in report.failures[0].name
    assert "ranks=" not in report.failures[0].smallest  # specs leave out the default, which is two
    assert "posted by only one of their two ranks" in report.failures[0].message
    (again,) = check_backend("cpu", cases=[report.failures[0].smallest]).failures
    assert again.message.startswith("its plan is wrong (`burst-portable plan` shows it): forward: ")
    assert again.seconds < 10


def test_conform_distinguishes_trial_from_strategy():
    with pytest.raises(
        InputError, match=r"label of one configuration.*--strategy ring tests all.*strategy=ring\(transfer=direct\)"
    ):
        check_backend("cpu", strategy="ring(transfer=direct)", coverage="quick")


def test_flag_accepts_word_or_integer(package):
    package({"theirs": "their_strategies:DeepRing", "other": "their_strategies:WordRing"})
    flags = strategy_flags()
    assert "--depth" in {flag(name) for name in flags}
    hardware = HardwareSpec(1.0, 1.0)
    assert make_named_strategy("theirs", None, {"depth": "3"}, hardware).depth == 3
    assert make_named_strategy("other", None, {"depth": "deep"}, hardware).depth == "deep"
    with pytest.raises(InputError, match="depth is not a depth; got 'deep'"):
        make_named_strategy("theirs", None, {"depth": "deep"}, hardware)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tensor_parallel", "see docs/strategies.md#tensor-parallelism"),
        ("zzz", "see docs/strategies.md"),
        ("rng", "did you mean 'ring'"),
    ],
)
def test_load_of_unknown_name_ends_with_a_hint(name, hint):
    for call in (load, bp.make_strategy, strategy_of):
        with pytest.raises(UnknownNameError, match=f"unknown strategy; got '{name}'; allowed: all_gather, .*; {hint}"):
            call(name)
