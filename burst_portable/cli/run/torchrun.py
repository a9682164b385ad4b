"""Run a job as one of the ranks that a launcher such as torchrun started."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from burst_portable.cli.run.job import Job
from burst_portable.cli.run.train import Gradients, OnStep, Outcome, run_rank
from burst_portable.cli.run.worker import device_of, join_launched
from burst_portable.config import LauncherEnv
from burst_portable.mesh import Mesh


@record  # torchrun then prints this rank's error last
def run_in_launcher(job: Job, launcher: LauncherEnv, on_step: OnStep) -> tuple[list[Outcome], Gradients]:
    """Run this rank of a job, and return the outcomes of all ranks in rank order and this rank's gradients."""
    device = device_of(job.device_type, launcher.local_rank)
    join_launched(job.backend, launcher)
    try:
        mesh = Mesh.from_group(ranks_per_node=job.ranks_per_node, backend=job.backend)
        outcome, gradients = run_rank(job, mesh, device, on_step)
        return [Outcome(**one) for one in _gather(asdict(outcome), mesh, device)], gradients
    finally:
        dist.destroy_process_group()


def _gather(values: dict[str, Any], mesh: Mesh, device: torch.device) -> list[dict[str, Any]]:
    """Return the values of all ranks in rank order, exchanged as JSON over the mesh's transport."""
    transport = mesh.transport(device.type)
    data = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.empty(8, dtype=torch.uint8, device=device) for _ in range(mesh.size)]
    transport.all_gather(torch.tensor([data.numel()], device=device).view(torch.uint8), sizes, "outcome sizes")
    parts = [torch.empty(int(size.view(torch.int64)), dtype=torch.uint8, device=device) for size in sizes]
    transport.all_gather(data, parts, "outcomes")
    return [json.loads(part.cpu().numpy().tobytes()) for part in parts]
