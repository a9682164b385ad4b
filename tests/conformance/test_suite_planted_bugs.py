"""Test that the conformance suite detects planted bugs around real kernels and transports.

The bugs are planted in the cpu backend, or in another one that can run here::

    python -m pytest tests/conformance/test_suite_planted_bugs.py --backend ascend
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from burst_portable import numerics
from burst_portable.backends.base import Backend, Probe
from burst_portable.backends.selection import load
from burst_portable.cli.conform_view import show
from burst_portable.conformance import check_backend
from burst_portable.conformance.base import BackendUnderTest
from burst_portable.conformance.checks import CHECKS
from burst_portable.conformance.report import Report
from burst_portable.conformance.selection import list_tests
from burst_portable.errors import InputError
from burst_portable.kernels.base import LazyKernel, Support, WrappedKernel
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.profiling import clocks
from burst_portable.profiling.intervals import Timeline
from burst_portable.profiling.recording_observer import RecordingObserver
from burst_portable.profiling.session import Session
from tests.support import planted_bugs, planted_transports
from tests.support.planted_bugs import KernelWrapper, Planted
from tests.support.planted_transports import DropsLastHop, SkipsReceiveWait, SkipsSendWait

# Bug -> the groups of which each detects it alone, with quick coverage.
KERNELS = {
    planted_bugs.WrongScale: ("kernels", "attention", "claims"),
    planted_bugs.OwnScale: ("kernels",),
    planted_bugs.DefaultScaleForZero: ("kernels",),
    planted_bugs.LocalColumns: ("kernels", "attention"),
    planted_bugs.BandOffByOne: ("kernels", "attention"),
    planted_bugs.FewBlocks: ("kernels",),
    planted_bugs.FewTokens: ("kernels",),
    planted_bugs.ManyGrouped: ("kernels",),
    planted_bugs.FlatBuffers: ("kernels", "attention"),
    planted_bugs.NarrowValues: ("kernels",),
    planted_bugs.BottomRight: ("kernels", "attention"),
    planted_bugs.StaleKeys: ("kernels", "attention"),
    planted_bugs.Base2: ("kernels", "attention"),
    planted_bugs.ReturnsNothing: ("kernels", "attention"),
    planted_bugs.TransposedLse: ("kernels",),
    planted_bugs.EmptyRows: ("kernels", "fully_masked"),
    planted_bugs.EmptyRowsInfinite: ("kernels", "fully_masked"),
    planted_bugs.SixteenBits: ("kernels", "attention"),
    planted_bugs.SixteenBitsOf16: ("kernels", "determinism"),
    planted_bugs.CoarserThanItSays: ("kernels", "claims"),
    planted_bugs.SaysNothingOfIt: ("kernels", "claims", "attention"),
    planted_bugs.HeadsByRemainder: ("kernels", "attention"),
    planted_bugs.SwappedGradients: ("kernels", "attention"),
    planted_bugs.SwappedAsAWhole: ("kernels",),
    planted_bugs.WritesItsLseElsewhere: ("kernels",),
    planted_bugs.Overwrites: ("kernels", "attention"),
    planted_bugs.ForgetsRows: ("kernels", "fully_masked"),
    planted_bugs.ClaimsTooMuch: ("claims",),
    planted_bugs.NoReasons: ("claims",),
    planted_bugs.RaisesInSupports: ("claims", "kernels"),
    planted_bugs.SaysTrue: ("claims", "kernels"),
    planted_bugs.Unsteady: ("kernels", "determinism"),
    planted_bugs.SideStream: ("memory",),
}
DECLINED = (planted_bugs.ClaimsTooMuch, planted_bugs.NoReasons)
"""Bugs that need a kernel that declines a call."""
TRANSPORTS = {
    DropsLastHop: ("transport", "attention"),
    planted_transports.ExchangesPair: ("transport",),
    planted_transports.ExchangesPeers: ("transport",),
    planted_transports.RepeatsChunks: ("transport",),
    planted_transports.ReusesBuffers: ("transport", "attention"),
    SkipsReceiveWait: ("transport", "memory"),
    SkipsSendWait: ("transport",),
    planted_transports.SendsOthersShares: ("transport",),
    planted_transports.SharesOwnDataOnly: ("transport",),
    planted_transports.SharesInWrongOrder: ("transport",),
    planted_transports.BeginsAnyhow: ("transport",),
}


@pytest.fixture(scope="session")
def real(request):
    """Return the backend in which bugs are planted."""
    backend = load(request.config.getoption("backend"))
    if not (probe := backend.probe()).ok:
        pytest.fail(f"{backend.name} cannot run here: {probe.reason}")
    return backend


def examine(backend: Planted, group: str, **options: object) -> Report:
    return check_backend(backend, ranks=4, only=[group], coverage="quick", fail_fast=True, timeout=3.0, **options)


def examine_bug(bug, group: str, real: Backend) -> Report | None:
    """Return the report on a planted bug; None if it is one of declined calls, and the kernels decline none."""
    if bug in DECLINED:
        bug.changed = False
    report = examine(Planted(bug, real=real), group)
    return None if bug in DECLINED and not bug.changed else report


# Pairs that take seconds, and whose bug and group are each in another pair.
SLOW = {(planted_bugs.SixteenBitsOf16, "determinism")}


def pairs(bugs):
    return [
        pytest.param(bug, group, id=f"{bug.__name__}-{group}", marks=[pytest.mark.full] * ((bug, group) in SLOW))
        for bug, groups in bugs.items()
        for group in groups
    ]


@pytest.mark.parametrize(("bug", "group"), pairs(KERNELS))
def test_kernel_bug_is_detected(bug, group, real):
    if bug is planted_bugs.SideStream and not real.capabilities.streams:
        pytest.skip(f"{real.name} has no streams")
    report = examine_bug(bug, group, real)
    if report is None:
        pytest.skip(f"the kernels of {real.name} decline nothing that this group tries")
    assert not report.ok
    assert report.failures[0].message
    assert report.failures[0].command.startswith("burst-portable conform --backend planted --case ")


class ServesAll(Planted):
    """A vendor whose only kernel declines no call."""

    def kernels(self):
        return (KernelWrapper(ReferenceKernel()),)


@pytest.mark.parametrize("bug", DECLINED)
def test_bug_of_declined_calls_skips_kernels_that_decline_none(bug):
    assert examine_bug(bug, "claims", ServesAll()) is None


class NoTransport(Backend):
    """A vendor with kernels and no transport."""

    name, capabilities = "no_transport", load("cpu").capabilities

    def probe(self):
        return Probe(True)

    def kernels(self):
        return (ReferenceKernel(),)


def test_group_skips_backend_without_transport():
    report = check_backend(NoTransport(), only=["claims", "group"], coverage="quick")
    assert not report.failures
    reasons = {result.skipped for result in report.results if result.check == "group"}
    assert reasons == {"the backend 'no_transport' has no transport, so it supports one rank only"}


class SixteenBitBase2(planted_bugs.Base2):
    """Support 16 bits only, as most vendors' kernels; return LSE in base 2."""

    def supports(self, call):
        return super().supports(call) if call.itemsize == 2 else Support(False, "it supports 16 bits only")


