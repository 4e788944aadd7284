"""A looped (weight-tied) GPT in one file.

A looped transformer applies the same stack of L blocks N times: depth without parameters. This file holds the whole
model, dense or mixture of experts, with every residual-scaling rule as one row of a table. It imports torch and the
standard library only, so it can be copied out and read alone. From top to bottom:

    LoopedConfig    every choice, with its unit and its default
    RULES           one row per scaling rule; adding a rule is adding a row
    Attention, MLP, Router, Experts, MoE
    Block           two sublayer visits, each the same line:
                    h <- post_norm(skip * h + carry(branch * out_norm(f(in_gain * pre_norm(h)))))
    LoopedGPT       the loop, segmented backprop, generation, the optimizer groups

    from minilooped import LoopedConfig, LoopedGPT
    model = LoopedGPT(LoopedConfig(vocab_size=65, block_size=64, n_layer=2, n_loop=4, n_head=4, n_embd=128))
    logits, loss = model(idx, targets)              # idx, targets: (B, T) int64
    for loss in model.segment_losses(idx, targets):  # the same, one loss per segment of loops
        loss.backward()

Shapes use B batch, T positions, C = n_embd, H heads, D = C / H, V vocabulary, E experts, k = top_k, S = B * T tokens.
Papers, cited by number: [1] On the Residual Scaling of Looped Transformers, arXiv 2606.18524. [2] DeepLoop,
arXiv 2607.13491. [3] LOOM, Looping Beyond Twice, arXiv 2610.01153. In [2] the letter N means L * N.
"""

import math
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# ----------------------------------------------------------------------------------------------------------------------
# Settings and how they are checked


