"""Test the benchmark scripts: exit codes, options, pictures, tables, and the kernels that they compare."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

import burst_portable as bp
from benchmarks import attention, picture, providers, tables
from benchmarks.ranks import check_device
from benchmarks.report import Result, beside, print_matrix, setting
from benchmarks.script import accelerator, count, current_device, end, file, names, share
from burst_portable.backends.selection import for_device
from burst_portable.errors import BackendUnavailableError, CommunicationTimeoutError, InputError, UnknownNameError
from burst_portable.layout import Segment
from burst_portable.planning.tiles import find_tiles

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [file.name for file in sorted(FOLDER.glob("*.py")) if "__main__" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_ends_with_shared_helper(name: str):
    assert (FOLDER / name).read_text(encoding="utf-8").endswith('if __name__ == "__main__":\n    end(main)\n')


@pytest.mark.parametrize(("error", "code"), [(UnknownNameError, 2), (CommunicationTimeoutError, 1)])
def test_end_prints_error_in_one_line(error, code, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/ring.py"])

    def main():
        raise error("what\nwas wrong")

    with pytest.raises(SystemExit) as ended:
        end(main)
    assert ended.value.code == code
    assert capsys.readouterr() == ("", "ring.py: what was wrong\n")


def test_end_returns_code_and_propagates_other_errors():
    with pytest.raises(SystemExit) as ended:
        end(lambda: 3)
    assert ended.value.code == 3
    with pytest.raises(ZeroDivisionError):
        end(lambda: 1 // 0)


def code_of(main, stdout, monkeypatch) -> object:
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit) as ended:
        end(main)
    return ended.value.code


def says_much() -> None:
    for _ in range(1000):
        print("a row of a table")


def says_little() -> int:
    print("all is well")
    return 0


def gives_help() -> None:
    argparse.ArgumentParser(prog="ring.py").parse_args(["--help"])


@pytest.mark.parametrize("main", [says_much, says_little, gives_help])
def test_end_returns_sigpipe_without_reader(main, monkeypatch, capsys):
    """The reader may be `head -1`, and all output may be buffered until the end."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        assert code_of(main, closed, monkeypatch) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_end_reports_full_disk(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks/ring.py"])
    with Path("/dev/full").open("w") as full:
        assert code_of(says_much, full, monkeypatch) == 1
    assert capsys.readouterr().err == "ring.py: the output cannot be written: No space left on device\n"


def test_end_keeps_output_before_failed_write(monkeypatch, tmp_path):
    def main() -> None:
        says_little()
        raise OSError(errno.ENOSPC, "No space left on device", "results.json")

    with (tmp_path / "out").open("w") as out:
        assert code_of(main, out, monkeypatch) == 1
    assert (tmp_path / "out").read_text() == "all is well\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_end_with_closed_output_returns_sigpipe(unbuffered):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.picture", "--check"],
        cwd=FOLDER.parent, stdout=write, stderr=subprocess.PIPE, text=True, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_option_types_parse_and_reject_values(tmp_path):
    assert count("7") == 7
    assert names(("a b", "c"), ";")("c;a b") == ["c", "a b"]
    with pytest.raises(argparse.ArgumentTypeError, match="0 is less than 1"):
        count("0")
    with pytest.raises(argparse.ArgumentTypeError, match="unknown: d, ; known are a, c"):
        names(("a", "c"))("a,d,")
    assert file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    for none in (tmp_path, tmp_path / "nowhere" / "new.json"):  # raises before hours of measurement
        with pytest.raises(argparse.ArgumentTypeError, match="is a folder, or lies in none"):
            file(str(none))


@pytest.mark.parametrize("there", [True, False])
def test_current_device_includes_index(there, monkeypatch):
    parts = {"is_available": there, "current_accelerator": torch.device("cuda"), "current_device_index": 3}
    for name, value in parts.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    assert current_device() == (torch.device("cuda", 3) if there else torch.device("cpu"))
    if there:
        assert accelerator() == torch.device("cuda", 3)
    else:
        with pytest.raises(BackendUnavailableError, match="torch sees none here"):
            accelerator()


