"""Speed and memory, as ratios inside one interleaved run on the CPU, beside what a user would pick instead.

    python benchmarks/bench.py --nanogpt ../nanoGPT --nanoloop ../nanoLOOP --looped-moe ../looped-moe \\
        --loopformer ../loopformer
    python benchmarks/bench.py --only moe segments

The peers are clones beside this repository, given by path, and x-transformers where it is installed. Without a peer its
rows are left out, and a target that needs them is not judged. One torch thread, CPU time, all variants of a table taken
in turn, round after round. Each part is written when it is done: data/results/bench.json, and bench.md made from it.
A difference below a tenth is a tie. Compare ratios inside one table only.
"""

import importlib.util
import inspect
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
import tyro
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from tqdm.auto import tqdm

from minilooped.engine.machine import pick_dtype
from minilooped.files import make_folder, write_atomically
from minilooped.model import MLP, LoopedConfig, LoopedGPT, MoE
from minilooped.presets import PRESETS
from minilooped.science import toy
from minilooped.science.probes import saved_bytes
from minilooped.science.records import RESULTS, only_user, read, source, write
from minilooped.train import train

Part = Literal[
    "step",
    "profile",
    "gpt2",
    "moe_layer",
    "moe_model",
    "segments",
    "loops",
    "graphs",
    "compiling",
    "generate",
    "toy",
    "trainer",
    "imports",
]


@dataclass(frozen=True)
class Options:
    nanogpt: Path | None = None  # a clone of karpathy/nanoGPT
    nanoloop: Path | None = None  # a clone of LoopedLMs/nanoLOOP
    looped_moe: Path | None = None  # a clone of epfml/looped-moe
    loopformer: Path | None = None  # a clone of armenjeddi/loopformer
    only: tuple[Part, ...] = get_args(Part)  # which tables to make
    rounds: int = 7  # counted rounds after one warm-up
    out: Path = RESULTS  # folder of bench.json and bench.md


# -- tables and targets ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A bound on one row over another. Met if the median over the rounds is within it."""

    row: str
    over: str | None  # None: a bound on the row's own values
    bound: float
    least: bool = False  # the bound is a lower one


@dataclass(frozen=True)
class Table:
    """What was measured, a number per round for every row, and what was asked for. Ratios are to the first row."""

    title: str
    unit: str
    samples: dict[str, list[float]]
    targets: Sequence[Target] = ()
    ratios: bool = True


def spread(values: Sequence[float], over: Sequence[float] | None = None) -> dict[str, float]:
    """Smallest, median, quartiles. Given `over`: smallest over smallest, the others of the ratios round by round."""
    least = min(values)
    if over is not None:
        least, values = least / min(over), [a / b for a, b in zip(values, over, strict=True)]
    if len(values) == 1:
        low = middle = high = values[0]
    else:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return dict(min=least, low=low, median=middle, high=high)


def judged(target: Target, samples: dict[str, list[float]]) -> dict[str, Any]:
    """The target with what came out; `met` is None where a row is missing."""
    judgement = dict(row=target.row, over=target.over, bound=target.bound, least=target.least, measured=None, met=None)
    if target.row in samples and (target.over is None or target.over in samples):
        measured = spread(samples[target.row], None if target.over is None else samples[target.over])
        median = measured["median"]
        judgement |= dict(measured=measured, met=median >= target.bound if target.least else median <= target.bound)
    return judgement


def as_record(table: Table) -> dict[str, Any]:
    """The table as it stands in bench.json."""
    first = next(iter(table.samples.values()))
    rows = [
        dict(row=name, samples=[round(value, 4) for value in values], **spread(values))
        | (dict(ratio=spread(values, first)) if table.ratios else {})
        for name, values in table.samples.items()
    ]
    targets = [judged(target, table.samples) for target in table.targets]
    return dict(title=table.title, unit=table.unit, rounds=len(first), rows=rows, targets=targets)


VERDICT = {True: "met", False: "**missed**", None: "not measured: a row is missing"}


