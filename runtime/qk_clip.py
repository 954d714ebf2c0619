"""QK-clip: keeps attention logits of latent-attention heads under a threshold (arXiv 2507.20534, Alg. 1).

The largest logit of each head over the step's batch is watched in the forward pass. After the
optimizer step, a head above the threshold has its query and key projections scaled by
sqrt(threshold / max); the shared part of the key serves all heads and stays, so the query's part for
it takes the whole factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.context_softmax import ContextSoftmaxCore
from shipway.runtime.parallelize import ParallelModel
from shipway.runtime.shards import block_of, local_tensor
from shipway.schemas.model import LatentAttention

QUERY_BLOCK = 512
"""Queries whose logits are made at a time."""


@dataclass
class QkClip:
    """Watches the latent-attention layers of this rank and clips them after a step."""

    model: ParallelModel
    latent: LatentAttention
    threshold: float
    largest: dict[str, Tensor] = field(default_factory=dict)
    """Largest logit of each head since the last clip, by layer name."""

    def __post_init__(self) -> None:
        for name, attention in self._attentions().items():
            attention.core.register_forward_pre_hook(
                lambda core, args, name=name: self._watch(name, core, args)
            )

    def clip(self) -> dict[str, float]:
        """Scale the projections of heads that went over; returns the largest logit of each layer."""
        mesh = self.model.mesh
        for name, attention in self._attentions().items():
            largest = self.largest.get(name)
            if largest is None:
                continue
            mesh.all_reduce(largest, ["dp_replicate", "fsdp"], op=dist.ReduceOp.MAX)
            largest = _of_all_heads(largest, mesh)
            factor = (self.threshold / largest).clamp(max=1.0)
            query = attention.q_up if hasattr(attention, "q_up") else attention.q_proj
            scale_rows(query.weight, self._query_rows(factor))
            scale_rows(attention.kv_up.weight, self._key_rows(factor))
        return {name: float(value.max()) for name, value in self._taken().items()}

    def forget(self) -> None:
        """Drop what was watched in a step that is not used."""
        self.largest.clear()

    def _taken(self) -> dict[str, Tensor]:
        taken, self.largest = self.largest, {}
        return taken

    def _query_rows(self, factor: Tensor) -> Tensor:
        own = factor.sqrt().unsqueeze(1).expand(-1, self.latent.nope_width)
        shared = factor.unsqueeze(1).expand(-1, self.latent.rope_width)
        return torch.cat([own, shared], 1).flatten()

    def _key_rows(self, factor: Tensor) -> Tensor:
        own = factor.sqrt().unsqueeze(1).expand(-1, self.latent.nope_width)
        values = torch.ones_like(factor).unsqueeze(1).expand(-1, self.latent.value_width)
        return torch.cat([own, values], 1).flatten()

    def _attentions(self) -> dict[str, nn.Module]:
        layers = {name: layer for part in self.model.parts for name, layer in part.layers.items()}
        return {name: layer.attention for name, layer in layers.items() if hasattr(layer.attention, "kv_up")}

    @torch.no_grad()
    def _watch(self, name: str, core: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not core.training or torch._C._current_graph_task_id() != -1:
            return  # evaluation, or recomputation
        q, k, v, *bounds = inputs
        first = 0
        if isinstance(core, ContextSoftmaxCore):
            (k, _), first = core.gathered(k, v), core.rows.rank * q.shape[1]
        found = largest_logits(q, k, core.scale, *bounds, first=first)
        self.largest[name] = torch.maximum(self.largest[name], found) if name in self.largest else found


def _of_all_heads(largest: Tensor, mesh: Mesh) -> Tensor:
    """[H] from this rank's heads [H / tp]."""
    if mesh.size("tp") == 1:
        return largest
    whole = largest.new_empty(mesh.size("tp") * len(largest))
    dist.all_gather_into_tensor(whole, largest, group=mesh.group("tp"))
    return whole


def largest_logits(
    q: Tensor, k: Tensor, scale: float, cu_seqlens: Tensor | None = None, first: int = 0
) -> Tensor:
    """Largest causal attention logit of each head [H], fp32, within documents.

    q [B, T, H, K] are the tokens of each row from `first` on, k [B, first + T, H, K]; `cu_seqlens` bounds
    the documents of whole rows, which may go on beyond.
    """
    batch, tokens, heads, _ = q.shape
    last = first + tokens
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, batch * last + 1, last, device=q.device)
    position = torch.arange(int(cu_seqlens[-1]), device=q.device)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True).view(batch, -1)
    largest = torch.full((heads,), -torch.inf, device=q.device)
    for start in range(first, last, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, last)
        queries = q[:, start - first : end - first].float()
        logits = torch.einsum("bqhk,bshk->bhqs", queries, k[:, :end].float()) * scale
        causal = torch.arange(start, end, device=q.device)[:, None] >= torch.arange(end, device=q.device)
        same = document[:, start:end, None] == document[:, None, :end]
        masked = logits.masked_fill(~(causal & same).unsqueeze(1), -torch.inf)
        largest = torch.maximum(largest, masked.amax((0, 2, 3)))
    return largest


def scale_rows(weight: Tensor, rows: Tensor) -> None:
    """Multiply each row of a (sharded) matrix by its own factor."""
    block = block_of(weight)
    mine = rows[block.offset[0] : block.offset[0] + block.size[0]]
    with torch.no_grad():
        local = local_tensor(weight)
        local.mul_(mine.to(local.dtype).unsqueeze(1))