def test_pictures_match_their_results():
    stale = [file.name for file, drawn in picture.pictures().items() if file.read_text(encoding="utf-8") != drawn]
    assert stale == [], "run python -m benchmarks.picture"


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.name)
def test_tables_match_their_results(path):
    assert path.read_text(encoding="utf-8") == tables.page(path), "run python -m benchmarks.tables"


def test_cut_rounds_down():
    assert [tables.cut(x, 2) for x in (0.999, 1.0, 1.29, 0.005)] == ["0.99", "1.00", "1.29", "0.00"]


def test_kind_of_separates_ours_others_and_bounds():
    kinds = {"hopper": "ours", "triton": "portable", "cudnn": "others", "context_parallel alltoall": "others"}
    kinds |= {
        "triton-state": "portable",
        "ring nccl": "ours",
        "ring nccl, nothing sent": "still",
        "plain call": "still",
        "flex-max": "others",
    }
    assert {name: picture.kind_of(name) for name in kinds} == kinds
    results = [
        {"row": "a", "provider": name, "tflops": {"forward": 9.0, "backward": 4.5}} for name in ("hopper", "<&>")
    ]
    drawn = picture.draw_file(
        {"setting": dict.fromkeys(("device", "torch", "triton", "date"), "x"), "results": results}
    )
    assert drawn.count(f'width="{picture.LONGEST:.1f}"') == 2
    assert drawn.count(f'width="{picture.LONGEST / 2:.1f}"') == 2
    assert "&lt;&amp;&gt;" in drawn


def test_setting_names_installed_versions(monkeypatch, tmp_path):
    """Only ring-flash-attn is installed here. Pictures also accept files without such versions."""
    pytest.importorskip("triton")
    there = tmp_path / "ring_flash_attn-0.1.99.dist-info"
    there.mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: ring-flash-attn\nVersion: 0.1.99\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    told = setting()
    assert told.pop("ring-flash-attn") == "0.1.99"
    assert set(told) == {"device", "torch", "triton", "python", "date"}
    results = [{"row": "a", "provider": "hopper", "tflops": {"forward": 9.0, "backward": 4.5}}]
    drawn = [
        picture.draw_file({"setting": one, "results": results}) for one in (told, told | {"ring-flash-attn": "0.1.99"})
    ]
    assert drawn[0] == drawn[1]


def test_beside_compares_kernels_round_by_round():
    """Ours is 10 % faster in each of four rounds while the device slows down by half."""
    mine = Result("row", "ours", rounds={"forward": [10.0, 10.0, 20.0, 20.0], "backward": [1.0]})
    theirs = Result("row", "theirs", rounds={"forward": [11.0, 11.0, 22.0, 5.0], "backward": [2.0]})
    assert beside(mine, theirs, "forward") == pytest.approx(1.1)
    assert beside(theirs, mine, "backward") == 0.5


def task_on_cpu(mask: bp.Mask, length: int = 48, kv_heads: int = 2) -> providers.Task:
    whole = (Segment(0, length),)
    heads = {"q": 2 * kv_heads, "k": kv_heads, "v": kv_heads, "dout": 2 * kv_heads}
    made = {n: torch.randn(1, length, h, 16).bfloat16() for n, h in heads.items()}
    return providers.Task("row", mask, find_tiles(mask, whole, whole), **made)


