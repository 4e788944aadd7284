"""Speed and memory of the model, as ratios inside one interleaved run on the CPU.

    python benchmarks/bench.py --nanogpt ../nanoGPT --nanoloop ../nanoLOOP
    python benchmarks/bench.py --only moe segments

The peers are clones beside this repository, given by path; without them their rows are left out. One torch thread, CPU
time, all variants of a table taken in turn, round after round; a row shows the minimum and the median over the rounds,
each divided by the reference's. A difference below a tenth is a tie. Compare ratios inside one table only.
"""

import importlib.util
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Literal, get_args

import torch
import tyro
from torch import nn
from tqdm.auto import tqdm

from minilooped.model import MLP, LoopedConfig, LoopedGPT, MoE
from minilooped.presets import PRESETS
from minilooped.probes import saved_bytes
from minilooped.train import pick_dtype, train

Part = Literal["step", "moe", "segments", "generate", "trainer", "imports"]


@dataclass(frozen=True)
class Options:
    nanogpt: Path | None = None  # a clone of karpathy/nanoGPT
    nanoloop: Path | None = None  # a clone of LoopedLMs/nanoLOOP
    only: tuple[Part, ...] = get_args(Part)  # which tables to make
    rounds: int = 8  # counted rounds after one warm-up


def peer(path: Path):
    """The `model` module of a clone, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.name}", path / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def table(title: str, variants: dict[str, Callable[[], object]], rounds: int) -> None:
    """Time every variant once per round, in turn, and print each one's ratio to the first."""
    seconds = {name: [] for name in variants}
    for number in tqdm(range(rounds + 1), desc=title, leave=False):
        for name, run in variants.items():
            began = time.process_time()
            run()
            if number > 0:  # the first round warms up
                seconds[name].append(time.process_time() - began)
    reference = next(iter(seconds.values()))
    print(f"\n{title} ({rounds} rounds)\n{'':44}{'ms, min':>9}{'min':>8}{'median':>8}")
    for name, values in seconds.items():
        ratio = min(values) / min(reference), statistics.median(values) / statistics.median(reference)
        print(f"{name:44}{1000 * min(values):9.2f}{ratio[0]:8.2f}{ratio[1]:8.2f}")


def training_step(model: nn.Module, optimizer, idx, targets, autocast: bool = False) -> Callable[[], None]:
    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(idx, targets)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def step(options: Options) -> None:
    """2 layers x 6 loops, width 256, against 12 untied layers and against the same loop in a peer."""
    shape = dict(vocab_size=512, block_size=128, n_head=8, n_embd=256)
    idx, targets = torch.randint(512, (2, 4, 128))
    variants: dict[str, Callable[[], object]] = {}
    for name, path, depth in (
        ("nanoGPT, 12 untied layers", options.nanogpt, dict(n_layer=12)),
        (
            "nanoLOOP, 2 x 6, pass-through",
            options.nanoloop,
            dict(n_prelude=0, n_block=2, n_coda=0, n_loop=6, input_injection="passthrough"),
        ),
    ):
        if path is not None:
            module = peer(path)
            model = module.GPT(module.GPTConfig(**shape, **depth, dropout=0.0, bias=False))
            variants[name] = training_step(
                model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu"), idx, targets
            )
    ours = LoopedConfig(**shape, n_layer=2, n_loop=6, mlp="gelu", pos="learned")
    for name, config in (
        ("ours, 2 x 6", ours),
        ("ours, 2 x 6, relu2", replace(ours, mlp="relu2")),
        ("ours, 2 x 6, rotary, qk-norm", replace(ours, pos="rope", qk_norm=True)),
        ("ours, 2 x 6, rotary, qk-norm, swiglu", replace(ours, pos="rope", qk_norm=True, mlp="swiglu")),
    ):
        for autocast in (False, True):
            model = LoopedGPT(config)
            optimizer = model.configure_optimizer(1e-3, 0.1)
            variants[name + (", bf16" if autocast else "")] = training_step(model, optimizer, idx, targets, autocast)
    table("Training step, batch 4 x 128, vocabulary 512", variants, options.rounds)


def moe(options: Options) -> None:
    """One MoE layer, top 2, against a dense MLP with the same active width."""
    x = torch.randn(4, 128, 256)
    for n_expert in (8, 32):
        config = LoopedConfig(
            n_embd=256, n_head=8, mlp="gelu", n_inner=256, n_expert=n_expert, top_k=2, init_std=256**-0.5
        )
        layers = {"dense MLP, width 512": MLP(config, 512), f"MoE, {n_expert} experts of width 256, top 2": MoE(config)}
        variants = {}
        for name, layer in layers.items():
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=config.init_std)

            def run(layer=layer):
                y = layer(x.requires_grad_())
                (y[0] if isinstance(layer, MoE) else y).square().mean().backward()

            variants[name] = run
        table(f"MoE layer, 512 tokens, forward and backward, {n_expert} experts", variants, 4 * options.rounds)


