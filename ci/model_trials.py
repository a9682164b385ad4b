"""Compare a small model of transformers with random weights on several ranks with one device.

`try_model` returns whether logits, loss and every gradient agree, or why the model is not supported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from burst_portable import Mesh, local_position_ids, run_threads, shard, unshard
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, check_model, parallelize
from burst_portable.integrations.transformers.loss import OWN_LOSS
from burst_portable.integrations.transformers.models.recurrent_layers import recurrent_layers, sizes_of

T = TypeVar("T")
LENGTH, BATCH, VOCABULARY, RANKS = 47, 2, 64, (2, 3)  # 47 is divisible by neither

# By their names in configs. Each config gets the sizes that it has.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": 9,
    "attention_chunk_size": 11,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "embedding_size": 16,
    "head_dim": 8,
}
# Changes that some models need, tried in this order.
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4})
# Options that the default config of a model type lacks.
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "cpmant": {"prompt_length": 4, "prompt_types": 4, "segment_types": 4},
    "esm": {"pad_token_id": 1, "mask_token_id": 3},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 9},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
    "zamba": {"layer_types": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}
LARGEST = 5_000_000  # parameters; a larger model has sizes under names that SIZES lacks
# transformers computes the loss and its gradient in float32, eager attention also its softmax.
ROUNDED, OF_FLOAT32 = 1e-6, 1e-5
# Transformers computes recurrent states in float32. Gated DeltaNet solves systems of equations in it. With float64 in
# their place, six of these models were tried, and differ from one device by less than 1e-13.
FLOAT32_STATES, OF_STATES = ", float32 states", 1e-4


@dataclass(frozen=True)
class Trial:
    """Result of a model.

    Attributes:
        verdict: "equal", "different", "refused" or "not tried".
        reason: reason of every other verdict than equal.
        apart: largest difference, as a part of what it is compared with: logits by their largest, the loss, each
            gradient by its norm.
        compared_with: the attention of the one device, "sdpa" or "eager"; with a note if it has recurrent states.
        own_loss: whether the model's own loss raises on a shard, so that a loss of the logits was compared.
    """

    verdict: str
    reason: str = ""
    apart: float = 0.0
    compared_with: str = ""
    own_loss: bool = False


@dataclass(frozen=True)
class Answer:
    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


def tiny_config(kind: str, **options: Any) -> Any:
    """Return a small config of a model type, without dropout, with all kinds of layers of its default."""
    config_class = CONFIG_MAPPING[kind]
    usual = config_class()
    known = set(usual.to_dict()) | set(config_class.attribute_map)
    sizes = {name: value for name, value in SIZES.items() if name in known}
    settable = not isinstance(
        getattr(config_class, config_class.attribute_map.get("layer_types", "layer_types"), None), property
    )
    if settable and (kinds := list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))):
        sizes |= {"layer_types": kinds * (3 - min(2, len(kinds))), "num_hidden_layers": max(2, len(kinds))}
    if (usual.to_dict().get("pad_token_id") or 0) >= VOCABULARY:
        sizes["pad_token_id"] = 0
    dropout = {name: 0.0 for name, value in usual.to_dict().items() if _is_dropout(name) and value}
    return config_class(**{**sizes, **dropout, **OPTIONS.get(kind, {}), **options})


def _is_dropout(name: str) -> bool:
    return ("dropout" in name or name.endswith(("pdrop", "jitter_noise"))) and not name.startswith("classifier")


def try_model(model_class: type[PreTrainedModel], kind: str, **options: Any) -> Trial:
    """Build a model and compare it. Only errors of transformers on one device give "not tried"."""
    for variant in VARIANTS:
        trial = _try_variant(model_class, kind, variant | options)
        if trial.verdict != "not tried":
            break
    return trial


def _try_variant(model_class: type[PreTrainedModel], kind: str, options: dict[str, Any]) -> Trial:
    outline = _tried(lambda: _built(model_class, kind, options, "meta"))
    if isinstance(outline, Exception):
        return Trial("not tried", f"no tiny model of it: {_told(outline)}")
    try:
        check_model(outline)
    except UnsupportedError as error:
        return Trial("refused", str(error).partition("; got ")[2])
    if (size := sum(p.numel() for p in outline.parameters())) > LARGEST:
        return Trial("not tried", f"no tiny model of it: {size} parameters")
    model = _built(model_class, kind, options, "cpu")
    _randomize(model)
    model = model.double().train()
    trial = _compare(model)
    if trial.verdict == "refused" and OWN_LOSS in trial.reason:
        return replace(_compare(model, own_loss=True), own_loss=True)
    return trial


def _built(model_class: type[PreTrainedModel], kind: str, options: dict[str, Any], device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(kind, **options)
    config._experts_implementation = "eager"  # other implementations do not support float64
    with torch.device(device):
        return model_class(config)


def _compare(model: PreTrainedModel, own_loss: bool = False) -> Trial:
    ids, labels = _tokens(seed=1), _tokens(seed=2)
    labels[0, 5:20] = -100
    plain = _plain_attention(model)
    expected = _tried(lambda: _on_one_device(model, plain, ids, labels, own_loss))
    if isinstance(expected, Exception):
        return Trial("not tried", f"on one device: {_told(expected)}")
    if not _attends(model, plain, ids, expected.logits):
        return Trial("not tried", "its tiny model's logits do not depend on other tokens")
    worst = 0.0
    for ranks in RANKS:
        answers = _tried(lambda: _on_ranks(ranks, model, ids, labels, own_loss))  # noqa: B023
        if isinstance(answers, UnsupportedError):
            return Trial("refused", str(answers))
        if isinstance(answers, Exception):
            return Trial("different", f"raises {_told(answers)}")
        worst = max(worst, *(apart(answer, expected) for answer in answers))
    reference = plain + FLOAT32_STATES * any(sizes_of(layer).recurrent is not None for layer in recurrent_layers(model))
    return Trial("equal" if worst <= allowed(reference) else "different", "", worst, reference)


def allowed(plain: str) -> float:
    """Return the tolerance for a comparison with SDPA or eager attention on one device, and perhaps float32 states."""
    if plain.endswith(FLOAT32_STATES):
        return OF_STATES
    return ROUNDED if plain == "sdpa" else OF_FLOAT32


def _on_ranks(ranks: int, model: PreTrainedModel, ids: Tensor, labels: Tensor, own_loss: bool) -> list[Answer]:
    models = [copy.deepcopy(model) for _ in range(ranks)]
    return run_threads(ranks, lambda mesh: _on_a_rank(models[mesh.rank], mesh, ids, labels, own_loss))


def _tried(work: Callable[[], T]) -> T | Exception:
    """Return the result of `work`, or its error. A model may raise anything, and the next one must still be tried."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        return error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _plain_attention(model: PreTrainedModel) -> str:
    """Return "sdpa", which keeps float64, or "eager" for models with softcap or sinks, which SDPA lacks."""
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and softcap is None else "eager"


