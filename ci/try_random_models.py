"""Compare random configurations of language models of Transformers on 2 and 3 ranks with one device.

    PYTHONPATH=. python ci/try_random_models.py [--seed SEED] [--count COUNT]

Model types come in random order, each with random sizes, heads, windows, kinds of layers and RoPE types. As in
`make_models`, logits, loss and every gradient are compared. Models that are refused or cannot be made small are printed
and do not count. Thirty models take half a minute.
Exit codes: 1 if a model differs from one device, 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from typing import Any

import torch
import transformers
from make_models import listed, short
from model_trials import OPTIONS, try_model
from transformers import CONFIG_MAPPING

ROPES = ("linear", "dynamic", "yarn", "llama3")


def random_options(kind: str, chance: random.Random) -> dict[str, Any]:
    """Return random options of the config of a model type, of those that it has."""
    config_class = CONFIG_MAPPING[kind]
    usual = config_class()
    known = set(usual.to_dict()) | set(config_class.attribute_map)
    heads = chance.choice([2, 4, 6, 8])
    size = chance.choice([8, 12, 16])
    layers = chance.randint(1, 4)
    together = {  # sizes that must fit each other: all or none
        "num_attention_heads": heads,
        "num_key_value_heads": chance.choice([n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0]),
        "hidden_size": heads * size,
        "head_dim": size,
    }
    apart = {
        "num_hidden_layers": layers,
        "sliding_window": chance.choice([3, 7, 15, 40]),
        "intermediate_size": chance.choice([24, 48, 80]),
        "attention_bias": chance.random() < 0.5,
        "tie_word_embeddings": chance.random() < 0.5,
        "num_experts_per_tok": chance.choice([1, 2]),
        "norm_topk_prob": chance.random() < 0.5,
        "output_router_logits": chance.random() < 0.4,
        "attention_chunk_size": chance.choice([5, 11, 30]),
    }
    chosen: dict[str, Any] = dict(together) if chance.random() < 0.8 else {}
    chosen |= {name: value for name, value in apart.items() if chance.random() < 0.8}
    rope = getattr(usual, "rope_parameters", None) or {}
    if "rope_type" in rope and chance.random() < 0.5:
        chosen["rope_parameters"] = random_rope(rope, chance)
    kinds = sorted(set(getattr(usual, "layer_types", None) or ()))
    if kinds and "layer_types" in known and kind not in OPTIONS:
        chosen |= {"num_hidden_layers": layers, "layer_types": [chance.choice(kinds) for _ in range(layers)]}
    return {name: value for name, value in chosen.items() if name in known}


def random_rope(usual: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return RoPE parameters of a random type, of which some depend on the length of the sequence."""
    kind = chance.choice(ROPES)
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    length = chance.choice([8, 16, 32])
    scale = {"factor": chance.choice([2.0, 4.0]), "original_max_position_embeddings": length}
    return usual | {"rope_type": kind} | scale | factors


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="Seed of models and options. Default: 0.")
    parser.add_argument("--count", type=int, default=30, help="Models to compare. Default: 30.")
    arguments = parser.parse_args(given)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chance, models = random.Random(arguments.seed), listed()
    verdicts: list[str] = []
    chance.shuffle(models)
    for kind, name in models:
        if len(verdicts) == arguments.count:
            break
        try:
            options = random_options(kind, chance)
        except Exception as error:  # noqa: BLE001  some default configs of Transformers are not valid
            print(f"   {name}: not tried: {type(error).__name__}", flush=True)
            continue
        trial = try_model(getattr(transformers, name), kind, **options)
        if trial.verdict in ("equal", "different"):
            verdicts.append(trial.verdict)
            result = f"{trial.verdict}, by {trial.apart:.1e} {trial.reason}"
            print(f"{len(verdicts):2} {name}: {result}  {json.dumps(options)}", flush=True)
        else:
            print(f"   {name}: {trial.verdict}: {short(trial.reason)}", flush=True)
    wrong = verdicts.count("different")
    print(f"{len(verdicts)} models with seed {arguments.seed}: {wrong} differ from one device")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
