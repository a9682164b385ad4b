"""Test `plan --strategy all`, which compares all strategies that support a call."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from burst_portable.backends.selection import kernels_of, load
from burst_portable.cli import main
from burst_portable.cli.plan import WITH_DROPOUT
from burst_portable.kernels.base import Kernel
from burst_portable.strategies.registry import classes

CALL = ("plan", "--seq-len", "4096", "--ranks", "8", "--heads", "8", "--strategy", "all")


def facts_of(capsys, *arguments):
    assert main([*CALL, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_all_lists_choice_of_auto_first(capsys):
    """`dispatch` is predicted to be faster, but `auto` does not compare it at assumed rates."""
    arguments = ("--seq-len", "131072", "--heads", "32", "--kv-heads", "8")
    facts = facts_of(capsys, *arguments)
    first, *_ = facts["strategies"]
    assert facts["chosen"].startswith(f"chose {first['label']} by predicted time")
    (dispatch,) = (one for one in facts["strategies"] if one["label"] == "dispatch")
    assert dispatch["seconds"] < first["seconds"]
    assert main([*CALL, *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[3].startswith(first["strategy"])
    assert "the choice of auto, what it compared, and the rest" in shown


def test_plan_all_lists_strategies_by_predicted_time(capsys):
    facts = facts_of(capsys)
    assert facts["schema"] == "burst_portable.plans/6"
    served = facts["strategies"]
    assert {one["strategy"] for one in served} == {*classes()} - {"auto"}
    compared, rest = ([one for one in served if one["compared"] is same] for same in (True, False))
    assert served == compared + rest
    assert {one["strategy"] for one in rest} == facts["not_compared"].keys()
    for part in (compared, rest):
        assert [one["seconds"] for one in part] == sorted(one["seconds"] for one in part)
    assert len({one["label"] for one in served}) == len(served)
    assert facts["chosen"].startswith(f"chose {served[0]['label']} by predicted time")
    (ring,) = (one for one in served if one["label"] == "ring")
    assert main([*CALL[:-1], "ring", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    for name, costs in ring["passes"].items():
        most = alone["passes"][name]["max"]
        assert (costs["sent_bytes"], costs["launches"]) == (most["sent_bytes"], most["launches"])
        assert costs["imbalance"] == alone["passes"][name]["imbalance"]
        assert costs["memory"] == alone["passes"][name]["memory"]
    assert ring["seconds"] == alone["seconds"]


def test_plan_all_gives_reason_of_unsuitable_strategy(capsys):
    facts = facts_of(capsys, "--heads", "6")
    assert facts["unsupported"].keys() == {"ulysses"}
    assert "cannot divide these heads" in facts["unsupported"]["ulysses"]
    assert main([*CALL, "--heads", "6"]) == 0
    shown = capsys.readouterr().out
    assert "not     ulysses: ulysses cannot divide these heads" in " ".join(shown.split("\n"))
    assert "auto    chose " in shown


def test_plan_all_lists_strategies_that_need_node_size(capsys):
    found = facts_of(capsys)["not_compared"]
    assert found.keys() == {"all_gather", "dispatch", "double_ring", "ring_self_attention", "usp"}
    assert not {"double_ring", "usp"} & facts_of(capsys, "--ranks-per-node", "4")["not_compared"].keys()
    measured = facts_of(capsys, "--hardware-spec", "h200")["not_compared"]
    assert measured.keys() == {"double_ring", "ring_self_attention", "usp"}
    assert main(CALL) == 0
    shown = capsys.readouterr().out
    assert "compares double_ring, usp only with the ranks per node (--ranks-per-node)" in shown
    assert "compares all_gather, dispatch only with measured links (--hardware-spec), and up to 16 ranks" in shown
    assert "compares ring_self_attention never: ring sends the same bytes and stores no scores" in shown


def test_plan_all_accepts_layout_and_nodes(capsys):
    facts = facts_of(capsys, "--ranks-per-node", "4", "--layout", "auto", "--mask", "window:200")
    assert facts["problem"]["layout"] == "contiguous"
    assert {
        "usp(ranks_per_node=4, backward_circulates=q)",
        "double_ring(ranks_per_node=4, backward_circulates=kv)",
    } <= {one["label"] for one in facts["strategies"]}
    assert main([*CALL, "--ranks-per-node", "4", "--layout", "auto", "--mask", "window:200"]) == 0
    assert "layout contiguous by predicted time; chose ring(transfer=direct)" in capsys.readouterr().out


def test_plan_all_rejects_options_of_one_strategy(capsys):
    assert main([*CALL, "--transfer", "direct"]) == 2
    assert "excludes options of a strategy; got --transfer direct" in capsys.readouterr().err


def test_plan_all_refuses_what_exceeds_the_memory_limit(capsys):
    every = {one["label"]: one for one in facts_of(capsys)["strategies"]}
    peaks = {label: max(p["memory"]["peak"] for p in one["passes"].values()) for label, one in every.items()}
    limit = (min(peaks.values()) + max(peaks.values())) // 2 >> 20
    facts = facts_of(capsys, "--max-memory-mib", str(limit))
    too_large = {label for label, peak in peaks.items() if peak > limit << 20}
    assert {one["label"] for one in facts["strategies"]} == set(peaks) - too_large
    assert too_large == set(facts["unsupported"]) - {"double_ring"}
    for label in too_large:
        assert facts["unsupported"][label].startswith("it needs ")
        assert "; the limit is " in facts["unsupported"][label]


def test_plan_all_lists_memory_if_nothing_fits(capsys):
    every = facts_of(capsys)["strategies"]
    assert main([*CALL, "--max-memory-mib", "1", "--json"]) == 2
    out, err = capsys.readouterr()
    facts = json.loads(out)
    peaks = [max(p["memory"]["peak"] for p in one["passes"].values()) for one in facts["strategies"]]
    assert peaks == sorted(peaks)
    assert {one["label"] for one in facts["strategies"]} == {one["label"] for one in every} <= set(facts["unsupported"])
    assert facts["chosen"].startswith("chose none: attention needs more memory")
    assert f"of {facts['strategies'][0]['label']}; allowed: max_memory_mib=1" in err
    assert main([*CALL, "--max-memory-mib", "1"]) == 2
    out, _ = capsys.readouterr()
    assert "none fits in the limit; by memory" in out
    assert "chose none: attention needs more memory" in out
    assert main([*CALL[:-1], "auto", "--max-memory-mib", "1"]) == 2
    assert capsys.readouterr().out == ""


def test_plan_takes_dropout(capsys):
    """Kernels with dropout are named, since this command imports none."""
    every = [one for name in ("cpu", "cuda") for one in kernels_of(load(name)) if one.name != "flash-attn-4"]  # absent
    kernels = [one if isinstance(one, Kernel) else one.load() for one in every]
    assert {kernel.name for kernel in kernels if kernel.traits.supports_dropout} == set(WITH_DROPOUT)
    for strategy in ("ring", "all"):
        assert main([*CALL[:-1], strategy, "--dropout", "0.1"]) == 0
        assert "note    only the kernels triton, triton-tf32, reference have dropout" in capsys.readouterr().out
    assert main([*CALL, "--dropout", "1"]) == 2
    assert "dropout_p is no probability of dropout; got 1.0; allowed: at least 0 and below 1" in capsys.readouterr().err


def test_plan_refuses_picture_that_is_no_svg(capsys, tmp_path):
    assert main([*CALL, "--picture", str(tmp_path / "a.png")]) == 2
    assert "--picture writes SVG; got" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_plan_all_shows_memory_of_larger_pass(capsys):
    """Backward, a rank has q, k, v, out and dO in 16 bits, and dQ, dK, dV, LSE and delta in float32."""
    facts = facts_of(capsys)
    for one in facts["strategies"]:
        backward = one["passes"]["backward"]["memory"]
        if one["strategy"] not in ("ulysses", "usp"):
            assert backward["shard"] == 512 * 8 * (128 * (5 * 2 + 3 * 4) + 2 * 4)
        assert (backward["scores"] > 0) == (one["strategy"] == "ring_self_attention")
    assert main(CALL) == 0
    assert "launches imbalance memory forward" in " ".join(capsys.readouterr().out.split())


def test_plan_labels_work_as_strategies(capsys):
    """`--strategy all` prints labels; each makes the same plan if it is typed back."""
    for one in facts_of(capsys, "--ranks-per-node", "4")["strategies"]:
        if "(" in one["label"]:
            assert main([*CALL[:-1], one["label"], "--ranks-per-node", "4", "--json"]) == 0
            alone = json.loads(capsys.readouterr().out)
            assert (alone["strategy"], alone["seconds"]) == (one["label"], one["seconds"])
    assert main([*CALL[:-1], "usp(ranks_per_node=2)", "--ranks-per-node", "4"]) == 2
    assert "ranks_per_node is given twice" in capsys.readouterr().err


def test_plan_all_picture_has_bars_of_the_table(capsys, tmp_path):
    """Each bar is as long as its share of the largest value of its column, and has its number."""
    facts = facts_of(capsys, "--heads", "6", "--ranks-per-node", "4", "--picture", str(tmp_path / "a.svg"))
    image = (tmp_path / "a.svg").read_text()
    texts = [one.text for one in ElementTree.fromstring(image).iter() if one.tag.endswith("text")]
    bars = re.findall(r'width="([\d.]+)" height="16" fill="#\w+"><title>([^<]+): [^<]+<', image)
    served = facts["strategies"]
    costs = {
        "predicted time": lambda one: [one["passes"][name]["seconds"] for name in ("forward", "backward")],
        "bytes sent": lambda one: [one["passes"][name]["sent_bytes"] for name in ("forward", "backward")],
        "launches": lambda one: [one["passes"][name]["launches"] for name in ("forward", "backward")],
        "memory": lambda one: [max(each["memory"]["peak"] for each in one["passes"].values())],
        "imbalance": lambda one: [one["passes"]["forward"]["imbalance"]],
    }
    for title, values in costs.items():
        longest = max(sum(values(one)) for one in served)
        for one in served:
            found = [float(width) for width, name in bars if name == f"{one['label']}, {title}"]
            shares = [value / longest for value in values(one)]
            full = max(sum(float(w) for w, name in bars if name == f"{x['label']}, {title}") for x in served)
            assert found == pytest.approx([share * full for share in shares], abs=0.2)
        assert title in texts
    assert {one["label"] for one in served} <= set(texts)
    assert any(text.startswith(f"auto: chose {served[0]['label']} by predicted time") for text in texts)
    assert "No row, call not supported: ulysses" in texts


def test_plan_rejects_picture_of_one_strategy(capsys, tmp_path):
    assert main([*CALL[:-1], "ring", "--picture", str(tmp_path / "a.svg")]) == 2
    assert "only a comparison has a picture; got --strategy ring; allowed: --strategy all" in capsys.readouterr().err
    assert main([*CALL, "--picture", str(tmp_path / "none" / "a.svg")]) == 2
    assert not (tmp_path / "a.svg").exists()
