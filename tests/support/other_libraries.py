"""Stand in for libraries that the pages name and this environment lacks: their functions, with their parameters.

Functions of flash_attn 2.8.3 compute. Those of DeepSpeed 0.19.8, Transformer Engine 2.20 and Megatron Core 0.16 only
have signatures: code of a page is checked against them, and not run.
"""

from __future__ import annotations

import ast
import warnings
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burst_portable.bench.flash_attn_stand_in import FlashAttn

OURS = Path(__file__).resolve().parents[2] / "burst_portable" / "integrations"


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Return the attention of [B, S, H, D] tensors. A window is (keys before, keys after) a query, -1 without limit."""
    assert (dropout_p, softcap, alibi_slopes, return_attn_probs) == (0.0, 0.0, None, False)
    before, after = (q.shape[1] if side < 0 else side for side in window_size)
    distance = torch.arange(q.shape[1]).unsqueeze(1) - torch.arange(k.shape[1])
    visible = (distance <= before) & (distance >= (0 if causal else -after))
    x = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*x, attn_mask=visible, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Return the attention of packed [total, H, D] tensors, one document after the other."""
    assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist()
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    parts = pairwise(cu_seqlens_q.tolist())
    return torch.cat([flash_attn_func(*(x[None, a:b] for x in (q, k, v)), **options)[0] for a, b in parts])


class DistributedAttention(torch.nn.Module):
    """The layer of DeepSpeed-Ulysses."""

    def __init__(
        self, local_attention, sequence_process_group, scatter_idx=2, gather_idx=0, sp_stream=None, num_kv_heads=None
    ):
        super().__init__()

    def forward(self, query, key, value, batch_dim_idx, rotary_pos_emb=None, *args, **kwargs) -> Tensor: ...


class UlyssesSPAttentionHF:
    """ALST's attention of Transformers models."""

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path, core_attn_implementation, sequence_parallel_size, micro_batch_size, seq_length=None,
        seq_length_is_variable=True, disable_in_eval=False, max_length=None,
    ): ...  # fmt: skip


class UlyssesSPDataLoaderAdapter:
    """ALST's wrapper of a data loader."""

    def __init__(self, dl, sp_rank, sp_group, sp_world_size, device): ...


def initialize(
    args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None,
    distributed_port=29500, mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None,
    config_params=None,
):  # fmt: skip
    """Return DeepSpeed's engine, optimizer, loader and scheduler."""


class DotProductAttention(torch.nn.Module):
    """The attention of Transformer Engine."""

    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, softcap=0.0, sequence_parallel=False,
        tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self", cp_group=None,
        cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
        return_max_logit=False, name=None,
    ):  # fmt: skip
        super().__init__()

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"): ...

    def forward(self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None, **options) -> Tensor: ...


def get_gpt_layer_with_transformer_engine_spec(
    num_experts=None, moe_grouped_gemm=False, qk_layernorm=False, multi_latent_attention=False, fp8=None,
    moe_use_legacy_grouped_gemm=False, qk_l2_norm=False, use_te_op_fuser=False, use_kitchen=False,
    use_te_activation_func=False, use_kitchen_attention=False, kitchen_attention_backend="sdpa",
):  # fmt: skip
    """Return a layer specification of Megatron-core."""


def get_batch_on_this_cp_rank(batch, cp_group=None):
    """Return the tokens of this rank, as Megatron Core selects them."""


def signatures_of(*files: Path) -> SimpleNamespace:
    """Return the functions and classes of modules that cannot be imported here, with their parameters only."""
    found: dict[str, Any] = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                exec(compile(ast.fix_missing_locations(ast.Module([_empty(node)], [])), str(file), "exec"), {}, found)
    return SimpleNamespace(**found)


def _empty(node: ast.FunctionDef | ast.ClassDef) -> ast.stmt:
    """Return a definition without annotations, decorators, bases and code. A derived class takes any arguments."""
    node.decorator_list = []
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            argument.annotation = None
        for extra in filter(None, (arguments.vararg, arguments.kwarg)):
            extra.annotation = None
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
        node.returns, node.body = None, [ast.Pass()]
        return node
    methods = [_empty(one) for one in node.body if isinstance(one, ast.FunctionDef)]
    if node.bases and "__init__" not in {getattr(one, "name", "") for one in methods}:
        methods += ast.parse("def __init__(self, *args, **kwargs): pass").body
    marks = ast.parse("UNKNOWN_BASES = True").body if node.bases else []
    node.bases, node.keywords, node.body = [], [], [*marks, *methods, ast.Pass()]
    return node


def _files(package: str) -> list[Path]:
    """Return the files of an installed package. It is not imported."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is a requirement of the tests"
    return [file for folder in spec.submodule_search_locations or () for file in Path(folder).rglob("*.py")]


def stand_ins() -> dict[str, Any]:
    """Return a namespace for each module that code of the pages imports and this environment cannot."""
    deepspeed = SimpleNamespace(initialize=initialize)
    sequence_parallel = SimpleNamespace(
        UlyssesSPAttentionHF=UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter=UlyssesSPDataLoaderAdapter
    )
    return {
        "flash_attn": SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func),
        "deepspeed": deepspeed,
        "deepspeed.sequence.layer": SimpleNamespace(DistributedAttention=DistributedAttention),
        "deepspeed.runtime.sequence_parallel.ulysses_sp": sequence_parallel,
        "transformer_engine.pytorch": SimpleNamespace(DotProductAttention=DotProductAttention),
        "megatron.core.models.gpt.gpt_layer_specs": SimpleNamespace(
            get_gpt_layer_with_transformer_engine_spec=get_gpt_layer_with_transformer_engine_spec
        ),
        "megatron.core.utils": SimpleNamespace(get_batch_on_this_cp_rank=get_batch_on_this_cp_rank),
        "ring_flash_attn": signatures_of(*_files("ring_flash_attn")),
        "burst_portable.integrations.deepspeed": signatures_of(OURS / "deepspeed.py"),
        "burst_portable.integrations.megatron": signatures_of(OURS / "megatron.py"),
        "burst_portable.integrations.trl": signatures_of(OURS / "trl.py"),  # TRL's trainers import for two seconds
        "torch.distributed": _distributed(),
        "yunchang": with_flash_attn("yunchang"),
    }


def with_flash_attn(package: str, module: str = "") -> Any:
    """Import a package that needs flash_attn, with this library's kernels in its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # these packages use torch.jit
        return FlashAttn().import_module(package, module)


def _distributed() -> Any:
    """Return torch.distributed with the class of NCCL's group, which torch for CPUs does not have."""
    options = SimpleNamespace(Options=lambda is_high_priority_stream=False: None)
    return SimpleNamespace(**{"ProcessGroupNCCL": options, **vars(torch.distributed)})
