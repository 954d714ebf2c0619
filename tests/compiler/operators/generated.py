"""The generated module of a model, to hold the catalogue against."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import torch
from torch import nn

from shipway.compiler.emit.model import Header, render_model
from shipway.schemas.model import Model

_HEADER = Header(name="test", shipway="0", plan_hash="none", command="none")
_COUNTER = itertools.count()


def generated(model: Model) -> ModuleType:
    """The generated `model.py`, imported."""
    name = f"generated_for_catalogue_{next(_COUNTER)}"
    module = ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(render_model(model, header=_HEADER), f"{name}.py", "exec"), module.__dict__)
    return module


def initialised(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Small random parameters, in `dtype` but for those that stay in fp32."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        parameter.data.normal_(0, 0.1, generator=generator)
        if not name.endswith(("a_log", "dt_bias", "router.weight")) and name != "weight":
            parameter.data = parameter.data.to(dtype)
    return module.train()