class SixteenBitVendor(Planted):
    """A vendor whose kernel supports 16 bits only. `heads` limits it further."""

    heads = 0

    def kernels(self):
        kernel = SixteenBitBase2(ReferenceKernel())
        kernel.name = "sixteen_bits"
        if self.heads:
            kernel.supports = lambda call: Support(call.heads == self.heads, "it supports other heads")
        return kernel, ReferenceKernel()


def test_quick_attention_examines_sixteen_bit_kernels():
    """All quick cases were in float32, so that the reference kernel computed them and the vendor's kernel conformed."""
    report = examine(SixteenBitVendor(), "attention")
    assert report.failures[0].kernels == ("sixteen_bits",)
    assert "error of lse is" in report.failures[0].message


@pytest.mark.parametrize(
    ("bug", "hint"),
    [
        (planted_bugs.Base2, "lse looks like base 2; it must be the natural logarithm"),
        (planted_bugs.ShiftedLse, "lse is off by the same number in every row: 0.001"),
        (
            planted_bugs.CountsThrice,
            "lse is off by the same number in every row: 1.1, as if each key were counted 3 times",
        ),
        (planted_bugs.SixteenBits, "out looks like it was rounded to bfloat16"),
        (planted_bugs.HeadsByRemainder, "query head h looks as if it read K/V head h % 6; it must read h // 2"),
        (planted_bugs.SwappedGradients, "dk and dv look swapped"),
        (planted_bugs.ForgetsKeyGradients, "dk is 0 everywhere: it was not written"),
        (planted_bugs.Overwrites, "dq is half of the exact value: it may be written instead of added"),
    ],
)
def test_failure_of_known_bug_names_its_cause(bug, hint):
    report = check_backend(Planted(bug), ranks=1, cases=["kernels:reference:ranks=1"], coverage="quick", fail_fast=True)
    message = report.failures[0].message
    assert f"{hint}; error of " in message
    assert "(max)" not in message or message.count("error of ") == len({*re.findall(r"error of (\w+)", message)})


