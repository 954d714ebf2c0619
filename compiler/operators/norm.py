"""RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

from shipway.compiler.frozen import frozen
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

    def scratch_bytes(self, shard: Shard) -> Number:
        return shard.local_tokens * self.width * 4


def norm_kernel(name: str, rows: Number, width: Number, shard: Shard) -> Elementwise:
    """Forward reads x and writes y; backward reads x and dy and writes dx."""
    size = rows * width * shard.element_bytes
    return Elementwise(name, 2 * size, 3 * size)


def norm_saved(name: str, rows: Number, width: Number, shard: Shard) -> tuple[Saved, ...]:
    """The input, and the fp32 reciprocal root mean square of each of `rows` rows."""
    return (
        Saved(f"{name} input", rows * width * shard.element_bytes),
        Saved(f"{name} rstd", rows * 4),
    )
