"""Train one model with each sequence over all GPUs of a host: this library, torch's context_parallel, and Ulysses.

    torchrun --nproc-per-node 8 benchmarks/end_to_end.py --layers 16

The model is a Llama with the sizes of an 8B model, random weights and --layers layers. The loop is that of
`burst-portable run`: bf16 autocast over float32 weights, gradient checkpointing, gradients summed over ranks, AdamW.
All contestants train the same parameters with a learning rate of 0, so every step has the same loss. Losses and
gradients are compared before times are taken. Steps run in turns, and the slowest rank counts. On CPUs, use
--shape tiny --seq-len 512 --dtype float32.

With --fsdp, FSDP2 shards the weights over all GPUs and computes in --dtype, and each contestant has its own model. Then
a contestant "tensor_N" also shards heads and features over N GPUs, and the sequence over groups of N GPUs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

if not __package__:  # started as a script by torchrun
    sys.path.insert(0, str(Path(__file__).parents[1]))

import burst_portable as bp
from benchmarks.other_models import BACKENDS, BOOK, NAME, ROTATIONS, ContextParallel, Ulysses
from benchmarks.ranks import Clock, Guard, join, leave
from benchmarks.report import setting
from benchmarks.script import count, end, names
from burst_portable.backends.selection import for_device
from burst_portable.cli.run.models import build, enable_gradient_checkpointing, outline, silence_transformers
from burst_portable.cli.run.outcome import TOLERANCES
from burst_portable.cli.run.setup import mfu, model_flops
from burst_portable.cli.run.train import Sharded, StepHistory, Trainer
from burst_portable.errors import InputError
from burst_portable.gradients import all_reduce
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.layouts import sizes_of
from burst_portable.strategies.registry import OURS as STRATEGIES

TENSOR = "tensor_"
CONTESTANTS = (
    *("burst_portable", *(f"burst_portable {name}" for name in STRATEGIES)),
    *(f"burst_portable {name} {TENSOR}{ranks}" for ranks in (2, 4) for name in STRATEGIES),
    *(" ".join((NAME, *how)) for how in ((), *product(BACKENDS), *product(BACKENDS, ROTATIONS))),
    BOOK,
)
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_theta": 500000.0,
    },
    "tiny": {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}  # fmt: skip
# Exceptions of torch's experimental parts and of transformers if they are not compatible.
FAILURES = (RuntimeError, ImportError, AttributeError, AssertionError, TypeError)
CHECKED = 1 << 26  # numbers of the largest parameter whose gradients are compared


def config_of_shape(shape: str, layers: int, seq_len: int) -> Any:
    from transformers import LlamaConfig

    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return LlamaConfig(**SHAPES[shape], **ends, num_hidden_layers=layers, max_position_embeddings=seq_len)


# ------------------------------------------------------------------------------------------- contestants


@dataclass(frozen=True)
class Contestant:
    """A model with the same parameters, what shards its batches, the context of its steps, and its optimizer."""

    name: str
    model: Any
    sharded: Sharded
    around: Callable[[Tensor], AbstractContextManager[None]] = lambda ids: nullcontext()
    optimizer: torch.optim.Optimizer | None = None  # None: that of all contestants


def ours(model: Any, mesh: bp.Mesh, strategy: str, kernel: str) -> Contestant:
    handle = parallelize(model, mesh, strategy=strategy, layout="auto", kernel=kernel)
    return Contestant(f"burst_portable {strategy}", model, Sharded(handle, mesh))


def shard_heads(model: Any, axis: DeviceMesh) -> None:
    """Shard a Llama's weights over an axis by the plan that transformers has for it."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    gathered = ColwiseParallel(output_layouts=Replicate())
    styles = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel(), "colwise_gather_output": gathered}
    styles["embedding_rowwise"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, axis, {name: styles[style] for name, style in model.tp_plan.items()})