def as_markdown(table: dict[str, Any]) -> str:
    """A record of `as_record` as Markdown."""
    ratios = "ratio" in table["rows"][0]
    heads = [f"{table['unit']}, min", "median"] + ["ratio, min", "median", "quartiles"] * ratios
    rounds = f", {table['rounds']} rounds" if table["rounds"] > 1 else ""
    lines = [f"### {table['title']}{rounds}", "", f"| | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for row in table["rows"]:
        cells = [f"{row['min']:.4g}", f"{row['median']:.4g}"]
        if ratios:
            ratio = row["ratio"]
            cells += [f"{ratio['min']:.2f}", f"{ratio['median']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}"]
        lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    if table["targets"]:
        lines += ["", "| target | bound | min | median | quartiles | |", "|---|---|---:|---:|---:|---|"]
    for target in table["targets"]:
        over = "" if target["over"] is None else f" / {target['over']}"
        measured = ["", "", ""]
        if target["measured"]:
            m = target["measured"]
            measured = [f"{m['min']:.3g}", f"{m['median']:.3g}", f"{m['low']:.3g} to {m['high']:.3g}"]
        bound = f"at {'least' if target['least'] else 'most'} {target['bound']:g}"
        lines.append(f"| {target['row']}{over} | {bound} | {' | '.join(measured)} | {VERDICT[target['met']]} |")
    return "\n".join(lines) + "\n"


PREAMBLE = """\
# Speed and memory

Made by `python benchmarks/bench.py` with clones of the peers, not by hand. One torch thread, CPU time. All variants of
a table are taken in turn, round after round, after one round that does not count. A ratio's minimum is the quickest
round over the reference's quickest; its median and quartiles are over the ratios of each round. The reference is the
first row. A target is met if the median is within its bound; the quartiles beside it show how sure that is. Compare
ratios inside one table only; below a tenth is a tie. Nothing is compiled but where a part says so. The peers run as
published, with AdamW as their optimizers make it on a CPU, one tensor at a time; ours is fused.

Most bounds come from measurements on a CPU with AMX, which multiplies bfloat16 faster than AVX-512 does; the last line
of a part says what it ran on. Model FLOPs utilisation on a GPU is not measured. What a slider's move takes is recorded
in [sliders.json](sliders.json), made by `python benchmarks/sliders.py`.
"""


def page(results: dict[str, Any]) -> str:
    """bench.md, all of it from what bench.json holds."""
    met = [t["met"] for part in results.values() for table in part["tables"] for t in table["targets"]]
    parts = [
        PREAMBLE,
        f"{len(met)} targets: {met.count(True)} met, {met.count(False)} missed, {met.count(None)} not measured.\n",
    ]
    for name, part in results.items():
        about = part["provenance"]
        parts.append(f"## {name}\n\n{inspect.getdoc(PARTS[name])}\n")
        parts += [as_markdown(table) for table in part["tables"]]
        parts.append(
            f"*{about['date']}, commit {about['commit']}, torch {about['torch']}, Python {about['python']}, "
            f"{about['cpu']}, {'AMX' if part['amx'] else 'no AMX'}*\n"
        )
    return "\n".join(parts)


# -- measuring ---------------------------------------------------------------------------------------------------------


def in_turn(
    title: str, variants: dict[str, Callable[[], object]], rounds: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """CPU milliseconds of every variant, once per round, in turn. warm_up: first a round that does not count."""
    samples = {name: [] for name in variants}
    for number in tqdm(range(warm_up + rounds), desc=title, leave=False):
        for name, run in variants.items():
            began = time.process_time()
            run()
            if number >= warm_up:
                samples[name].append(1000 * (time.process_time() - began))
    return samples


def timed(title: str, variants: dict[str, Callable[[], object]], rounds: int, *targets: Target) -> Table:
    return Table(title, "ms", in_turn(title, variants, rounds), targets)


def peer(path: Path, file: str = "model.py") -> ModuleType:
    """A module of a clone, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.name}", path / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], bf16: bool = False
) -> Callable[[], None]:
    """Forward, backward, clipping and update. Products in bfloat16 by autocast, or all in float32."""

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def our_step(
    config: LoopedConfig,
    idx: Tensor,
    targets: Tensor,
    bf16: bool = False,
    collapsed: bool = False,
    kind: Callable[[LoopedConfig], LoopedGPT] = LoopedGPT,
) -> Callable[[], None]:
    """A step of our model. collapsed: every token goes to the first two experts. kind: makes the model."""
    model = kind(config)
    if collapsed:
        for block in model.blocks:
            block.mlp.router.bias[:2] += 100
    return training_step(model, model.configure_optimizer(1e-3, 0.1), lambda: model(idx, targets)[1], bf16)


def nanogpt_step(
    module: ModuleType, idx: Tensor, targets: Tensor, *call: int, bf16: bool = False, **shape: Any
) -> Callable[[], None]:
    """A step of nanoGPT or of a fork of it, with its own optimizer. call: what its forward takes besides."""
    with redirect_stdout(StringIO()):  # they print as they are made
        model = module.GPT(module.GPTConfig(dropout=0.0, bias=False, **shape))
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    return training_step(model, optimizer, lambda: model(idx, targets, *call)[1], bf16)


SHAPE = dict(vocab_size=512, block_size=128, n_head=8, n_embd=256)
OURS = LoopedConfig(**SHAPE, n_layer=2, n_loop=6, mlp="gelu", pos="learned")
LARGE = dict(vocab_size=50257, block_size=256, n_head=12, n_embd=768)  # GPT-2 small's
OURS_LARGE = LoopedConfig(**LARGE, n_layer=4, n_loop=3, mlp="relu2", pos="learned", norm="layer")
BLOCK = dict(pos="rope", qk_norm=True)  # the block that the presets use, but for their swiglu


def step(options: Options) -> list[Table]:
    """Training step of 2 layers x 6 loops, width 256, batch 4 x 128, vocabulary 512: 12 block visits in every row.

    In float32 all rows are a tie, since they make the same products. Ours has GPT-2's GELU, by tanh, which costs more
    on a CPU than the one by erf in loopformer and x-transformers; the row with erf shows how much.
    """
    idx, targets = torch.randint(512, (2, 4, 128))
    variants: dict[str, Callable[[], object]] = {}

    def both(name: str, make: Callable[[bool], Callable[[], None]]):
        variants[name], variants[f"{name}, bf16"] = make(False), make(True)

    if options.nanogpt:
        module = peer(options.nanogpt)
        both("nanoGPT, 12 untied", lambda b: nanogpt_step(module, idx, targets, bf16=b, **SHAPE, n_layer=12))
    if options.nanoloop:
        looped, depth = peer(options.nanoloop), dict(n_prelude=0, n_block=2, n_coda=0, n_loop=6)
        depth |= dict(input_injection="passthrough")
        both("nanoLOOP", lambda b: nanogpt_step(looped, idx, targets, bf16=b, **SHAPE, **depth))
    if options.loopformer:
        plain, depth = peer(options.loopformer, "models/base_loop.py"), dict(n_layer=2, intermediate_dim=1024)
        both("loopformer, plain loop", lambda b: nanogpt_step(plain, idx, targets, 6, bf16=b, **SHAPE, **depth))
    if importlib.util.find_spec("x_transformers"):
        both("x-transformers, repeated order", lambda b: x_transformers_step(idx, targets, b))
    both("ours", lambda b: our_step(OURS, idx, targets, b))
    both("ours, relu2", lambda b: our_step(replace(OURS, mlp="relu2"), idx, targets, b))
    variants["ours, GELU by erf (no option)"] = our_step(OURS, idx, targets, kind=with_erf)
    both("ours, rotary, qk-norm", lambda b: our_step(replace(OURS, **BLOCK), idx, targets, b))
    both("ours, rotary, qk-norm, swiglu", lambda b: our_step(replace(OURS, **BLOCK, mlp="swiglu"), idx, targets, b))
    others = "loopformer, plain loop", "x-transformers, repeated order"
    return [
        timed(
            "Training step",
            variants,
            options.rounds,
            Target("ours, rotary, qk-norm, bf16", "nanoGPT, 12 untied", 0.50),
            Target("ours", "nanoLOOP", 1.05),
            *(Target(f"ours{kind}", f"{other}{kind}", 1.0) for kind in ("", ", bf16") for other in others),
        )
    ]


def x_transformers_step(idx: Tensor, targets: Tensor, bf16: bool) -> Callable[[], None]:
    from x_transformers import Decoder, TransformerWrapper

    stack = Decoder(
        dim=256,
        heads=8,
        attn_dim_head=32,
        attn_flash=True,
        ff_no_bias=True,
        custom_layers=("a", "f") * 2,
        layers_execute_order=tuple(range(4)) * 6,
    )
    model = TransformerWrapper(num_tokens=512, max_seq_len=128, tie_embedding=True, attn_layers=stack)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    return training_step(
        model, optimizer, lambda: nn.functional.cross_entropy(model(idx).flatten(0, 1), targets.flatten()), bf16
    )


class ExactMLP(MLP):
    """With the GELU of loopformer and x-transformers, by erf."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(nn.functional.gelu(self.w_in(x)))


def with_erf(config: LoopedConfig) -> LoopedGPT:
    """Our model with exact MLPs."""
    model = LoopedGPT(config)
    for block in model.blocks:
        exact = ExactMLP(config, block.mlp.w_out.in_features)
        exact.load_state_dict(block.mlp.state_dict())
        block.mlp = exact
    return model


def profile(options: Options) -> list[Table]:
    """Where the training step of the row "ours, rotary, qk-norm" spends its time, by operator (wall clock).

    Predicted: products have 60 % in float32, so that nothing else can gain much; in bfloat16 rotary positions and
    qk-norm cost a quarter. The table above shows what they cost, and the operators below that nothing but the products
    is large: no change to the model was found that gains 5 %.
    """
    idx, targets = torch.randint(512, (2, 4, 128))
    config, large = replace(OURS, **BLOCK), torch.randint(50257, (2, 1, 256))
    tables = []
    for name, run in (
        ("float32", our_step(config, idx, targets)),
        ("bfloat16", our_step(config, idx, targets, bf16=True)),
        ("GPT-2 small's shape, 4 x 3, float32", our_step(OURS_LARGE, *large)),
    ):
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run()
            run()
        times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
        top = sorted(times, key=times.get, reverse=True)[:10]
        shares = {key: [100 * times[key] / sum(times.values())] for key in top}
        tables.append(Table(f"Operators, {name}", "% of the time", shares, ratios=False))
    return tables


def gpt2(options: Options) -> list[Table]:
    """Training step at GPT-2 small's shape, batch 1 x 256, vocabulary 50,257: 4 layers x 3 loops against 12 untied.

    In float32 the miss is the products' doing: the profile shows four fifths of our step in them, and nanoGPT makes the
    same ones. What tying saves, the update of 57 M parameters, is small beside them. The tied embedding's dense
    gradient (fill and add in the profile) is the largest of the rest, and shrinks with a larger batch.
    """
    idx, targets = torch.randint(50257, (2, 1, 256))
    variants: dict[str, Callable[[], object]] = {}
    if options.nanogpt:
        module = peer(options.nanogpt)
        for name, bf16 in (("nanoGPT, 12 untied", False), ("nanoGPT, 12 untied, bf16", True)):
            variants[name] = nanogpt_step(module, idx, targets, bf16=bf16, **LARGE, n_layer=12)
    variants["ours, 4 x 3"] = our_step(OURS_LARGE, idx, targets)
    variants["ours, 4 x 3, bf16"] = our_step(OURS_LARGE, idx, targets, bf16=True)
    return [
        timed(
            "Training step, GPT-2 small's shape",
            variants,
            min(options.rounds, 5),
            Target("ours, 4 x 3", "nanoGPT, 12 untied", 0.80),
            Target("ours, 4 x 3, bf16", "nanoGPT, 12 untied", 0.42),
        )
    ]


def moe_layer(options: Options) -> list[Table]:
    """One MoE layer, top 2 of experts of width 256, 512 tokens, against a dense MLP with the same active width."""
    x, tables = torch.randn(4, 128, 256), []
    for n_expert, bound in ((8, 1.50), (32, 2.00)):
        config = LoopedConfig(
            n_embd=256, n_head=8, mlp="gelu", n_inner=256, n_expert=n_expert, top_k=2, init_std=256**-0.5
        )
        dense, sparse, variants = "dense MLP, width 512", f"MoE, {n_expert} experts", {}
        for name, layer in {dense: MLP(config, 512), sparse: MoE(config)}.items():
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=config.init_std)

            def run(layer=layer):
                y = layer(x.requires_grad_())
                (y[0] if isinstance(layer, MoE) else y).square().mean().backward()

            variants[name] = run
        title = f"MoE layer, {n_expert} experts, forward and backward"
        tables.append(timed(title, variants, 4 * options.rounds, Target(sparse, dense, bound)))
    return tables


def moe_model(options: Options) -> list[Table]:
    """Training step of the full MoE model: 2 x 6, 8 SwiGLU experts of width 256, top 2, a router per loop, Switch loss.

    Collapsed: every token goes to the same two experts.
    """
    idx, targets = torch.randint(512, (2, 4, 128))
    config = replace(OURS, **BLOCK, mlp="swiglu", n_inner=256, n_expert=8, top_k=2, router="per_loop", balance="switch")
    variants: dict[str, Callable[[], object]] = {}
    for kind, collapsed in (("", False), (", collapsed", True)):
        if options.looped_moe:  # in float32 only: its experts on a CPU do not run under autocast
            variants[f"looped-moe{kind}"] = looped_moe_step(peer(options.looped_moe), idx, targets, collapsed)
        for precision, bf16 in (("", False), (", bf16", True)):
            variants[f"ours{kind}{precision}"] = our_step(config, idx, targets, bf16, collapsed)
    return [
        timed(
            "Training step, MoE",
            variants,
            options.rounds,
            Target("ours", "looped-moe", 0.75),
            Target("ours, bf16", "looped-moe", 0.75),
            Target("ours, collapsed", "ours", 1.2),
            Target("ours, collapsed, bf16", "ours, bf16", 1.2),
        )
    ]


def looped_moe_step(module: ModuleType, idx: Tensor, targets: Tensor, collapsed: bool) -> Callable[[], None]:
    model = module.LoopedMoETransformer(
        module.ModelConfig(
            d_model=256,
            n_heads=8,
            d_ff=256,
            n_experts=8,
            top_k=2,
            seq_len=128,
            vocab_size=512,
            topology=[(2, 6)],
            per_loop_routers=True,
        )
    )
    if collapsed:
        push = torch.tensor([100.0] * 2 + [0.0] * 6)
        for layer in model.layers:
            for router in layer.moe.routers:
                router.register_forward_hook(lambda router, inputs, logits: logits + push)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)

    def loss() -> Tensor:
        _, cross_entropy, balance, _ = model(idx, targets)
        return cross_entropy + 0.01 * balance

    return training_step(model, optimizer, loss)