def test_rounded_float64_inputs_are_detected():
    """Inputs that float32 represents exactly did not show it."""
    (result,) = check_backend(Planted(planted_bugs.RoundsFloat64), cases=["kernels:reference:dtype=float64"]).results
    assert "error of out" in result.message


def test_kernel_that_returns_no_support_is_named():
    (result,) = check_backend(Planted(planted_bugs.SaysTrue), cases=["claims:reference-reasons"]).results
    assert result.message.startswith(
        "BackendUnavailableError: the kernel 'reference' is broken: supports returned no Support; got True; allowed: "
    )
    assert result.message.endswith("; fix tests.support.planted_bugs.SaysTrue.supports")


def test_failure_names_the_cause_in_its_smallest_case():
    """On two ranks, merged results in base 2 look like no known bug."""
    (result,) = check_backend(Planted(planted_bugs.MergedBase2), cases=["kernels:reference:default"]).results
    assert result.message.startswith(
        "in the smallest case, lse looks like base 2; it must be the natural logarithm; error"
    )


def test_report_does_not_conform_without_each_kernel(capsys):
    """The suite tries no kernel for 40 heads, so the report must not say that the backend conforms."""
    vendor = SixteenBitVendor()
    vendor.heads = 40
    report = examine(vendor, "fully_masked")
    assert report.ok
    assert not report.conforms
    show(report)
    text = capsys.readouterr().out
    assert "conforms" not in text
    assert "planted passed the selected tests (fully_masked; not claims, kernels, " in text
    assert "sixteen_bits was not examined: it declined: it supports other heads" in text
    assert Report.from_json(report.to_json()).computed() == {"sixteen_bits": 0, "reference": 4}
    show(replace(report, only=()))
    assert "planted passed the selected tests, which do not examine every kernel: " in capsys.readouterr().out


def test_report_names_kernels_that_compute_nothing(real):
    report = examine(Planted(real=real), "transport")
    assert report.ok
    assert not report.conforms
    assert report.not_examined == dict.fromkeys(report.kernels, "no selected test computed with it")
    report = check_backend(real, only=["transport"], coverage="quick", ranks=3, wrap=planted_transports.ExchangesPeers)
    assert report.failures
    assert report.not_examined == dict.fromkeys(report.kernels, "no selected test computed with it")
    raising = Planted(planted_bugs.RaisesInSupports)
    report = check_backend(raising, cases=["kernels:reference:default"], coverage="quick", fail_fast=True)
    unused = {"cpu_flash": "no selected test computed with it", "reference": "its tests failed before it computed"}
    assert report.not_examined == unused


def test_quick_group_has_three_ranks():
    """Two ranks cannot show that the messages of two peers are exchanged."""
    names = [test.name for test in list_tests(BackendUnderTest(load("cpu"), 8, "quick"), ["group"])]
    assert names[0] == "messages-3ranks"


