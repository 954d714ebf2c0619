"""Which optimizer takes which parameter, and one object that steps and saves them together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shipway.runtime.adamw import AdamW, AdamWOptions, AdamWParameter
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.mesh import Mesh
from shipway.runtime.muon import Muon, MuonOptions, MuonParameter
from shipway.runtime.muon_exchange import copies_of
from shipway.runtime.parallel.data import DTYPES
from shipway.runtime.parallel.tensor import is_divided
from shipway.schemas import training

GroupRule = tuple[str, int | bool]
"""("muon", heads) or ("adamw", decay)."""


def rule_of(name: str, groups: Mapping[str, GroupRule]) -> GroupRule:
    """The first rule whose regular expression is found in a parameter's name; raises Fatal when none is."""
    for pattern, rule in groups.items():
        if re.search(pattern, name):
            return rule
    raise Fatal(f"no optimizer group takes the parameter {name}: build the model again")


@dataclass
class Optimizer:
    """AdamW and, where the blueprint says so, Muon, over the parameters of this rank."""

    adamw: AdamW
    muon: Muon
    step_count: int = 0

    def step(self, learning_rate: float) -> None:
        """One optimizer step; every rank must call it."""
        self.step_count += 1
        self.adamw.step(learning_rate, self.step_count)
        self.muon.step(learning_rate)

    def state_tensors(self) -> dict[str, Tensor]:
        """State to save, by parameter name and kind, each sharded as its parameter."""
        kinds = {
            "momentum": self.muon.momentum,
            "first": self.adamw.first,
            "second": self.adamw.second,
        }
        return {f"{name}.{kind}": value for kind, values in kinds.items() for name, value in values.items()}


def build_optimizer(
    named_parameters: Mapping[str, nn.Parameter],
    groups: Mapping[str, GroupRule],
    options: training.Optimizer,
    precision: training.Precision,
    device: torch.device,
    mesh: Mesh | None = None,
) -> Optimizer:
    """Sort parameters by the generated model's groups; with `adamw` in the blueprint all go to AdamW.

    With `mesh`, ranks that tensor parallel leaves with the same parameters share Muon's work on them, as
    replicas always do, and its layout says whether state is kept in host memory.
    """
    moments = DTYPES[precision.optimizer]
    muon_parameters: list[MuonParameter] = []
    adamw_parameters: list[AdamWParameter] = []
    for name, parameter in named_parameters.items():
        kind, value = rule_of(name, groups)
        if kind == "muon" and isinstance(options, training.Muon):
            heads = int(value) if options.per_head else 1
            copies = (*copies_of(parameter), *_tensor_copies(parameter, mesh))
            muon_parameters.append(MuonParameter(name, parameter, heads, copies))
        else:
            adamw_parameters.append(AdamWParameter(name, parameter, decay=kind == "muon" or bool(value)))
    host = device if mesh is not None and mesh.layout.offloads_optimizer else None
    adamw_options = AdamWOptions(options.betas, options.eps, options.weight_decay, moments)
    return Optimizer(
        AdamW(adamw_parameters, adamw_options, host),
        Muon(muon_parameters, _muon_options(options, precision, device), host),
    )


def _tensor_copies(parameter: Tensor, mesh: Mesh | None) -> tuple[dist.ProcessGroup, ...]:
    if mesh is None or mesh.size("tp") == 1 or is_divided(parameter):
        return ()
    return (mesh.group("tp"),)


def _muon_options(
    options: training.Optimizer, precision: training.Precision, device: torch.device
) -> MuonOptions:
    products = torch.float32 if device.type == "cpu" else torch.bfloat16
    if not isinstance(options, training.Muon):
        options = training.Muon()
    return MuonOptions(
        momentum=options.momentum,
        steps=options.newton_schulz_steps,
        update_rms=options.update_rms,
        weight_decay=options.weight_decay,
        product_dtype=products,
        momentum_dtype=DTYPES[precision.optimizer],
    )
