"""RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step, total
from shipway.compiler.operators.base import Elementwise, Kernel, Number, Operator, Parameter, Saved, Shard
from shipway.schemas.layout import Recompute


@frozen
class Norm(Operator):
    """RMSNorm over the model width, on the tokens that sequence parallel leaves to a rank."""

    width: int
    block: str = "norms"

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("weight", (self.width,)),)

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        return (norm_kernel("norm", shard.local_tokens, self.width, shard),)

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        if recompute != "none":
            return ()
        return norm_saved("norm", shard.local_tokens, self.width, shard)

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        """What it makes is added to the residual path's gradient."""
        size = shard.local_tokens * self.width * shard.element_bytes
        kept = total(tensor.bytes for tensor in self.saved(shard, "none"))
        return (Step("norm", size, 2 * size + kept, weights=self.width),)

    def scratch_bytes(self, shard: Shard) -> Number:
        return shard.local_tokens * self.width * 4


def norm_kernel(name: str, rows: Number, width: Number, shard: Shard) -> Elementwise:
    """Forward reads x and writes y; backward reads x and dy and writes dx."""
    size = rows * width * shard.element_bytes
    return Elementwise(name, 2 * size, 3 * size)


def norm_backward(name: str, rows: Number, width: Number, shard: Shard) -> Step:
    """Backward of a norm inside another operator."""
    size = rows * width * shard.element_bytes
    kept = total(tensor.bytes for tensor in norm_saved(name, rows, width, shard))
    return Step(name, size, size + kept, weights=width)


def norm_saved(name: str, rows: Number, width: Number, shard: Shard) -> tuple[Saved, ...]:
    """The input, and the fp32 reciprocal root mean square of each of `rows` rows."""
    return (
        Saved(f"{name} input", rows * width * shard.element_bytes),
        Saved(f"{name} rstd", rows * 4),
    )