def shard_weights(model: Any, axis: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard weights, gradients and optimizer states over an axis by FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(dtype, torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=axis, mp_policy=policy)


def theirs(model: Any, mesh: bp.Mesh, device: torch.device, backend: str, rotate: str) -> Contestant:
    handle = ContextParallel(model, device, backend, rotate)
    return Contestant(f"{NAME} {backend} {rotate}", model, Sharded(handle, mesh), handle.around)


def by_the_book(model: Any, mesh: bp.Mesh, kernel: str) -> Contestant:
    return Contestant(BOOK, model, Sharded(Ulysses(model, mesh, kernel), mesh))


def full_gradient(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter's gradient, gathered if it is sharded."""
    gradient = parameter.grad
    assert gradient is not None, "the backward pass has run"
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


# --------------------------------------------------------------------------------------------- measuring


@dataclass
class Trained:
    """One contestant's steps."""

    contestant: str
    reason: str = ""
    plan: str = ""
    losses: list[float] = field(default_factory=list)
    gradient_difference: float | None = None
    seconds: list[float] = field(default_factory=list)  # of each measured step
    seconds_to_start: float = 0.0  # of the first step
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int = 0


class Run:
    """All contestants on one set of parameters."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        silence_transformers()
        self.arguments, self.started = arguments, time.monotonic()
        self.links = join(arguments.timeout)
        self.clock, self.mesh = Clock(self.links), bp.Mesh.from_group()
        self.dtype = getattr(torch, arguments.dtype)
        backend = for_device(self.links.device.type)
        self.peak, self.reading = backend.peaks(arguments.dtype), backend.capabilities.streams
        config = self.config = config_of_shape(arguments.shape, arguments.layers, arguments.seq_len)
        if arguments.vocab_size:
            config.vocab_size = arguments.vocab_size
        self.flops = model_flops(config, outline(config), seq_len=arguments.seq_len, batch=1, scoring=False)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, config.vocab_size, (1, arguments.seq_len), generator=generator)
        self.ids = self.ids.to(self.links.device)
        if arguments.fsdp:  # each contestant has a separate model
            self.model = outline(config)
        else:
            self.model = self.built()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.right: dict[str, Tensor] = {}
        self.results: list[Trained] = []

    def main(self) -> None:
        self.say(f"{self.parameters / 1e9:.2f} B parameters on {self.links.size} ranks, {self.elapsed():.0f} s")
        entries = [entry for name in self.arguments.contestants if (entry := self.prepare(name))]
        for turn in range(2 * self.arguments.rounds):
            if self.clock.slowest(self.elapsed()) > self.arguments.budget:
                self.say("no time for more steps")
                break
            for contestant, result in entries if turn % 2 == 0 else entries[::-1]:
                result.seconds.append(self.step(contestant, result))
        for result in self.results:
            self.conclude(result)
        if self.links.rank == 0:
            self.write()
            self.print_table()

    def built(self) -> Any:
        """Return the model with the weights that all contestants have."""
        model, _ = build("", copy.deepcopy(self.config), self.dtype, 0, self.links.device)
        return model.train()

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        if self.links.rank == 0:
            print(text, flush=True)

    def prepare(self, name: str) -> tuple[Contestant, Trained] | None:
        """Return a contestant whose first step agrees with the first contestant's."""
        result = Trained(name)
        self.results.append(result)
        started = time.monotonic()
        timer = Guard(self.links.rank).watch(self.arguments.limit, f"the first step of {name}")
        try:
            contestant = self.contestant(name, result)
            self.step(contestant, result)
            self.check(contestant, result)
        except FAILURES as error:  # one contestant without the other is worth more than nothing
            result.reason = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        timer.cancel()
        if self.clock.slowest(float(bool(result.reason))) and not result.reason:
            result.reason = "FAILED on another rank"
        result.seconds_to_start = round(time.monotonic() - started, 1)
        self.say(f"{name}: {result.reason or f'loss {result.losses[0]:.6f}'}, {self.elapsed():.0f} s")
        return None if result.reason else (contestant, result)

    def contestant(self, name: str, result: Trained) -> Contestant:
        kind, _, how = name.partition(" ")
        how, _, ranks = how.partition(TENSOR)
        how, tensor = how.strip(), int(ranks or 1)
        if tensor > 1 and not self.arguments.fsdp:
            raise InputError(f"{name} needs --fsdp")
        size = self.links.size
        grid = init_device_mesh(self.links.device.type, (size // tensor, tensor), mesh_dim_names=("sequence", "tensor"))
        if self.arguments.fsdp:
            model = self.built()
        else:  # separate modules and config; all contestants share the parameters
            model = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        if self.arguments.recompute:
            enable_gradient_checkpointing(model)
        if tensor > 1:
            shard_heads(model, grid["tensor"])
        if kind == NAME:
            backend, _, rotate = (how or "cudnn").partition(" ")
            made = theirs(model, self.mesh, self.links.device, backend, rotate or "allgather")
        elif name == BOOK:
            made = by_the_book(model, self.mesh, self.arguments.kernel)
        else:
            mesh = self.mesh if tensor == 1 else bp.Mesh.from_device_mesh(grid, "sequence")
            result.plan = self.planned(mesh, model, how or "auto", tensor)
            made = ours(model, mesh, how or "auto", self.arguments.kernel)
        if not self.arguments.fsdp:
            return made
        shard_weights(model, grid["sequence"], self.dtype)
        # Weights that are sharded over one axis and over two cannot be in one list of an operation.
        return replace(made, optimizer=torch.optim.AdamW(model.parameters(), lr=0.0, foreach=tensor == 1))

    def planned(self, mesh: bp.Mesh, model: Any, strategy: str, tensor: int) -> str:
        """Return the strategy and the layout of a model whose heads are sharded over `tensor` ranks."""
        sizes = sizes_of(model.config)
        sizes |= {name: sizes[name] // tensor for name in ("heads", "kv_heads")}
        plan = bp.plan_for_mesh(
            mesh, seq_len=self.arguments.seq_len, **sizes, strategy=strategy,
            dtype=self.dtype, device=self.links.device, kernel=self.arguments.kernel,
        )  # fmt: skip
        chosen = plan.reason.rpartition("chose ")[2].partition(" by predicted time")[0] if strategy == "auto" else ""
        return f"{chosen or plan.strategy}; {plan.layout.name}"

    def step(self, contestant: Contestant, result: Trained) -> float:
        """Run one step and return its seconds."""
        course, device = StepHistory(), torch.get_device_module(self.links.device)
        trainer = Trainer(contestant.model, self.links.device, self.dtype, contestant.sharded)
        if self.reading:
            device.reset_peak_memory_stats()

        def work() -> None:
            with contestant.around(self.ids):
                if contestant.optimizer is None:
                    trainer.train_step(self.optimizer, self.ids, course)
                else:
                    course.losses.append(self.step_with_fsdp(contestant, contestant.optimizer))

        seconds = self.clock.time(work, 1)
        result.losses += course.losses
        if self.reading:
            result.peak_memory_bytes = max(result.peak_memory_bytes, device.max_memory_allocated())
        return seconds

    def step_with_fsdp(self, contestant: Contestant, optimizer: torch.optim.Optimizer) -> float:
        """Train one step and return the mean loss. FSDP2 averages the gradients of a sequence's ranks."""
        optimizer.zero_grad(set_to_none=True)
        sharded, mesh = contestant.sharded.model, contestant.sharded.mesh
        loss = contestant.model(**sharded.shard(self.ids)).loss
        (loss * mesh.size).backward()
        optimizer.step()
        return all_reduce(loss.detach().double().reshape(1), mesh).item()

    def check(self, contestant: Contestant, result: Trained) -> None:
        """Compare the loss, and the gradients of the first and last layer, with the first contestant's."""
        kept = ("layers.0.", f"layers.{self.arguments.layers - 1}.", "model.norm.")
        gradients = {
            name: full_gradient(p)
            for name, p in contestant.model.named_parameters()
            if any(part in name for part in kept) and p.numel() <= CHECKED
        }
        if not self.right:
            self.right = gradients
            return
        limits, loss = TOLERANCES[self.arguments.dtype], self.results[0].losses[0]
        pairs = [(gradients[name].double(), right.double()) for name, right in self.right.items()]
        apart = sum(float((g - r).square().sum()) for g, r in pairs) ** 0.5
        result.gradient_difference = apart / sum(float(r.square().sum()) for _, r in pairs) ** 0.5
        loss_difference = abs(result.losses[0] - loss) / abs(loss)
        if not (loss_difference <= limits["loss"] and result.gradient_difference <= limits["gradient"]):
            told = f"loss {result.losses[0]:.6f}, not {loss:.6f}; gradients {result.gradient_difference:.1e} apart"
            result.reason = f"WRONG: {told}"

    def conclude(self, result: Trained) -> None:
        result.peak_memory_bytes = int(self.clock.slowest(result.peak_memory_bytes))
        if not result.seconds:
            return
        seconds = statistics.median(result.seconds)
        result.seconds_per_step = seconds
        result.tokens_per_second = self.arguments.seq_len / seconds
        result.mfu = mfu(self.flops, seconds, self.links.size, self.peak.flops)

    # ------------------------------------------------------------------------------------------ reporting

    def facts(self) -> dict[str, Any]:
        a = self.arguments
        return {
            "setting": {**setting(), "ranks": self.links.size},
            "model": {
                "shape": a.shape, "layers": a.layers, "parameters": self.parameters, "seq_len": a.seq_len,
                "vocab_size": self.config.vocab_size, "dtype": a.dtype, "recompute": a.recompute, "fsdp": a.fsdp,
                "model_flops_per_step": self.flops,
            },
            "peak": asdict(self.peak),
            "results": [asdict(result) for result in self.results],
        }  # fmt: skip

    def write(self) -> None:
        self.arguments.out.mkdir(parents=True, exist_ok=True)
        path = self.arguments.out / f"end-to-end-{self.arguments.label}.json"
        path.write_text(json.dumps(self.facts(), indent=1) + "\n", encoding="utf-8")

    def print_table(self) -> None:
        facts = self.facts()
        model, peak = facts["model"], self.peak
        print(" ".join(f"{name} {value};" for name, value in facts["setting"].items()))
        how = "layers recomputed" if model["recompute"] else "activations kept"
        size = f"{model['layers']} layers, {model['parameters'] / 1e9:.3g} B parameters, {model['seq_len']} tokens"
        needed = f"{model['model_flops_per_step'] / 1e12:.4g} TFLOP per step"
        weights = "FSDP2" if model["fsdp"] else "weights on each rank"
        print(f"{model['shape']}, {size}, {model['dtype']}, {how}, {weights}; {needed}")
        most = f"{peak.flops / 1e12:.4g} TFLOP/s" if peak.flops else "unknown"
        print(f"peak of {peak.device}: {most} ({peak.source})")
        print(f"{'contestant':34} {'s/step':>9} {'tokens/s':>9} {'MFU':>7} {'GiB':>6}  loss")
        for one in self.results:
            if one.reason or not one.seconds_per_step:
                print(f"{one.contestant:34} - {one.reason[:120] or 'no step was measured'}")
                continue
            mfu = "-" if one.mfu is None else f"{one.mfu:.1%}"
            line = f"{one.contestant:34} {one.seconds_per_step:9.4g} {one.tokens_per_second:9,.0f} {mfu:>7}"
            plan = f"  [{one.plan}]" if one.plan else f"  gradients {one.gradient_difference or 0:.1e} apart"
            print(f"{line} {one.peak_memory_bytes / 2**30:6.1f}  {one.losses[0]:.6f}{plan}")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES, help="Sizes of the model.")
    parser.add_argument("--layers", type=count, default=8, help="Layers of the model. Default: 8.")
    parser.add_argument("--seq-len", type=count, default=131072, help="Tokens per sequence. Default: 131072.")
    parser.add_argument("--dtype", default="bfloat16", choices=TOLERANCES, help="dtype of autocast.")
    parser.add_argument(
        "--contestants",
        type=names(CONTESTANTS),
        default=f"burst_portable,{NAME}",
        help="The first is the reference of losses and gradients. "
        f"burst_portable [STRATEGY] [{TENSOR}N with --fsdp], {NAME} [cudnn or flash] [allgather or alltoall], {BOOK}",
    )
    parser.add_argument("--kernel", default="auto", help="Local kernel of burst_portable and Ulysses. Default: auto.")
    parser.add_argument("--keep", dest="recompute", action="store_false", help="keep activations")
    parser.add_argument("--fsdp", action="store_true", help="Shard weights by FSDP2, in bf16 if --dtype is bfloat16.")
    parser.add_argument("--vocab-size", type=count, help="Tokens of the vocabulary. Default: that of --shape.")
    parser.add_argument("--rounds", type=count, default=1, help="Rounds of two steps per contestant. Default: 1.")
    parser.add_argument("--budget", type=float, default=60.0, help="Seconds after which no step begins.")
    parser.add_argument("--limit", type=float, default=60.0, help="Seconds after which a first step counts as hung.")
    parser.add_argument("--timeout", type=float, default=30.0, help="Seconds to wait for one message. Default: 30.")
    parser.add_argument("--label", default="run", help="The file is end-to-end-LABEL.json.")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="Folder of the file.")
    arguments = parser.parse_args(given)
    Run(arguments).main()
    leave()


if __name__ == "__main__":
    end(main)
