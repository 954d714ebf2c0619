"""QK-clip: keeps attention logits of latent-attention heads under a threshold (arXiv 2507.20534, Alg. 1).

The largest logit of each head over the step's batch is watched in the forward pass. After the
optimizer step, a head above the threshold has its query and key projections scaled by
sqrt(threshold / max); the shared part of the key serves all heads and stays, so the query's part for
it takes the whole factor.

Making all logits again would cost a good part of the attention itself. A layer that was far from the
threshold in the step before is only bounded: no logit exceeds the largest norm of a query times a key's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shipway.runtime.kernels.documents import document_of_token
from shipway.runtime.kernels.elementwise import unseen
from shipway.runtime.mesh import Mesh
from shipway.runtime.parallel.context_softmax import ContextSoftmaxCore
from shipway.runtime.parallelize import ParallelModel
from shipway.runtime.shards import block_of, local_tensor
from shipway.schemas.model import LatentAttention

QUERY_BLOCK = 512
"""Queries whose logits are made at a time."""
FAR = 0.5
"""Share of the threshold under which a layer's logits are only bounded in the next step."""


@dataclass
class QkClip:
    """Watches the latent-attention layers of this rank and clips them after a step."""

    model: ParallelModel
    latent: LatentAttention
    threshold: float
    largest: dict[str, Tensor] = field(default_factory=dict)
    """Largest logit of each head since the last clip, or its bound, by layer name."""
    bounded: set[str] = field(default_factory=set)
    """Layers far from the threshold; the same on every rank."""

    def __post_init__(self) -> None:
        for name, attention in self._attentions().items():
            attention.core.register_forward_pre_hook(
                lambda core, args, name=name: self._watch(name, core, args)
            )

    def clip(self) -> dict[str, float]:
        """Scale the projections of heads that went over; returns each layer's largest logit, or its bound."""
        mesh = self.model.mesh
        taken, self.largest = self.largest, {}
        found: dict[str, Tensor] = {}
        for name, attention in self._attentions().items():
            if name not in taken:
                continue
            mesh.all_reduce(taken[name], ["dp_replicate", "fsdp"], op=dist.ReduceOp.MAX)
            largest = _of_all_heads(taken[name], mesh)
            found[name] = largest.max()
            if name not in self.bounded:
                self._scale(attention, self.threshold / largest.clamp(min=self.threshold))
        values = torch.stack(list(found.values())).tolist() if found else []
        largest_of = dict(zip(found, values, strict=True))
        self.bounded = {name for name, value in largest_of.items() if value < FAR * self.threshold}
        return largest_of

    def _scale(self, attention: nn.Module, factor: Tensor) -> None:
        query = attention.q_up if hasattr(attention, "q_up") else attention.q_proj
        scale_rows(query.weight, self._query_rows(factor))
        scale_rows(attention.kv_up.weight, self._key_rows(factor))

    def forget(self) -> None:
        """Drop what was watched in a step that is not used."""
        self.largest.clear()

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
        with unseen():
            if name in self.bounded:
                found = bound_of_logits(q, k, core.scale)
            else:
                found = largest_logits(q, k, core.scale, *bounds, first=first)
        self.largest[name] = torch.maximum(self.largest[name], found) if name in self.largest else found


def _of_all_heads(largest: Tensor, mesh: Mesh) -> Tensor:
    """[H] from this rank's heads [H / tp]."""
    if mesh.size("tp") == 1:
        return largest
    whole = largest.new_empty(mesh.size("tp") * len(largest))
    dist.all_gather_into_tensor(whole, largest, group=mesh.group("tp"))
    return whole


def bound_of_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """What no logit of a head exceeds, [H] in fp32: largest norms of q [B, T, H, K] and k [B, S, H, K]."""
    of_queries, of_keys = (
        torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax((0, 1)) for x in (q, k)
    )
    return of_queries * of_keys * scale


def largest_logits(
    q: Tensor, k: Tensor, scale: float, cu_seqlens: Tensor | None = None, first: int = 0
) -> Tensor:
    """Largest causal attention logit of each head [H], fp32, within documents; products in the dtype of `q`.

    q [B, T, H, K] are the tokens of each row from `first` on, k [B, S, H, K] those of whole rows, whose
    documents `cu_seqlens` bounds.
    """
    batch, tokens, heads, _ = q.shape
    document = None
    if cu_seqlens is not None:
        document = document_of_token(cu_seqlens, batch * k.shape[1]).view(batch, -1)
    queries, keys = q.transpose(1, 2), k.transpose(1, 2)
    largest = torch.full((heads,), -torch.inf, device=q.device)
    for start in range(first, first + tokens, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, first + tokens)
        logits = queries[:, :, start - first : end - first] @ keys[:, :, :end].mT  # [B, H, block, end]
        if document is not None:
            other = document[:, None, start:end, None] != document[:, None, None, :end]
            logits.masked_fill_(other, -torch.inf)
        later = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        logits[..., start:].masked_fill_(later, -torch.inf)
        largest = torch.maximum(largest, logits.amax((0, 2, 3)).float())
    return largest * scale


def scale_rows(weight: Tensor, rows: Tensor) -> None:
    """Multiply each row of a (sharded) matrix by its own factor."""
    block = block_of(weight)
    mine = rows[block.offset[0] : block.offset[0] + block.size[0]]
    with torch.no_grad():
        local = local_tensor(weight)
        local.mul_(mine.to(local.dtype).unsqueeze(1))
