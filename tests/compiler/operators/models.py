"""Small models drawn at random, over everything that the catalogue can say."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st

from shipway.schemas.model import Model

Data = dict[str, Any]


def examples(number: int) -> settings:
    """So many drawn models; a failing one is not shrunk, as every step would generate and run a model."""
    return settings(max_examples=number, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))


def same_examples(number: int) -> settings:
    """So many drawn models, the same in every run: for tests whose examples take seconds each."""
    return settings(max_examples=number, deadline=None, derandomize=True, phases=(Phase.generate,))


widths = st.sampled_from([32, 48, 64])


@st.composite
def delta(draw: st.DrawFn) -> Data:
    heads = draw(st.integers(2, 4))
    return {
        "heads": heads,
        "value_heads": heads * draw(st.integers(1, 2)),
        "key_width": draw(st.sampled_from([16, 24])),
        "value_width": draw(st.sampled_from([8, 16, 24])),
        "convolution_width": draw(st.integers(2, 4)),
        "decay": {"kind": draw(st.sampled_from(["bounded", "unbounded"]))},
        "decay_rank": draw(st.sampled_from([8, 12])),
        "output_gate": draw(st.sampled_from(["full", "low_rank"])),
        "output_gate_bias": draw(st.booleans()),
        "chunk": draw(st.sampled_from([32, 64])),
    }


gates = st.sampled_from(["none", "elementwise", "per_head"])
positions = st.sampled_from([{"kind": "none"}, {"kind": "rotary"}])


@st.composite
def latent(draw: st.DrawFn) -> Data:
    shared = draw(st.sampled_from([0, 8]))
    nope = draw(st.sampled_from([16, 24]))
    return {
        "heads": draw(st.integers(2, 4)),
        "query_rank": draw(st.sampled_from([None, 20])),
        "kv_rank": draw(st.sampled_from([12, 24])),
        "nope_width": nope,
        "rope_width": shared,
        "value_width": draw(st.sampled_from([12, nope, nope + shared])),
        "position": draw(positions) if shared else {"kind": "none"},
        "output_gate": draw(gates),
    }


@st.composite
def grouped(draw: st.DrawFn) -> Data:
    kv_heads = draw(st.integers(1, 3))
    return {
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "head_width": draw(st.sampled_from([8, 16])),
        "position": draw(positions),
        "query_key_norm": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "output_gate": draw(gates),
    }


@st.composite
def experts(draw: st.DrawFn) -> Data:
    groups = draw(st.sampled_from([1, 3]))
    latent_width = draw(st.sampled_from([None, 16, 24]))
    return {
        "routed": 6 * groups,
        "active": draw(st.integers(1, 3)),
        "inner_width": draw(st.sampled_from([20, 32])),
        "latent_width": latent_width,
        "latent_norm": draw(st.booleans()),
        "router_input": draw(st.sampled_from(["hidden", "latent"])) if latent_width else "hidden",
        "shared": draw(st.integers(0, 2)),
        "shared_inner_width": draw(st.sampled_from([None, 28])),
        "shared_gate": False,
        "scores": draw(st.sampled_from(["sigmoid", "softmax"])),
        "renormalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "groups": groups,
        "active_groups": min(groups, 2),
        "balancing": {"kind": draw(st.sampled_from(["quantile", "bias", "auxiliary", "none"]))},
    }


@st.composite
def models(
    draw: st.DrawFn,
    attention: tuple[str, ...] = ("delta", "latent", "grouped"),
    feed_forward: tuple[str, ...] = ("dense", "experts"),
    layers: int = 3,
    vision: bool = False,
) -> Model:
    """A model of up to `layers` layers with kinds drawn from those given."""
    number = draw(st.integers(1, layers))
    residual = st.sampled_from(
        [{"kind": "plain"}, {"kind": "full"}, *({"kind": "block", "block_layers": n} for n in (1, 2))]
    )
    data: Data = {
        "vocabulary": draw(st.sampled_from([61, 97])),
        "width": draw(widths),
        "layers": number,
        "attention": {
            "mix": draw(st.lists(st.sampled_from(attention), min_size=number, max_size=number)),
            "delta": draw(delta()),
            "latent": draw(latent()),
            "grouped": draw(grouped()),
        },
        "feed_forward": {
            "mix": draw(st.lists(st.sampled_from(feed_forward), min_size=number, max_size=number)),
            "dense_inner_width": draw(st.sampled_from([40, 64])),
            "experts": draw(experts()),
            "activation": draw(st.sampled_from([{"kind": "situ"}, {"kind": "swiglu"}])),
        },
        "residual": draw(residual),
        "tied_embeddings": draw(st.booleans()),
        "multi_token_prediction": draw(st.sampled_from([None, {"depth": 1}, {"depth": 2}])),
    }
    if data["feed_forward"]["experts"]["shared"]:
        data["feed_forward"]["experts"]["shared_gate"] = draw(st.booleans())
    if vision:
        data["vision"] = draw(vision_towers())
    return Model.from_data(data)


@st.composite
def vision_towers(draw: st.DrawFn) -> Data:
    return {
        "layers": draw(st.integers(1, 3)),
        "width": draw(st.sampled_from([16, 32])),
        "heads": draw(st.integers(1, 2)),
        "head_width": draw(st.sampled_from([8, 16])),
        "inner_width": draw(st.sampled_from([24, 40])),
        "patch": draw(st.sampled_from([2, 4])),
        "position_grid": 8,
        "merge": draw(st.sampled_from([1, 2])),
        "projector_width": draw(st.sampled_from([24, 32])),
    }