LOOM_SHAPE = LoopedConfig(vocab_size=512, block_size=256, n_layer=2, n_loop=12, n_head=8, n_embd=256)


def all_segments(segment: int | None) -> Callable[[], None]:
    """Forward and backward of 2 layers x 12 loops on a batch of 8 x 256, `segment` loops at a time."""
    model = LoopedGPT(replace(LOOM_SHAPE, segment=segment))
    idx, targets = torch.randint(512, (2, 8, 256))

    def run():
        for loss in model.segment_losses(idx, targets):
            loss.backward()

    run.model = model
    return run


def resident_peak() -> float:
    """Largest resident memory of this process so far, in MiB, as Linux counts it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def resident_rise(segment: int | None) -> float:
    """MiB by which resident memory rises over the loaded model in one forward and backward."""
    torch.set_num_threads(1)
    run = all_segments(segment)
    before = resident_peak()
    run()
    return resident_peak() - before


def segments(options: Options) -> list[Table]:
    """Segmented backprop: 2 layers x 12 loops, width 256, batch 8 x 256. Resident memory is of a new process each."""
    runs = {("all 12 loops" if k is None else f"segments of {k}"): (k, all_segments(k)) for k in (None, 6, 3, 1)}
    held = {}
    for name, (_, run) in runs.items():
        own = [*run.model.parameters(), *run.model.buffers()]
        held[name] = [saved_bytes(run, own) / 2**20]
    tables = [Table("Held for the backward pass", "MiB", held, [Target("segments of 3", "all 12 loops", 0.27)])]
    pair = {name: runs[name] for name in ("all 12 loops", "segments of 3")}
    if Path("/proc/self/status").exists():
        rises = {name: [] for name in pair}
        for _ in range(3):
            for name, (segment, _) in pair.items():
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                    rises[name].append(fresh.submit(resident_rise, segment).result())
        target = Target("segments of 3", "all 12 loops", 0.40)
        tables.append(Table("Resident memory above the loaded model", "MiB", rises, [target]))
    variants = {name: run for name, (_, run) in pair.items()}
    target = Target("segments of 3", "all 12 loops", 1.10)
    return [*tables, timed("Forward and backward", variants, min(options.rounds, 5), target)]


def loops(options: Options) -> list[Table]:
    """What a loop costs: the training step of 2 layers, width 256, batch 4 x 128, over the number of loops.

    A line, fixed + share * N, is fitted to 1, 2, 4 and 8 loops of each round. 12 loops should cost 12 shares more than
    the fixed part.
    """
    idx, targets = torch.randint(512, (2, 4, 128))
    counts = (1, 2, 4, 8, 12)
    variants = {f"n_loop = {n}": our_step(replace(OURS, n_loop=n), idx, targets) for n in counts}
    table = timed("Training step over loops", variants, options.rounds)
    fits = []
    for *short, last in zip(*table.samples.values(), strict=True):
        share, fixed = statistics.linear_regression(counts[:-1], short)
        fits.append((fixed, share, (last - fixed) / share))
    fixed, share, cost = map(list, zip(*fits, strict=True))
    name = "12 loops less the fixed part, in shares"
    line = {"fixed part, ms": fixed, "share of a loop, ms": share, name: cost}
    return [table, Table("The line", "value", line, [Target(name, None, 12.3)], ratios=False)]


def graphs(options: Options) -> list[Table]:
    """Graphs that torch.compile has made of the blocks so far, in one process, as the loop count changes.

    Compiling the block leaves the loop outside. A second model's multiplier costs one more graph, in which it is a
    symbol; that one serves all others. The multiplier 1 is left out of the product, so it has a graph of its own.
    """
    small = dict(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32)
    idx = torch.randint(64, (2, 16))

    def count(models: dict[str, tuple[LoopedGPT, int]]) -> dict[str, list[float]]:
        torch.compiler.reset()
        counter, samples = CompileCounter(), {}
        for name, (model, n_loop) in models.items():
            for block in model.blocks:
                block.compile(backend=counter)
            model(idx, idx, n_loop=n_loop)[1].backward()
            samples[name] = [counter.frame_count]
        torch.compiler.reset()
        return samples

    model = LoopedGPT(LoopedConfig(**small, n_loop=3))
    one = count({f"run with n_loop = {n}": (model, n) for n in (3, 6, 12, 1)})
    many = count({f"made for n_loop = {n}": (LoopedGPT(LoopedConfig(**small, n_loop=n)), n) for n in (1, 3, 6, 12)})
    return [
        Table("One model", "graphs", one, [Target("run with n_loop = 12", "run with n_loop = 3", 1)], ratios=False),
        Table("A model each", "graphs", many, [Target("made for n_loop = 12", "made for n_loop = 3", 1)], ratios=False),
    ]


def seconds_to_compile(whole: bool, *n_loops: int) -> list[float]:
    """CPU seconds, the C++ compiler's included, by which a first training step at each loop count exceeds a second."""
    torch.set_num_threads(1)
    idx, targets = torch.randint(512, (2, 4, 128))
    model = LoopedGPT(replace(OURS, n_loop=n_loops[0]))
    for part in (model,) if whole else model.blocks:
        part.compile()

    def step(n_loop: int) -> float:
        began = sum(os.times()[:4])  # user and system time, of this process and of its ended children
        model(idx, targets, n_loop=n_loop)[1].backward()
        return sum(os.times()[:4]) - began

    return [step(n_loop) - step(n_loop) for n_loop in n_loops]


