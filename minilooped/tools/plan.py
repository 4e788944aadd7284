"""What a training run will take, before it takes it: parameters, operations, memory, hours.

    minilooped plan --preset gpt2-small-loop --gpu A100     # from the shell

    from minilooped.plan import memory, plan
    memory(model_config, train_config).peak                # bytes
    print(plan(model_config, train_config))                # the whole page

The memory is not computed from a formula that could fall out of step with the model: one training step runs on *fake*
tensors, which have a shape and a type and no data, and what is alive is counted. It takes seconds for any size.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..data import load_corpus
from ..engine.machine import PEAK_TFLOPS, peak_tflops
from ..files import Need, read_json
from ..model import Experts, LoopedConfig, LoopedGPT
from ..train import TrainConfig, micro_batches_of_peak

EXAMPLES = ("L4", "RTX 4090", "A100", "H100")  # where no GPU is named
MOST_TOKENS = 2**21  # in a micro-batch: more than the memory of any device holds of a model worth planning
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "passing")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside: those alive, `now`, and the most at any time, `peak`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}  # by storage: views share one

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, key)
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, key: int):
        self.now -= self.sizes.pop(key)


@dataclass(frozen=True)
class Memory:
    """What training holds, in bytes. The parts are not all there at the same time, so they may be more than `peak`."""

    weights: int  # with buffers
    gradients: int
    optimizer: int  # Adam's two moments; of a matrix that Muon trains, one
    activations: int  # held for the backward pass of a micro-batch, by its largest segment
    peak: int  # the most at any moment of training and evaluation

    @property
    def passing(self) -> int:
        """What comes and goes at the fullest moment: logits, gradients of activations, an operation's own needs."""
        return max(0, self.peak - self.weights - self.gradients - self.optimizer - self.activations)


def memory(model_config: LoopedConfig, train_config: TrainConfig, dtype: torch.dtype = torch.bfloat16) -> Memory:
    """The memory of a training step and an evaluation at the largest shape, found without computing them.

    model_config: with its vocab_size. dtype: of matrix products, bfloat16 or float32. Counted is what eager torch keeps
    in tensors; a compiled block keeps less, and the libraries of the device have some hundred megabytes of their own.
    """
    # Those that wait for their next segment hold their streams, each as much as the other.
    waiting = micro_batches_of_peak(model_config, train_config.grad_accum)
    simulated = min(3, waiting)
    found = _simulated(model_config, train_config, dtype, simulated)
    if waiting > simulated:
        each = found.peak - _simulated(model_config, train_config, dtype, simulated - 1).peak
        found = replace(found, peak=found.peak + (waiting - simulated) * each)
    return found


def at_loops(counts: Sequence[Memory], n_loop: int) -> Memory:
    """The memory of n_loop loops, from that of one, two and perhaps three with all other settings the same.

    Without segments every further loop adds to each part what the last one added. With recompute_loops the second may
    add more than the third: a branch multiplier that is exactly 1, as that of gpt2-small at one loop, multiplies
    nothing and needs no room. So give three there.
    """
    if n_loop <= len(counts):
        return counts[n_loop - 1]
    further = n_loop - len(counts)
    before, last = (astuple(memory) for memory in counts[-2:])
    return Memory(*(b + further * (b - a) for a, b in zip(before, last, strict=True)))


# By preset, batch_size, recompute_loops and loss_chunk: the memory of one loop, of two, and perhaps of three.
Counts = dict[tuple[str, int, bool, int | None], tuple[Memory, ...]]


def load_counts(path: Path) -> Counts:
    """What benchmarks/memory.py counted.

    ``FileNotFoundError`` if there is no such file, ``ValueError`` that names file and field if it is no such record.
    """
    parts = [field.name for field in fields(Memory)]
    row: dict[str, Need] = dict(preset=str, batch_size=int, recompute_loops=bool, loss_chunk=int | None, n_loop=int)
    content = read_json(path, {"runs": [row | dict.fromkeys(parts, int)]}, "restore it, or record it anew")
    counts: Counts = {}
    for run in sorted(content["runs"], key=lambda run: run["n_loop"]):
        setting = (run["preset"], run["batch_size"], run["recompute_loops"], run.get("loss_chunk"))
        counts[setting] = (*counts.get(setting, ()), Memory(*(run[name] for name in parts)))
    return counts


def any_expert_linear(x: Tensor, weight: Tensor, load: Tensor) -> Tensor:
    """Stands for `model.grouped_linear` where there are no data to group by: the same shapes and bytes."""
    if torch.is_autocast_enabled("cpu"):
        weight = weight.to(torch.get_autocast_dtype("cpu"))
    return x @ weight[0]


