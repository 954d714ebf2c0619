"""The operators of a model as a graph: who reads whose output."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import networkx

from shipway.schemas.model import Model

if TYPE_CHECKING:
    from shipway.compiler.lower import LoweredModel

SUBLAYERS = ("attention", "feed_forward")


def operator_graph(lowered: LoweredModel) -> networkx.MultiDiGraph[str]:
    """Nodes `embed`, `layers.3.attention`, ..., `norm`, `head`, `vision`, `prediction.0`.

    An edge's `kind` is `data`, `residual` (the state that a plain residual adds to, or a sublayer
    that a block or running sum adds up) or `attention residual` (a source that a site weighs). A
    finished block of block attention residuals is a node `block.0`, ...
    """
    graph: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    graph.add_node("embed", part=lowered.embedding)
    for index, layer in enumerate(lowered.layers):
        for role in SUBLAYERS:
            graph.add_node(f"layers.{index}.{role}", part=layer)
    graph.add_node("norm", part=lowered.final)
    graph.add_node("head", part=lowered.head)
    _add_depth(graph, lowered.model)
    graph.add_edge("norm", "head", kind="data")
    if lowered.vision is not None:
        graph.add_node("vision", part=lowered.vision)
        graph.add_edge("vision", "embed", kind="data")
    before = "norm"
    for index, part in enumerate(lowered.prediction):
        node = f"prediction.{index}"
        graph.add_node(node, part=part)
        graph.add_edge(before, node, kind="data")
        graph.add_edge("embed", node, kind="data")
        before = node
    return graph


def _add_depth(graph: networkx.MultiDiGraph[str], model: Model) -> None:
    chain = ["embed", *(f"layers.{i}.{role}" for i in range(model.layers) for role in SUBLAYERS), "norm"]
    match model.residual.kind:
        case "plain":
            for before, node in pairwise(chain):
                graph.add_edge(before, node, kind="data")
                if before != "embed":
                    graph.add_edge(before, node, kind="residual")
        case "full":
            for position, node in enumerate(chain[1:], start=1):
                graph.add_edges_from(
                    ((source, node) for source in chain[:position]), kind="attention residual"
                )
        case "block":
            _add_blocks(graph, chain, 2 * model.residual.block_layers)


def _add_blocks(graph: networkx.MultiDiGraph[str], chain: list[str], block_sublayers: int) -> None:
    """The running sum is sealed as a source once the first site of the next block has read it."""
    sealed: list[str] = []
    running = ["embed"]
    for position, node in enumerate(chain[1:]):
        graph.add_edges_from(((source, node) for source in sealed), kind="attention residual")
        graph.add_edges_from(((part, node) for part in running), kind="residual")
        if node == "norm":
            break
        if position % block_sublayers == 0:
            block = f"block.{len(sealed)}"
            graph.add_edges_from(((part, block) for part in running), kind="residual")
            sealed, running = [*sealed, block], []
        running.append(node)
