"""RMSNorm (Zhang and Sennrich 2019, arxiv.org/abs/1910.07467), in few operations where a CPU counts them.

Letters: D size of what is normed, the last dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    """1 / sqrt(mean(x²) + eps) over the last dimension of x [*, D], [*, 1]; eps [] in x's dtype."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps, size, size, value=1 / x.shape[-1]).rsqrt_()


class Norm(torch.autograd.Function):
    """x [*, D] · inverse_rms(x) · weight [D], and its gradients; once differentiable.

    On a CPU F.rms_norm's gradient is that of each of its operations: twice the time, and x · inverse_rms(x) is kept.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = inverse_rms(x, x.new_full((), eps))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        to_x = to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = product.flatten(0, -2).sum(dim=0)
        if ctx.needs_input_grad[0]:
            # d scale / dx = -scale³ · x / D: what the gradient has along x falls out
            along = (product @ weight)[..., None].mul_(scale).mul_(-1 / x.shape[-1])
            to_x = (grad * weight).mul_(scale).addcmul_(normed, along)
        return to_x, to_weight, None


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, computed in float32, given back in x's dtype; grad flows."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        plain = x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32
        if plain and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling():
            return Norm.apply(x, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)
