"""What the tests of trainer/rl_math.py share: short ways to write tensors, and a gradient by autograd."""

import torch

NAN, INF = float("nan"), float("inf")


def tensor(*rows):
    """Rows of numbers as float32 [N, R]."""
    return torch.tensor(rows, dtype=torch.float32)


def mask_of(*rows):
    """Rows of 0 and 1 as bool [N, R]."""
    return torch.tensor(rows, dtype=torch.bool)


def assert_close(actual, expected, atol=1e-6):
    """Equal within an absolute tolerance, in shape too."""
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), expected, atol=atol, rtol=0)


def gradient(function, at):
    """d function(at) / d at for a scalar function."""
    leaf = at.clone().requires_grad_()
    function(leaf).backward()
    return leaf.grad
