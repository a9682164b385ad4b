"""Build the stand-in for CANN: shared libraries with which the installed torch_npu loads.

    python backends/ascend/standin/build.py FOLDER [--update]

FOLDER gets lib64/ and set_env.sh, like an installed CANN. The script reads the functions of CANN that torch_npu's
libraries import and compares them with `symbols.txt`. If a release of torch_npu imports other functions, review them
and write the new list with --update. Functions without an imitation print an error when called, and fail.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

HERE = Path(__file__).resolve().parent
SYMBOLS = HERE / "symbols.txt"
SOURCES = ("streams.c", "device.c", "hccl.c")
# The libraries that torch_npu's libraries need. All functions are in the first one.
LIBRARIES = ("ascendcl", "hccl", "graph", "ge_runner", "acl_op_compiler", "acl_tdt_channel", "atb", "opapi")
OF_CANN = re.compile(r"(acl|rt|Hccl|Msprof|ge|atb)[A-Z]\w*|acl[a-z]+[A-Z]\w*")
ABSENT = """int {name}(void)
{{
    fprintf(stderr, "stand-in for CANN: {name} is not imitated\\n");
    return INTERNAL;
}}
"""


def torch_npu_libraries() -> list[Path]:
    """Return the shared libraries of the installed torch_npu that are loaded with it."""
    wheel = distribution("torch_npu")
    files = [Path(str(wheel.locate_file(f))) for f in wheel.files or ()]
    return [f for f in files if re.search(r"torch_npu/(lib/[^/]+|_C[^/]*)\.so$", f.as_posix())]


def symbols(library: Path, which: str) -> set[str]:
    """Return the dynamic symbols of a library, without versions. `which` is "undefined" or "defined"."""
    done = subprocess.run(
        ["nm", "-D", f"--{which}-only", str(library)], capture_output=True, text=True, check=True
    )  # nm comes with gcc
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.strip()}


def wanted() -> list[str]:
    """Return the functions of CANN that torch_npu's libraries import."""
    libraries = torch_npu_libraries()
    assert libraries, "torch_npu is installed with its libraries"
    there = set().union(*(symbols(f, "defined") for f in libraries))
    names = set().union(*(symbols(f, "undefined") for f in libraries)) - there
    return sorted(name for name in names if OF_CANN.fullmatch(name))


def difference(now: list[str], listed: list[str]) -> str:
    """Describe the new and the missing names; "" if the lists are equal."""
    new, gone = sorted(set(now) - set(listed)), sorted(set(listed) - set(now))
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in (("new", new), ("gone", gone)) if names)


def build(folder: Path, names: list[str]) -> None:
    """Compile into `folder`/lib64 and write `folder`/set_env.sh."""
    libraries = folder / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    compiler = ["gcc", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-builtin-declaration-mismatch"]
    sources = [str(HERE / "cann" / name) for name in SOURCES]
    first = libraries / f"lib{LIBRARIES[0]}.so"
    subprocess.run([*compiler, "-o", str(first), *sources, "-lpthread"], check=True)
    missing = [name for name in names if name not in symbols(first, "defined")]
    rest = folder / "rest.c"
    rest.write_text(
        '#include <stdio.h>\n#include "standin.h"\n' + "".join(ABSENT.format(name=name) for name in missing)
    )
    everything = [*sources, str(rest), f"-I{HERE / 'cann'}"]
    subprocess.run([*compiler, "-Wl,-soname," + first.name, "-o", str(first), *everything, "-lpthread"], check=True)
    for name in LIBRARIES[1:]:  # empty libraries that load the first one
        link = libraries / f"lib{name}.so"
        soname = f"-Wl,-soname,{link.name}"
        needs = [f"-L{libraries}", "-Wl,--no-as-needed", f"-l{LIBRARIES[0]}"]
        subprocess.run([*compiler, soname, "-o", str(link), "-x", "c", "/dev/null", *needs], check=True)
    (folder / "set_env.sh").write_text(
        f'export ASCEND_HOME_PATH="{folder}"\n'
        f'export ASCEND_OPP_PATH="{folder}/opp"\n'
        f'export LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
    )
    for part in ("opp", "runtime", "compiler"):  # torch_npu checks that they exist
        (folder / part).mkdir(exist_ok=True)


def main(arguments: list[str]) -> int:
    """Build the stand-in, or print why not, and return the exit code."""
    if shutil.which("gcc") is None or shutil.which("nm") is None:
        print("the stand-in for CANN is built from C: gcc is missing (Debian: apt install gcc)", file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    names = wanted()
    if "--update" in arguments:
        SYMBOLS.write_text("\n".join(names) + "\n", encoding="utf-8")
    if changed := difference(names, SYMBOLS.read_text(encoding="utf-8").split()):
        print(f"torch_npu wants other functions of CANN than symbols.txt lists: {changed}", file=sys.stderr)
        return 1
    build(folder, names)
    print(f"stand-in for CANN in {folder}: {len(names)} functions wanted, as symbols.txt lists them")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
