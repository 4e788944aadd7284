"""What the model's tests share: small models, random tokens, and the published equations as an oracle.

`Reference` is the oracle. It takes the weights of a LoopedGPT and nothing else of it, gives every visit its own copy of
them, and applies the equations in the order in which the papers write them. It is therefore also the untied stack.
"""

import itertools
import math

import torch
from torch import Tensor

from minilooped.model import RULES, LoopedConfig, LoopedGPT

RULE_NAMES = sorted(RULES)

TINY = dict(vocab_size=11, block_size=12, n_layer=2, n_loop=3, n_head=2, n_embd=16, init_std=0.25)
MOE = dict(n_expert=4, n_expert_shared=1, top_k=2, n_inner=8)
# Every part of LOOM but its rule.
LOOM_PARTS = dict(reinject=True, loop_residual=0.5, loop_end_norm=True, moe_out_norm=True, router="per_loop", **MOE)


def tiny(**changes) -> LoopedConfig:
    return LoopedConfig(**(TINY | changes))


def build(
    config: LoopedConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0, shaken: bool = False
) -> LoopedGPT:
    """A model with its initial weights. `shaken` moves every parameter off them, so that no 0 or 1 hides a fault."""
    torch.manual_seed(seed)
    model = LoopedGPT(config).to(dtype)
    if shaken:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def tokens(config: LoopedConfig, batch: int = 2, length: int | None = None, seed: int = 1) -> Tensor:
    """Random token ids, (batch, length); the length defaults to a full window."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, config.block_size if length is None else length)
    return torch.randint(config.vocab_size, shape, generator=generator)


def example(config: LoopedConfig, batch: int = 2, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and unrelated targets, one of them ignored."""
    idx, targets = tokens(config, batch, length, seed=1), tokens(config, batch, length, seed=2)
    targets[0, 0] = -100
    return idx, targets