def test_quick_group_uses_sixteen_bit_kernel():
    """The kernel and the transport of a vendor met in no quick test: its case was in float32."""
    vendor = BackendUnderTest(SixteenBitVendor(), 8, "quick")
    cases = [test.case for test in list_tests(vendor, ["group"]) if test.case]
    assert [vendor.choose(case.make_call("cpu")).name for case in cases] == ["sixteen_bits"]
    assert {case.dtype for case in cases} == {torch.bfloat16}


class Labelled(planted_transports.TransportWrapper):
    """Assert that each message has a label, which errors need."""

    def post(self, sends, receives, label=""):
        assert label, "a message without a label"
        return super().post(sends, receives, label)


def test_transport_trials_label_all_messages(real):
    report = check_backend(real, only=["transport"], coverage="quick", ranks=2, wrap=Labelled)
    assert report.ok, report.failures[0].message


def test_kernel_that_writes_into_outputs_passes(real):
    report = examine(Planted(planted_bugs.WritesIntoOutputs, real=real), "kernels")
    assert report.ok, report.failures[0].message


@pytest.mark.parametrize("group", [pytest.param("kernels", marks=pytest.mark.full), "claims"])
def test_rounding_stated_by_kernel_is_allowed(group, real):
    """The rounding is that of TF32. It is allowed only if the kernel is named."""
    report = examine(Planted(planted_bugs.Coarse, real=real), group)
    assert report.ok, report.failures[0].message


def test_rounding_tolerance_grows_with_scores(real):
    """TF32 changes a score of 100 by 0.1, so attention loses 1 % there."""
    backend = Planted(planted_bugs.Coarse, real=real)
    case = "mask=full,layout=contiguous,ranks=1,heads=2x1x64x64,batch=1,length=67,values=large"
    report = check_backend(backend, cases=[f"kernels:{kernel.name}:{case}" for kernel in backend.kernels()])
    assert report.ok, report.failures[0].message
    errors = [error for result in report.results for name, (error, _) in result.errors.items() if name == "dq"]
    assert max(errors) > 4 * 2**-10  # allowed error of scores of usual size


@pytest.mark.parametrize(("bug", "group"), pairs(TRANSPORTS))
def test_transport_bug_is_detected(bug, group, real):
    report = examine(Planted(real=real), group, wrap=bug)
    assert not report.ok
    assert report.failures[0].message


def test_missing_direct_transport_is_detected(real):
    report = check_backend(Planted(real=real, direct_transport="peer_copy"), cases=["claims:direct-transport"])
    assert "no connect_direct" in report.failures[0].message


class ClaimsStreams(Planted):
    """The group "group" then needs one device per rank, and is skipped."""

    @property
    def capabilities(self):
        return replace(super().capabilities, streams=True)


def test_claimed_streams_of_cpu_are_detected():
    report = check_backend(ClaimsStreams(), cases=["claims:streams"])
    assert "torch records no event on cpu" in report.failures[0].message


class WithProbeFacts(Planted):
    """Report the given facts in its probe."""

    facts: ClassVar[dict[str, object]] = {}

    def probe(self):
        return Probe(True, facts=self.facts)


def test_probe_facts_that_are_not_json_are_named():
    WithProbeFacts.facts = {"chips": 2, "memory": torch.ones(2)}
    report = check_backend(WithProbeFacts(), cases=["claims:probe"])
    assert "'memory' is a Tensor" in report.failures[0].message


def test_selection_without_tests_is_refused(real):
    with pytest.raises(InputError, match="no test was selected; got group with 1 rank"):
        check_backend(real, only=["group"], ranks=1)


def test_evidence_level_is_that_of_the_probe():
    WithProbeFacts.facts = {"evidence_level": "gold"}
    with pytest.raises(InputError, match=r"evidence level in the probe of the backend 'planted'; got 'gold'"):
        check_backend(WithProbeFacts(), cases=["claims:probe"])
    WithProbeFacts.facts = {}
    assert check_backend(WithProbeFacts(), cases=["claims:probe"]).evidence_level == "not stated"
    WithProbeFacts.facts = {"evidence_level": "simulated"}
    assert check_backend(WithProbeFacts(), cases=["claims:probe"]).evidence_level == "simulated"


