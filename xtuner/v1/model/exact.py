"""Models whose forward gives a row the same bits in any company; see `ops.exact`."""

import torch
from torch import Tensor, nn

from xtuner.v1.ops.cpu import cpu_kernels_available
from xtuner.v1.ops.exact import exact_linear

from .config import MHAConfig, TransformerConfig
from .dense import DecoderModel
from .lora import LoRALinear
from .moe import Experts, Router, StackedLinear
from .moe_config import MoEModelConfig


class ExactLinear(nn.Linear):
    """A linear layer by `exact_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return exact_linear(input, self.weight, self.bias)


def make_exact(model: DecoderModel) -> None:
    """Let the products of the layers and of the head be exact ones, in place; after adapters, before sharding.

    Attention is exact with a context that is: `exact_packed_attention`, or the engine's.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ExactLinear
        elif isinstance(module, LoRALinear | Router | StackedLinear | Experts):
            module.exact = True
    model.exact = True


def exact_problems(config: TransformerConfig, device_type: str, dtype: torch.dtype) -> list[str]:
    """Why a model cannot be exact on "cuda" or "cpu" in this type; empty if it can."""
    kind, attention = config.model_type, config.attention
    problems = []
    if isinstance(config, MoEModelConfig) and (config.experts_are_stacked or config.router.bias):
        problems.append(f"{kind} models have transposed experts or biased routers, which are not exact yet")
    if not isinstance(attention, MHAConfig):
        problems.append(f"{kind} models have latent attention, which is not exact yet")
        return problems
    if attention.sinks or any(config.window_of(layer) for layer in range(config.num_hidden_layers)):
        problems.append(f"{kind} layers have sinks or sliding windows, which exact attention does not know yet")
    if device_type != "cuda":
        if dtype not in (torch.float32, torch.bfloat16):
            problems.append(f"the type of compute is {dtype}: exact operations on a CPU are of float32 or bfloat16")
        if not cpu_kernels_available():
            problems.append("exact operations on a CPU are Numba's, which is missing: pip install numba")
        return problems
    dim = attention.head_dim
    if dim & (dim - 1) or not 16 <= dim <= 256:
        problems.append(f"attention.head_dim={dim} is none of 16, 32, 64, 128 and 256")
    widths = {name: getattr(config, name, 8) for name in ("hidden_size", "intermediate_size", "moe_intermediate_size")}
    if odd := [f"{name}={width}" for name, width in widths.items() if width % 8]:
        problems.append(f"{', '.join(odd)}: not a multiple of 8")
    if dtype not in (torch.bfloat16, torch.float16):
        problems.append(f"the type of compute is {dtype}: exact products on CUDA are of bfloat16 or float16")
    return problems


def check_exact_device(device: torch.device) -> None:
    """Raise RuntimeError if the kernels were not made for this device."""
    if device.type != "cuda":
        return
    from xtuner.v1.ops.hopper_attention import runs_hopper_kernels

    if not runs_hopper_kernels(device):
        raise RuntimeError(
            "deterministic=True: exact mode runs on Hopper GPUs with Triton 3.6, not on "
            f"{torch.cuda.get_device_name(device)} with what is installed here; set deterministic=False."
        )
