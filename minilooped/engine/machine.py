"""What this machine is and can do: its device, its number types, its speed, its memory. Each choice with its reason."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..model import LoopedGPT, evaluating


def pick_device(asked: str = "auto") -> tuple[torch.device, str]:
    """The device to compute on, and the reason."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if asked != "auto":
        if (asked == "cuda" and not cuda) or (asked == "mps" and not mps):
            raise ValueError(f"device={asked!r} was asked for, but torch sees none here: leave it at 'auto'")
        return torch.device(asked), "asked for"
    if cuda:
        return torch.device("cuda"), f"torch sees {torch.cuda.get_device_name()}"
    if mps:
        return torch.device("mps"), "Apple GPU; its numbers differ a little. Should they look wrong: device=cpu"
    return torch.device("cpu"), "torch sees no GPU"


def pick_dtype(device: torch.device, asked: str = "auto") -> tuple[torch.dtype, str]:
    """The type of matrix products, and the reason: bfloat16 where the hardware computes in it, else float32."""
    if asked != "auto":
        return getattr(torch, asked), "asked for"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "this GPU computes in bfloat16"
        return torch.float32, "this GPU has no bfloat16 arithmetic"
    if device.type == "cpu":
        if cpu_has_bfloat16():
            return torch.bfloat16, "this CPU computes in bfloat16"
        return torch.float32, "this CPU has no bfloat16 arithmetic"
    return torch.float32, "bfloat16 is not dependable on an Apple GPU"


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies in bfloat16 (AVX512-BF16 or AMX). Where it does not, bfloat16 is emulated: slower."""
    # Newer versions of torch have the public get_capabilities, older ones a private function per capability.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    if capabilities:
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


@dataclass(frozen=True)
class Machine:
    """Where and in which number type to compute, and why."""

    device: torch.device
    device_reason: str
    dtype: torch.dtype  # of matrix products
    dtype_reason: str
    tf32: bool  # whether products in float32 may be rounded to 19 bits where the GPU is then faster

    def autocast(self) -> AbstractContextManager:
        """The context in which matrix products take `dtype`."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @contextmanager
    def configured(self, threads: int | None) -> Iterator[None]:
        """torch with so many CPU threads (None: as many as it has) and with this machine's float32 products."""
        threads_before, precision_before = torch.get_num_threads(), torch.get_float32_matmul_precision()
        try:
            if threads is not None:
                torch.set_num_threads(threads)
            if self.tf32:
                torch.set_float32_matmul_precision("high")
            yield
        finally:
            if threads is not None:
                torch.set_num_threads(threads_before)
            if self.tf32:
                torch.set_float32_matmul_precision(precision_before)


def pick_machine(device: str = "auto", dtype: str = "auto") -> Machine:
    """What `pick_device` and `pick_dtype` choose. TF32 is on where a GPU computes and no dtype was asked for."""
    chosen, why = pick_device(device)
    return Machine(chosen, why, *pick_dtype(chosen, dtype), tf32=chosen.type == "cuda" and dtype == "auto")


# Dense bfloat16 products with float32 sums, as the makers' data sheets give them (without sparsity), in 1e12 operations
# a second. The first name that occurs in the device's name counts, if no digit follows it: an A4000 is no A40.
PEAK_TFLOPS = {
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A40": 150,
    "A10G": 70,
    "A10": 125,
    "A6000": 155,
    "RTX 5090": 209,
    "RTX 4090": 165,
    "RTX 3090": 71,
}


def peak_tflops(device_name: str) -> float | None:
    """The best that a GPU can do in bfloat16, in TFLOP/s, by its name; None if it is not in the table."""
    return next((float(peak) for name, peak in PEAK_TFLOPS.items() if re.search(rf"{name}(?!\d)", device_name)), None)


class AttentionCalls(TorchDispatchMode):
    """Notes the fused attention kernels that run inside, with the type of their inputs."""

    def __init__(self):
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name:
            kernel = name.strip("_").removeprefix("scaled_dot_product_")
            self.kernels.append(f"{kernel} kernel in {str(args[0].dtype).removeprefix('torch.')}")
        return func(*args, **(kwargs or {}))


def attention_kernel(
    model: LoopedGPT, idx: Tensor, autocast: Callable[[], AbstractContextManager] = nullcontext
) -> str:
    """Which attention ran for tokens idx (B, T), and in which type: one forward is made to see it."""
    with evaluating(model), AttentionCalls() as calls, autocast():
        model(idx, n_loop=1, return_logits=False)
    return calls.kernels[0] if calls.kernels else "plain matrix products"
