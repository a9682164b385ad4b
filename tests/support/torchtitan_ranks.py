"""Train torchtitan's Llama on two context-parallel ranks: tests/integration/test_torchtitan.py.

python -m tests.support.torchtitan_ranks FOLDER

torchtitan supports no CPUs: here its name of the device is replaced. Each rank compares the loss and all gradients with
those of a model on one device, whose attention is torch's with a dense mask.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchtitan.tools.utils as device_of_torchtitan
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

device_of_torchtitan.device_type, device_of_torchtitan.device_module = "cpu", torch.cpu

from torchtitan.config import CompileConfig, OverrideConfig, ParallelismConfig, TrainingConfig, derive, override  # noqa: E402
from torchtitan.config.override import apply_overrides  # noqa: E402
from torchtitan.distributed import ParallelDims, full_dtensor  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.distributed.context_parallel import prepare_context_parallel_input  # noqa: E402
from torchtitan.models.common.attention import GQAttention, VarlenAttention  # noqa: E402
from torchtitan.models.common.rope import ComplexRoPE  # noqa: E402
from torchtitan.models.llama3 import _build_llama3_layers, llama3_configs, parallelize_llama  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

from burst_portable import Mask, Mesh  # noqa: E402
from burst_portable.errors import InputError, MismatchError, UnsupportedError  # noqa: E402
from burst_portable.integrations.torchtitan import Documents, Rows, attention  # noqa: E402
from tests.support.forked import run_forked  # noqa: E402

RANKS, TOKENS = 2, 64
OVERRIDE = "burst_portable.integrations.torchtitan.attention"


class DenseAttention(Module):
    """Attention of torch with a dense mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Tensor, scale: float | None, enable_gqa: bool
    ) -> Tensor:
        document = (attention_masks == 0).cumsum(1)
        visible = (document[:, :, None] == document[:, None]) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(*heads_first, attn_mask=visible[:, None], scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


class OnOneDevice(GQAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        return super().forward(x_BLD, positions, positions)  # type: ignore[arg-type]


@override(target=GQAttention.Config)
def dense(cfg: Any) -> Any:
    return derive(cfg, OnOneDevice.Config, inner_attention=DenseAttention.Config())


def build(name: str, **options: Any) -> Any:
    """Return a Llama of two layers with an override of its attention."""
    config = llama3_configs["debugmodel"](attn_backend="flex")
    sizes = {"dim": config.dim, "n_heads": 8, "n_kv_heads": 2, "hidden_dim": 96, "n_layers": 2, "attn_backend": "flex"}
    config.layers = _build_llama3_layers(**sizes, rope=ComplexRoPE.Config(dim=32, max_seq_len=TOKENS))
    set_llama3_sharding_config(config, enable_sp=False)
    replaced = apply_overrides(OverrideConfig(imports=[(name, options)]), config)
    assert len(replaced) == 2
    with torch.device("meta"):
        return config.build()


def fill(model: Any) -> None:
    """Set all parameters, each from the same random numbers on all ranks."""
    model.to_empty(device="cpu")
    model.init_states(buffer_device=None)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in sorted(named_parameters(model).items()):
            x = torch.randn(p.shape, generator=generator) * 0.05 + ("norm" in name)
            p.copy_(distribute_tensor(x, p.device_mesh, p.placements) if isinstance(p, DTensor) else x)


def named_parameters(model: Any) -> dict[str, Any]:
    return {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}


def batch(documents: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and positions of rows of documents, whose lengths are given."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 2048, (len(documents), TOKENS + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, :9] = -100
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in documents])
    return ids[:, :-1].clone(), labels, positions


def summed_loss(logits: Any, labels: Any) -> Any:
    logits, labels = (x.to_local() if isinstance(x, DTensor) else x for x in (logits, labels))
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def results_alone(documents: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    model = build(f"{__name__}.dense")
    fill(model)
    ids, labels, positions = batch(documents)
    loss = summed_loss(model(ids, positions=positions), labels)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in named_parameters(model).items()}


def results(
    dims: ParallelDims, documents: tuple[tuple[int, ...], ...], balancer: str | None, *, recompute: bool, **options: Any
) -> dict[str, Tensor]:
    """Return the loss and gradients as torchtitan's Trainer computes them."""
    model = build(OVERRIDE, **options)
    is_sharded = dims.spmd_backend == "full_dtensor"
    dist_utils.set_spmd_backend(dims.spmd_backend)
    if is_sharded:
        model = parallelize_llama(
            model,
            parallel_dims=dims,
            training=TrainingConfig(dtype="float32", mixed_precision_param="float32"),
            parallelism=ParallelismConfig(context_parallel_degree=RANKS, spmd_backend="full_dtensor"),
            compile_config=CompileConfig(),
            ac_config=FullAC.Config() if recompute else None,  # type: ignore[arg-type]
            dump_folder="",
        )
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    else:
        model.parallelize(dims)  # with torch 2.13, torchtitan has no FSDP for this backend
    fill(model)
    ids, labels, positions = batch(documents)
    more: dict[str, Any] = {"positions": positions}
    mesh = dims.get_mesh("cp")
    ids, labels, more = prepare_context_parallel_input(ids, labels, more, mesh, torch.device("cpu"), balancer)
    if is_sharded:
        ids, labels, more = full_dtensor.parallelize_inputs(dims, ids, labels, more)
    with dist_utils.get_spmd_context(parallel_dims=dims)():
        loss = summed_loss(model(ids, **more), labels)
        loss.backward()
    found = {"loss": loss.detach()} | {name: p.grad for name, p in named_parameters(model).items()}
    for name, x in found.items():
        if isinstance(x, DTensor):
            found[name] = x.full_tensor()
        else:
            dist.all_reduce(x)
    return found


def check_errors(rank: int, mesh: Mesh) -> None:
    """Check that rows of other ranks, an unknown order, and options without an equivalent raise an error."""

    def rows_of(positions: list[int], layout: str = "auto") -> Any:
        return Documents(mesh, layout).rows(torch.tensor([positions]))

    reader = Documents(mesh, "auto")
    aligned = [[0, 1, 2, 3], [0, 1, 2, 3]][rank]  # two documents, or four halves of two others
    either, causal = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[[0, 1, 6, 7], [2, 3, 4, 5]][rank]])
    with pytest.raises(InputError, match=r"several layouts fit.*got zigzag and contiguous; pass --override.imports"):
        reader.rows(either)
    assert reader.rows(causal) == Rows((Mask.causal(),), "zigzag")
    assert reader.rows(either) == Rows((Mask.documents((0, 2, 4, 6, 8)),), "zigzag")
    assert rows_of(aligned).layout == "contiguous"
    with pytest.raises(MismatchError, match="do not count up in their documents; got layout 'zigzag'"):
        rows_of(aligned, "zigzag")
    with pytest.raises(MismatchError, match="give the ranks of a sequence the same rows"):
        rows_of([[0, 1, 2, 3], [9, 5, 2, 8]][rank])
    layer: Any = llama3_configs["debugmodel"](attn_backend="flex").layers[0].attention
    with pytest.raises(UnsupportedError, match=r"got VarlenAttention.Config\(.*window_size=\(5, 0\).*without a window"):
        attention(derive(layer, GQAttention.Config, inner_attention=VarlenAttention.Config(window_size=(5, 0))))
    with pytest.raises(InputError, match="unknown layout for torchtitan; got striped"):
        attention(layer, layout="striped")
    inner = attention(layer).inner_attention.build()
    with pytest.raises(UnsupportedError, match="did not parallelize"):
        inner.rows_of(torch.zeros(1, 4))
    inner.mesh = mesh
    with pytest.raises(InputError, match="no positions; return them from the data loader"):
        inner.rows_of(None)


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": RANKS, "tp": 1, "pp": 1, "ep": 1, "world_size": RANKS}
    # One for each backend: DTensor keeps meshes that are equal to an earlier one.
    dims_of: Any = {name: ParallelDims(**sizes, spmd_backend=name) for name in ("full_dtensor", "spmd_types")}
    many = ((20, 7, 37), (33, 31))
    for backend, documents, balancer, recompute, options in (
        ("full_dtensor", many, "headtail", True, {}),
        ("full_dtensor", ((64,),), None, False, {"strategy": "ulysses"}),
        ("spmd_types", many[:1], "headtail", False, {"layout": "zigzag"}),
    ):
        found = results(dims_of[backend], documents, balancer, recompute=recompute, **options)
        expected = results_alone(documents)
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            error = (found[name] - x).norm() / x.norm()
            assert error < 3e-6, (backend, name, error)
    check_errors(rank, Mesh.from_group(dist.group.WORLD))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(RANKS, main, Path(sys.argv[1]))