def segments(options: Options) -> None:
    """Activation bytes held by the largest segment, and time, at 12 loops."""
    config = LoopedConfig(vocab_size=512, block_size=256, n_layer=2, n_loop=12, n_head=8, n_embd=256)
    idx, targets = torch.randint(512, (2, 8, 256))
    held, variants = {}, {}
    for segment in (None, 6, 3, 1):
        model = LoopedGPT(replace(config, segment=segment))

        def run(model=model):
            for loss in model.segment_losses(idx, targets):
                loss.backward()

        name = f"segments of {segment} loops" if segment else "all 12 loops at once"
        held[name], variants[name] = saved_bytes(run, [*model.parameters(), *model.buffers()]), run
    full = held["all 12 loops at once"]
    print("\nActivations held for the backward pass, 2 layers x 12 loops, batch 8 x 256")
    for name, size in held.items():
        print(f"{name:44}{size / 2**20:9.1f} MiB{size / full:8.3f}")
    table("Forward and backward, 2 layers x 12 loops", variants, max(2, options.rounds // 4))


def generate(options: Options) -> None:
    """128 new tokens from one, cached and recomputed."""
    shape = dict(vocab_size=512, block_size=256, n_head=8, n_embd=256)
    prompt = torch.zeros(1, 1, dtype=torch.long)
    model = LoopedGPT(LoopedConfig(**shape, n_layer=2, n_loop=6, mlp="gelu", pos="learned"))
    variants: dict[str, Callable[[], object]] = {
        "ours, cached": lambda: model.generate(prompt, 128),
        "ours, recomputed": lambda: model.generate(prompt, 128, use_cache=False),
    }
    if options.nanogpt is not None:
        module = peer(options.nanogpt)
        nanogpt = module.GPT(module.GPTConfig(**shape, n_layer=12, dropout=0.0, bias=False)).eval()
        variants["nanoGPT, 12 untied layers"] = lambda: nanogpt.generate(prompt, 128)
    table("Generation of 128 tokens, one sequence, 2 x 6", variants, max(2, options.rounds // 4))


def trainer(options: Options) -> None:
    """The trainer's tokens per second against a bare loop of forward, backward and step on one batch. Wall time."""
    preset, n_steps = PRESETS["shakespeare"], 100
    best = {"bare loop": math.inf, "trainer": math.inf}  # seconds per step
    for _ in range(max(3, options.rounds // 2)):
        quiet = replace(preset.train, max_steps=n_steps, eval_every=0, sample_every=0, save_every=0, decay_steps=0)
        with tempfile.TemporaryDirectory() as runs, redirect_stdout(StringIO()):
            result = train(preset.model, replace(quiet, runs=runs))
        first, last = result.history[0], result.history[-1]
        seconds = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
        best["trainer"] = min(best["trainer"], seconds)

        model = LoopedGPT(result.model.config)
        optimizer = model.configure_optimizer(1e-3, 0.1, optimizer=preset.train.optimizer)
        idx, targets = torch.randint(model.config.vocab_size, (2, preset.train.batch_size, model.config.block_size))
        run = training_step(model, optimizer, idx, targets, pick_dtype(torch.device("cpu"))[0] == torch.bfloat16)
        run()
        began = time.perf_counter()
        for _ in range(n_steps):
            run()
        best["bare loop"] = min(best["bare loop"], (time.perf_counter() - began) / n_steps)
    ratio = best["bare loop"] / best["trainer"]
    print(f"\nTrainer's tokens per second / bare loop's, the shakespeare preset: {ratio:.3f}")


def imports(options: Options) -> None:
    """What importing the package costs once torch is there, and whether `import minilooped` brings torch in."""
    code = "import sys, time, torch; t = time.perf_counter(); import minilooped.train; print(time.perf_counter() - t)"
    seconds = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(options.rounds)]
    print(f"\nimport minilooped.train after torch: {min(seconds):.3f} s (median {statistics.median(seconds):.3f})")
    code = "import sys, minilooped; print('torch' in sys.modules)"
    print("import minilooped imports torch:", subprocess.check_output([sys.executable, "-c", code], text=True).strip())


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"made by: python {' '.join(sys.argv[:1])} with clones of the peers, {date.today().isoformat()}")
    print(
        f"torch {torch.__version__}, python {platform.python_version()}, {platform.machine()}, "
        f"{torch.backends.cpu.get_cpu_capability()}, one thread, CPU time"
    )
    for name in options.only:
        globals()[name](options)