def plain_number(value: Any, whole: bool) -> int | float | None:
    """A number of any library as one of Python's, so np.int64(3) as 3. None if it is none, or not whole but should be.

    True and False are no numbers here.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) and not whole else None


COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def unmet(value: Any, annotation: Any, bounds: str | None) -> str | None:
    """What a setting must be by its annotation and is not, in words; None if all is well. See `check_settings`."""
    kinds = get_args(annotation) or (annotation,)
    if get_origin(annotation) is Literal:
        return None if value in kinds else f"one of {', '.join(kinds)}"
    if bool in kinds:
        return None if isinstance(value, bool) else "True or False"
    if str in kinds:
        return None if isinstance(value, str) else "a str"
    whole = int in kinds
    kind, least, most = ("an int", ">= 1", "<= 9e18") if whole else ("a finite number", ">= 0", "<= 1e300")
    number = plain_number(value, whole)
    for bound in (*(bounds or least).split(", "), most):
        sign, limit = bound.split()
        if number is None or not COMPARISONS[sign](number, float(limit)):
            return f"{kind} {bound}"
    return None


def check_settings(settings: Any, bounds: Mapping[str, str]) -> None:
    """Check each field of a dataclass by its annotation, and store its numbers as Python's own.

    An annotation is a Literal of strings, or bool, str, int or float, perhaps with None. bounds: what the number of a
    field must fulfil, such as ">= 0, < 1"; without an entry an int must be >= 1 and a float >= 0. Raises a ValueError
    that names the field, its value and what it must be.
    """
    for field in fields(settings):
        value, optional = getattr(settings, field.name), type(None) in get_args(field.type)
        if value is None and optional:
            continue
        if wanted := unmet(value, field.type, bounds.get(field.name)):
            raise ValueError(f"{field.name}={value!r} must be {wanted}{', or None' if optional else ''}")
        if (number := plain_number(value, whole=False)) is not None:
            object.__setattr__(settings, field.name, number)  # the dataclass may be frozen


# A visit of a block takes Python a fraction of a millisecond: at the largest depths a forward pass takes minutes.
MAX_LAYERS = MAX_LOOPS = 100_000

BOUNDS = {
    "n_layer": f">= 1, <= {MAX_LAYERS}",
    "n_loop": f">= 1, <= {MAX_LOOPS}",
    "init_std": "> 0",  # 0 would switch the model off, and so would lam = 0
    "lam": "> 0",
    "l_ref": "> 0",
    "loop_residual": ">= 0, < 1",
    "n_expert": ">= 0",
    "n_expert_shared": ">= 0",
}


@dataclass(frozen=True)
class LoopedConfig:
    """Every choice of the model. A combination that cannot work raises a ValueError that names the fields."""

    vocab_size: int = 50257  # tokens V
    block_size: int = 1024  # longest window, in tokens
    n_layer: int = 12  # unique blocks L
    n_loop: int = 1  # passes N through the whole stack; the unrolled depth is L * N
    n_head: int = 12  # attention heads H
    n_embd: int = 768  # width C
    n_inner: int | None = None  # MLP width (per expert); None: 4C, for swiglu 8C/3, shared out over the active experts
    mlp: Literal["swiglu", "gelu", "relu2"] = "swiglu"  # gelu is GPT-2's tanh form
    qk_norm: bool = False  # parameter-free RMSNorm on queries and keys
    norm: Literal["rms", "layer"] = "rms"  # kind of the learned norms; layer is GPT-2's
    pos: Literal["rope", "learned"] = "rope"  # rotary positions, or a learned vector for each (GPT-2)
    bias: bool = False  # biases in attention, MLP and LayerNorm; routed experts have none
    tie_embeddings: bool = True  # one matrix for the embedding and the head
    init_std: float = 0.02  # base std of every matrix; suits width 768. n_embd ** -0.5 makes growth visible when narrow

    rule: str = "factored"  # residual scaling: a row of RULES
    lam: float | None = None  # branch constant lambda; None: the row's own (0.5 for loom, else 1)
    l_ref: float = 1  # reference depth: L/l_ref takes the place of L. 1 is the literal 1/(N sqrt L); [1] used 12
    embed_norm: bool | None = None  # parameter-free RMSNorm of the embedding, so that R_0 = 1; None: the row's own

    reinject: bool = False  # LOOM: mix the embedding back in at the start of loops t = 2..N
    reinject_lam: float = 0.5  # its constant: g_t = reinject_lam / (t sqrt L)
    loop_residual: float | None = None  # LOOM: EMA decay beta of the looping residual, in [0, 1); None: none
    loop_end_norm: bool = False  # LOOM: parameter-free RMSNorm closing every loop

    n_expert: int = 0  # routed experts E; 0 is a dense MLP
    n_expert_shared: int = 0  # experts that every token visits, with weight 1
    top_k: int = 2  # routed experts per token
    router: Literal["shared", "per_loop"] = "shared"  # one router for all loops, or one per loop
    router_init: Literal["copy", "independent"] = "copy"  # per-loop routers start equal, or not
    gate: Literal["softmax", "sigmoid"] = "softmax"  # logits to scores
    # bias: a selection bias, moved once per optimizer update by `LoopedGPT.move_biases`. switch: the Switch loss. The
    # Switch loss is a product of two means over the tokens of one forward, so it is taken per micro-batch and process:
    # gradients of the same step in 8 micro-batches differed from those in one by 0.05 to 0.24 %.
    balance: Literal["bias", "switch", "none"] = "bias"
    balance_coef: float = 2e-3  # step of the bias, or weight of the Switch loss
    z_coef: float = 1e-3  # weight of the router z-loss, a mean over all tokens, those without a target included
    moe_out_norm: bool = False  # LOOM: learned RMSNorm on the MoE output

    segment: int | None = None  # loops per segment of segmented backprop; None: ordinary backprop

    # Two ways to save memory in training that change no result.
    recompute_loops: bool = False  # activation checkpointing: hold each loop's start only, and run it again backwards
    loss_chunk: int | None = None  # tokens whose logits are there at a time; None: all. For large vocabularies

    def __post_init__(self):
        check_settings(self, BOUNDS)
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is not one of {', '.join(RULES)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}: change one of them")
        if self.pos == "rope" and self.n_embd // self.n_head % 2:
            raise ValueError(
                f"pos='rope' turns pairs, so the head width n_embd/n_head={self.n_embd // self.n_head} must be even: "
                "change n_embd or n_head, or use pos='learned'"
            )
        if 0 < self.n_expert < self.top_k:
            raise ValueError(f"top_k={self.top_k} is more than the n_expert={self.n_expert} experts: lower top_k")
        for name, off in (("n_expert_shared", 0), ("router", "shared"), ("moe_out_norm", False)):
            value = getattr(self, name)
            if value != off and not self.n_expert:
                raise ValueError(f"{name}={value!r} needs experts: set n_expert > 0, or leave {name} at {off!r}")

    @property
    def n_unroll(self) -> int:
        """Unrolled depth in blocks, L * N."""
        return self.n_layer * self.n_loop

    def segments(self, n_loop: int | None = None) -> list[range]:
        """The loops, 0-based, of each segment of segmented backprop; the last one may be shorter."""
        n_loop = self.n_loop if n_loop is None else n_loop
        length = self.segment or n_loop
        return [range(first, min(first + length, n_loop)) for first in range(0, n_loop, length)]

    @property
    def layer_ratio(self) -> float:
        """L / l_ref, unique layers as the scaling rules count them."""
        return self.n_layer / self.l_ref

    @property
    def depth_ratio(self) -> float:
        """L * N / l_ref, the unrolled depth as the scaling rules count it."""
        return self.n_unroll / self.l_ref

    @property
    def inner(self) -> int:
        """Resolved MLP width: of the dense MLP, or of one expert."""
        if self.n_inner is not None:
            return self.n_inner
        width = self.n_embd * (8 / 3 if self.mlp == "swiglu" else 4)  # the same number of weights either way
        if self.n_expert:
            width /= self.top_k + self.n_expert_shared  # so that the active experts are as wide as the dense MLP
        if self.mlp != "swiglu" and not self.n_expert:
            return int(width)
        return max(8, 8 * round(width / 8))

    @property
    def row(self) -> "Row":
        """The resolved row of the scaling rule."""
        return RULES[self.rule](self)

    @property
    def normalizes_embedding(self) -> bool:
        """Resolved `embed_norm`."""
        return self.row.embed_norm if self.embed_norm is None else self.embed_norm

    def num_params(self) -> int:
        """Parameters of the model, reckoned without making one: a looped block once, a tied matrix once."""
        width, row = self.n_embd, self.row

        def mlp(inner: int, bias: bool) -> int:
            inner_in = inner * (2 if self.mlp == "swiglu" else 1)
            return width * (inner_in + inner) + bias * (inner_in + width)

        norm = width * (2 if self.norm == "layer" and self.bias else 1)
        block = 4 * width * (width + self.bias) + {"none": 0, "pre": 2, "post": 2, "both": 4}[row.norm] * norm
        block += row.learn_branch + self.moe_out_norm * width
        if self.n_expert:
            routers = self.n_loop if self.router == "per_loop" else 1
            block += self.n_expert * (routers * width + mlp(self.inner, bias=False))
        if self.n_expert_shared or not self.n_expert:
            block += mlp(self.inner * (self.n_expert_shared or 1), self.bias)
        positions = self.block_size if self.pos == "learned" else 0
        tokens = self.vocab_size * (1 if self.tie_embeddings else 2)
        return self.n_layer * block + (tokens + positions) * width + norm


# ----------------------------------------------------------------------------------------------------------------------
# Residual scaling: every rule is one row


@dataclass(frozen=True)
class Row:
    """What a scaling rule fills in. `in_gain` may be a function of the 1-based block visit, 1..L*N."""

    skip: float = 1.0  # multiplies the stream
    branch: float = 1.0  # multiplies the sublayer's output; with `learn_branch` only its start
    learn_branch: bool = False  # one learned scalar per unique block takes the place of `branch`
    init_gain: float = 1.0  # multiplies the init of value, output and MLP matrices; never q, k, embeddings, biases
    in_gain: float | Callable[[int], float] = 1.0  # multiplies the normalised input of a sublayer
    norm: Literal["pre", "post", "both", "none"] = "pre"  # where the learned norms of a sublayer sit
    lr_factor: float = 1.0  # multiplies the learning rate of everything inside the blocks
    eps_factor: float = 1.0  # the same for Adam's epsilon
    embed_norm: bool = False  # default of LoopedConfig.embed_norm


def lam_or(default: float, c: LoopedConfig) -> float:
    """The config's lambda, or the row's own."""
    return default if c.lam is None else c.lam


# No row adds GPT-2's 1/sqrt(2L) to the init of the output projections: depth would be paid for twice.
RULES: dict[str, Callable[[LoopedConfig], Row]] = {
    # No scaling: tied updates add up like N, untied ones like sqrt(L). [1] section 1
    "none": lambda c: Row(),
    "sqrt": lambda c: Row(branch=c.n_loop**-0.5),  # what untied layers would need
    "inverse": lambda c: Row(branch=1 / c.n_loop),  # what tied ones need
    "sqrt_depth": lambda c: Row(branch=c.n_unroll**-0.5),
    # lambda / (N sqrt(L/l_ref)): loops and layers apart. The learning rate and Adam's epsilon see L only. [1] theorem 3
    "factored": lambda c: Row(
        branch=lam_or(1.0, c) / c.n_loop * c.layer_ratio**-0.5,
        lr_factor=c.layer_ratio**-0.5,
        eps_factor=c.layer_ratio**-0.5,
    ),
    # The scale of LOOM [3]; its other parts are switches of their own.
    "loom": lambda c: Row(branch=lam_or(0.5, c) / c.n_loop * c.n_layer**-0.5, embed_norm=True),
    # Depth-muP, arXiv 2310.02244: 1/sqrt(depth) on branch, learning rate and epsilon. CompleteP, arXiv 2505.01618, at
    # alpha = 1: 1/depth on branch and epsilon. Both see the unrolled depth.
    "depth_mup": lambda c: Row(
        branch=c.depth_ratio**-0.5, lr_factor=c.depth_ratio**-0.5, eps_factor=c.depth_ratio**-0.5
    ),
    "completep": lambda c: Row(branch=1 / c.depth_ratio, eps_factor=1 / c.depth_ratio),
    # LayerNorm Scaling, arXiv 2502.05795: the norm's output fades with the visit.
    "layernorm_scaling": lambda c: Row(in_gain=lambda visit: visit**-0.5),
    # ReZero, arXiv 2003.04887: silent branches that learn to speak, and no norm.
    "rezero": lambda c: Row(branch=0.0, learn_branch=True, norm="none"),
    # DeepNorm, arXiv 2203.00555, p = 1/4, and DeepLoop [2], p = 1/2: (2LN)^p on the skip, (8LN)^-p on the init.
    "deepnorm": lambda c: Row(skip=(2 * c.n_unroll) ** 0.25, init_gain=(8 * c.n_unroll) ** -0.25, norm="post"),
    "deeploop": lambda c: Row(
        skip=(2 * c.n_unroll) ** 0.5, init_gain=(8 * c.n_unroll) ** -0.5, norm="both", embed_norm=True
    ),
}


# ----------------------------------------------------------------------------------------------------------------------
# Small pieces


def scale(x: Tensor, factor: float | Tensor) -> Tensor:
    """factor * x; a plain 1 costs nothing and changes no bit."""
    return x if isinstance(factor, float) and factor == 1.0 else factor * x


def rms_norm(x: Tensor) -> Tensor:
    """Parameter-free RMSNorm over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def make_norm(config: LoopedConfig) -> nn.Module:
    """A learned norm of the configured kind."""
    if config.norm == "rms":
        return nn.RMSNorm(config.n_embd, eps=1e-6)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)  # GPT-2's epsilon


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# Where the width of the logits decides the speed of a matrix product, and the multiple to which it is padded there.
PADDED_DEVICES, PADDED_MULTIPLE = ("cuda",), 128


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits (S, V), targets (S,), -100 is ignored -> (), the sum over the targets, in float32 or better."""
    return F.cross_entropy(at_least_float32(logits), targets, reduction="sum")


def counted(targets: Tensor) -> Tensor:
    """How many targets count, (); 1 where all are ignored, so that their loss is 0 and not NaN."""
    return (targets != -100).sum().clamp_min(1)


def rotary_table(block_size: int, head_size: int, base: float = 10000.0) -> Tensor:
    """cos and sin of the rotary angles, (2, block_size, 1, 1, D), laid out for `rotate`."""
    frequency = base ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)  # (D/2,)
    angle = torch.outer(torch.arange(block_size, dtype=torch.float64), frequency)  # (block_size, D/2)
    cos = torch.cat((angle.cos(), angle.cos()), dim=-1)
    sin = torch.cat((-angle.sin(), angle.sin()), dim=-1)
    return torch.stack((cos, sin))[:, :, None, None, :]


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x (B, T, *, H, D) by its position's angle, in the table's precision."""
    cos, sin = rope  # each (T, 1, 1, D)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q (B, H, T, D) are the last T of the S positions of k and v (B, H, S, D)."""
    T, S = q.shape[-2], k.shape[-2]
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and S <= 512:
        # The CPU's fused kernel has a slow bfloat16 backward; up to about this length plain products are faster.
        with torch.autocast("cpu", enabled=False):
            mask = torch.full((T, S), -torch.inf, dtype=q.dtype).triu(S - T + 1)
            score = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)  # (B*H, T, S)
            return (score.softmax(dim=-1) @ v.flatten(0, 1)).view_as(q)
    if T in (1, S):  # the last position sees all, so it needs no mask
        return F.scaled_dot_product_attention(q, k, v, is_causal=T == S)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class KVCache:
    """Preallocated keys and values for generation: one slot per (loop, layer), since every visit has its own."""

    def __init__(self, config: LoopedConfig, n_loop: int, batch: int, like: Tensor, length: int | None = None):
        self.capacity = config.block_size if length is None else min(length, config.block_size)
        self.length = 0  # positions filled so far
        head_size = config.n_embd // config.n_head
        shape = (n_loop, config.n_layer, 2, batch, config.n_head, self.capacity, head_size)
        self.store = torch.empty(shape, dtype=like.dtype, device=like.device)

    def slot(self, loop: int, layer: int) -> tuple[Tensor, int]:
        """The store (2, B, H, capacity, D) of one visit, and the position at which the new tokens start."""
        return self.store[loop, layer], self.length


