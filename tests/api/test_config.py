"""Test which environment variables are read as settings, and which as those of a launcher."""

from __future__ import annotations

import os
from collections import UserDict
from pathlib import Path

import pytest

from burst_portable.config import LauncherEnv, from_environment, read_launcher_env, triton_cache
from burst_portable.errors import InputError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_launched_detects_launcher():
    assert read_launcher_env({}) is None
    assert (
        read_launcher_env({"MASTER_ADDR": "host", "MASTER_PORT": "x", "LOCAL_RANK": "0"}) is None
    )  # cluster variables without a launcher
    assert read_launcher_env(TORCHRUN) == LauncherEnv(1, 2, 1, "host:29500")
    assert read_launcher_env({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}) == LauncherEnv(
        1, 2, 1, "host:29500"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({name: None}, f"but not {name}") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        *(({name: ""}, f"but not {name}") for name in TORCHRUN),
        *(({name: "x"}, f"{name}='x'") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")),
        *(({name: "-1"}, f"{name}='-1'") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")),
        ({"RANK": "2"}, "RANK < WORLD_SIZE"),
        ({"RANK": "²"}, "RANK='²'"),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "9" * 5001}, "RANK < WORLD_SIZE"),
        ({"MASTER_PORT": "65536"}, "1 to 65535"),
    ],
    ids=str,
)
def test_launched_rejects_incomplete_variables(changes, said):
    environment = {k: v for k, v in {**TORCHRUN, **changes}.items() if v is not None}
    with pytest.raises(InputError, match="start with torchrun, or unset RANK") as error:
        read_launcher_env(environment)
    assert said in str(error.value)


def test_from_environment_follows_changes(monkeypatch):
    assert from_environment() is from_environment()
    for value, kernel in (("reference", "reference"), ("", "auto"), ("kérnel", "kérnel")):
        monkeypatch.setenv("BURST_KERNEL", value)
        assert from_environment().kernel == kernel
    monkeypatch.delenv("BURST_KERNEL")
    assert from_environment().kernel == "auto"
    monkeypatch.setenv("BURST_TIMEOUT", "soon")
    for _ in range(2):
        with pytest.raises(InputError, match="BURST_TIMEOUT must be a number of seconds; got 'soon'"):
            from_environment()


def test_from_environment_reads_a_replaced_environ(monkeypatch):
    monkeypatch.setattr(os, "environ", {"BURST_KERNEL": "reference"})
    assert from_environment().kernel == "reference"


def test_from_environment_decodes_nothing_again(monkeypatch):
    """Every call without a mesh reads six variables: those of an unchanged environment are not decoded again."""

    class Unread(UserDict):
        decodevalue = encodekey = __getitem__ = None

    monkeypatch.setenv("BURST_KERNEL", "reference")
    first, unread = from_environment(), Unread()
    unread._data = os.environ._data
    monkeypatch.setattr(os, "environ", unread)
    assert from_environment() is first
    del unread._data
    with pytest.raises(TypeError):  # the planted bug: each variable is looked up in os.environ
        from_environment()


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, Path.home() / ".triton" / "cache"),
        ({"TRITON_HOME": "/a"}, Path("/a/.triton/cache")),
        ({"TRITON_HOME": "/a", "TRITON_CACHE_DIR": "/b"}, Path("/b")),
        ({"TRITON_CACHE_DIR": "/b", "TRITON_ALWAYS_COMPILE": "1"}, None),
        ({"DISABLE_PTXAS_OPT": "1"}, None),
    ],
    ids=str,
)
def test_triton_cache_follows_variables_of_triton(environment, folder):
    assert triton_cache(environment) == folder