def gradients(model: LoopedGPT) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def slope(x: list[float], y: list[float]) -> float:
    """Least-squares slope of log y against log x."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (x, y))
    x, y = x - x.mean(), y - y.mean()
    return ((x @ y) / (x @ x)).item()


def published_row(config: LoopedConfig) -> dict:
    """The multipliers of `config.rule`, from the papers. N loops, L blocks, D = N L, visits counted from 1."""
    N, L, D = config.n_loop, config.n_layer, config.n_loop * config.n_layer
    lam, depth, unrolled = config.lam or 1.0, L / config.l_ref, D / config.l_ref
    plain = dict(
        skip=1.0, branch=1.0, init_gain=1.0, in_gain=lambda visit: 1.0, norm="pre", lr_factor=1.0, eps_factor=1.0
    )
    rows = {
        "none": {},
        "sqrt": dict(branch=1 / math.sqrt(N)),
        "inverse": dict(branch=1 / N),
        "sqrt_depth": dict(branch=1 / math.sqrt(D)),
        # On the Residual Scaling of Looped Transformers, arXiv 2606.18524: lambda N^-1 m_L^-1/2, m_L = L / l_ref
        "factored": dict(branch=lam / N * depth**-0.5, lr_factor=depth**-0.5, eps_factor=depth**-0.5),
        # LOOM, arXiv 2610.01153: gamma = lambda / (H sqrt M), lambda = 0.5
        "loom": dict(branch=(config.lam or 0.5) / (N * math.sqrt(L))),
        # Depth-muP, arXiv 2310.02244, and CompleteP, arXiv 2505.01618, whose alpha is 1/2 and 1 here
        "depth_mup": dict(branch=unrolled**-0.5, lr_factor=unrolled**-0.5, eps_factor=unrolled**-0.5),
        "completep": dict(branch=unrolled**-1.0, lr_factor=1.0, eps_factor=unrolled**-1.0),
        # The Curse of Depth, arXiv 2502.05795
        "layernorm_scaling": dict(in_gain=lambda visit: 1 / math.sqrt(visit)),
        "rezero": dict(branch=None, norm="none"),  # ReZero, arXiv 2003.04887; its branch is a learned scalar
        # DeepNorm, arXiv 2203.00555, decoder-only; DeepLoop, arXiv 2607.13491
        "deepnorm": dict(skip=(2 * D) ** 0.25, init_gain=(8 * D) ** -0.25, norm="post"),
        "deeploop": dict(skip=math.sqrt(2 * D), init_gain=1 / math.sqrt(8 * D), norm="both"),
    }
    return plain | rows[config.rule]


class Reference:
    """The equations, visit by visit, with separate weights for every visit. Nothing is shared with the model's code."""

    def __init__(self, model: LoopedGPT, n_loop: int | None = None):
        self.config, self.row = model.config, published_row(model.config)
        self.n_loop = model.config.n_loop if n_loop is None else n_loop

        def copies(named_parameters) -> dict[str, Tensor]:
            return {name: parameter.detach().clone().requires_grad_() for name, parameter in named_parameters}

        self.outer = copies((n, p) for n, p in model.named_parameters() if not n.startswith("blocks."))
        self.visits = [[copies(block.named_parameters()) for block in model.blocks] for _ in range(self.n_loop)]
        # As it is now: an update of the model moves it.
        self.balance_bias = [{n: b.clone() for n, b in block.named_buffers()} for block in model.blocks]

    def gradients(self) -> dict[str, Tensor]:
        """The gradient a shared weight must have: the sum over the visits' own."""
        result = {name: p.grad for name, p in self.outer.items() if p.grad is not None}
        for layer in range(self.config.n_layer):
            for name in self.visits[0][layer]:
                grads = [visit[layer][name].grad for visit in self.visits]
                grads = [grad for grad in grads if grad is not None]
                if grads:
                    result[f"blocks.{layer}.{name}"] = sum(grads)
        return result

    # -- the model -----------------------------------------------------------------------------------------------------

    def embedding(self, idx: Tensor) -> Tensor:
        x = self.outer["wte.weight"][idx]
        if self.config.pos == "learned":
            x = x + self.outer["wpe.weight"][torch.arange(idx.shape[1])]
        default = self.config.rule in ("loom", "deeploop")
        on = default if self.config.embed_norm is None else self.config.embed_norm
        return self.unit_rms(x) if on else x

    def readout(self, h: Tensor) -> Tensor:
        head = self.outer["wte.weight" if self.config.tie_embeddings else "head.weight"]
        return self.norm(h, self.outer, "final_norm") @ head.T

    def loops(self, idx: Tensor, cut_after: tuple[int, ...] = ()) -> list[tuple[Tensor, list[Tensor]]]:
        """The stream after each loop, and the auxiliary losses of its visits. No gradient passes a cut."""
        c, row, result = self.config, self.row, []
        z, global_memory = self.embedding(idx), (0.0, 0.0)
        for t in range(1, self.n_loop + 1):
            aux, local_memory = [], (0.0, 0.0)  # the local memory is cleared at each loop start
            if c.reinject and t >= 2:
                g = min(1.0, c.reinject_lam / (t * math.sqrt(c.n_layer)))
                z = (1 - g) * z + g * self.embedding(idx)
            for m in range(1, c.n_layer + 1):
                w = self.visits[t - 1][m - 1]
                gain = row["in_gain"]((t - 1) * c.n_layer + m)
                branch = w["branch"] if c.rule == "rezero" else row["branch"]
                before, after = row["norm"] in ("pre", "both"), row["norm"] in ("post", "both")

                x = self.norm(z, w, "attn_pre_norm") if before else z
                update = branch * self.attention(gain * x, w)
                if c.loop_residual is not None:
                    local_memory = self.write(local_memory, update, c.loop_residual)
                    recent = local_memory[0] / local_memory[1]
                    global_memory = self.write(global_memory, recent, c.loop_residual)
                    update = recent + global_memory[0] / global_memory[1]
                z = row["skip"] * z + update
                z = self.norm(z, w, "attn_post_norm") if after else z

                x = self.norm(z, w, "mlp_pre_norm") if before else z
                if c.n_expert:
                    update, loss = self.experts(gain * x, w, t, self.balance_bias[m - 1]["mlp.router.bias"])
                    aux.append(loss)
                    if c.moe_out_norm:
                        update = self.unit_rms(update) * w["mlp_out_norm.weight"]
                else:
                    update = self.mlp(gain * x, w, "mlp.")
                z = row["skip"] * z + branch * update
                z = self.norm(z, w, "mlp_post_norm") if after else z
            if c.loop_end_norm:
                z = self.unit_rms(z)
            result.append((z, aux))
            if t in cut_after:
                z = z.detach()
                if c.loop_residual is not None:
                    global_memory = (global_memory[0].detach(), global_memory[1])
        return result

    def losses(self, idx: Tensor, targets: Tensor, segment: int | None = None, training: bool = True) -> list[Tensor]:
        """One loss per segment: cross-entropy at its last loop plus the mean of its visits' auxiliary losses."""
        ends = [*range(segment or self.n_loop, self.n_loop, segment or self.n_loop), self.n_loop]
        loops, result = self.loops(idx, cut_after=tuple(ends)), []
        for start, end in itertools.pairwise([0, *ends]):
            kept = targets != -100
            log_p = self.readout(loops[end - 1][0]).log_softmax(dim=-1)[kept]
            loss = -log_p.gather(1, targets[kept][:, None]).mean()
            aux = [a for _, visits in loops[start:end] for a in visits]
            result.append(loss + sum(aux) / len(aux) if training and aux else loss)
        return result

    # -- its parts -----------------------------------------------------------------------------------------------------

    @staticmethod
    def write(memory, x: Tensor, beta: float):
        """N <- beta N + x, D <- beta D + 1; the memory reads N / D."""
        return beta * memory[0] + x, beta * memory[1] + 1

    @staticmethod
    def unit_rms(x: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)

    def norm(self, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
        if self.config.norm == "rms":
            return self.unit_rms(x) * w[f"{name}.weight"]
        x = x - x.mean(dim=-1, keepdim=True)
        x = x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]
        return x + w[f"{name}.bias"] if self.config.bias else x

    def attention(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        c, T = self.config, x.shape[1]
        D = c.n_embd // c.n_head
        bias = w["attn.qkv.bias"] if c.bias else torch.zeros(3 * c.n_embd).to(x)
        parts = [x @ a.T + b for a, b in zip(w["attn.qkv.weight"].split(c.n_embd), bias.split(c.n_embd), strict=True)]
        heads = []
        for head in range(c.n_head):
            q, k, v = (part[..., head * D : (head + 1) * D] for part in parts)  # (B, T, D)
            if c.qk_norm:
                q, k = self.unit_rms(q), self.unit_rms(k)
            if c.pos == "rope":
                q, k = self.turn(q), self.turn(k)
            score = q @ k.transpose(1, 2) / math.sqrt(D)
            score = score + torch.full((T, T), -math.inf).to(x).triu(1)
            heads.append(score.softmax(dim=-1) @ v)
        out = torch.cat(heads, dim=-1) @ w["attn.proj.weight"].T
        return out + w["attn.proj.bias"] if c.bias else out

    @staticmethod
    def turn(x: Tensor) -> Tensor:
        """Rotary positions (arXiv 2104.09864): pair (i, i + D/2) is a complex number, turned by pos * 10000^(-2i/D)."""
        T, D = x.shape[-2:]
        angle = torch.arange(T).double()[:, None] * 10000.0 ** (-2 * torch.arange(D // 2).double() / D)
        cos, sin = angle.cos().float().to(x), angle.sin().float().to(x)  # the model keeps its table in float32
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.complex(cos, sin)
        return torch.cat((z.real, z.imag), dim=-1)

    def activation(self, x: Tensor) -> Tensor:
        if self.config.mlp == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            return gate * gate.sigmoid() * up
        if self.config.mlp == "gelu":
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x.clamp_min(0) ** 2

    def mlp(self, x: Tensor, w: dict[str, Tensor], place: str) -> Tensor:
        bias = (w[f"{place}w_in.bias"], w[f"{place}w_out.bias"]) if self.config.bias else (0.0, 0.0)
        return self.activation(x @ w[f"{place}w_in.weight"].T + bias[0]) @ w[f"{place}w_out.weight"].T + bias[1]

    def experts(self, x: Tensor, w: dict[str, Tensor], t: int, balance_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Every expert for every token, weighted; 0 for those not chosen."""
        c, routers = self.config, w["mlp.router.weight"]
        logits = x @ routers[min(t, len(routers)) - 1].T  # (B, T, E)
        score = logits.softmax(dim=-1) if c.gate == "softmax" else logits.sigmoid()
        chosen = torch.zeros_like(score).scatter(-1, (score + balance_bias).topk(c.top_k).indices, 1.0)
        weight = chosen * score
        if c.top_k > 1:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        y = sum(
            weight[..., e, None] * (self.activation(x @ w["mlp.experts.w_in"][e]) @ w["mlp.experts.w_out"][e])
            for e in range(c.n_expert)
        )
        if c.n_expert_shared:
            y = y + self.mlp(x, w, "mlp.shared.")
        aux = c.z_coef * logits.logsumexp(dim=-1).square().mean()
        if c.balance == "switch":  # arXiv 2101.03961, equation 4: E sum_e f_e P_e
            share = chosen.mean(dim=(0, 1)) / c.top_k
            probability = (score / score.sum(dim=-1, keepdim=True)).mean(dim=(0, 1))
            aux = aux + c.balance_coef * c.n_expert * (share * probability).sum()
        return y, aux