def compiling(options: Options) -> list[Table]:
    """Seconds that torch.compile takes: 2 layers, width 256, batch 4 x 128, forward and backward, on the CPU.

    Each in a new process with an empty cache. With the blocks compiled, as the trainer does it, the loop is outside
    what is compiled. The model compiled as a whole holds every visit, and takes longer with each.
    """
    blocks, whole = "blocks, n_loop = {}", "whole model, n_loop = {}"
    changed = "blocks, run with n_loop = 12 after 3"
    runs = {blocks.format(1): (False, 1), blocks.format(3): (False, 3, 12), blocks.format(12): (False, 12)}
    runs |= {whole.format(n): (True, n) for n in (1, 3, 12)}
    samples = {}
    for _ in range(min(options.rounds, 3)):
        for name, run in tqdm(runs.items(), desc="Compiling", leave=False):
            with tempfile.TemporaryDirectory() as cache:
                own = dict(TORCHINDUCTOR_CACHE_DIR=cache, TORCHINDUCTOR_COMPILE_THREADS="1")
                with patch.dict(os.environ, own), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                    took = fresh.submit(seconds_to_compile, *run).result()
            for row, seconds in zip((name, changed), took, strict=False):
                samples.setdefault(row, []).append(seconds)
    targets = [Target(blocks.format(12), blocks.format(3), 1.1), Target(changed, blocks.format(3), 0.1)]
    return [Table("Seconds more than a step", "s", samples, targets)]


