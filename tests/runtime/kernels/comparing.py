"""How a kernel is held against its float64 reference."""

import torch


def leaf(*shape, seed=0, spread=1.0, dtype=torch.float64):
    """A reproducible random tensor that wants a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=dtype) * spread).requires_grad_()


def gradients(outputs, inputs, seed=3):
    """Gradients of a random weighting of all outputs."""
    generator = torch.Generator().manual_seed(seed)
    total = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs)
    return torch.autograd.grad(total, inputs, retain_graph=True)


def assert_all_close(found, expected, tolerance=1e-10):
    """Every pair, absolutely and relatively."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_same_function(found, expected, inputs, tolerance=1e-10):
    """Values and gradients of two lists of outputs of the same inputs."""
    assert_all_close(found, expected, tolerance)
    assert_all_close(gradients(found, inputs), gradients(expected, inputs), tolerance)