def _randomize(model: PreTrainedModel) -> None:
    """Set weights with which every part of a model matters. Many start at zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)


def _tokens(seed: int) -> Tensor:
    # Small token numbers are padding and other marks in some models.
    return torch.randint(8, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def _on_one_device(model: PreTrainedModel, plain: str, ids: Tensor, labels: Tensor, own_loss: bool) -> Answer:
    alone = copy.deepcopy(model)
    alone.set_attn_implementation(plain)
    out = alone(input_ids=ids) if own_loss else alone(input_ids=ids, labels=labels)
    loss = _loss(out.logits, labels) if own_loss else out.loss
    loss.backward()
    return Answer(out.logits.detach(), loss.item(), gradients(alone))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that equals the sum of the ranks' parts."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()


def _attends(model: PreTrainedModel, plain: str, ids: Tensor, logits: Tensor) -> bool:
    """Return whether the last token's logits depend on the token three before; else "equal" would prove nothing."""
    alone = copy.deepcopy(model)
    alone.set_attn_implementation(plain)
    other = ids.clone()
    other[:, -4] = 8 + (ids[:, -4] - 7) % (VOCABULARY - 8)
    with torch.no_grad():
        return bool((alone(input_ids=other).logits[:, -1] - logits[:, -1]).abs().max() > 1e-6)


def _on_a_rank(model: PreTrainedModel, mesh: Mesh, ids: Tensor, labels: Tensor, own_loss: bool) -> Answer:
    sharded = parallelize(model, mesh)
    if own_loss:
        positions = local_position_ids(mesh, seq_len=ids.shape[1], layout=sharded.layout).unsqueeze(0)
        rows = shard(ids, mesh, layout=sharded.layout)
        out = model(input_ids=rows, position_ids=positions, seq_len=ids.shape[1])
        loss = _loss(out.logits, shard(labels, mesh, layout=sharded.layout)) * out.logits.shape[1] / ids.shape[1]
    else:
        out = model(**sharded.shard(ids, labels))
        loss = out.loss
    loss.backward()
    all_reduce_gradients(model.parameters(), mesh)
    whole = all_reduce(loss.detach().reshape(1), mesh).item()
    logits = unshard(out.logits.detach(), mesh, seq_len=ids.shape[1], layout=sharded.layout)
    return Answer(logits, whole, gradients(model))


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def apart(answer: Answer, expected: Answer) -> float:
    logits = (answer.logits - expected.logits).abs().max() / expected.logits.abs().max()
    worst = max(logits.item(), abs(answer.loss - expected.loss) / abs(expected.loss))
    whole = torch.cat([g.reshape(-1) for g in expected.gradients.values()]).norm()
    for name in expected.gradients.keys() | answer.gradients.keys():
        left, right = (a.gradients.get(name, torch.zeros(())) for a in (answer, expected))
        # A small gradient may be a sum whose terms cancel each other, such as that of NeoMME's first lambdas: 1e-9 of
        # all gradients. Its error is that of the terms, whose factor, the loss, has the precision of float32.
        worst = max(worst, ((left - right).norm() / max(right.norm(), 1e-3 * whole)).item())
    return worst if torch.isfinite(answer.logits).all() else float("inf")