def generate(options: Options) -> list[Table]:
    """Generation from one token, 2 x 6, width 256, float32. Recomputed: all positions anew for every token.

    A batch of 16 gains on what a step costs however large it is, and on the products, whose weights are read once for
    all. It gains little on attention, which every sequence does for itself, and less on the products than one would
    think: weights this small stay in the processor's cache, so a sequence alone is not slowed by reading them.
    The table of 512 tokens takes longest: two rounds, and none before that does not count.
    """
    shape = SHAPE | dict(block_size=512)
    model, one = LoopedGPT(replace(OURS, block_size=512)), torch.zeros(1, 1, dtype=torch.long)
    cached, recomputed = "ours, cached", "ours, recomputed"
    long = {cached: lambda: model.generate(one, 511), recomputed: lambda: model.generate(one, 511, use_cache=False)}
    single, batch = "ours, 16 one by one", "ours, 16 at once"
    short: dict[str, Callable[[], object]] = {
        batch: lambda: model.generate(one.expand(16, 1), 63),
        single: lambda: [model.generate(one, 63) for _ in range(16)],
    }
    if options.nanogpt:
        module = peer(options.nanogpt)
        with redirect_stdout(StringIO()):
            nanogpt = module.GPT(module.GPTConfig(**shape, n_layer=12, dropout=0.0, bias=False)).eval()
        short["nanoGPT, 12 untied, one of the 16"] = lambda: nanogpt.generate(one, 63)
    # The slowest rounds of all, so few; those of the other table have warmed up the model.
    tables = [
        timed("16 sequences of 64 tokens", short, min(options.rounds, 5), Target(single, batch, 6, least=True)),
        Table(
            "One sequence of 512 tokens",
            "ms",
            in_turn("512 tokens", long, min(options.rounds, 2), warm_up=False),
            [Target(recomputed, cached, 8, least=True)],
        ),
    ]
    return tables


