"""Groups of parameters that the table has a column for."""

from __future__ import annotations

GROUPS = (
    "vision",
    "router",
    "experts",
    "shared",
    "latent",
    "residual",
    "norms",
    "attention",
    "ends",
    "dense",
)
"""All, in the order in which ranks agree to take them."""


def group_of(parameter: str) -> str:
    """The column of the table that a parameter's gradient is in."""
    for word, group in (
        ("vision", "vision"),
        ("router", "router"),
        ("experts", "experts"),
        ("shared", "shared"),
        ("latent_", "latent"),
        ("residual", "residual"),
        ("norm", "norms"),
        ("attention", "attention"),
    ):
        if word in parameter:
            return group
    return "ends" if parameter.startswith(("embed", "head")) else "dense"
