"""shipway validate"""

from __future__ import annotations

from shipway.compiler.cli.options import ConfigDir, Json, Name, Overrides, Quiet


def command(
    name: Name,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a blueprint, and report all its mistakes at once."""
    from shipway.compiler.cli.output import Output
    from shipway.compiler.cli.planning import read_blueprint, warnings_json

    output = Output(as_json=json, quiet=quiet)
    read = read_blueprint(name, overrides, config_dir, output)
    output.data(
        {
            "valid": True,
            "blueprint": read.blueprint.model_dump(mode="json"),
            "diagnostics": warnings_json(read.warnings),
        }
    )
    if not json:
        output.warn(read.warnings)
    output.show(f"[bold green]✓[/] {read.blueprint.name} is valid: {_summary(read.blueprint)}")


def _summary(blueprint: object) -> str:
    from shipway.schemas.blueprint import Blueprint

    assert isinstance(blueprint, Blueprint)
    stages, cluster = blueprint.training.stages, blueprint.cluster
    contexts = " → ".join(f"{stage.context:,}" for stage in stages)
    devices = f"{cluster.devices:,} × {cluster.device.name}"
    return f"{blueprint.model.layers} layers, stages of {contexts} tokens, {devices}"
