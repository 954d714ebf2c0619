"""Write a build folder: everything rendered first, then written at once, and never over a user's edits."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from shipway.compiler.emit.manifest import MANIFEST, Manifest, read_manifest
from shipway.compiler.emit.model import Header, render_model
from shipway.compiler.emit.templates import templates
from shipway.compiler.frozen import frozen
from shipway.compiler.launch.files import launch_files
from shipway.compiler.writing import write_files
from shipway.schemas.diagnostics import Diagnostic, Location
from shipway.schemas.plan import Plan, canonical_json


@frozen
class BuildFolder:
    """A build folder that holds what its plan says."""

    folder: Path
    written: tuple[Path, ...]
    """Files that are new or changed, relative to the folder."""
    unchanged: tuple[Path, ...]
    """Files that were there already, byte for byte."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files but the manifest, relative to the folder."""
        return tuple(sorted(self.written + self.unchanged))


def build(
    plan: Plan, folder: Path, force: bool = False, *, command: str = ""
) -> BuildFolder | list[Diagnostic]:
    """Write the build folder of `plan`; the same plan gives the same bytes.

    Returns diagnostics instead, and touches nothing, when files were edited since Shipway wrote them
    (EN002; `force` overwrites them) or the folder cannot be written (EN003). `command` is what the user
    typed to build, which the help repeats; what made the plan, when not given.
    """
    texts = build_files(plan)
    manifest_text = Manifest.of(plan.hash, texts).text()
    try:
        before = read_manifest(folder)
        differing = {path: text for path, text in texts.items() if not _holds(folder / path, text)}
        edited = [path for path in differing if _edited(folder, path, before)]
        if edited and not force:
            return [_refusal(folder, edited, command or _command(plan))]
        left_over = [path for path in before.files if path not in texts and not _edited(folder, path, before)]
        new_manifest = {} if _holds(folder / MANIFEST, manifest_text) else {MANIFEST: manifest_text}
        _write(folder, differing | new_manifest)
        for path in left_over:
            (folder / path).unlink(missing_ok=True)
    except OSError as error:
        reason = (error.strerror or "error").lower()
        return [Diagnostic(code="EN003", summary=f"{error.filename or folder} cannot be written: {reason}")]
    unchanged = tuple(Path(path) for path in texts if path not in differing)
    return BuildFolder(folder, tuple(map(Path, differing)), unchanged)


def build_files(plan: Plan) -> dict[str, str]:
    """Text of every file of a build folder but the manifest, by path within it, sorted."""
    header = Header(plan.name, plan.shipway, plan.hash, _command(plan))
    files = {
        "plan.json": canonical_json(plan),
        "model.py": render_model(plan.blueprint.model, header=header),
        **launch_files(plan),
    }
    files["README.md"] = _readme(plan, files)
    return dict(sorted(files.items()))


def _readme(plan: Plan, files: Mapping[str, str]) -> str:
    return (
        templates("build")
        .get_template("README.md.j2")
        .render(
            plan=plan,
            command=_command(plan),
            target=plan.blueprint.cluster.target.kind,
            launch=any(path.startswith("launch/") for path in files),
            container=any(path.startswith("container/") for path in files),
        )
    )


def _command(plan: Plan) -> str:
    return shlex.join(["shipway", "build", *(plan.origin or (plan.name,))])


def _holds(path: Path, text: str) -> bool:
    """Whether a file is there with exactly this text."""
    return path.exists() and path.read_bytes() == text.encode()


def _edited(folder: Path, path: str, manifest: Manifest) -> bool:
    """Whether a file is there and is not what Shipway wrote."""
    target = folder / path
    return target.exists() and not manifest.wrote(path, target.read_bytes())


def _refusal(folder: Path, edited: list[str], command: str) -> Diagnostic:
    count = f"{len(edited)} files were" if len(edited) > 1 else f"{edited[0]} was"
    return Diagnostic(
        code="EN002",
        summary=f"{count} edited or not written by Shipway, and would be overwritten",
        where=Location(file=str(folder / edited[0])),
        because=tuple(str(folder / path) for path in edited),
        help=f"Move them away, or overwrite them: {command} --force",
    )


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write all texts, or none; scripts can be run."""
    modes = {folder / path: 0o755 if path.endswith(".sh") else 0o644 for path in texts}
    write_files({folder / path: text for path, text in texts.items()}, modes=modes)