def test_fused_computes_striped_mask_as_causal_square(monkeypatch):
    """The first query and the last key see nothing and are left out. A wrong row is still detected."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    task = task_on_cpu(providers.striped(48))
    calls, right = providers._fused(task, SDPBackend.MATH), attention.reference(task)
    assert calls[0]()[0].shape[1] == 47
    assert not attention.wrong(attention.errors(calls, task, right))
    right["dk"][:, 46] += 1.0
    assert attention.wrong(attention.errors(calls, task, right))


@pytest.mark.parametrize("head", [0, 3, -1])
def test_errors_detect_one_wrong_checked_head(head, monkeypatch):
    """The query heads that read the first K/V head and those that read the last one of three."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    task = task_on_cpu(bp.Mask.causal(), kv_heads=3)
    right = attention.reference(task)
    kernel = next(one for one in for_device("cpu").kernels() if one.name == "cpu_flash")
    forward, backward = providers.in_16_bits(kernel, task)
    assert not attention.wrong(attention.errors((forward, backward), task, right))

    def wrong():
        out, lse = forward()
        lse[:, head] += 1e-3
        return out, lse

    found = attention.errors((wrong, backward), task, right)
    assert attention.wrong(found) == (head != 3)
    assert found["out"] < attention.ERROR_LIMIT


def test_triton_whole_returns_16_bit_results(monkeypatch):
    """The call zeroes and rounds gradients. Repeated calls give equal 16-bit results."""
    kernel = next(one for one in for_device("cpu").kernels() if one.name == "cpu_flash")
    monkeypatch.setattr("burst_portable.kernels.triton.triton_kernel.TritonKernel", lambda: kernel)
    forward, backward = providers.PROVIDERS["triton-whole"](task_on_cpu(bp.Mask.causal()))
    first, second = backward(), backward()
    assert {x.dtype for x in (forward()[0], *first)} == {torch.bfloat16}
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_flex_flash_passes_mask_to_backend(monkeypatch):
    """The backend is "FLASH". A torch without this option is detected, because it would ignore it."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: lambda q, *_, **options: asked.append(options) or q)
    monkeypatch.setattr("torch.nn.attention.flex_attention.create_block_mask", lambda *_, **__: "block mask")
    forward, _ = providers.PROVIDERS["flex-flash"](task_on_cpu(bp.Mask.prefix_lm(16)))
    forward()
    expected = {"block_mask": "block mask", "score_mod": None, "enable_gqa": True}
    assert asked[-1] == {**expected, "kernel_options": {"BACKEND": "FLASH"}}
    monkeypatch.delattr("torch.nn.attention.flex_attention.FlexKernelOptions")
    with pytest.raises(providers.Absent, match="has no backends"):
        providers.PROVIDERS["flex-flash"](task_on_cpu(bp.Mask.prefix_lm(16)))


def test_share_takes_parts_of_a_whole():
    assert share("1/2") == (1, 2)
    for text in ("2/2", "-1/2", "0/0", "1"):
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            share(text)


def test_matrix_has_every_head_size_and_mask():
    rows = attention.matrix("4k")
    assert len(rows) == len(attention.HEADS) * len(attention.MATRIX_MASKS)
    for row in rows.values():
        visible = bp.Mask.parse(row.mask, row.length).num_pairs(row.length, row.length)
        assert 0 < visible <= row.length**2
    assert rows["mla-gqa-4k"].heads == (16, 4)
    assert (rows["mla-gqa-4k"].head, rows["mla-gqa-4k"].v_head) == (192, 128)


def test_print_matrix_names_best_other_of_both_passes(capsys):
    def result(provider, forward, backward):
        passes = {"forward": forward, "backward": backward}
        return Result("row", provider, tflops={"forward": 9, "backward": 9}, rounds=passes)

    print_matrix([result("auto", [1, 1], [1, 3]), result("cudnn", [2, 2], [1, 4]), result("flex", [1, 1], [3, 7])])
    assert "cudnn 9/9 1.500" in capsys.readouterr().out


def test_check_device_rejects_more_ranks_than_devices():
    check_device(1, 2)
    with pytest.raises(InputError, match="no device for the rank; got local rank 2; allowed: 2 ranks per host"):
        check_device(2, 2)
