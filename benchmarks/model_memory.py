"""Compute the peak memory of a training step under FSDP2 without a device.

    python -m benchmarks.model_memory --seq-len 512k --ranks 8
    python -m benchmarks.model_memory --config CONFIG.json --seq-len 128k --ranks 4

One rank's step of examples/train_hugging_face_with_fsdp.py runs on torch's fake tensors, which have no memory, and
torch's FSDPMemTracker adds up their bytes: float32 weights, bfloat16 activations, recomputed layers. The process group
sends nothing. Attention is replaced by a function that allocates the tensors that docs/memory.md lists. Not included:
memory of the driver, of NCCL and of peer copies, and fragments of the allocator.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, LlamaConfig

import burst_portable as bp
from benchmarks.script import count, end
from burst_portable.cli.flags import tokens
from burst_portable.integrations.transformers.loss import causal_loss
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from examples.train_hugging_face_with_fsdp import LossInChunks

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
NAME = "allocates"
ADAM_STATES = 2  # per weight, in its dtype


class Allocate(torch.autograd.Function):
    """The tensors of one attention: q, k and v of shape ``[B, H, S, D]``, and bytes of remote blocks in each pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, remote: tuple[int, int]) -> Tensor:
        blocks = torch.empty(remote[0], dtype=torch.uint8)
        out, lse = (
            torch.empty(q.transpose(1, 2).shape, dtype=torch.float32),
            torch.empty(q.shape[:3], dtype=torch.float32),
        )
        ctx.save_for_backward(q, k, v, out := out.to(q.dtype), lse)
        ctx.remote = remote
        del blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        blocks = torch.empty(ctx.remote[1], dtype=torch.uint8)
        *qkv, _, lse = ctx.saved_tensors
        delta, gradients = torch.empty_like(lse), [torch.empty(x.shape, dtype=torch.float32) for x in qkv]
        results = [x.to(grad.dtype) for x in gradients]
        del blocks, delta, gradients
        return *results, None


def remote_bytes(config: Any, seq_len: int, ranks: int) -> tuple[int, int]:
    """Return the bytes of remote blocks that a rank of `ring` holds at once, forward and backward."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    plan = bp.plan(
        seq_len=seq_len, ranks=ranks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, strategy="ring", itemsize=2
    )
    costs = plan_cost(plan, HardwareSpec(tflops=400, intra_node_bandwidth=100)).per_rank
    return costs["forward"][0].blocks_held, costs["backward"][0].blocks_held


def peak_bytes(config: Any, seq_len: int, ranks: int, rows: int | None) -> int:
    """Return the peak of a step with Adam's states. `rows`: tokens of a chunk of the loss; None: all logits at once."""
    remote, local = remote_bytes(config, seq_len, ranks), seq_len // ranks
    AttentionInterface.register(NAME, lambda _, q, k, v, *args, **kw: (Allocate.apply(q, k, v, remote), None))
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    config._attn_implementation, config.use_cache = NAME, False
    mesh = init_device_mesh("cpu", (ranks,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
        model.loss_function = causal_loss
        step = model if rows is None else LossInChunks(model, rows)
        for part in [*model.base_model.layers, step]:
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        weights = sum(p.to_local().nbytes for p in model.parameters())
        ids, labels = torch.zeros(1, local, dtype=torch.int64), torch.tensor(seq_len)
        inputs = {"input_ids": ids, "labels": ids, "shift_labels": ids, "num_items_in_batch": labels}
        with FSDPMemTracker(step) as tracker:
            loss = step(**inputs, position_ids=torch.arange(local).unsqueeze(0))
            (loss if rows else loss.loss).backward()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak + ADAM_STATES * weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="JSON file of a model's config; default: Llama 3.1 8B")
    parser.add_argument("--seq-len", type=tokens, default=tokens("512k"), help="tokens of the full sequence")
    parser.add_argument("--ranks", type=count, default=8, help="GPUs that share the sequence, and FSDP2's shards")
    parser.add_argument("--loss-rows", type=count, default=2048, help="tokens whose logits are in memory at a time")
    a = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=a.ranks, store=FakeStore())
    config = AutoConfig.from_pretrained(a.config) if a.config else LlamaConfig(**LLAMA_8B)
    print(f"{config.num_hidden_layers} layers, {a.seq_len // a.ranks:,} of {a.seq_len:,} tokens per rank")
    for name, rows in (("all logits", None), (f"{a.loss_rows:,} logits", a.loss_rows)):
        print(f"{name:14} {peak_bytes(config, a.seq_len, a.ranks, rows) / 2**30:6.1f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    end(main)
