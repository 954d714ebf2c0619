"""The build folder: deterministic, whole or not at all, and never over a user's edits."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from shipway.compiler.compose import compose
from shipway.compiler.emit.build import BuildFolder, build, build_files
from shipway.compiler.emit.manifest import MANIFEST
from shipway.compiler.pipeline import make_plan
from shipway.compiler.validate import validate
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.plan import Plan, canonical_json


@cache
def plan_of(name: str, *overrides: str) -> Plan:
    blueprint, diagnostics = validate(compose(name, overrides))
    assert blueprint is not None, diagnostics
    plan = make_plan(blueprint, (name, *overrides))
    assert isinstance(plan, Plan), plan
    return plan


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def built(plan: Plan, folder: Path, force: bool = False) -> BuildFolder:
    result = build(plan, folder, force)
    assert isinstance(result, BuildFolder), result
    return result


def refused(plan: Plan, folder: Path) -> Diagnostic:
    result = build(plan, folder)
    assert isinstance(result, list)
    (diagnostic,) = result
    return diagnostic


def test_folder_holds_the_plan_and_a_model_that_imports_without_the_compiler(tmp_path: Path) -> None:
    plan = plan_of("tiny")
    built(plan, tmp_path / "tiny")
    assert (tmp_path / "tiny" / "plan.json").read_text() == canonical_json(plan)
    program = (
        "import sys, model; instance = model.Model();"
        "print(sum(t.numel() for t in instance.state_dict().values()));"
        "assert not any(name.startswith('shipway.compiler') for name in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "tiny", capture_output=True, text=True
    )
    assert ran.stdout.strip() == str(plan.parameters.total), ran.stderr


def test_same_plan_gives_the_same_bytes_and_a_second_build_writes_nothing(tmp_path: Path) -> None:
    plan = plan_of("tiny")
    for name in ("a", "b"):
        built(plan, tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    before = (tmp_path / "a" / "model.py").stat().st_mtime_ns
    again = built(plan, tmp_path / "a")
    assert again.written == ()
    assert (tmp_path / "a" / "model.py").stat().st_mtime_ns == before


def test_files_do_not_depend_on_where_or_when_they_are_written(tmp_path: Path) -> None:
    program = (
        "from tests.templates.test_build import plan_of; from shipway.compiler.emit.build import build_files;"
        "import hashlib; print(hashlib.sha256(repr(build_files(plan_of('tiny'))).encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]
    hashes = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "TZ": "Asia/Tokyo"}
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        hashes.add(ran.stdout)
    assert len(hashes) == 1


def test_an_edited_file_is_not_overwritten_and_nothing_else_is_touched(tmp_path: Path) -> None:
    built(plan_of("tiny"), tmp_path)
    (tmp_path / "model.py").write_text("# mine\n")
    before = contents(tmp_path)
    diagnostic = refused(plan_of("tiny", "training.seed=7"), tmp_path)
    assert diagnostic.code == "EN002"
    assert diagnostic.because == (str(tmp_path / "model.py"),)
    assert "--force" in diagnostic.help
    assert contents(tmp_path) == before


def test_force_overwrites_an_edited_file(tmp_path: Path) -> None:
    plan = plan_of("tiny")
    built(plan, tmp_path)
    fresh = contents(tmp_path)
    (tmp_path / "model.py").write_text("# mine\n")
    assert built(plan, tmp_path, force=True).written == (Path("model.py"),)
    assert contents(tmp_path) == fresh


def test_files_that_shipway_wrote_follow_a_new_plan(tmp_path: Path) -> None:
    built(plan_of("tiny"), tmp_path)
    changed = plan_of("tiny", "training.seed=7")
    assert Path("plan.json") in built(changed, tmp_path).written
    assert set(contents(tmp_path)) == {*build_files(changed), MANIFEST}


def test_a_file_of_the_users_own_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("# mine\n")
    assert refused(plan_of("tiny"), tmp_path).because == (str(tmp_path / "model.py"),)
    assert set(contents(tmp_path)) == {"model.py"}


def test_files_of_another_target_go_unless_they_were_edited(tmp_path: Path) -> None:
    slurm = plan_of("tiny", "cluster.target={kind: slurm}")
    built(slurm, tmp_path)
    scripts = sorted(path for path in contents(tmp_path) if path.startswith("launch/"))
    assert scripts
    edited = tmp_path / scripts[0]
    edited.write_text(edited.read_text() + "# mine\n")
    built(plan_of("tiny"), tmp_path)
    left = set(contents(tmp_path)) - {*build_files(plan_of("tiny")), MANIFEST}
    assert left == {scripts[0]}


def test_a_manifest_that_was_damaged_makes_every_file_the_users(tmp_path: Path) -> None:
    built(plan_of("tiny"), tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    diagnostic = refused(plan_of("tiny", "training.seed=7"), tmp_path)
    assert str(tmp_path / "plan.json") in diagnostic.because


def test_nothing_outside_the_folder_is_removed_for_a_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "build"
    built(plan_of("tiny"), folder)
    outside = tmp_path / "precious"
    outside.write_bytes(b"")
    empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    manifest = folder / MANIFEST
    manifest.write_text(manifest.read_text().replace('"files": {', f'"files": {{"../precious": "{empty}",'))
    built(plan_of("tiny", "training.seed=7"), folder)
    assert outside.exists()


def test_a_folder_that_cannot_be_written_is_a_diagnostic(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(plan_of("tiny"), tmp_path / "file" / "build").code == "EN003"


def test_a_write_that_fails_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(plan_of("tiny"), tmp_path)
    before = contents(tmp_path)

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert refused(plan_of("tiny", "training.seed=7"), tmp_path).code == "EN003"
    assert contents(tmp_path) == before


def test_readme_says_how_to_build_and_launch(tmp_path: Path) -> None:
    plan = plan_of("tiny", "training.seed=7")
    readme = build_files(plan)["README.md"]
    assert "shipway build tiny training.seed=7" in readme
    assert plan.hash in readme
    for stage in plan.stages:
        assert f"| {stage.name} |" in readme


def test_building_imports_no_torch() -> None:
    program = (
        "import sys; import shipway.compiler.emit.build, shipway.compiler.emit.model;"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
