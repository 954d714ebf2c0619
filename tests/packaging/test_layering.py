"""The layering contracts hold, and each of them can break."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("schemas", "compiler", "templates", "blueprints", "runtime")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of pyproject.toml over the `shipway` found in `folder`."""
    code = (
        "import sys;"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')];"
        f"sys.path.insert(0, {str(folder)!r});"
        "from importlinter.cli import lint_imports;"
        f"sys.exit(lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, no_cache=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small `shipway` with one module a layer and no imports."""
    for layer in FOLDERS:
        package = tmp_path / "shipway" / layer
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "part.py").touch()
    return tmp_path


def test_the_sources_keep_the_contracts(tmp_path: Path) -> None:
    (tmp_path / "shipway").mkdir()
    for layer in FOLDERS:
        (tmp_path / "shipway" / layer).symlink_to(ROOT / layer)
    checked = lint_imports(tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "3 kept, 0 broken" in checked.stdout


def test_a_tree_without_imports_keeps_the_contracts(tree: Path) -> None:
    assert lint_imports(tree).returncode == 0


@pytest.mark.parametrize(
    ("layer", "statement"),
    [
        ("schemas", "import shipway.compiler.part"),
        ("schemas", "def late():\n    import shipway.runtime.part"),
        ("runtime", "from shipway.compiler import part"),
        ("compiler", "import torch"),
        ("compiler", "import shipway.runtime.part"),
    ],
)
def test_a_forbidden_import_breaks_a_contract(tree: Path, layer: str, statement: str) -> None:
    (tree / "shipway" / layer / "part.py").write_text(statement + "\n")
    checked = lint_imports(tree)
    assert checked.returncode == 1
    assert "1 broken" in checked.stdout
