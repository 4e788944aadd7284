"""What does each visit of shared weights contribute to their gradient? [2] DeepLoop, arXiv 2607.13491."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...model import MLP, LoopedGPT
from .running import beside, blocks_of, watched


def visit_gradients(model: LoopedGPT, idx: Tensor, scalars: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Gradients of K scalars with respect to each sublayer's matrices, one visit at a time, in eval mode.

    scalars: from the logits (B, T, V) to K numbers, (K,). Returns 2L tensors (K, N, P), attention and MLP of each block
    in turn. P counts the entries of the sublayer's two matrices, as one long vector; biases and norms are left out. The
    sum over the N visits is the gradient of the shared matrices. Raises ValueError for a model with experts.
    """
    sublayers: list[tuple[nn.Linear, nn.Linear]] = []
    for block in blocks_of(model):
        if not isinstance(block.mlp, MLP):
            raise ValueError("visit_gradients needs a dense model: set n_expert to 0")
        sublayers += [(block.attn.qkv, block.attn.proj), (block.mlp.w_in, block.mlp.w_out)]
    heard: dict[nn.Module, list[Tensor]] = {matrix: [] for pair in sublayers for matrix in pair}
    said: dict[nn.Module, list[Tensor]] = {matrix: [] for matrix in heard}  # N of each: (B, T, I) and (B, T, O)

    def record(matrix: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        heard[matrix].append(inputs[0])
        said[matrix].append(output)

    (idx,) = beside(model, idx)
    with watched(model, heard, record):
        values = scalars(model(idx)[0])  # (K,)
    outputs = [output for matrix in said for output in said[matrix]]
    found: dict[nn.Module, list[Tensor]] = {matrix: [] for matrix in heard}  # K of (N, O * I)
    for value in values:
        slopes = iter(torch.autograd.grad(value, outputs, retain_graph=True))
        for matrix, inputs in heard.items():
            gradients = [torch.einsum("bto,bti->oi", next(slopes), x.detach()) for x in inputs]  # of W in W x
            found[matrix].append(torch.stack(gradients).flatten(1))
    return [torch.cat([torch.stack(found[matrix]) for matrix in pair], -1) for pair in sublayers]


def visit_alignment(U: Tensor, G: Tensor) -> float:
    """kappa_R of one sublayer from its R visits: what they do to the output, U (S, R, P), and to the loss, G (R, P).

        ||sum_r U_r|| ||sum_r G_r|| / (R max_r ||U_r|| max_r ||G_r||)

    with the norm of U taken over its S directions in the output, too. It is R for visits that agree, 1 for visits at
    right angles (and of one length), 0 for visits that cancel. In [2] two constants, which bound the norms of the
    visits, stand in place of the largest ones measured.
    """
    R = len(G)
    together = U.sum(1).norm() * G.sum(0).norm()
    return (together / (R * U.norm(dim=(0, 2)).max() * G.norm(dim=1).max())).item()


def kappa(model: LoopedGPT, idx: Tensor, *, directions: int = 4, seed: int = 0) -> float:
    """Visit alignment kappa_R: the largest `visit_alignment` of a model's sublayers, for tokens idx (B, T).

    U is with respect to the logits along `directions` random ones, G to the loss of the next token in idx. [2] Raises
    ValueError where there is no direction, or no next token.
    """
    if directions < 1:
        raise ValueError(f"directions={directions} must be at least 1")
    if idx.shape[-1] < 2:
        raise ValueError(f"kappa needs a next token: idx {tuple(idx.shape)} must have two tokens or more")
    (idx,) = beside(model, idx)

    def scalars(logits: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(directions, *logits.shape, generator=generator).to(logits)  # (S, B, T, V)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
        return torch.cat(((drawn * logits).sum((1, 2, 3)), loss[None]))

    return max(visit_alignment(g[:-1], g[-1]) for g in visit_gradients(model, idx, scalars))


def stream_gradients(model: LoopedGPT, idx: Tensor, targets: Tensor) -> Tensor:
    """Norm of the loss's gradient with respect to the stream that enters each visit, (N, L), in eval mode."""
    before: list[Tensor] = []  # N * L streams (B, T, C)
    idx, targets = beside(model, idx, targets)
    with watched(model, model.blocks, lambda block, inputs, outputs: before.append(inputs[0])):
        loss = model(idx, targets)[1]
    norms = [gradient.norm() for gradient in torch.autograd.grad(loss, before)]
    return torch.stack(norms).view(-1, len(model.blocks)).cpu()
