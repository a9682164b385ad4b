"""Make small transformers models with random weights, and compute results on one device for comparison."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from burst_portable import Mesh, run_threads, unshard
from burst_portable.comm.local import Fabric, LocalTransport
from burst_portable.config import Config
from burst_portable.gradients import BUCKET_BYTES
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Other implementations of experts do not support float64.
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
MODELS: dict[str, Any] = {
    "llama": lambda **o: LlamaForCausalLM(LlamaConfig(**SIZES, **o)),
    "mistral": lambda **o: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=13, **o)),
    "qwen2": lambda **o: Qwen2ForCausalLM(Qwen2Config(**SIZES, **o)),
    "qwen3": lambda **o: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, **o)),
    "mixtral": lambda **o: MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4, **o)),
    "qwen3_moe": lambda **o: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, num_experts=4, moe_intermediate_size=24, **o)
    ),
    # Softcap, and layers that alternate between a window and full attention.
    "gemma2": lambda **o: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=9, **o)),
}
_SEEDED = Lock()  # ranks that are threads share torch's generator
LENGTH = 47  # not divisible by 2, 3, 4 or 6


def mesh_without_peer() -> Mesh:
    """Return the mesh of rank 0 of 2 without a second rank; errors must not wait for it."""
    transport = LocalTransport(Fabric(2, 1.0), 0)
    return Mesh(0, 2, lambda device_type: transport, config=Config(timeout=0.01))


@dataclass
class Answer:
    loss: float
    logits: Tensor
    gradients: dict[str, Tensor]


def make(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a model in training mode, with equal weights in every call."""
    with _SEEDED:
        torch.manual_seed(0)
        return MODELS[kind](**options).to(dtype).train()


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def on_one_device(model: Any, ids: Tensor, labels: Tensor | None = None) -> Answer:
    """Return the answer of plain transformers. A softcap needs eager attention, because SDPA has none."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager" if model.config.model_type == "gemma2" else "sdpa")
    out = model(input_ids=ids, labels=ids if labels is None else labels, use_cache=False)
    out.loss.backward()
    return Answer(out.loss.item(), out.logits.detach(), gradients_of(model))


def on_ranks(
    ranks: int,
    model: Any,
    ids: Tensor,
    labels: Tensor | None = None,
    *,
    wrap: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    **options: Any,
) -> list[Answer]:
    """Return the answer of each rank: unsharded logits, summed loss and gradients. `wrap` is applied to each model."""
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def work(mesh: Mesh) -> Answer:
        mine = models[mesh.rank]
        sharded = parallelize(mine, mesh, **options)
        out = (wrap(mine) if wrap else mine)(**sharded.shard(ids, labels))
        out.loss.backward()
        all_reduce_gradients(mine.parameters(), mesh, bucket_bytes=bucket_bytes)
        loss = all_reduce(out.loss.detach().reshape(1), mesh).item()
        layout = sharded.layout_of(ids.shape[1], None)
        logits = unshard(out.logits.detach(), mesh, seq_len=ids.shape[1], layout=layout)
        return Answer(loss, logits, gradients_of(mine))

    return run_threads(ranks, work)


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(answer: Answer, expected: Answer, *, exact: float = 1e-12, gradients: float = 1e-7) -> None:
    """Compare logits and all gradients. transformers computes the loss in float32."""
    torch.testing.assert_close(answer.logits, expected.logits, rtol=exact, atol=exact)
    assert abs(answer.loss - expected.loss) <= 1e-6 * abs(expected.loss)
    assert answer.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        # The loss is float32, and so is the gradient that enters the model.
        apart = (answer.gradients[name] - gradient).norm() / gradient.norm()
        assert apart <= max(exact, gradients), f"{name}: {apart:.2e}"


def checkpoint_activations(model: Any, *, use_reentrant: bool = False) -> None:
    """Enable gradient checkpointing, whose method has another name in older releases of transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