@pytest.mark.parametrize(
    ("bug", "much"),
    [
        (planted_bugs.FewBlocks, "length=777"),
        (planted_bugs.FewHeads, "40x8"),
        (planted_bugs.FewPrograms, "40x8"),
        (planted_bugs.FewSequences, "batch=9"),
    ],
)
def test_full_coverage_finds_bug_that_needs_large_input(bug, much, real):
    backend = Planted(bug, real=real)
    found = [test.text for test in list_tests(BackendUnderTest(backend), ["kernels"]) if much in test.name]
    assert found
    assert not check_backend(backend, cases=found, fail_fast=True).ok


@pytest.mark.parametrize(
    ("bug", "much"),
    [
        (planted_bugs.SixteenBitBlocks, ":long-keys"),
        (planted_bugs.SixteenBitGradientBlocks, ":long-queries"),
        (planted_bugs.DropsRaggedBlock, "length=265"),
    ],
)
def test_quick_coverage_finds_bug_of_long_or_ragged_sums(bug, much, real):
    """Only this one of the quick tests of kernels finds the bug in 16 bits."""
    backend = Planted(bug, real=real)
    found = [t.text for t in list_tests(BackendUnderTest(backend, coverage="quick"), ["kernels"]) if much in t.name]
    report = check_backend(backend, cases=found, coverage="quick", fail_fast=True)
    assert not report.ok
    assert report.failures[0].message


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (planted_bugs.Repeats, ""),
        (planted_bugs.KeepsOut, "out of forward_single_call was changed by the next call"),
        (planted_bugs.KeepsGradients, "dq of backward_single_call was changed by the next call"),
        (planted_bugs.KeepsSoftcap, "with another softcap"),
        (planted_bugs.LeavesOutLargeSoftcap, "with another softcap"),
        (planted_bugs.KeepsSeed, "with another seed"),
        (planted_bugs.WrongIfYielding, "with yields_to_comm=True"),
        (planted_bugs.WrongDelta, "error of row_delta"),
    ],
)
def test_repeated_calls_find_what_one_call_does_not_show(bug, says, real):
    """`Repeats` has no bug. All other tests of the group pass with the other bugs, even with usual coverage."""
    backend = Planted(bug, real=real)
    tests = list_tests(BackendUnderTest(backend, coverage="quick"), ["kernels"])
    found = [test.text for test in tests if test.name.endswith(":repeated-calls")]
    report = check_backend(backend, cases=found, coverage="quick")
    assert report.ok is (bug is planted_bugs.Repeats), report.markdown()
    assert all(says in failure.message for failure in report.failures), report.markdown()


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (planted_bugs.ExcusesItself, "the trait rounding must be 0 to 2**-8"),
        (planted_bugs.WritesNowhere, "it declares writes_into, but has no attend_into"),
        (planted_bugs.UntypedTraits, "traits must be a KernelTraits; got None"),
    ],
)
def test_claims_reject_traits_that_cannot_be_true(bug, says, real):
    assert says in examine(Planted(bug, real=real), "claims").failures[0].message


class NamesTwice(Planted):
    """A backend whose lazy kernel has another name than its class."""

    def kernels(self):
        target = "burst_portable.kernels.reference:ReferenceKernel"
        return (LazyKernel("theirs", target, needs="json"),)


def test_claims_reject_lazy_kernel_of_another_name():
    assert "its class has the name 'reference'" in examine(NamesTwice(), "claims").failures[0].message


@pytest.mark.full
@pytest.mark.parametrize("bug", [DropsLastHop, SkipsReceiveWait, SkipsSendWait, None])
def test_process_bug_is_detected(bug, real):
    """`None` wraps the transport without a bug and must pass."""
    report = examine(Planted(wire=bug or planted_transports.TransportWrapper, real=real), "group")
    assert report.ok is (bug is None), report.markdown()
    # Each failure is that of a rank, and not a failure to start ranks.
    assert all(re.search(r"\brank \d", failure.message) for failure in report.failures), report.markdown()


