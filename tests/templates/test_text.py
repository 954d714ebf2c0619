"""The text of generated models: golden, formatted, lint-clean, typed, and nothing more than needed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shipway.compiler.emit.constants import mix_expression
from shipway.compiler.emit.model import Header, render_model
from tests.templates.generated import HEADER, PUBLISHED, VARIANTS, blueprint_model, variant

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "model"
GOLDEN_BLUEPRINTS = ("tiny", "k3", "deepseek_v3", "kimi_linear_48b", "qwen3_235b", "llama31_405b")


def every_text() -> dict[str, str]:
    texts = {name: render_model(blueprint_model(name), header=HEADER) for name in PUBLISHED}
    return texts | {name.replace(" ", "_"): render_model(variant(name), header=HEADER) for name in VARIANTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text of every model, and the package's sources where mypy finds them."""
    folder = tmp_path_factory.mktemp("models")
    for name, text in every_text().items():
        (folder / f"model_{name}.py").write_text(text)
    (folder / "typing" / "shipway").mkdir(parents=True)
    for part in ("runtime", "schemas"):
        (folder / "typing" / "shipway" / part).symlink_to(ROOT / part)
    return folder


@pytest.mark.parametrize("name", GOLDEN_BLUEPRINTS)
def test_text_is_that_of_the_golden_copy(name: str, update_golden: bool) -> None:
    header = Header(
        name=name, shipway="0.1.0", plan_hash="sha256:" + 64 * "0", command=f"shipway build {name}"
    )
    text = render_model(blueprint_model(name), header=header)
    golden = GOLDEN / f"{name}.py"
    if update_golden:
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), "if this change is meant, run pytest with --update-golden"


def test_k3_is_one_file_that_a_person_reads() -> None:
    text = render_model(blueprint_model("k3"), header=HEADER)
    assert len(text.splitlines()) < 800


def test_texts_are_formatted_and_lint_clean(folder: Path) -> None:
    config = ["--config", str(ROOT / "pyproject.toml")]
    for command in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command]
        ran = subprocess.run([*ruff, *config, str(folder)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout


def test_texts_type_check(folder: Path) -> None:
    # nn.Module's call gives Any, and some tensor methods of torch have no types
    options = ["--strict", "--no-warn-return-any", "--allow-untyped-calls", "--follow-imports=silent"]
    options.append(f"--cache-dir={ROOT / '.mypy_cache' / 'generated'}")  # reading torch's types takes longest
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, sorted(folder.glob("model_*.py")))],
        env={**os.environ, "MYPYPATH": str(folder / "typing")},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("name", [*PUBLISHED, *VARIANTS])
def test_every_constant_class_and_function_is_used(name: str) -> None:
    model = blueprint_model(name) if name in PUBLISHED else variant(name)
    tree = ast.parse(render_model(model, header=HEADER))
    defined = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets} | {
        node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    read = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert defined - read == {"Model"}


def test_text_has_nothing_of_what_the_model_has_not() -> None:
    text = render_model(blueprint_model("llama31_405b"), header=HEADER)
    for absent in ("Router", "Delta", "Latent", "situ", "VisionTower", "prediction", "sources"):
        assert absent not in text


def test_header_says_where_the_file_came_from() -> None:
    text = render_model(blueprint_model("tiny"), header=HEADER)
    assert HEADER.plan_hash in text
    assert HEADER.command in text


@pytest.mark.parametrize(
    ("kinds", "expression"),
    [
        (("a", "a", "b") * 4, '("a", "a", "b") * 4'),
        (("a", *("b", "c") * 3, "c"), '("a",) + ("b", "c") * 3 + ("c",)'),
        (("a", "b", "c"), '("a", "b", "c")'),
        (("a",), '("a",)'),
    ],
)
def test_mix_is_written_as_its_shortest_pattern(kinds: tuple[str, ...], expression: str) -> None:
    assert mix_expression(kinds) == expression
    assert eval(expression) == kinds
