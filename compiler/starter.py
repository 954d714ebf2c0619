"""The blueprint that `shipway init` writes."""

from __future__ import annotations

_TEXT = """\
# yaml-language-server: $schema=SCHEMA
#
# A blueprint: a model, how it is trained, and on what. Check it with `shipway validate FILE`,
# see what it takes with `shipway plan FILE`, train with `shipway launch FILE`.
#
# Each section starts from a config that comes with Shipway, or from one of yours: a file
# model/mine.yaml beside this one is found as `- model: mine`.
defaults:
  - model: tiny  # also small_h200, k3, deepseek_v3, qwen3_30b_a3b, llama31_8b, ...
  - training: tiny
  - cluster: cpu_2  # this machine, two processes; with GPUs h200_1, h200_8, h100_8, ...
  - _self_  # what stands below is laid over the three

name: NAME  # of the build folder and of the runs

model:
  layers: 8  # a multiple of the pattern in model/tiny.yaml: three delta layers, one latent
  # width: 128
  # feed_forward:
  #   experts:
  #     routed: 16  # experts there are
  #     active: 4  # of them, those that a token passes

training:
  seed: 0
  data:
    sources:
      stdlib: {kind: python_stdlib}  # the Python standard library's own text
      # mine: {kind: files, path: texts}  # .txt, .jsonl or .parquet, relative to this file
  checkpoints:
    every_steps: 25

  # A list replaces the whole list below it, so stages are written in full:
  # stages:
  #   - name: short
  #     context: 256  # 8K means 8,192 here
  #     tokens: 320Ki
  #     global_batch: 4Ki  # tokens in one optimizer step, a multiple of context
  #     learning_rate: {kind: cosine, peak: 4e-3, final: 4e-4, warmup: 10%}

# Whatever is left out is searched. To pin a part of the layout:
#   training:
#     layout: {tensor_parallel: 2}
# On the command line: shipway plan FILE cluster=h200_1 training.micro_batch=2
"""


def starter(name: str, schema: str) -> str:
    """Text of a starter blueprint called `name`, which refers to a JSON Schema file for editors."""
    return _TEXT.replace("NAME", name).replace("SCHEMA", schema)
