"""Run `axolotl train` on CPU ranks, with a small model, a small dataset and the file of the examples.

python -m tests.support.axolotl_command RANKS FOLDER

One rank runs axolotl without the plugin. The model is saved in FOLDER/model; its checkpoint has the losses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_with_axolotl.yaml"
CHARACTERS = [*("<pad>", "<unk>", "<s>", "</s>", "\n"), *map(chr, range(32, 127))]
PLUGIN = """
from accelerate import PartialState
from axolotl.integrations.base import BasePlugin


class UseCpu(BasePlugin):
    def register(self, cfg):
        PartialState(cpu=True)

    def load_datasets(self, cfg, preprocess=False):
        cfg.device_map = {"": "cpu"}  # axolotl sets the number of a GPU
"""


def train(ranks: int, folder: Path) -> None:
    folder.mkdir()
    _write_model(folder / "start")
    _write_dataset(folder / "data.jsonl")
    (folder / "use_cpu.py").write_text(PLUGIN, encoding="utf-8")
    (folder / "train.yaml").write_text(yaml.safe_dump(_settings(folder, ranks)), encoding="utf-8")
    own = {"ACCELERATE_USE_CPU": "true", "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder)])
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launch, "-m", "axolotl.cli.train", "train.yaml"]
    subprocess.run(command, cwd=folder, env=os.environ | own, check=True)


def _settings(folder: Path, ranks: int) -> dict[str, Any]:
    settings = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    if ranks == 1:
        del settings["sequence_parallelism"]
        settings["plugins"] = []
    else:
        settings["sequence_parallelism"]["cp_size"] = ranks
    settings["plugins"] += ["use_cpu.UseCpu"]
    settings["datasets"] = [{"path": "data.jsonl", "ds_type": "json", "type": "alpaca"}]
    changed = {"base_model": "start", "sequence_len": 1024, "attn_implementation": "sdpa", "bf16": False}
    changed |= {"optimizer": "adamw_torch", "adam_epsilon": 1e-4, "learning_rate": 0.01, "logging_steps": 1}
    same_rows = {"curriculum_sampling": True, "sample_packing_sequentially": True}  # the order would depend on ranks
    return settings | changed | same_rows


def _write_model(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({x: i for i, x in enumerate(CHARACTERS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    numbers = {"vocab_size": len(CHARACTERS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **numbers))
    for i, parameter in enumerate(model.parameters()):
        values = parameter.data.new_tensor(range(parameter.numel())).add(i).mul(0.7).sin()
        parameter.data = values.reshape(parameter.shape) * 0.3 if parameter.dim() > 1 else parameter.data
    model.save_pretrained(folder)


def _write_dataset(file: Path) -> None:
    with file.open("w", encoding="utf-8") as out:
        for i in range(24):
            a, b = 7 * i % 90, 13 * i % 80
            row = {"instruction": f"Add {a} and {b}.", "input": "", "output": f"The sum is {a + b}." * (1 + i % 5)}
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    train(int(sys.argv[1]), Path(sys.argv[2]))