def _simulated(c: LoopedConfig, train_config: TrainConfig, dtype: torch.dtype, grad_accum: int) -> Memory:
    with ExitStack() as inside:
        inside.enter_context(FakeTensorMode())
        live = inside.enter_context(LiveBytes())
        model = LoopedGPT(c)
        for module in model.modules():
            if isinstance(module, Experts):
                module.product = any_expert_linear
        weights = live.now
        optimizer = model.configure_optimizer(
            train_config.lr, train_config.weight_decay, optimizer=train_config.optimizer
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # from here on it has its state
        optimizer.zero_grad()
        moments, activations = live.now - weights, 0

        shape = (train_config.batch_size, c.block_size)
        batches = [[torch.zeros(shape, dtype=torch.int64) for _ in "xy"] for _ in range(grad_accum)]
        losses = [model.segment_losses(x, y) for x, y in batches]
        for _ in c.segments():
            for micro_batch in losses:  # in the order of train.accumulate
                before = live.now
                with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                    loss = next(micro_batch)
                activations = max(activations, live.now - before)
                loss.backward()
                del loss
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        gradients = sum(p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        del losses, micro_batch
        model.eval()
        with torch.no_grad():
            model(*batches[0], return_logits=False)
        return Memory(weights, gradients, moments, activations, live.peak)


def training_tokens(model_config: LoopedConfig, train_config: TrainConfig) -> int:
    """Tokens of the whole training, each as often as it is seen."""
    c = train_config
    return c.max_steps * c.grad_accum * c.batch_size * model_config.block_size


def hours(model_config: LoopedConfig, train_config: TrainConfig, tflops: float, mfu: float) -> float:
    """Training time where the share `mfu` of the device's best, `tflops`, goes into what the model has to compute."""
    with torch.device("meta"):
        model, N = LoopedGPT(model_config), model_config.n_loop
    drawn = [N] if train_config.n_loop_sampling == "fixed" else range(1, N + 1)
    flops = sum(model.flops_per_token(n_loop=n) for n in drawn) / len(drawn)
    return training_tokens(model_config, train_config) * flops / (mfu * tflops * 1e12) / 3600


def plan(
    model_config: LoopedConfig,
    train_config: TrainConfig,
    *,
    gpu: str | None = None,
    mfu: float = 0.4,
    gpu_memory: float | None = None,
) -> str:
    """A page that says what a training run will take.

    gpu: a name that contains one of `train.PEAK_TFLOPS`; None: the GPU that is here, else a few for comparison.
    mfu: the share of its best that is expected of it, in (0, 1].
    gpu_memory: gigabytes (1e9 bytes) that it has: the micro-batch is halved until it fits.
    Raises ValueError for what cannot be.
    """
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu={mfu} must lie in (0, 1]")
    if gpu_memory is not None and not gpu_memory > 0:
        raise ValueError(f"gpu_memory={gpu_memory} must be a number of gigabytes > 0")
    in_micro_batch = train_config.batch_size * model_config.block_size
    if in_micro_batch > MOST_TOKENS:  # counting them chunk by chunk would take minutes
        raise ValueError(
            f"batch_size={train_config.batch_size} windows of {model_config.block_size} are {in_micro_batch:,} tokens "
            f"in one micro-batch, and no device holds more than {MOST_TOKENS:,}: lower batch_size and raise grad_accum"
        )
    corpus = load_corpus(train_config.data, train_config.tokenizer)
    model_config = replace(model_config, vocab_size=corpus.tokenizer.vocab_size)
    peaks = expected_peaks(gpu, train_config.peak_tflops)
    dtype = torch.float32 if train_config.dtype == "float32" else torch.bfloat16

    c, needed = train_config, memory(model_config, train_config, dtype)
    if gpu_memory is not None:
        while needed.peak > gpu_memory * 1e9 and c.batch_size % 2 == 0:
            c = replace(c, batch_size=c.batch_size // 2, grad_accum=c.grad_accum * 2)
            needed = memory(model_config, c, dtype)
    with torch.device("meta"):
        model = LoopedGPT(model_config)
    tokens, per_step = training_tokens(model_config, c), c.grad_accum * c.batch_size * model_config.block_size
    parts = [f"{name} {in_bytes(getattr(needed, name))}" for name in MEMORY_PARTS]
    lines = [
        f"model    {model_config.n_layer} blocks x {model_config.n_loop} loops = {model_config.n_unroll} block visits, "
        f"{model.num_params():,} parameters, each once",
        f"compute  {model.flops_per_token() / 1e6:,.0f} MFLOP to train on a token, over all block visits",
        f"batch    {c.grad_accum} micro-batches of {c.batch_size} x {model_config.block_size} = {per_step:,} tokens",
        f"tokens   {c.max_steps:,} steps: {tokens:,}, {tokens / len(corpus.train):,.1f} times over {corpus.name}",
        f"memory   {in_bytes(needed.peak)} at most, in {str(dtype).removeprefix('torch.')} and not compiled",
        f"         parts, not all there at once: {', '.join(parts)}",
    ]
    if gpu_memory is not None and needed.peak > gpu_memory * 1e9:
        lines.append(
            f"notice   more than {gpu_memory:g} GB: set --recompute-loops or --loss-chunk, or a smaller block_size"
        )
    elif c.batch_size != train_config.batch_size:
        lines.append(f"notice   {gpu_memory:g} GB want --batch-size {c.batch_size} --grad-accum {c.grad_accum}")
    for name, tflops in peaks.items():
        time = hours(model_config, c, tflops, mfu)
        lines.append(f"time     {time:,.1f} hours on {name}, if it spends {mfu:.0%} of its {tflops:g} TFLOP/s on this")
    if model_config.recompute_loops:
        lines.append("notice   with recompute_loops the blocks run forward twice: up to a third longer than that")
    return "\n".join(lines)


def in_bytes(size: float) -> str:
    """As MB, from a thousand of them on as GB."""
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"


def expected_peaks(gpu: str | None, given: float | None) -> dict[str, float]:
    """TFLOP/s by name: of the GPU that is asked for, of the one that is here, or of a few. `given` beats the table."""
    if gpu is None and torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    if gpu is None:
        return {name: PEAK_TFLOPS[name] for name in EXAMPLES} if given is None else {"this device": given}
    best = given or peak_tflops(gpu)
    if best is None:
        raise ValueError(f"gpu={gpu!r} is none of {', '.join(PEAK_TFLOPS)}: give its --peak-tflops")
    return {gpu: best}
