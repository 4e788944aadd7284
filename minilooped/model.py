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

    logits, loss = LoopedGPT(LoopedConfig(n_layer=2, n_loop=4))(idx, targets)  # idx, targets: (B, T) int64

Shapes use B batch, T positions, C = n_embd, H heads, D = C / H, V vocabulary, E experts, k = top_k, S = B * T tokens.
Papers, cited by number: [1] On the Residual Scaling of Looped Transformers, arXiv 2606.18524. [2] DeepLoop,
arXiv 2607.13491. [3] LOOM, Looping Beyond Twice, arXiv 2610.01153. In [2] the letter N means L * N.
"""

import math
import numbers
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# ----------------------------------------------------------------------------------------------------------------------
# Configuration

# What a number must fulfil, where an int >= 1 or a float >= 0 is not enough. A block visit takes Python a fraction of a
# millisecond, so that a forward pass of 100,000 loops takes a minute.
BOUNDS = {"n_layer": ">= 1, <= 100000", "n_loop": ">= 1, <= 100000", "loop_residual": ">= 0, < 1"}
BOUNDS |= dict.fromkeys(("init_std", "lam", "l_ref"), "> 0")  # 0 would switch the model off
BOUNDS |= dict.fromkeys(("n_expert", "n_expert_shared"), ">= 0")


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
    router_init: Literal["copy", "independent"] = "copy"  # copy: the per-loop routers start equal
    gate: Literal["softmax", "sigmoid"] = "softmax"  # logits to scores
    # bias: one for the selection, see `LoopedGPT.move_biases`. switch: the Switch loss, a product of two means over the
    # tokens of one forward. So the gradient of a step in 8 micro-batches differs from that in one by 0.05 to 0.24 %.
    balance: Literal["bias", "switch", "none"] = "bias"
    balance_coef: float = 2e-3  # step of the bias, or weight of the Switch loss
    z_coef: float = 1e-3  # weight of the router z-loss, a mean over all tokens, those without a target included
    moe_out_norm: bool = False  # LOOM: learned RMSNorm on the MoE output

    segment: int | None = None  # loops per segment of segmented backprop; None: ordinary backprop

    # Two ways to save memory in training that change no result.
    recompute_loops: bool = False  # activation checkpointing: hold each loop's start, run the loop again in backward
    loss_chunk: int | None = None  # tokens whose logits exist at the same time; None: all. For large vocabularies

    def __post_init__(self):
        check_settings(self, BOUNDS)
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} is not one of {', '.join(RULES)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}: change one of them")
        if self.pos == "rope" and self.n_embd // self.n_head % 2:
            odd = f"pos='rope' turns pairs, so the head width n_embd/n_head={self.n_embd // self.n_head} must be even"
            raise ValueError(f"{odd}: change n_embd or n_head, or use pos='learned'")
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
        width, inner, row = self.n_embd, self.inner, self.row
        inner_in = inner * (2 if self.mlp == "swiglu" else 1)
        norm = width * (2 if self.norm == "layer" and self.bias else 1)
        norms = {"none": 0, "pre": 2, "post": 2, "both": 4}[row.norm]
        block = 4 * width * (width + self.bias) + norms * norm + self.moe_out_norm * width + row.learn_branch
        if self.n_expert:
            routers = self.n_loop if self.router == "per_loop" else 1
            block += self.n_expert * width * (routers + inner_in + inner)
        if mlps := self.n_expert_shared if self.n_expert else 1:  # MLPs that every token visits
            block += mlps * width * (inner_in + inner) + self.bias * (mlps * inner_in + width)
        vectors = self.vocab_size * (1 if self.tie_embeddings else 2) + (self.pos == "learned") * self.block_size
        return self.n_layer * block + vectors * width + norm


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


# No row adds GPT-2's 1/sqrt(2L) to the init of the output projections. That factor would count the depth twice.
RULES: dict[str, Callable[[LoopedConfig], Row]] = {
    # No scaling: tied updates add up like N, untied ones like sqrt(L). [1] section 1
    "none": lambda c: Row(),
    "sqrt": lambda c: Row(branch=c.n_loop**-0.5),  # what untied layers would need
    "inverse": lambda c: Row(branch=1 / c.n_loop),  # what tied ones need
    "sqrt_depth": lambda c: Row(branch=c.n_unroll**-0.5),
    # lambda / (N sqrt(L/l_ref)): loops and layers count separately, and learning rate and epsilon see L. [1] theorem 3
    "factored": lambda c: Row(
        branch=(c.lam or 1) / c.n_loop * (c.n_layer / c.l_ref) ** -0.5,
        lr_factor=(c.n_layer / c.l_ref) ** -0.5,
        eps_factor=(c.n_layer / c.l_ref) ** -0.5,
    ),
    # The scale of LOOM [3]; its other parts are switches of their own.
    "loom": lambda c: Row(branch=(c.lam or 0.5) / c.n_loop * c.n_layer**-0.5, embed_norm=True),
    # Depth-muP, arXiv 2310.02244: 1/sqrt(depth) on branch, learning rate and epsilon. CompleteP, arXiv 2505.01618, at
    # alpha = 1: 1/depth on branch and epsilon. Both count the unrolled depth.
    "depth_mup": lambda c: Row(
        branch=(c.n_unroll / c.l_ref) ** -0.5,
        lr_factor=(c.n_unroll / c.l_ref) ** -0.5,
        eps_factor=(c.n_unroll / c.l_ref) ** -0.5,
    ),
    "completep": lambda c: Row(branch=1 / (c.n_unroll / c.l_ref), eps_factor=1 / (c.n_unroll / c.l_ref)),
    # LayerNorm Scaling, arXiv 2502.05795: the norm's output shrinks with the visit.
    "layernorm_scaling": lambda c: Row(in_gain=lambda visit: visit**-0.5),
    # ReZero, arXiv 2003.04887: the multiplier of a branch is learned and starts at 0, and there is no norm.
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
        # The CPU's fused kernel has a slow bfloat16 backward. Up to about this length plain products are faster.
        with torch.autocast("cpu", enabled=False):
            mask = torch.full((T, S), -torch.inf, dtype=q.dtype).triu(S - T + 1)
            score = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)  # (B*H, T, S)
            return (score.softmax(dim=-1) @ v.flatten(0, 1)).view_as(q)
    if T in (1, S):  # the last position sees all others, so it needs no mask
        return F.scaled_dot_product_attention(q, k, v, is_causal=T == S)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class KVCache:
    """Preallocated keys and values for generation: one slot per (loop, layer), for each visit has its own."""

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
        """rope: (2, T, 1, 1, D), the angles of these positions, needed where pos='rope'; slot: see KVCache."""
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, 3, H, D)
        qk, v = qkv.split((2, 1), dim=2)  # (B, T, 2, H, D), (B, T, 1, H, D)
        if self.qk_norm:
            qk = rms_norm(qk)
        if self.rotary:
            if rope is None or rope.shape[1] != T:
                raise ValueError(f"pos='rope' needs the angles of these {T} positions: give rope=model.rope[:, :{T}]")
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

    bias: Tensor  # (E,), added to the scores for the selection only; no gradient moves it, see `LoopedGPT.move_biases`
    collected: Tensor  # (E,) int64, tokens that each expert got in the training forwards since the last move

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.config = config
        n_router = config.n_loop if config.router == "per_loop" else 1
        self.weight = nn.Parameter(torch.empty(n_router, config.n_expert, config.n_embd))
        self.register_buffer("bias", torch.zeros(config.n_expert))
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

    def move_bias(self, load: Tensor) -> None:
        """One step of `balance_coef` for each expert: up below the mean load, down above it. [3]; load: (E,) int64"""
        above = torch.sign(len(load) * load - load.sum())  # in whole numbers, so that the mean load itself gives 0
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
    return torch.cat([rows @ w for rows, w in zip(x.split(load.tolist()), weight.unbind(0), strict=True)])


class Experts(nn.Module):
    """E feed-forward layers with their weights stacked. Rows sorted by expert in, rows sorted by expert out."""

    product = staticmethod(grouped_linear)  # another function where rows cannot be counted, as in a plan

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.kind, inner = config.mlp, config.inner
        inner_in = inner * (2 if self.kind == "swiglu" else 1)
        self.w_in = nn.Parameter(torch.empty(config.n_expert, config.n_embd, inner_in))
        self.w_out = nn.Parameter(torch.empty(config.n_expert, inner, config.n_embd))

    def forward(self, x: Tensor, load: Tensor) -> Tensor:
        return self.product(activate(self.kind, self.product(x, self.w_in, load)), self.w_out, load)


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
        """Write `update`, and return what takes its place on the stream: the sum of both memories' means."""
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
        self.skip, self.beta = row.skip, config.loop_residual or 0.0
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
        x = scale(self.attn_pre_norm(h), in_gain)
        update = scale(self.attn(x, rope, slot).to(h.dtype), self.branch)
        if memory is not None:
            update, memory = memory.carry(update, self.beta)
        h = self.attn_post_norm(scale(h, self.skip) + update)

        x = scale(self.mlp_pre_norm(h), in_gain)
        update, routing = self.mlp(x, loop) if isinstance(self.mlp, MoE) else (self.mlp(x), None)
        update = scale(self.mlp_out_norm(update.to(h.dtype)), self.branch)
        h = self.mlp_post_norm(scale(h, self.skip) + update)
        return h, memory, routing


