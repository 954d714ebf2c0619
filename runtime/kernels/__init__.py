"""Kernels of the generated model: plain functions, each documented where it stands.

`dispatch.table()` shows which implementation serves each of them.
"""

from .activation import sigmoid_gate, situ_glu, swiglu
from .balance import (
    add_margins,
    auxiliary_loss,
    expert_load,
    max_violation,
    quantile_bias,
    quantile_bias_from_histogram,
    sign_bias,
    solve_quantile_bias,
    update_quantile_bias,
    update_sign_bias,
)
from .dispatch import Choice, table
from .documents import positions_from
from .experts import Order, Routing, grouped_mm, order_by_expert, permute, route, router_logits, unpermute
from .latent_cache import gather_pages, latent_attention_step, write_pages
from .loss import chunk_rows, linear_cross_entropy
from .norm import gated_rms_norm, rms_norm
from .operations import (
    DeltaCore,
    SoftmaxCore,
    attention_residual,
    delta_rule,
    delta_segment,
    delta_step,
    short_convolution,
    softmax_attention,
)
from .project import project
from .rotary import Yarn, frequencies, rotary

__all__ = [
    "Choice",
    "DeltaCore",
    "Order",
    "Routing",
    "SoftmaxCore",
    "Yarn",
    "add_margins",
    "attention_residual",
    "auxiliary_loss",
    "chunk_rows",
    "delta_rule",
    "delta_segment",
    "delta_step",
    "expert_load",
    "frequencies",
    "gated_rms_norm",
    "gather_pages",
    "grouped_mm",
    "latent_attention_step",
    "linear_cross_entropy",
    "max_violation",
    "order_by_expert",
    "permute",
    "positions_from",
    "project",
    "quantile_bias",
    "quantile_bias_from_histogram",
    "rms_norm",
    "rotary",
    "route",
    "router_logits",
    "short_convolution",
    "sigmoid_gate",
    "sign_bias",
    "situ_glu",
    "softmax_attention",
    "solve_quantile_bias",
    "swiglu",
    "table",
    "unpermute",
    "update_quantile_bias",
    "update_sign_bias",
    "write_pages",
]
