"""Blueprints for tests: a small valid one written out whole, and changes to it."""

from __future__ import annotations

from pathlib import Path

WHOLE = """\
name: whole
model:
  vocabulary: 272
  width: 64
  layers: 4
  attention:
    mix:
      pattern: [delta, latent]
    delta:
      heads: 4
      key_width: 16
      value_width: 16
      decay: {kind: bounded, minimum: -5.0}
      decay_rank: 16
    latent:
      heads: 4
      kv_rank: 32
  feed_forward:
    mix:
      head: [dense]
      pattern: [experts]
    dense_inner_width: 128
    experts:
      routed: 8
      active: 2
      inner_width: 32
    activation: {kind: swiglu}
training:
  stages:
    - name: one
      context: 256
      tokens: 64Ki
      global_batch: 4Ki
      learning_rate: {kind: cosine, peak: 1e-3}
cluster:
  name: here
  nodes: 1
  devices_per_node: 6
  device: cpu
"""
"""A blueprint without a defaults list."""


def changed(old: str, new: str) -> str:
    """The whole blueprint with one piece of text replaced, which must be there exactly once."""
    assert WHOLE.count(old) == 1, old
    return WHOLE.replace(old, new)


def write(folder: Path, text: str | bytes, name: str = "mine.yaml") -> Path:
    """A file in `folder`, with the folders that its name asks for."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def place(text: str, needle: str, inside: str = "") -> tuple[int, int]:
    """Line and column of `needle` in `text`; `inside`: of this piece within it."""
    start = text.index(needle) + (needle.index(inside) if inside else 0)
    return text.count("\n", 0, start) + 1, start - (text.rfind("\n", 0, start) + 1) + 1
