"""Writes docs/tried_models.md: which of transformers' language models were tried over ranks, and which are refused.

    python ci/make_models.py [MODEL_TYPE ...]

Each is tried by `model_trials`, half a minute in all. With names nothing is written; their rows are printed. The exit
code is 1 where a model gave another answer than one device, and 2 for a name that transformers does not list.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import transformers
from model_trials import LENGTH, RANKS, Trial, allowed, try_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "tried_models.md"

HEAD = f"""# Models of transformers that were tried

Made by `python ci/make_models.py` with transformers {transformers.__version__}; do not edit it. [Models](models.md)
says how to use them.

Every model that transformers lists for causal and for masked language modelling, made small, with random weights in
float64 and in training mode, on a sequence of {LENGTH} tokens: over {" and ".join(map(str, RANKS))} ranks, and on one
device with transformers' own attention. Logits, loss and every gradient are compared; the column says within which part
of their size they agree. transformers computes the loss in float32, many models their norms or routers, and eager
attention its softmax: hence 1e-6 and 1e-5.
"""
OWN_LOSS = "Its own loss would be wrong on a shard and is refused: compute one from the logits."


def listed() -> list[tuple[str, str]]:
    """(model type, class name), without repetition."""
    both = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), *MODEL_FOR_MASKED_LM_MAPPING_NAMES.items()]
    return list(dict.fromkeys((kind, name if isinstance(name, str) else name[0]) for kind, name in both))


def row(kind: str, class_name: str, trial: Trial) -> str:
    """A line of the table that the verdict belongs to."""
    told = trial.reason.replace("|", "/").replace("[", "\\[")  # \[: not a link
    if trial.verdict == "equal":
        # What is allowed and not what was found, which rounds otherwise on another machine.
        told = f"{allowed(trial.compared_with):.0e} | {trial.compared_with} | {OWN_LOSS if trial.own_loss else ''}"
    elif trial.verdict == "different":
        told = f"**{told or f'by {trial.apart:.1e}'}**"
    return f"| {kind} | {class_name} | {told} |"


def page(trials: dict[tuple[str, str], Trial]) -> str:
    """The whole page."""
    tables = {
        "equal": "| model type | class | within | compared with | |\n| --- | --- | --- | --- | --- |",
        "different": "| model type | class | what |\n| --- | --- | --- |",
        "refused": "| model type | class | reason |\n| --- | --- | --- |",
        "not tried": "| model type | class | why |\n| --- | --- | --- |",
    }
    parts = [HEAD]
    for verdict, head in tables.items():
        rows = [row(*model, trial) for model, trial in trials.items() if trial.verdict == verdict]
        if rows:
            parts += [f"## {verdict.capitalize()}: {len(rows)}\n", head, *rows, ""]
    return "\n".join(parts)


def try_named(kind: str, class_name: str) -> Trial:
    """A trial by names; what transformers says meanwhile is not our matter."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return try_model(getattr(transformers, class_name), kind)


def main(kinds: list[str]) -> int:
    """Try all and write the page, or some and print their rows."""
    if unknown := set(kinds) - {kind for kind, _ in listed()}:
        print(f"make_models: transformers lists no {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    trials = {(kind, name): try_named(kind, name) for kind, name in listed() if not kinds or kind in kinds}
    if kinds:
        print("\n".join(row(*model, trial) + f" {trial.verdict} {trial.apart:.1e}" for model, trial in trials.items()))
    else:
        TARGET.write_text(page(trials), encoding="utf-8")
    return int(any(trial.verdict == "different" for trial in trials.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
