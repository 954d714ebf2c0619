"""The wheel holds every module and every data file, under one import name."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("schemas", "compiler", "templates", "blueprints", "runtime")


def source_files(root: Path) -> set[str]:
    """Paths below the mapped folders, as the wheel should name them."""
    return {
        f"shipway/{path.relative_to(root).as_posix()}"
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "dist")]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_module_and_data_file_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if not name.endswith("/")}
    assert source_files(ROOT) - packed == set()


def test_nothing_but_shipway_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"shipway"}


def test_every_folder_with_modules_is_a_package() -> None:
    """setup.py finds packages by `__init__.py`; a folder without one would be left out of the wheel."""
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    without = {path.parent for path in modules if not (path.parent / "__init__.py").exists()}
    assert sorted(str(folder.relative_to(ROOT)) for folder in without) == []


def test_the_licence_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    assert b"Apache License" in wheel.read(name)
