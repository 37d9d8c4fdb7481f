"""Products with a weight matrix, through the fastest kernels at hand.

On a CPU and in float32 torch multiplies with MKL. oneDNN, which comes with torch too, takes 3 to 30 % less on many
tokens, and down to half on a few where the weight lies in an order of its own. What it gives differs from F.linear by
rounding alone.
"""

import os
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAIR = 2  # rows, for which MKL has a product of its own
FEWEST_TOKENS = 32  # below, putting the weight into oneDNN's order costs more than it saves
# oneDNN keeps what it prepared for the last 1024 sizes, and so does torch's layer above it, half a megabyte a size. A
# number of tokens hardly ever comes again, so a run would grow by that. Both read these when they are first used.
CACHES, CACHED_SIZES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), 128
FEWEST_INPUTS = 256  # of a weight: products with smaller ones take less time than preparing oneDNN for a new size


@lru_cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch can keep CPU weights in oneDNN's own order; asked once, by trying it.

    torch's compiler uses these operators for weights that do not change; they are not documented, so where they are
    missing there is F.linear. Before that first use of oneDNN it bounds what is kept for sizes.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(CACHED_SIZES))
    x, weight = torch.ones(2, 16, dtype=dtype), torch.ones(16, 16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return bool((plus(x, x, packed) == 17).all()) and bool((gated(x, packed, packed) - 256).abs().max() < 1)
    except (AttributeError, RuntimeError):
        return False


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in the order in which `times` is fastest; the weight itself where there is no other."""
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return weight


def through_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] · weightᵀ + bias, [n, out], of a weight that may be packed or lie in any order; no grad."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] · weightᵀ + bias, [n, out], of a weight that may be packed."""
    if weight.is_mkldnn:
        return through_onednn(x, weight, bias)
    if len(x) == PAIR and multiplies_pairs(x.device, x.dtype):
        out = (weight @ x.t()).t().contiguous()
        return out if bias is None else out + bias
    return F.linear(x, weight, bias)


def multiplies_pairs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of two rows is fastest with the factors in the other order: a third of F.linear's time, and a
    tenth less than from a packed weight."""
    return device.type == "cpu" and dtype == torch.float32


def plus(base: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """base [n, out] + x [n, in] · weightᵀ, of a weight that may be packed; base may be of higher precision."""
    if weight.is_mkldnn and base.dtype == x.dtype:
        return torch.ops.mkldnn._linear_pointwise.binary(x, base, weight, None, "add")
    return base + times(x, weight)


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x · gateᵀ) ⊙ (x · upᵀ), [n, out], of weights that may be packed."""
    if gate.is_mkldnn:
        opened = torch.ops.mkldnn._linear_pointwise(x, gate, None, "swish", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, opened, up, None, "mul")
    return F.silu(times(x, gate), inplace=True).mul_(times(x, up))


class LargeProduct(torch.autograd.Function):
    """x [T, in] · weightᵀ [T, out], and its gradients; once differentiable."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return through_onednn(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = through_onednn(grad, weight.t())
        if ctx.needs_input_grad[1]:
            to_weight = grad.t() @ x  # MKL is the faster one here
        return to_x, to_weight


class LargeGatedProduct(torch.autograd.Function):
    """(silu(gate) ⊙ up) [T, in] · weightᵀ, [T, out], and its gradients; once differentiable. What stands in brackets is
    worked out again in the backward pass: kept, it and silu(gate) would be a quarter of all that a layer keeps."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return through_onednn(F.silu(gate).mul_(up), weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        opened = F.silu(gate)
        to_weight = grad.t() @ (opened * up) if ctx.needs_input_grad[2] else None
        inner = through_onednn(grad, weight.t())
        to_up = opened.mul_(inner)
        return torch.ops.aten.silu_backward(inner.mul_(up), gate), to_up, to_weight


class Linear(nn.Linear):
    """nn.Linear, through oneDNN where that pays off."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_large_for(x):
            return super().forward(x)
        return LargeProduct.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])

    def is_large_for(self, x: Tensor) -> bool:
        """Whether LargeProduct is what multiplies x [..., in]."""
        return (
            self.bias is None and x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32
            and self.in_features >= FEWEST_INPUTS and x.numel() >= FEWEST_TOKENS * self.in_features
            and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu") and can_pack(torch.float32)
        )  # fmt: skip
