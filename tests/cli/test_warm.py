"""Test `burst-portable kernels --warm`: the calls of a model, the choice of kernels, and Triton's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from burst_portable.backends.selection import load
from burst_portable.cli import main
from burst_portable.config import environment_of_children
from burst_portable.errors import UnknownNameError, UnsupportedError
from burst_portable.mask import Mask

pytest.importorskip("triton")
pytest.importorskip("transformers")

from burst_portable.cli.warm import Job, calls_of, kernel_for, launches_of

TINY = {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64,
    "sliding_window": 64, "attn_logit_softcapping": 30.0,
}  # fmt: skip


def job_of(tmp_path, fields, **changes):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    usual = Job(str(tmp_path), "gfx942", "bfloat16", (512,), 2, None, ("ring",), (), deterministic=False)
    return replace(usual, **changes)


def test_calls_of_model_with_windows_and_softcap(tmp_path):
    calls = list(calls_of(job_of(tmp_path, TINY)))
    assert {call.mask for call in calls} == {Mask.window(63), Mask.causal()}
    for call in calls:
        assert (call.heads, call.kv_heads, call.head_dim, call.v_head_dim) == (4, 2, 16, 16)
        assert (call.softcap, call.ranks, call.dtype, call.device) == (30.0, 2, "bfloat16", "meta")


def test_calls_of_named_masks_replace_those_of_model(tmp_path):
    calls = list(calls_of(job_of(tmp_path, TINY, masks=("documents:0,100,512", "causal"))))
    assert [call.mask for call in calls] == [Mask.documents([0, 100, 512]), Mask.causal()]


def test_calls_of_several_lengths(tmp_path):
    calls = calls_of(job_of(tmp_path, TINY, masks=("causal",), seq_lens=(512, 8192)))
    assert [call.layout.length for call in calls] == [512, 8192]


def test_calls_of_model_with_latent_attention(tmp_path):
    fields = {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 8,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 1,
    }  # fmt: skip
    (call,) = calls_of(job_of(tmp_path, fields))
    assert (call.heads, call.kv_heads, call.head_dim, call.v_head_dim) == (8, 8, 192, 128)


@pytest.mark.parametrize(
    ("target", "head_dim", "deterministic", "name"),
    [
        ("sm_90", 128, False, "hopper"),
        ("sm_90", 128, True, "hopper"),
        ("sm_90", 16, False, "hopper"),
        ("sm_80", 128, False, "triton"),
        ("gfx942", 128, True, "triton"),
    ],
)
def test_kernel_for_target_is_first_that_compiles(tmp_path, target, head_dim, deterministic, name):
    (call, *_) = calls_of(job_of(tmp_path, TINY | {"head_dim": head_dim}, deterministic=deterministic))
    backend = load("rocm" if target.startswith("gfx") else "cuda")
    assert kernel_for(backend, call, target).name == name


def test_kernel_for_named_is_that_kernel(tmp_path):
    (call, *_) = calls_of(job_of(tmp_path, TINY | {"head_dim": 128}))
    assert kernel_for(load("cuda"), call, "sm_90", "triton").name == "triton"
    assert kernel_for(load("cuda"), replace(call, head_dim=16, v_head_dim=16), "sm_90", "hopper").name == "hopper"
    with pytest.raises(UnknownNameError, match="cublas"):
        kernel_for(load("cuda"), call, "sm_90", "cublas")
    with pytest.raises(UnsupportedError, match="not hopper: it is for sm_90"):
        kernel_for(load("cuda"), call, "sm_80", "hopper")


def test_kernel_for_reports_why_none_compiles(tmp_path):
    (call, *_) = calls_of(job_of(tmp_path, TINY | {"head_dim": 512}))
    with pytest.raises(UnsupportedError, match=r"for sm_80; got .*triton: head size 512 is larger.*another package"):
        kernel_for(load("cuda"), call, "sm_80")


def test_launches_of_ring_have_all_masks_ranks_and_strides(tmp_path):
    assert len(list(launches_of(job_of(tmp_path, TINY)))) == 2 * 2 * 2


def test_launches_of_unknown_target_raise(tmp_path):
    with pytest.raises(UnknownNameError, match=r"sm_91.*gfx942"):
        list(launches_of(job_of(tmp_path, TINY, target="sm_91")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm_90", "--head-dim", "64"], "--head-dim and --warm exclude each other"),
        (["--target", "sm_90", "--target", "sm_80"], "--warm compiles for one target; got sm_90, sm_80"),
        (["--target", "sm_90", "--dtype", "int8"], "unknown dtype; got 'int8'"),
        (["--target", "sm_90", "--strategy", "rings"], "unknown strategy; got 'rings'"),
        (["--target", "sm_90", "--ranks", "2", "--strategy", "ring_self_attention"], "has no kernels to compile; got"),
        (["--target", "sm_90", "--mask", "causality"], "unknown mask; got 'causality'"),
        (["--target", "sm_90", "--ranks", "8", "--seq-len", "4"], "ranks"),
        ([], "the target is not known; got a machine without a GPU; name it with --target"),
    ],
)
def test_warm_rejects_usage(tmp_path, capsys, arguments, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    job_of(tmp_path, TINY)
    assert main(["kernels", "--warm", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_warm_compiles_once(tmp_path):
    """The first run compiles the forward without and with a state, and three backward kernels; the second none."""
    job_of(tmp_path, TINY | {"sliding_window": None})
    command = [
        sys.executable, "-m", "burst_portable", "kernels", "--warm", str(tmp_path), "--target", "gfx942",
        "--ranks", "2", "--strategy", "ring", "--seq-len", "512", "--json",
    ]  # fmt: skip
    environment = environment_of_children(TRITON_CACHE_DIR=str(tmp_path / "cache"), TRITON_INTERPRET="0")
    first, second = (
        json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout) for _ in "ab"
    )
    names = ["attend_kernel", "attend_kernel", "delta_kernel", "keys_kernel", "queries_kernel"]
    assert sorted(one["name"] for one in first["kernels"]) == names
    assert not any(one["cached"] for one in first["kernels"])
    assert all(one["cached"] for one in second["kernels"])
    assert {one["digest"] for one in first["kernels"]} == {one["digest"] for one in second["kernels"]}
    assert first["schema"] == "burst_portable.warm/1"
    assert first["cache"] == str(tmp_path / "cache")
