"""What each block of a generated model keeps for backward on this GPU, read off the allocator.

    shipway build bench/blueprints/small_h200_8k.yaml --out build/q
    python bench/kept_bytes.py build/q --out bench/results/h200-kept-bytes.json

Training precision on one device: bf16 parameters, packed as whole rows. tests/bench holds the operator
catalogue to what this wrote.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

FP32 = ("dt_bias", "a_log", "router.weight")
BLOCKS = (
    "attention_residual",
    "attention_norm",
    "attention",
    "feed_forward_residual",
    "feed_forward_norm",
    "feed_forward",
)


def main() -> int:
    """Run two forwards and backwards, and write what the second one kept, block by block."""
    parser = argparse.ArgumentParser(description="Bytes that each block keeps for backward.")
    parser.add_argument("build", type=Path)
    parser.add_argument("--layers", type=int, default=8, help="first layers of the model to run")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    module = load(options.build / "model.py")
    model = first_layers(module, options.layers)
    tokens = torch.randint(0, module.VOCABULARY, (options.sequences, options.context), device="cuda")
    for _ in range(2):  # the first forward compiles, and keeps workspaces
        kept = forward_backward(model, tokens)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sequences": options.sequences,
        "context": options.context,
        "kept_bytes": kept,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def load(path: Path) -> ModuleType:
    """Import a generated model.py."""
    spec = importlib.util.spec_from_file_location("generated_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generated_model"] = module
    spec.loader.exec_module(module)
    return module


def first_layers(module: ModuleType, layers: int) -> nn.Module:
    """The model's first layers with initial weights, in training precision, on the GPU."""
    with torch.device("meta"):
        model = module.Model()
    for name in [name for name in model.layers if int(name) >= layers]:
        del model.layers[name]
    model = model.to_empty(device="cuda")
    model.init_weights()
    for name, parameter in model.named_parameters():
        if not name.endswith(FP32):
            parameter.data = parameter.data.bfloat16()
    return model.train()


def forward_backward(model: nn.Module, tokens: torch.Tensor) -> dict[str, int]:
    """Growth of allocated memory over each block's forward."""
    before: dict[str, int] = {}
    kept: dict[str, int] = {}
    hooks = []
    for layer, module in model.layers.items():
        for block in BLOCKS:
            name = f"{layer}.{block}"
            target = getattr(module, block)
            hooks.append(
                target.register_forward_pre_hook(
                    lambda *_, name=name: before.__setitem__(name, torch.cuda.memory_allocated())
                )
            )
            hooks.append(
                target.register_forward_hook(
                    lambda *_, name=name: kept.__setitem__(name, torch.cuda.memory_allocated() - before[name])
                )
            )
    loss = model(tokens, tokens)
    (loss / tokens.numel()).backward()
    model.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    return kept


if __name__ == "__main__":
    sys.exit(main())
