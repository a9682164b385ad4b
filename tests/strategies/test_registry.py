"""Strategies by name: ours, and those of other packages, which may be anything."""

from __future__ import annotations

import sys

import pytest

import burst_portable as bp
from burst_portable.errors import InputError, UnknownNameError, UnsupportedError
from burst_portable.strategies import registry
from burst_portable.strategies.registry import OURS, broken, classes, known, load, make_strategy, strategy_of
from burst_portable.strategies.ring import RingStrategy
from tests.support.plugins import install

THEIRS = """
from dataclasses import dataclass
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.options import PREFETCH_STEPS, option
from burst_portable.strategies.ring import RingStrategy

@dataclass(frozen=True)
class Theirs(RingStrategy):
    name = "theirs"
    title = "a ring of another package"
    exact = EXACT

    @classmethod
    def candidates(cls, call, machine):
        yield "theirs", cls()

    @classmethod
    def trials(cls):
        return {"theirs": cls(), "theirs+fetch": cls("direct")}

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
"""


def forget():
    for kept in (classes, broken, registry._loaded):
        kept.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that installs a package with these entry points."""
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


def test_load_imports_each_of_ours_by_its_name():
    assert tuple(known())[: len(OURS)] == OURS
    for name in OURS:
        assert load(name).name == name
        assert load(name).title


def test_strategy_of_another_package_is_found(package):
    package({"theirs": "their_strategies:Theirs"})
    assert "theirs" in known()
    assert make_strategy("theirs", transfer="direct").as_code() == "Theirs(transfer='direct')"
    plan = bp.plan(seq_len=64, ranks=4, heads=4, strategy="theirs")
    assert plan.strategy == "theirs"
    assert "theirs " in bp.plan(seq_len=64, ranks=4, heads=4).reason  # `auto` has compared it


def test_auto_never_takes_an_inexact_strategy(package):
    package({"theirs": "their_strategies:Theirs"}, exact=False)
    assert bp.plan(seq_len=64, ranks=4, heads=4, strategy="theirs").strategy == "theirs"
    assert "theirs" not in bp.plan(seq_len=96, ranks=4, heads=4).reason


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("their_strategies:NoDataclass", "decorate it with @dataclass"),
        ("their_strategies:NoPlan", "lacks plan"),
        ("their_strategies:NoTitle", "has no title"),
        ("their_strategies:THEIRS", "fails to import.*THEIRS"),
        ("their_strategies:dataclass", "is no subclass of"),
        ("their_absent_module:Theirs", "fails to import.*their_absent_module"),
        ("burst_portable.strategies.ring:RingStrategy", "calls itself 'ring'"),
    ],
)
def test_load_refuses_what_is_no_strategy(package, target, message):
    package({"theirs": target})
    with pytest.raises(UnsupportedError, match=message):
        make_strategy("theirs")
    reason = bp.plan(seq_len=128, ranks=4, heads=4).reason  # not named: the others still serve
    assert "not theirs: the strategy 'theirs'" in reason


def test_load_refuses_a_name_of_two_packages(package):
    package({"theirs": "their_strategies:Theirs"})
    package({"theirs": "other_strategies:Theirs"}, module="other_strategies")
    with pytest.raises(UnsupportedError, match="packages register the strategy 'theirs' at once"):
        load("theirs")


def test_package_cannot_take_our_name(package):
    package({"ring": "their_strategies:Theirs"})
    assert load("ring") is RingStrategy
    assert "not ring of their_strategies:Theirs:" in bp.plan(seq_len=160, ranks=4, heads=4).reason


def test_strategy_of_passes_ranks_per_node_on_to_those_that_have_it():
    assert strategy_of("double_ring", 2).inner == 2
    assert strategy_of("ring", 2) == RingStrategy()
    with pytest.raises(UnknownNameError, match="unknown strategy"):
        strategy_of(object())


def test_options_are_checked_together():
    with pytest.raises(InputError, match=r'begins with its owner; got local_block_order=.last.; transfer="direct"'):
        RingStrategy(local_block_order="last")
    with pytest.raises(InputError, match="come one by one; got blocks_per_launch=2"):
        RingStrategy(blocks_per_launch=2)
    assert RingStrategy("direct", blocks_per_launch=2).blocks_per_launch == 2