def toy_simulation(options: Options) -> list[Table]:
    """The toy recursion: d = 256, N = 64, 8 seeds, tied and untied together, the weights drawn anew."""
    name = "tied and untied"
    variants = {name: lambda: [toy.growth([64], 1.0, tied=tied) for tied in (True, False)]}
    samples = in_turn("toy", variants, 2 * options.rounds)
    return [Table("Toy simulation", "ms", samples, [Target(name, None, 100)], ratios=False)]


def trainer(options: Options) -> list[Table]:
    """100 steps of the `shakespeare` preset in the trainer, against a bare loop of forward, backward and update."""
    preset, n_steps = PRESETS["shakespeare"], 100
    samples: dict[str, list[float]] = {"bare loop": [], "trainer": []}  # milliseconds per step
    for _ in tqdm(range(options.rounds), desc="Trainer", leave=False):
        quiet = replace(preset.train, max_steps=n_steps, eval_every=0, sample_every=0, save_every=0, decay_steps=0)
        seconds: list[float] = []  # at the end of each step
        with tempfile.TemporaryDirectory() as runs, redirect_stdout(StringIO()):
            result = train(
                preset.model, replace(quiet, runs=runs), on_step=lambda step, at=seconds: at.append(time.process_time())
            )
        samples["trainer"].append(1000 * (seconds[-1] - seconds[0]) / (n_steps - 1))

        model = LoopedGPT(result.model.config)
        optimizer = model.configure_optimizer(1e-3, 0.1, optimizer=preset.train.optimizer)
        idx, targets = torch.randint(model.config.vocab_size, (2, preset.train.batch_size, model.config.block_size))
        bf16 = pick_dtype(torch.device("cpu"))[0] == torch.bfloat16
        run = training_step(model, optimizer, lambda m=model, i=idx, t=targets: m(i, t)[1], bf16)
        run()
        began = time.process_time()
        for _ in range(n_steps):
            run()
        samples["bare loop"].append(1000 * (time.process_time() - began) / n_steps)
    return [Table("Trainer", "ms a step", samples, [Target("trainer", "bare loop", 1.05)])]


