"""Test which environment variables are read as those of a launcher."""

from __future__ import annotations

import pytest

from burst_portable.config import LauncherEnv, read_launcher_env
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
