"""Run one rank of tests/device/test_torchtitan.py: the script of `burst-portable init torchtitan`.

python -m tests.support.device_torchtitan FOLDER RANK RANKS burst_portable|torchtitan

torchtitan 0.3.0 calls a function that torch 2.13 does not have, and imports packages that a run without a data set of
Hugging Face does not use. They are replaced here if they are missing.
"""

from __future__ import annotations

import io
import json
import logging
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.support.device_programs import MISSING, device_of, join

STEPS = 4
SCRIPT = Path(__file__).parents[2] / "burst_portable" / "cli" / "scripts" / "torchtitan_script.py"


def replace_missing() -> list[str]:
    """Replace what is missing and not used in this run, and return its names."""
    replaced = []
    if find_spec("datasets") is None:
        package, part = ModuleType("datasets"), ModuleType("datasets.distributed")
        package.Dataset = package.load_dataset = part.split_dataset_by_node = None  # type: ignore[attr-defined]
        sys.modules |= {"datasets": package, "datasets.distributed": part}
        replaced.append("datasets")
    if find_spec("tensorboard") is None:
        sys.modules["torch.utils.tensorboard"] = package = ModuleType("torch.utils.tensorboard")
        package.SummaryWriter = None  # type: ignore[attr-defined]
        replaced.append("tensorboard")
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *_: None  # type: ignore[attr-defined]
        replaced.append("torch.distributed.set_timeout")
    return replaced


def use_cpus() -> None:
    """Let torchtitan train on CPUs, to try this program."""
    import torchtitan.tools.utils as tools
    from torch.distributed.fsdp import FSDPModule

    unused: dict[str, Any] = {
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda *_: None,
        "memory_stats": lambda *_: {},
        "current_device": lambda: 0,
    }
    of_cpus = SimpleNamespace(**{**vars(torch.cpu), **unused})
    tools.device_type, tools.device_module = "cpu", of_cpus  # type: ignore[assignment]
    original = FSDPModule.set_gradient_divide_factor

    def set_factor(self: Any, factor: float) -> None:
        original(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo has no other

    FSDPModule.set_gradient_divide_factor = set_factor  # type: ignore[method-assign]


def fill(model: Any) -> None:
    """Set the parameters, each from the same random numbers on any number of ranks."""
    generator = torch.Generator().manual_seed(5)
    named = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in sorted(named.items()):
            x = (torch.randn(p.shape, generator=generator) * 0.05 + ("norm" in name)).to(p.device)
            p.copy_(distribute_tensor(x, p.device_mesh, p.placements) if isinstance(p, DTensor) else x)


def main(folder: Path, rank: int, ranks: int, attention: str) -> None:
    device = device_of(rank)
    try:
        print("replaced:", ", ".join(replace_missing()) or "nothing")
        if device.type == "cpu":
            use_cpus()
        script = runpy.run_path(str(SCRIPT), run_name="script")
    except (ImportError, AttributeError) as error:
        print(f"missing: {error}")
        sys.exit(MISSING)
    join(folder, rank, ranks, has_group=True)
    script["init_logger"]()
    config = script["configured"]("llama3_debugmodel", None, seq_len=512, steps=STEPS, batch=1, cp_size=ranks)
    if attention == "torchtitan":
        config.override = script["OverrideConfig"]()
    config.dump_folder = str(folder)
    config.metrics.log_freq, config.metrics.disable_color_printing = 1, True
    trainer = script["Trainer"](config)
    for part in trainer.model_parts:
        fill(part)
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger().addHandler(handler)
    trainer.train()
    logging.getLogger().removeHandler(handler)
    trainer.close()
    # The loss that torchtitan 0.3.0 logs is multiplied by the number of ranks.
    found = re.findall(r"loss: *([0-9.]+) +grad_norm: *([0-9.]+)", lines.getvalue())
    values = [[float(loss) / ranks, float(norm)] for loss, norm in found]
    (folder / f"{attention} {rank} of {ranks}.json").write_text(json.dumps(values))
    dist.destroy_process_group()


if __name__ == "__main__":
    words = sys.argv[1:]
    main(Path(words[0]), int(words[1]), int(words[2]), words[3])