def imports(options: Options) -> list[Table]:
    """What importing the package costs once torch is there, and whether `import minilooped` brings torch in."""

    def python(code: str) -> float:
        return float(subprocess.check_output([sys.executable, "-c", code]))

    clock = "time.process_time()"
    after = f"import sys, time, torch; t = {clock}; import minilooped.train; print(1000 * ({clock} - t))"
    torch_too = python("import sys, minilooped; print(int('torch' in sys.modules))")
    name = "import minilooped brings torch in (1 is yes)"
    times = {"import minilooped.train after torch": [python(after) for _ in range(options.rounds)]}
    return [
        Table("Import time", "ms", times, ratios=False),
        Table("Import of torch", "yes", {name: [torch_too]}, [Target(name, None, 0)], ratios=False),
    ]


PARTS: dict[Part, Callable[[Options], list[Table]]] = {
    "step": step,
    "profile": profile,
    "gpt2": gpt2,
    "moe_layer": moe_layer,
    "moe_model": moe_model,
    "segments": segments,
    "loops": loops,
    "graphs": graphs,
    "compiling": compiling,
    "generate": generate,
    "toy": toy_simulation,
    "trainer": trainer,
    "imports": imports,
}


def main(options: Options) -> None:
    for name in ("nanogpt", "nanoloop", "looped_moe", "loopformer"):
        path = getattr(options, name)
        if path is not None and not path.is_dir():
            raise SystemExit(f"--{name.replace('_', '-')} {path} is not a folder: give the path of a clone")
    torch.set_num_threads(1)
    make_folder(options.out)
    path, amx = options.out / "bench.json", getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16", False)
    for name in options.only:
        torch.manual_seed(0)
        about = source(path, f"python benchmarks/bench.py --only {name}, with clones of the peers")
        tables = [as_record(table) for table in PARTS[name](options)]
        with only_user(path, wait=60):
            results = read(path) if path.exists() else {}
            results[name] = dict(provenance=about, amx=bool(amx), tables=tables)
            results = {part: results[part] for part in get_args(Part) if part in results}
            write(path, results)
            write_atomically(options.out / "bench.md", page(results))
        print("\n".join(["", *map(as_markdown, tables)]), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