@pytest.mark.full
def test_conformance_finds_transport_that_uses_global_ranks():
    backend = Planted(wire=planted_transports.UsesGlobalRanks)
    everyone, some = check_backend(backend, cases=["group:messages-2ranks", "group:messages-2ranks-of-3"]).results
    assert everyone.ok
    assert not some.ok
    (right,) = check_backend("cpu", cases=["group:messages-2ranks-of-3"]).results
    assert right.ok


def test_sinks_added_in_each_step_are_detected(monkeypatch, real):
    once = numerics.add_sinks

    def every_hop(state, sinks):
        for _ in range(planted_bugs.SinksEveryHop.calls.count):
            once(state, sinks)

    monkeypatch.setattr(numerics, "add_sinks", every_hop)
    report = examine(Planted(planted_bugs.SinksEveryHop, real=real), "attention")
    assert not report.ok
    assert "dsinks" in report.failures[0].errors


# A kernel without a bug passes the group "kernels" above; it uses no transport.
@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=[pytest.mark.full] * (group == "kernels")) for group in CHECKS if group != "group"],
)
def test_wrapped_transport_without_bug_passes(group, real):
    report = check_backend(
        Planted(real=real), ranks=4, only=[group], coverage="quick", wrap=planted_transports.TransportWrapper
    )
    assert report.ok, report.markdown()


def test_quick_check_covers_kernel_with_few_supported_sizes(real):
    backend = Planted(planted_bugs.FewSizes, real=real)
    report = check_backend(backend, only=["kernels"], coverage="quick", kernel="reference")
    assert report.ok, report.markdown()
    tried = {test.name for test in report.results if not test.skipped}
    assert len(tried) >= 8, tried
    assert "reference:flat-error-bfloat16" in tried


# ---------------------------------------------------------------------------------------------------- the profiler


def late_clock(monkeypatch):
    """Return microseconds instead of nanoseconds."""
    for clock in (clocks.HostClock, clocks.DeviceClock):
        once = clock.read
        monkeypatch.setattr(clock, "read", lambda self, mark, once=once: once(self, mark) // 1000)
    monkeypatch.setattr(clocks.HostClock, "mark", staticmethod(lambda: time.perf_counter_ns() // 1000))


def kernels_lost(monkeypatch):
    """Omit the records of the first step of a backward pass."""
    once = RecordingObserver.row

    def row(self, kind, backward, step, *rest):
        if not (kind == "compute" and backward and step == 0):
            once(self, kind, backward, step, *rest)

    monkeypatch.setattr(RecordingObserver, "row", row)


def waits_as_computing(monkeypatch):
    """Count exposed communication as compute."""
    once = Timeline.partition

    def partition(self):
        parts = once(self)
        return parts | {"compute": parts["compute"] + parts["exposed_comm"], "exposed_comm": 0}

    monkeypatch.setattr(Timeline, "partition", partition)


def idle_forgotten(monkeypatch):
    """Report idle time as 0."""
    once = Timeline.measure
    monkeypatch.setattr(Timeline, "measure", lambda self, windows: once(self, windows) | {"idle": windows[:, 0] * 0})


def bits_changed(monkeypatch):
    """Round once more in a recorded kernel."""
    once = Session.observe

    class Rounding(WrappedKernel):
        def attend(self, *args, **options):
            state = super().attend(*args, **options)
            return planted_bugs.changed_state(state, out=state[0].bfloat16().to(state[0].dtype))

    def wrap(self, prepared, mesh):
        prepared = once(self, prepared, mesh)
        return replace(prepared, kernel=Rounding(prepared.kernel))

    monkeypatch.setattr(Session, "observe", wrap)


PROFILER = {
    late_clock: "a kernel of at least 20 ms",
    kernels_lost: "pairs are in the report, but the mask has",
    waits_as_computing: "but its events give",
    idle_forgotten: "do not add up",
    bits_changed: "has other bits while it is recorded",
}


@pytest.mark.parametrize(("bug", "says"), PROFILER.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_profiler_bug_is_detected(bug, says, monkeypatch, real):
    bug(monkeypatch)
    report = check_backend(Planted(real=real), ranks=4, only=["profiler"], coverage="quick")
    assert any(says in failure.message for failure in report.failures), report.markdown()
