"""Train a small GPT of Megatron-core, each sequence sharded over all ranks.

Any number of ranks gives the same losses. It runs on CPUs, where Megatron has no rotary embeddings and no
DistributedDataParallel: gradients are summed here.

torchrun --nproc-per-node 1 examples/train_with_megatron.py
torchrun --nproc-per-node 2 examples/train_with_megatron.py
"""

import inspect
import pydoc_data.topics
import warnings

import torch
import torch.distributed as dist
from torch import Tensor

warnings.filterwarnings("ignore", message=".*[Aa]pex|.*ransformer.?[Ee]ngine")  # packages for GPUs

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402

from burst_portable.integrations.megatron import replace_attention  # noqa: E402

TOKENS = 256
IS_NEW = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters  # of Megatron-core 0.19
OPTIONS = {"is_hybrid_cp": False} if IS_NEW else {}


def batches() -> list[dict[str, Tensor]]:
    """Return rows of bytes, the same on all ranks, as Megatron's data loaders do."""
    texts = [text.encode() for text in sorted(pydoc_data.topics.topics.values()) if len(text.encode()) > TOKENS]
    ids = torch.tensor([list(text[: TOKENS + 1]) for text in texts[:6]])
    positions = torch.arange(TOKENS).repeat(2, 1)
    rows = zip(ids[:, :-1].split(2), ids[:, 1:].split(2), strict=True)
    return [{"tokens": tokens.clone(), "labels": labels.clone(), "position_ids": positions} for tokens, labels in rows]


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        context_parallel_size=ranks,
        use_cpu_initialization=True,
    )
    torch.manual_seed(0)
    spec = replace_attention(get_gpt_layer_local_spec())  # the only line of this library
    model = GPTModel(config, spec, vocab_size=256, max_sequence_length=TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sequence = parallel_state.get_context_parallel_group()
    losses = []
    for batch in batches():
        count = batch["labels"].numel()
        part = get_batch_on_this_cp_rank(batch, **OPTIONS)
        loss = model(part["tokens"], part["position_ids"], None, labels=part["labels"]).sum() / count
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=sequence)  # on GPUs, Megatron's DistributedDataParallel does it
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=sequence)
        losses.append(total.item())
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
