"""What is laid together without Hydra is what Hydra composes: values, and where each came from."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shipway.compiler.compose import Composed, compose
from shipway.compiler.documents import read_document
from shipway.compiler.groups import SearchPath, our_folder
from shipway.compiler.plain import lay_together

OURS = sorted(path.stem for path in our_folder().glob("*.yaml"))


def by_hydra(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Composed:
    """The composition with the plain road closed."""
    with monkeypatch.context() as closed:
        closed.setattr("shipway.compiler.plain.lay_together", lambda *_: None)
        return compose(*arguments)


def assert_same(one: Composed, other: Composed) -> None:
    assert one.data == other.data
    assert one.provenance == other.provenance
    assert one.complete
    assert other.complete
    assert (one.path, one.folders, one.origin) == (other.path, other.folders, other.origin)
    assert one.diagnostics == other.diagnostics == ()


def is_plain(path: Path, *overrides: str) -> bool:
    return lay_together(read_document(path), SearchPath((path.parent, our_folder())), overrides) is not None


@pytest.mark.parametrize("name", OURS)
def test_our_blueprints_are_plain_and_as_hydra_has_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_plain(our_folder() / f"{name}.yaml")
    assert_same(compose(name), by_hydra(monkeypatch, name))


def test_chosen_configs_are_as_hydra_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("cluster=h800_256x8", "training=tiny")
    assert is_plain(our_folder() / "k3.yaml", *overrides)
    assert_same(compose("k3", overrides), by_hydra(monkeypatch, "k3", overrides))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "a", "1e3", "yes", "3:1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)
sections = st.dictionaries(st.sampled_from(["x", "y", "z"]), values, max_size=3)


@settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(model=sections, training=sections, own=st.fixed_dictionaries({"model": sections}))
def test_any_plain_blueprint_is_as_hydra_has_it(
    model: Any, training: Any, own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group, data in (("model", model), ("training", training)):
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "mine.yaml").write_text(yaml.safe_dump(data))
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"defaults": [{"model": "mine"}, {"training": "mine"}, "_self_"], **own}))
    if is_plain(path):
        assert_same(compose(str(path)), by_hydra(monkeypatch, str(path)))


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [_self_, {model: tiny}]\n",
        "defaults: [{model: tiny}]\n",
        "defaults: [{override model: tiny}, _self_]\n",
        "defaults: [{model@second: tiny}, _self_]\n",
        "defaults: [{model: nowhere}, _self_]\n",
        "# @package other\nname: own\n",
        "name: ${training.seed}\n",
        "name: ???\n",
        "hydra: {}\n",
        "defaults: [{model: tiny}, _self_]\nmodel: [1]\n",
        "name: own\nname: twice\n",
        "[1, 2]\n",
        "cluster: {device: nowhere}\n",
    ],
)
def test_anything_finer_is_left_to_hydra(text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    assert not is_plain(path)


@pytest.mark.parametrize(
    "override",
    ["+model=tiny", "~model", "model=null", "training.seed=2", "model=nowhere", "model=a,b", "model"],
)
def test_other_overrides_are_left_to_hydra(override: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("defaults: [{model: tiny}, _self_]\n")
    assert is_plain(path, "model=small_h200")
    assert not is_plain(path, override)
