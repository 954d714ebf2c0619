"""The build folder's `container/`: a Dockerfile, and what makes Apptainer's and enroot's image of it."""

from __future__ import annotations

from shipway.compiler.launch.job import Programme
from shipway.compiler.launch.templates import fill
from shipway.schemas.plan import Plan

BASES = {
    "cuda": "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime",
    "cpu": "python:3.12.11-slim-bookworm",
}
"""Base image by the devices' software family; the tag names one version, never `latest`.

For ROCm the site's own image is named when the image is built: AMD's tags differ by driver.
"""


def container_files(plan: Plan, programme: Programme) -> dict[str, str]:
    """Text of each file, by path relative to the build folder."""
    kind = programme.cluster.device.kind
    values = {
        "name": programme.name,
        "slug": programme.slug,
        "plan_hash": programme.plan_hash,
        "tag": programme.plan_hash.removeprefix("sha256:")[:12],
        "regenerate": programme.regenerate,
        "version": plan.shipway,
        "base": BASES.get(kind, ""),
        "cuda": kind == "cuda",
    }
    files = {
        "container/enroot.sh": fill("container/enroot.sh.j2", **values),
        "container/Dockerfile": fill("container/Dockerfile.j2", **values),
        "container/Dockerfile.dockerignore": "**/__pycache__\nruns\n.shipway-manifest.json\n",
    }
    if kind in BASES:
        files["container/apptainer.def"] = fill("container/apptainer.def.j2", **values)
    return files