# ----------------------------------------------------------------------------------------------------------------------
# The looped model

# On these devices the width of the logits decides how fast the head is. In training it is padded to such a multiple.
PADDED_DEVICES, PADDED_MULTIPLE = ("cuda",), 128


class LoopedGPT(nn.Module):
    """L blocks applied N times: one Python loop over visits, each block one object called many times."""

    rope: Tensor | None

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.pos == "learned" else None
        self.blocks: Sequence[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(config) for _ in range(config.n_layer)
        )
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
    def init_weights(self) -> None:
        """Matrices ~ N(0, init_std^2), times the rule's init gain for value, output and MLP; biases 0; norms 1."""
        gain, width = self.row.init_gain, self.config.n_embd
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            if parameter.dim() < 2:
                continue  # norms and ReZero's scalars are made with their final values
            parameter.normal_(std=self.config.init_std)
            if name.endswith(".qkv.weight"):
                parameter[2 * width :].mul_(gain)  # the values; queries and keys keep gain 1
            elif name.startswith("blocks.") and not name.endswith(".router.weight"):
                parameter.mul_(gain)
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
        return 0.0 if loop == 0 else min(1.0, self.config.reinject_lam / ((loop + 1) * self.config.n_layer**0.5))

    def run_loop(
        self, h: Tensor, loop: int, x0: Tensor, ema: EMA | None = None, start: int = 0, cache: KVCache | None = None
    ) -> tuple[Tensor, EMA | None, list[Routing]]:
        """One pass through the stack.

        h: (B, T, C), the stream; loop: 0-based; x0: (B, T, C), the embedding; ema: the looping residual's global
        memory, None in the first loop; start: position of the first token. Returns the stream, the global memory, and
        the routing of each layer if there are experts.
        """
        # The memory goes in as tensors, because the backward pass lets go of saved tensors, but not of a tuple.
        inputs = h, loop, x0, start, cache, *(ema or ())
        if self.config.recompute_loops and torch.is_grad_enabled() and cache is None:
            # Nothing of this loop is held but its inputs. The backward pass runs it a second time.
            return checkpoint(self._visit_blocks, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self._visit_blocks(*inputs)

    def _visit_blocks(
        self, h: Tensor, loop: int, x0: Tensor, start: int, cache: KVCache | None, *global_ema: Tensor
    ) -> tuple[Tensor, EMA | None, list[Routing]]:
        config, in_gain, memory, routings = self.config, self.row.in_gain, None, []
        if config.reinject and loop > 0:
            h = torch.lerp(h, x0, self.reinjection_gain(loop))
        if config.loop_residual is not None:
            memory = Memory(local=EMA.empty(h), global_=EMA(*global_ema) if global_ema else EMA.empty(h))
        rope = None if self.rope is None else self.rope[:, start : start + h.shape[1]]
        for layer, block in enumerate(self.blocks):
            gain = in_gain(loop * config.n_layer + layer + 1) if callable(in_gain) else in_gain
            slot = None if cache is None else cache.slot(loop, layer)
            h, memory, routing = block(h, loop, gain, rope, memory, slot)
            if routing is not None:
                routings.append(routing)
        if config.loop_end_norm:
            h = rms_norm(h)
        return h, None if memory is None else memory.global_, routings

    def _head(self) -> tuple[Tensor, Tensor | None]:
        """The head's matrix (V, C) and no bias; or, padded, a matrix (V', C) and a bias (V',).

        A GPU's tensor cores want widths that are multiples of 64 or 128, and GPT-2's vocabulary of 50,257 is odd. In
        training on a GPU the matrix therefore gets rows of zeros, with a bias of minus infinity: their logits have
        probability 0 and no gradient. The padding is made anew for each product. No parameter and no result shows it.
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

    def cross_entropy(self, h: Tensor, targets: Tensor, logits: Tensor | None = None) -> Tensor:
        """Loss of the read-out: h (B, T, C), targets (B, T), -100 is ignored -> (), nats per target that counts.

        With `loss_chunk` the logits of so many tokens exist at the same time, and the backward pass makes them again.
        logits: (B, T, V), if they are made already. Where all targets are ignored, the loss is 0 and not NaN.
        """
        h, targets = h.flatten(0, 1), targets.flatten()  # (S, C), (S,)
        size = self.config.loss_chunk or len(h)
        if logits is None:
            weight, bias = self._head()  # padded once for all chunks

        def summed(h: Tensor, targets: Tensor) -> Tensor:
            read = F.linear(self.final_norm(h), weight, bias) if logits is None else logits.flatten(0, 1)  # (S, V)
            return F.cross_entropy(at_least_float32(read), targets, reduction="sum")

        if logits is not None or size >= len(h):
            total = summed(h, targets)
        else:
            chunks = zip(h.split(size), targets.split(size), strict=True)
            first, *rest = [checkpoint(summed, *chunk, use_reentrant=False) for chunk in chunks]
            total = sum(rest, first)
        return total / (targets != -100).sum().clamp_min(1)

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
        if targets is not None:
            loss = self._with_aux_loss(self.cross_entropy(h, targets, logits), routings)
        self._collect_loads(routings)
        return (logits, loss, states) if return_states else (logits, loss)

    def segment_losses(
        self, idx: Tensor, targets: Tensor, *, n_loop: int | None = None
    ) -> Generator[Tensor, None, None]:
        """Segmented backprop [3]: one loss per segment of `config.segment` loops, the last segment may be shorter.

        Call backward on each loss before taking the next: the stream and the global memory are then detached, so no
        gradient crosses a cut, and only the activations of one segment are held. The embedding is recomputed for every
        segment, so that the next one uses an optimizer step made in between. Without `segment`, or with at least N
        loops in it, there is one loss, equal to the forward's.
        """
        if targets is None:
            raise ValueError("segment_losses needs targets")
        n_loop = self.loop_count(n_loop)
        self._check_tokens(idx, targets)
        return self._segment_losses(idx, targets, self.config.segments(n_loop))

    def _segment_losses(self, idx: Tensor, targets: Tensor, segments: list[range]) -> Generator[Tensor, None, None]:
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

    def loop_count(self, n_loop: int | None) -> int:
        """The loop count of a call; None is the config's."""
        return self.config.n_loop if n_loop is None else checked("n_loop", n_loop, int, BOUNDS["n_loop"])

    def _check_tokens(self, idx: Tensor, targets: Tensor | None = None, start: int = 0) -> None:
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

    # -- balancing the experts -----------------------------------------------------------------------------------------

    def _with_aux_loss(self, loss: Tensor, routings: list[list[Routing]]) -> Tensor:
        """The loss, in train mode plus the mean of all visits' auxiliary losses."""
        losses = [routing.aux_loss for routed in routings for routing in routed]
        return loss + torch.stack(losses).mean() if self.training and losses else loss

    def _routers(self) -> list[Router]:
        """The routers whose selection bias balances the experts, one per layer; none with another `balance`."""
        mlps = [block.mlp for block in self.blocks if self.config.balance == "bias"]
        return [mlp.router for mlp in mlps if isinstance(mlp, MoE)]

    def _collect_loads(self, routings: list[list[Routing]]) -> None:
        """After a forward that trains: add each layer's loads, summed over its visits, to what its router has."""
        if self.training and torch.is_grad_enabled():
            for layer, router in enumerate(self._routers()):
                router.collected += torch.stack([routed[layer].load for routed in routings]).sum(dim=0)

    @torch.no_grad()
    def move_biases(self) -> None:
        """Bias balancing [3]: move each layer's selection bias by the loads collected since the last call.

        Call this once per optimizer update, after `optimizer.step()`. The loads are those of all training forwards with
        gradients since the last call, summed over visits, segments, micro-batches and processes, so that the move does
        not depend on how a step is divided. Nothing moves if nothing was collected, or if `balance` is not "bias".
        """
        if not (routers := self._routers()):
            return
        loads = torch.stack([router.collected for router in routers])  # (L, E)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(loads)
        for router, load in zip(routers, loads, strict=True):
            router.move_bias(load)
        self.forget_loads()

    def forget_loads(self) -> None:
        """Clear the loads collected for `move_biases`, for forwards that no optimizer update follows."""
        for router in self._routers():
            router.collected.zero_()

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
        stop_token: a row ends with the first stop token it draws, and is filled up with it. The call ends when all rows
        have ended. Past block_size tokens the window is the last block_size ones, and it is run anew for every token,
        since all its positions move. Runs in eval mode and restores the mode. Raises ValueError for an option that
        cannot work, FloatingPointError for logits that are not finite.
        """
        temperature = checked("temperature", temperature, float)
        max_new_tokens = checked("max_new_tokens", max_new_tokens, int, ">= 0")
        top_k = checked("top_k", top_k, int | None, ">= 0")
        stop_token = checked("stop_token", stop_token, int | None, f">= 0, < {self.config.vocab_size}")
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

    # -- counting and optimizing ---------------------------------------------------------------------------------------

    def num_params(self) -> int:
        """Unique parameters: a looped block once, a tied matrix once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, training: bool = True, n_loop: int | None = None) -> int:
        """Floating-point operations per token at a full window, for the executed depth.

        Two per weight of every matrix a token meets (L * N block visits, k + shared experts, one head per segment),
        and 4 T C per attention visit over T = block_size keys (the causal half is not subtracted, as is usual).
        Training counts the backward pass as two forwards. n_loop: another loop count than the config's.
        """
        config, width = self.config, self.config.n_embd
        mlp = width * config.inner * (3 if config.mlp == "swiglu" else 2)
        if config.n_expert:
            mlp = mlp * (config.top_k + config.n_expert_shared) + width * config.n_expert
        visit = 2 * (4 * width**2 + mlp) + 4 * config.block_size * width
        n_loop = self.loop_count(n_loop)
        heads = len(config.segments(n_loop)) if training else 1
        forward = config.n_layer * n_loop * visit + heads * 2 * width * config.vocab_size
        return 3 * forward if training else forward

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
        checked("optimizer", optimizer, Literal["adamw", "muon"])
        groups: dict[str, dict[str, Any]] = {}
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            hidden, kind = name.startswith("blocks."), "no_decay" if parameter.dim() < 2 else "decay"
            if optimizer == "muon" and hidden and parameter.dim() == 2:
                kind = "muon"
            group = groups.setdefault(f"{'hidden' if hidden else 'outer'}_{kind}", dict(params=[]))
            group["params"].append(parameter)
        for name, group in groups.items():
            lr_factor, eps_factor = (self.row.lr_factor, self.row.eps_factor) if "hidden" in name else (1.0, 1.0)
            group |= dict(name=name, lr=lr * lr_factor, lr_scale=lr_factor)
            group |= dict(weight_decay=0.0 if "no_decay" in name else weight_decay)
            group |= {} if "muon" in name else dict(eps=eps * eps_factor)  # Muon has an epsilon of another kind
        muon = groups.pop("hidden_muon", None)
        fused = self.wte.weight.device.type in ("cpu", "cuda")
        adamw = torch.optim.AdamW(list(groups.values()), lr=lr, betas=betas, fused=fused)
        if muon is None:
            return adamw
        return OptimizerPair(torch.optim.Muon([muon], lr=lr, adjust_lr_fn="match_rms_adamw"), adamw)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the `with` block. Afterwards, after an error too, the mode is what it was before."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token per row of logits (B, V) -> (B, 1). Raises FloatingPointError where a row has NaN or infinity.

    Minus infinity is allowed: such a token is never drawn, as long as the row has another one.
    """
    logits = at_least_float32(logits)
    best = logits.amax(dim=-1, keepdim=True)  # (B, 1); NaN where a row has one
    if not best.is_meta and not best.isfinite().all():  # a meta tensor has no numbers to look at
        raise FloatingPointError("the model's logits are not finite: its weights or its stream have diverged")
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

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict) -> None:
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)


# ----------------------------------------------------------------------------------------------------------------------
# The check of settings, of the trainer's too


def plain_number(value: Any, whole: bool) -> int | float | None:
    """A number of any library as Python's own, so np.int64(3) as 3; None for anything else. whole: integers only."""
    if isinstance(value, bool):
        return None  # though Python counts them as integers
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) and not whole else None


COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def unmet(value: Any, annotation: Any, bounds: str | None) -> str | None:
    """The demand on a value that it does not meet, in words; None if the value is fine. See `checked`."""
    kinds = get_args(annotation) or (annotation,)
    if get_origin(annotation) is Literal:
        return None if value in kinds else f"one of {', '.join(kinds)}"
    for kind, words in ((bool, "True or False"), (str, "a str")):
        if kind in kinds:
            return None if isinstance(value, kind) else words
    whole = int in kinds
    words, least, most = ("an int", ">= 1", "<= 9e18") if whole else ("a finite number", ">= 0", "<= 1e300")
    number = plain_number(value, whole)
    for bound in (*(bounds or least).split(", "), most):
        sign, limit = bound.split()
        if number is None or not COMPARISONS[sign](number, float(limit)):
            return f"{words} {bound}"
    return None


def checked(name: str, value: Any, annotation: Any, bounds: str | None = None) -> Any:
    """The value of a setting, a number as Python's own; or a ValueError with its name, value and what it must be.

    annotation: a Literal of strings, or bool, str, int or float, perhaps with None. bounds: those of a number, such as
    ">= 0, < 1"; without them an int must be >= 1, and a float >= 0.
    """
    if value is None and type(None) in get_args(annotation):
        return None
    if demand := unmet(value, annotation, bounds):
        or_none = ", or None" if type(None) in get_args(annotation) else ""
        raise ValueError(f"{name}={value!r} must be {demand}{or_none}")
    number = plain_number(value, whole=False)
    return value if number is None else number


def check_settings(settings: Any, bounds: Mapping[str, str]) -> None:
    """Check each field of a dataclass, which may be frozen, by its annotation and its entry in `bounds`."""
    for field in fields(settings):
        value = checked(field.name, getattr(settings, field.name), field.type, bounds.get(field.name))
        object.__setattr__(settings, field.name, value)
