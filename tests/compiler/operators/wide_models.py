"""Models of the widths that real ones have, drawn at random: kernels of CUDA devices take them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from shipway.schemas.model import Model

gates = st.sampled_from(["none", "elementwise", "per_head"])
widths = st.sampled_from([512, 1024, 1536])


@st.composite
def wide_models(draw: st.DrawFn, attention: str, feed_forward: str) -> Model:
    """Two layers of one kind, the second of which opens no block."""
    nope, rope = draw(st.sampled_from([64, 128])), draw(st.sampled_from([0, 64]))
    kv_heads = draw(st.sampled_from([2, 4]))
    mix: dict[str, Any] = {
        "delta": {
            "heads": draw(st.sampled_from([4, 8])),
            "key_width": draw(st.sampled_from([64, 128])),
            "value_width": draw(st.sampled_from([64, 128])),
            "decay_rank": draw(st.sampled_from([64, 128])),
            "output_gate": draw(st.sampled_from(["full", "low_rank"])),
            "chunk": draw(st.sampled_from([32, 64])),
        },
        "latent": {
            "heads": draw(st.sampled_from([4, 8])),
            "query_rank": draw(st.sampled_from([None, 256])),
            "kv_rank": draw(st.sampled_from([128, 512])),
            "nope_width": nope,
            "rope_width": rope,
            "value_width": draw(st.sampled_from([64, 128])),
            "output_gate": draw(gates),
        },
        "grouped": {
            "heads": kv_heads * draw(st.sampled_from([1, 4])),
            "kv_heads": kv_heads,
            "head_width": draw(st.sampled_from([64, 128])),
            "position": {"kind": draw(st.sampled_from(["none", "rotary"]))},
            "query_key_norm": draw(st.booleans()),
            "output_gate": draw(gates),
        },
    }
    experts = {
        "routed": draw(st.sampled_from([8, 32])),
        "active": draw(st.sampled_from([1, 2, 4])),
        "inner_width": draw(st.sampled_from([256, 512])),
        "latent_width": draw(st.sampled_from([None, 256])),
        "latent_norm": draw(st.booleans()),
        "shared": draw(st.integers(0, 2)),
        "balancing": {"kind": draw(st.sampled_from(["quantile", "bias"]))},
    }
    residual = draw(st.sampled_from([{"kind": "plain"}, {"kind": "block", "block_layers": 2}]))
    return Model.from_data(
        {
            "vocabulary": 512,
            "width": draw(widths),
            "layers": 2,
            "attention": {"mix": [attention] * 2, attention: mix[attention]},
            "feed_forward": {
                "mix": [feed_forward] * 2,
                "dense_inner_width": draw(st.sampled_from([1024, 4096])),
                "experts": experts,
                "activation": {"kind": draw(st.sampled_from(["situ", "swiglu"]))},
            },
            "residual": residual,
        }
    )
