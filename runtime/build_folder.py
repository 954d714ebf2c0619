"""Reading what `shipway build` wrote: the plan and the generated model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from pydantic import ValidationError

from shipway.runtime.exit_codes import Fatal
from shipway.schemas.plan import Plan


def read_plan(build: Path) -> Plan:
    """The plan of a build folder; raises Fatal when it is missing or of another format."""
    path = build / "plan.json"
    try:
        return Plan.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise Fatal(f"{path} does not exist: is {build} a folder that `shipway build` wrote?") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Fatal(
            f"{path} is not a plan of this version ({where}: {first['msg']}): build it again"
        ) from None


def import_model(build: Path) -> ModuleType:
    """The generated model module; raises Fatal when it does not import."""
    path = build / "model.py"
    if not path.exists():
        raise Fatal(f"{path} does not exist: run `shipway build` again")
    spec = importlib.util.spec_from_file_location("shipway_generated_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError, NameError) as error:
        raise Fatal(f"{path} does not import: {error}") from error
    return module