# ----------------------------------------------------------------------------------------------------------------------
# Sublayers


class Attention(nn.Module):
    """Causal multi-head self-attention. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.n_head, self.qk_norm, self.rotary = config.n_head, config.qk_norm, config.pos == "rope"
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # rows: queries, keys, values
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, rope: Tensor | None = None, slot: tuple[Tensor, int] | None = None) -> Tensor:
        B, T, C = x.shape
        if self.rotary and (rope is None or rope.shape[1] != T):
            raise ValueError(
                f"with pos='rope' a block needs the angles of its {T} positions: give it "
                f"rope=model.rope[:, s : s + {T}], where s is the first position, 0 without a cache"
            )
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, 3, H, D)
        qk, v = qkv.split((2, 1), dim=2)  # (B, T, 2, H, D), (B, T, 1, H, D)
        if self.qk_norm:
            qk = rms_norm(qk)
        if self.rotary:
            qk = rotate(qk, rope)
        q, k = qk.transpose(1, 3).unbind(2)  # each (B, H, T, D)
        v = v.squeeze(2).transpose(1, 2)  # (B, H, T, D)
        if slot is not None:  # append the new keys and values, then attend to all that are stored
            store, start = slot
            store[0, :, :, start : start + T], store[1, :, :, start : start + T] = k, v
            k, v = store[:, :, :, : start + T].to(q.dtype)
        return self.proj(attend(q, k, v).transpose(1, 2).reshape(B, T, C))


def activate(kind: str, x: Tensor) -> Tensor:
    """The MLP's nonlinearity; swiglu halves the last dimension."""
    if kind == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(x, approximate="tanh") if kind == "gelu" else F.relu(x).square()


class MLP(nn.Module):
    """Dense feed-forward layer. (..., C) -> (..., C)"""

    def __init__(self, config: LoopedConfig, inner: int):
        super().__init__()
        self.kind = config.mlp
        self.w_in = nn.Linear(config.n_embd, inner * (2 if self.kind == "swiglu" else 1), bias=config.bias)
        self.w_out = nn.Linear(inner, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(activate(self.kind, self.w_in(x)))


class Routing(NamedTuple):
    """What a router decided for the S tokens of one visit."""

    choice: Tensor  # (S, k) int64, experts of each token
    weight: Tensor  # (S, k), their weights; each row sums to 1 unless k = 1
    load: Tensor  # (E,) int64, tokens per expert
    aux_loss: Tensor  # (), balance and z-loss, already weighted


class Router(nn.Module):
    """Scores the experts for every token and picks the top k. One set of weights for all loops, or one per loop."""

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.config = config
        n_router = config.n_loop if config.router == "per_loop" else 1
        self.weight = nn.Parameter(torch.empty(n_router, config.n_expert, config.n_embd))
        # Added to the scores for selection only. No gradient reaches it: `LoopedGPT.move_biases` moves it.
        self.register_buffer("bias", torch.zeros(config.n_expert))
        # Tokens that each expert got in the training forwards since the last move, (E,).
        self.register_buffer("collected", torch.zeros(config.n_expert, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, loop: int) -> Routing:
        """x: (S, C); loop: 0-based. Loops beyond the trained ones use the last router."""
        config, n_expert = self.config, self.config.n_expert
        x = at_least_float32(x)  # routing is decided in float32 whatever the rest computes in
        rows = self.weight[min(loop, len(self.weight) - 1)]  # (E, C), one row per expert
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x, rows.to(x.dtype))  # (S, E)
        score = logits.softmax(dim=-1) if config.gate == "softmax" else logits.sigmoid()
        choice = (score.detach() + self.bias).topk(config.top_k, dim=-1).indices  # (S, k)
        weight = score.gather(1, choice)  # (S, k)
        if config.top_k > 1:  # at k = 1 the only weight would be 1 and the router would learn nothing
            weight = weight / weight.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        flat = choice.flatten()
        load = flat.new_zeros(n_expert).scatter_add_(0, flat, torch.ones_like(flat))
        aux_loss = config.z_coef * logits.logsumexp(dim=-1).square().mean()
        if config.balance == "switch":  # E * sum of (share of the tokens) * (mean probability); 1 when balanced
            share = load.to(score.dtype) / load.sum()
            probability = (score / score.sum(dim=-1, keepdim=True)).mean(dim=0)
            aux_loss = aux_loss + config.balance_coef * n_expert * (share * probability).sum()
        return Routing(choice, weight, load, aux_loss)

    def move_bias(self, load: Tensor):
        """One step of `balance_coef` for each expert: up below the mean load, down above it. [3]; load: (E,) int64"""
        above = torch.sign(len(load) * load - load.sum())  # in whole numbers, where a load at the mean gives exactly 0
        self.bias -= self.config.balance_coef * above.to(self.bias.dtype)


def grouped_linear(x: Tensor, weight: Tensor, load: Tensor) -> Tensor:
    """x (S*k, I), sorted by expert, through weight (E, I, O); `load` (E,) counts each expert's rows. -> (S*k, O)"""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    # Eagerly one kernel serves both dtypes; under torch.compile its shape rules know bfloat16 only.
    dtypes = (torch.bfloat16,) if torch.compiler.is_compiling() else (torch.bfloat16, torch.float32)
    if hasattr(F, "grouped_mm") and x.dtype in dtypes and aligned:
        return F.grouped_mm(x, weight, offs=load.cumsum(0).to(torch.int32))
    groups = x.split(load.tolist())
    return torch.cat([group @ w for group, w in zip(groups, weight.unbind(0), strict=True)])


class Experts(nn.Module):
    """E feed-forward layers with their weights stacked. Rows sorted by expert in, rows sorted by expert out."""

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.kind, inner = config.mlp, config.inner
        inner_in = inner * (2 if self.kind == "swiglu" else 1)
        self.w_in = nn.Parameter(torch.empty(config.n_expert, config.n_embd, inner_in))
        self.w_out = nn.Parameter(torch.empty(config.n_expert, inner, config.n_embd))

    def forward(self, x: Tensor, load: Tensor) -> Tensor:
        return grouped_linear(activate(self.kind, grouped_linear(x, self.w_in, load)), self.w_out, load)


class MoE(nn.Module):
    """Mixture of experts: each token visits its top k routed experts and all shared ones. No token is dropped."""

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.top_k = config.top_k
        self.router = Router(config)
        self.experts = Experts(config)
        # Shared experts all have weight 1, so together they are one wider MLP.
        self.shared = MLP(config, config.n_expert_shared * config.inner) if config.n_expert_shared else None

    def forward(self, x: Tensor, loop: int = 0) -> tuple[Tensor, Routing]:
        B, T, C = x.shape
        tokens = x.reshape(B * T, C)  # (S, C)
        routing = self.router(tokens, loop)
        order = routing.choice.flatten().argsort(stable=True)  # the S*k (token, choice) pairs, grouped by expert
        out = self.experts(tokens.index_select(0, order // self.top_k), routing.load)  # (S*k, C)
        out = out.index_select(0, order.argsort()).view(B * T, self.top_k, C)  # back in the tokens' order: (S, k, C)
        y = (out * routing.weight[..., None]).sum(dim=1).view(B, T, C)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, routing


# ----------------------------------------------------------------------------------------------------------------------
# The block and what it carries from visit to visit


class EMA(NamedTuple):
    """Normalised exponential moving average: after m writes, weights beta^(m-j)(1-beta)/(1-beta^m), which sum to 1."""

    total: Tensor  # (B, T, C), float32 or better
    weight: Tensor  # ()

    @classmethod
    def empty(cls, like: Tensor) -> "EMA":
        total = torch.zeros_like(at_least_float32(like.detach()))
        return cls(total, total.new_zeros(()))

    def write(self, x: Tensor, beta: float) -> "EMA":
        return EMA(beta * self.total + x, beta * self.weight + 1)

    def read(self) -> Tensor:
        return self.total / self.weight


class Memory(NamedTuple):
    """LOOM's looping residual [3]: a local memory, new in every loop, and a global one that reads from the local."""

    local: EMA
    global_: EMA

    def carry(self, update: Tensor, beta: float) -> tuple[Tensor, "Memory"]:
        """Write `update`, and return what takes its place on the stream: both memories' means."""
        local = self.local.write(update, beta)
        recent = local.read()
        global_ = self.global_.write(recent, beta)
        return (recent + global_.read()).to(update.dtype), Memory(local, global_)


class Block(nn.Module):
    """Attention, then MLP or experts. The same object is visited once per loop."""

    def __init__(self, config: LoopedConfig):
        super().__init__()
        row = config.row
        before, after = row.norm in ("pre", "both"), row.norm in ("post", "both")
        self.skip, self.beta = row.skip, config.loop_residual
        self.branch = nn.Parameter(torch.tensor(row.branch)) if row.learn_branch else row.branch
        self.attn = Attention(config)
        self.attn_pre_norm = make_norm(config) if before else nn.Identity()
        self.attn_post_norm = make_norm(config) if after else nn.Identity()
        self.mlp = MoE(config) if config.n_expert else MLP(config, config.inner)
        self.mlp_pre_norm = make_norm(config) if before else nn.Identity()
        self.mlp_out_norm = nn.RMSNorm(config.n_embd, eps=1e-6) if config.moe_out_norm else nn.Identity()
        self.mlp_post_norm = make_norm(config) if after else nn.Identity()

    def forward(
        self,
        h: Tensor,
        loop: int = 0,
        in_gain: float = 1.0,
        rope: Tensor | None = None,
        memory: Memory | None = None,
        slot: tuple[Tensor, int] | None = None,
    ) -> tuple[Tensor, Memory | None, Routing | None]:
        """One visit. h: (B, T, C), the residual stream; loop: 0-based; rope: (2, T, 1, 1, D); slot: see KVCache."""
        update = self.attn(scale(self.attn_pre_norm(h), in_gain), rope, slot).to(h.dtype)
        update = scale(update, self.branch)
        if memory is not None:
            update, memory = memory.carry(update, self.beta)
        h = self.attn_post_norm(scale(h, self.skip) + update)

        x, routing = scale(self.mlp_pre_norm(h), in_gain), None
        if isinstance(self.mlp, MoE):
            update, routing = self.mlp(x, loop)
        else:
            update = self.mlp(x)
        update = scale(self.mlp_out_norm(update.to(h.dtype)), self.branch)
        h = self.mlp_post_norm(scale(h, self.skip) + update)
        return h, memory, routing


# ----------------------------------------------------------------------------------------------------------------------
# The looped model


class LoopedGPT(nn.Module):
    """L blocks applied N times: one Python loop over visits, each block one object called many times."""

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.pos == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = make_norm(config)
        # A tied head has no parameter of its own: it reads the embedding's.
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        rope = rotary_table(config.block_size, config.n_embd // config.n_head) if config.pos == "rope" else None
        self.register_buffer("rope", None if rope is None else rope.float(), persistent=False)
        self.init_weights()

    @property
    def row(self) -> Row:
        """The resolved row of the scaling rule."""
        return self.config.row

    @torch.no_grad()
    def init_weights(self):
        """Matrices ~ N(0, init_std^2), times the rule's init gain for value, output and MLP; biases 0; norms 1."""
        gain, width = self.row.init_gain, self.config.n_embd
        for name, parameter in self.named_parameters():
            if name.endswith(".branch") or "norm" in name:
                continue  # made with their final values: ReZero's scalars and the norms
            if name.endswith(".bias"):
                parameter.zero_()
                continue
            parameter.normal_(std=self.config.init_std)
            if name.endswith(".qkv.weight"):
                parameter[2 * width :] *= gain  # the values; queries and keys keep gain 1
            elif name.startswith("blocks.") and not name.endswith(".router.weight"):
                parameter *= gain
            elif name.endswith(".router.weight") and self.config.router_init == "copy":
                parameter.copy_(parameter[:1].clone().expand_as(parameter))  # [3]: every loop starts from router 0

    # -- the loop ------------------------------------------------------------------------------------------------------

    def embed(self, idx: Tensor, start: int = 0) -> Tensor:
        """Tokens (B, T) at positions start, start + 1, ... -> the stream before the first loop, (B, T, C)."""
        x0 = self.wte(idx)
        if self.wpe is not None:
            x0 = x0 + self.wpe.weight[start : start + idx.shape[1]]
        return rms_norm(x0) if self.config.normalizes_embedding else x0

    def reinjection_gain(self, loop: int) -> float:
        """g_t = reinject_lam / (t sqrt L), at most 1, for t = loop + 1; 0 in the first loop. [3]"""
        t = loop + 1
        return 0.0 if t == 1 else min(1.0, self.config.reinject_lam / (t * math.sqrt(self.config.n_layer)))

    def run_loop(
        self,
        h: Tensor,
        loop: int,
        x0: Tensor,
        global_ema: EMA | None = None,
        start: int = 0,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, EMA | None, list[Routing | None]]:
        """One pass through the stack.

        h: (B, T, C), the stream; loop: 0-based; x0: (B, T, C), the embedding; global_ema: the looping residual's
        global memory, None in the first loop; start: position of the first token. Returns the stream, the global
        memory and one routing per layer.
        """
        if self.config.recompute_loops and torch.is_grad_enabled() and cache is None:
            return self._recomputed_loop(h, loop, x0, global_ema, start)
        return self._run_loop(h, loop, x0, global_ema, start, cache)

    def _recomputed_loop(
        self, h: Tensor, loop: int, x0: Tensor, global_ema: EMA | None, start: int
    ) -> tuple[Tensor, EMA | None, list[Routing | None]]:
        """A loop of which nothing is held but its inputs: the backward pass runs it a second time."""

        def run(h: Tensor, loop: int, x0: Tensor, start: int, *global_ema: Tensor):
            return self._run_loop(h, loop, x0, EMA(*global_ema) if global_ema else None, start)

        # The global memory goes in as tensors: saved for the backward pass, and let go by it. A tuple is only kept.
        inputs = h, loop, x0, start, *(global_ema or ())
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _run_loop(
        self, h: Tensor, loop: int, x0: Tensor, global_ema: EMA | None, start: int, cache: KVCache | None = None
    ) -> tuple[Tensor, EMA | None, list[Routing | None]]:
        config, in_gain, rope, memory, routings = self.config, self.row.in_gain, None, None, []
        if config.reinject and loop > 0:
            h = torch.lerp(h, x0, self.reinjection_gain(loop))
        if config.loop_residual is not None:
            memory = Memory(local=EMA.empty(h), global_=EMA.empty(h) if global_ema is None else global_ema)
        if self.rope is not None:
            rope = self.rope[:, start : start + h.shape[1]]
        for layer, block in enumerate(self.blocks):
            gain = in_gain(loop * config.n_layer + layer + 1) if callable(in_gain) else in_gain
            slot = None if cache is None else cache.slot(loop, layer)
            h, memory, routing = block(h, loop, gain, rope, memory, slot)
            routings.append(routing)
        if config.loop_end_norm:
            h = rms_norm(h)
        return h, None if memory is None else memory.global_, routings

    def _head(self) -> tuple[Tensor, Tensor | None]:
        """The head's matrix (V, C) and no bias; or, padded, a matrix (V', C) and a bias (V').

        GPT-2's vocabulary of 50,257 is odd, and a GPU's tensor cores want widths that are multiples of 64 or 128. So in
        training on a GPU rows of zeros are added to the matrix for the time of the product, with a bias of minus
        infinity: the added logits have probability 0 and no gradient. Parameters, checkpoints and the logits that
        `logits` returns never show them.
        """
        weight = self.wte.weight if self.head is None else self.head.weight
        extra = -len(weight) % PADDED_MULTIPLE
        if not extra or weight.device.type not in PADDED_DEVICES or not torch.is_grad_enabled():
            return weight, None
        return F.pad(weight, (0, 0, 0, extra)), F.pad(weight.new_zeros(len(weight)), (0, extra), value=-math.inf)

    def logits(self, h: Tensor) -> Tensor:
        """Read the stream out: final norm and head, (B, T, C) -> (B, T, V). Works on the state after any loop."""
        weight, bias = self._head()
        logits = F.linear(self.final_norm(h), weight, bias)
        return logits if bias is None else logits[..., : self.config.vocab_size]

    def cross_entropy(self, h: Tensor, targets: Tensor) -> Tensor:
        """Loss of the read-out: h (B, T, C), targets (B, T), -100 is ignored -> (), nats per target that counts.

        With `loss_chunk` the logits of that many tokens are there at a time, and the backward pass makes them again.
        """
        h, targets = h.flatten(0, 1), targets.flatten()  # (S, C), (S,)
        size = self.config.loss_chunk or len(h)
        weight, bias = self._head()  # padded once for all chunks

        def summed(h: Tensor, targets: Tensor) -> Tensor:
            return summed_cross_entropy(F.linear(self.final_norm(h), weight, bias), targets)

        if size >= len(h):
            total = summed(h, targets)
        else:
            chunks = zip(h.split(size), targets.split(size), strict=True)
            total = sum(checkpoint(summed, *chunk, use_reentrant=False) for chunk in chunks)
        return total / counted(targets)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        n_loop: int | None = None,
        return_states: bool = False,
        return_logits: bool = True,
        cache: KVCache | None = None,
    ) -> tuple[Tensor | None, Tensor | None] | tuple[Tensor | None, Tensor | None, list[Tensor]]:
        """Run all loops once. Returns (logits, loss), and the states too if asked for.

        idx: (B, T) int64, T <= block_size; targets: (B, T) int64, -100 is ignored.
        n_loop: another loop count at test time. The rule's multipliers stay those of the trained count, routers beyond
            it reuse the last one, re-injection goes on by its formula.
        return_logits: False gives None in their place, which saves memory where `loss_chunk` is set.
        cache: a KVCache that holds the positions before idx; idx is appended to it.
        logits: (B, T, V); loss: (), cross-entropy in nats per token, in train mode plus the experts' auxiliary losses,
            or None without targets; states: N tensors (B, T, C), the stream after each loop, before the final norm.
        """
        n_loop = self.loop_count(n_loop)
        start = 0 if cache is None else cache.length
        self._check_tokens(idx, targets, start)
        h = x0 = self.embed(idx, start)
        global_ema, states, routings = None, [], []
        for loop in range(n_loop):
            h, global_ema, routed = self.run_loop(h, loop, x0, global_ema, start, cache)
            routings.append(routed)
            if return_states:
                states.append(h)
        if cache is not None:
            cache.length += idx.shape[1]
        logits, loss = self.logits(h) if return_logits else None, None
        if targets is not None and return_logits:
            loss = summed_cross_entropy(logits.flatten(0, 1), targets.flatten()) / counted(targets)
        elif targets is not None:
            loss = self.cross_entropy(h, targets)
        if loss is not None:
            loss = self._with_aux_loss(loss, routings)
        self._collect_loads(routings)
        return (logits, loss, states) if return_states else (logits, loss)

    def segment_losses(self, idx: Tensor, targets: Tensor, *, n_loop: int | None = None) -> Iterator[Tensor]:
        """Segmented backprop [3]: one loss per segment of `config.segment` loops, the last segment may be shorter.

        Call backward on each loss before taking the next: the stream and the global memory are then detached, so no
        gradient crosses a cut, and the activations of one segment are all that is ever held. The embedding is
        recomputed for every segment, so an optimizer step between two of them is seen. Without `segment`, or with at
        least N loops in it, there is one loss, equal to the forward's.
        """
        if targets is None:
            raise ValueError("segment_losses needs targets")
        n_loop = self.loop_count(n_loop)
        self._check_tokens(idx, targets)
        return self._segment_losses(idx, targets, self.config.segments(n_loop))

    def _segment_losses(self, idx: Tensor, targets: Tensor, segments: list[range]) -> Iterator[Tensor]:
        h = global_ema = None
        for loops in segments:
            x0, routings = self.embed(idx), []
            h = x0 if h is None else h
            for loop in loops:
                h, global_ema, routed = self.run_loop(h, loop, x0, global_ema)
                routings.append(routed)
            loss = self._with_aux_loss(self.cross_entropy(h, targets), routings)
            self._collect_loads(routings)
            # Of what this segment made, the stream and the global memory are all that waits for the next one.
            h = h.detach()
            global_ema = None if global_ema is None else EMA(global_ema.total.detach(), global_ema.weight)
            del x0, routings, routed
            yield loss
            del loss

    def _with_aux_loss(self, loss: Tensor, routings: list[list[Routing | None]]) -> Tensor:
        if self.training and self.config.n_expert:
            loss = loss + torch.stack([r.aux_loss for routed in routings for r in routed]).mean()
        return loss

    # -- balancing the experts -----------------------------------------------------------------------------------------

    def _routers(self) -> list[Router]:
        """The routers whose selection bias balances the experts, one per layer; none with another `balance`."""
        balanced = self.config.n_expert and self.config.balance == "bias"
        return [block.mlp.router for block in self.blocks] if balanced else []

    def _collect_loads(self, routings: list[list[Routing | None]]):
        """After a forward that trains: add each layer's loads, summed over its visits, to what its router has."""
        collects = self.training and torch.is_grad_enabled()
        for layer, router in enumerate(self._routers() if collects else []):
            router.collected += torch.stack([routed[layer].load for routed in routings]).sum(dim=0)

    @torch.no_grad()
    def move_biases(self):
        """Bias balancing [3]: move each layer's selection bias by the loads collected since the last call.

        Call this once per optimizer update, after `optimizer.step()`. The loads are those of all training forwards with
        gradients since the last call, summed over visits, segments, micro-batches and processes, so that the move does
        not depend on how a step is divided. Nothing moves if nothing was collected, or if `balance` is not "bias".
        """
        routers = self._routers()
        if not routers:
            return
        loads = torch.stack([router.collected for router in routers])  # (L, E)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(loads)
        for router, load in zip(routers, loads, strict=True):
            router.move_bias(load)
        self.forget_loads()

    def forget_loads(self):
        """Clear the loads collected for `move_biases`, for forwards that no optimizer update follows."""
        for router in self._routers():
            router.collected.zero_()

    def loop_count(self, n_loop: int | None) -> int:
        """The loop count of a call: the config's for None, and any whole number from 1 on."""
        if n_loop is None:
            return self.config.n_loop
        count = plain_number(n_loop, whole=True)
        if count is None or not 1 <= count <= MAX_LOOPS:
            bound = f"<= {MAX_LOOPS}" if count is not None and count > 1 else ">= 1"
            raise ValueError(
                f"n_loop={n_loop!r} must be a whole number {bound} (this model was made for "
                f"n_loop={self.config.n_loop})"
            )
        return int(count)

    def _check_tokens(self, idx: Tensor, targets: Tensor | None = None, start: int = 0):
        if idx.dim() != 2 or idx.numel() == 0:
            raise ValueError(f"idx must be (B, T) with at least one token, got {tuple(idx.shape)}")
        if start + idx.shape[1] > self.config.block_size:
            before = f" after {start} cached ones" if start else ""
            raise ValueError(
                f"{idx.shape[1]} tokens{before} are more than block_size={self.config.block_size}: "
                "crop idx to the last block_size tokens, or build the model with a larger block_size"
            )
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets {tuple(targets.shape)} and idx {tuple(idx.shape)} must have the same shape")

    # -- generation ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        n_loop: int | None = None,
        stop_token: int | None = None,
        use_cache: bool = True,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue idx (B, T) by max_new_tokens tokens -> (B, T + max_new_tokens), or fewer with a stop token.

        temperature: 0 is greedy. top_k: sample from the k likeliest; None or 0 is off. n_loop: loops per token.
        stop_token: a row ends with the first one it draws, and is filled up with it; when all rows have ended, the
        result does, too. Past block_size tokens the window is the last block_size ones, and it is run anew for every
        token, since all its positions move. Runs in eval mode and restores the mode. Raises ValueError for an option
        that cannot work, FloatingPointError for logits that are not finite.
        """
        check_sampling(temperature, max_new_tokens, top_k, stop_token, self.config.vocab_size)
        n_loop, block_size, cache = self.loop_count(n_loop), self.config.block_size, None
        ended = torch.zeros(len(idx), 1, dtype=torch.bool, device=idx.device)
        with evaluating(self):
            for _ in range(max_new_tokens):
                new = idx[:, -block_size:]
                if not use_cache or idx.shape[1] > block_size:
                    cache = None
                elif cache is None:
                    cache = KVCache(self.config, n_loop, len(idx), self.wte.weight, idx.shape[1] + max_new_tokens)
                else:
                    new = idx[:, -1:]
                logits = self(new, n_loop=n_loop, cache=cache)[0][:, -1]  # (B, V)
                token = pick(logits, temperature, top_k, generator)  # (B, 1)
                if stop_token is not None:
                    token = token.masked_fill(ended, stop_token)
                    ended |= token == stop_token
                idx = torch.cat((idx, token), dim=1)
                if stop_token is not None and ended.all():
                    break
        return idx

    # -- counting ------------------------------------------------------------------------------------------------------

    def num_params(self) -> int:
        """Unique parameters: a looped block once, a tied matrix once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, training: bool = True, n_loop: int | None = None) -> int:
        """Floating-point operations per token at a full window, for the executed depth.

        Two per weight of every matrix a token meets (L * N block visits, k + shared experts, one head per segment),
        and 4 T C per attention visit over T = block_size keys (the causal half is not subtracted, as is usual).
        Training counts the backward pass as two forwards. n_loop: another loop count than the config's.
        """
        config = self.config
        width = config.n_embd
        mlp = width * config.inner * (3 if config.mlp == "swiglu" else 2)
        if config.n_expert:
            mlp = mlp * (config.top_k + config.n_expert_shared) + width * config.n_expert
        visit = 2 * (4 * width**2 + mlp) + 4 * config.block_size * width
        n_loop = self.loop_count(n_loop)
        heads = len(config.segments(n_loop)) if training else 1
        forward = config.n_layer * n_loop * visit + heads * 2 * width * config.vocab_size
        return 3 * forward if training else forward

    # -- optimizer -----------------------------------------------------------------------------------------------------

    def configure_optimizer(
        self,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        optimizer: Literal["adamw", "muon"] = "adamw",
    ) -> "torch.optim.AdamW | OptimizerPair":
        """The optimizer, with the rule's factors in its parameter groups.

        Everything inside the blocks is "hidden": its learning rate and Adam epsilon are multiplied by the row's
        `lr_factor` and `eps_factor`. Tensors with fewer than two dimensions (norms, biases, ReZero's scalars) do not
        decay. Each group carries `name` and `lr_scale`; a schedule sets group["lr"] = lr * group["lr_scale"].
        "muon": the hidden 2-D matrices go to torch.optim.Muon with the update's RMS matched to AdamW's, so that one lr
        serves both; stacked experts and routers (3-D) and all else stay with AdamW.
        """
        if optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer={optimizer!r} is not one of adamw, muon")
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                place = "hidden" if name.startswith("blocks.") else "outer"
                kind = "no_decay" if parameter.dim() < 2 else "decay"
                if optimizer == "muon" and place == "hidden" and parameter.dim() == 2:
                    kind = "muon"
                groups.setdefault(f"{place}_{kind}", []).append(parameter)

        def group(name: str) -> dict:
            hidden = name.startswith("hidden")
            lr_scale = self.row.lr_factor if hidden else 1.0
            decay = 0.0 if name.endswith("no_decay") else weight_decay
            options = dict(params=groups[name], name=name, lr=lr * lr_scale, lr_scale=lr_scale, weight_decay=decay)
            return (
                options if name.endswith("muon") else options | dict(eps=eps * (self.row.eps_factor if hidden else 1))
            )

        adamw = torch.optim.AdamW(
            [group(name) for name in groups if not name.endswith("muon")],
            lr=lr,
            betas=betas,
            fused=self.wte.weight.device.type in ("cpu", "cuda"),
        )
        if "hidden_muon" not in groups:
            return adamw
        muon = torch.optim.Muon([group("hidden_muon")], lr=lr, adjust_lr_fn="match_rms_adamw")
        return OptimizerPair(muon, adamw)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards, after an error too, the mode that was there."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def check_sampling(temperature: float, max_new_tokens: int, top_k: int | None, stop_token: int | None, vocab_size: int):
    """Raise a ValueError that names the first option of `generate` that cannot work."""
    if plain_number(temperature, whole=False) is None or not temperature >= 0:
        raise ValueError(f"temperature={temperature!r} must be a number >= 0")
    for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k or 0), ("stop_token", stop_token or 0)):
        count = plain_number(value, whole=True)
        if count is None or count < 0:
            raise ValueError(f"{name}={value!r} must be a whole number >= 0")
    if stop_token is not None and stop_token >= vocab_size:
        raise ValueError(f"stop_token={stop_token} is no token of this model: it has vocab_size={vocab_size}")


def pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token per row of logits (B, V) -> (B, 1). Raises FloatingPointError where a row has NaN or infinity.

    Minus infinity is allowed: such a token is never drawn, as long as the row has another one.
    """
    logits = at_least_float32(logits)
    best = logits.amax(dim=-1, keepdim=True)  # (B, 1); NaN where a row has one
    if not best.isfinite().all():
        raise FloatingPointError(
            "the model's logits are not finite, so no token can be drawn: its weights have diverged, or its stream "
            "overflows at this number of loops"
        )
    if temperature < torch.finfo(logits.dtype).tiny:  # 0, or so small that a division by it would be one by 0
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - best) / temperature  # at most 0: no overflow as temperature -> 0
    if top_k and top_k < logits.shape[-1]:
        likeliest = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(1, likeliest.indices, likeliest.values)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)


class OptimizerPair:
    """Several optimizers that step as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict):
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
