"""Composition: groups, overrides, interpolations; and where every value came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from shipway.compiler.compose import Composed, compose
from shipway.compiler.documents import parse_document
from shipway.compiler.groups import our_folder
from shipway.compiler.validate import validate
from tests.compiler.blueprint_files import WHOLE, place, write

MINE = """\
defaults:
  - model: mine
  - training: tiny
  - cluster: cpu_2
  - _self_
name: composed
model:
  width: 96
"""
MODEL = """\
defaults:
  - tiny
  - _self_
layers: 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a blueprint and a group of its own, as the working directory."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, MINE)
    write(tmp_path, MODEL, "model/mine.yaml")
    return tmp_path


def at(composed: Composed, *path: str | int) -> str:
    """The place of a value, as diagnostics print it."""
    return str(composed.provenance.location(path))


def value(composed: Composed, *path: str | int) -> object:
    """A composed value."""
    found: object = composed.data
    for key in path:
        found = found[key]  # type: ignore[index]
    return found


def test_values_keep_their_file_line_and_column(folder: Path) -> None:
    composed = compose("mine.yaml")
    assert composed.diagnostics == ()
    assert at(composed, "name") == "mine.yaml:6:7"
    assert at(composed, "model", "width") == "mine.yaml:8:10"
    assert at(composed, "model", "layers") == "model/mine.yaml:4:9"
    line, column = place((our_folder() / "model/tiny.yaml").read_text(), "272")
    assert at(composed, "model", "vocabulary").endswith(f"model/tiny.yaml:{line}:{column}")
    assert value(composed, "model", "layers") == 4
    assert value(composed, "model", "width") == 96


def test_override_is_named_by_its_number(folder: Path) -> None:
    composed = compose("mine.yaml", ["training.seed=7", "training.stages.0.context=512"])
    assert at(composed, "training", "seed") == "override 1:1:15"
    assert at(composed, "training", "stages", 0, "context") == "override 2:1:27"
    assert value(composed, "training", "stages", 0, "context") == 512


def test_new_key_needs_no_plus(folder: Path) -> None:
    assert value(compose("mine.yaml", ["training.micro_batch=2"]), "training", "micro_batch") == 2
    assert value(compose("mine.yaml", ["+training.micro_batch=2"]), "training", "micro_batch") == 2


def test_group_choice_and_device_override(folder: Path) -> None:
    composed = compose(
        "mine.yaml", ["cluster=h800_256x8", "cluster.device=h20", "cluster.device.memory=80GB"]
    )
    assert value(composed, "cluster", "nodes") == 256
    assert value(composed, "cluster", "device", "name") == "H20"
    assert value(composed, "cluster", "device", "memory") == "80GB"
    assert at(composed, "cluster", "device", "memory") == "override 3:1:23"
    assert at(composed, "cluster", "device") == "override 2:1:16"
    assert "device/h20.yaml" in at(composed, "cluster", "device", "peak", "bf16")


def test_deleted_value_is_gone(folder: Path) -> None:
    composed = compose("mine.yaml", ["~training.precision"])
    assert "precision" not in composed.data["training"]
    assert not composed.provenance.known(("training", "precision", "compute"))


def test_list_replaces_list_and_its_places(folder: Path) -> None:
    stage = "{name: a, context: 1, tokens: 1, global_batch: 1, learning_rate: {kind: constant, peak: 1}}"
    stages = f"stages: [{stage}]"
    write(folder, f"{MINE}training:\n  {stages}\n")
    composed = compose("mine.yaml")
    assert len(composed.data["training"]["stages"]) == 1
    assert at(composed, "training", "stages", 0, "name") == "mine.yaml:10:19"
    assert not composed.provenance.known(("training", "stages", 1))


def test_mapping_is_laid_over_mapping(folder: Path) -> None:
    composed = compose("mine.yaml", ["model.attention.delta={heads: 2}"])
    assert value(composed, "model", "attention", "delta", "heads") == 2
    assert value(composed, "model", "attention", "delta", "key_width") == 32


def test_override_may_change_the_form_of_a_value(folder: Path) -> None:
    composed = compose("mine.yaml", ["model.feed_forward.mix=[dense,experts,experts,experts]"])
    blueprint, diagnostics = validate(composed)
    assert diagnostics == []
    assert blueprint is not None
    assert blueprint.model.feed_forward_kinds() == ("dense", "experts", "experts", "experts")


def test_package_header_and_renamed_group(folder: Path) -> None:
    write(folder, "# @package training.data\nheld_out: 3%\n", "extra/held.yaml")
    write(folder, "every_steps: 7\n", "save/often.yaml")
    text = MINE.replace("  - _self_\n", "  - extra: held\n  - save@training.checkpoints: often\n  - _self_\n")
    write(folder, text)
    composed = compose("mine.yaml")
    assert composed.diagnostics == ()
    assert value(composed, "training", "data", "held_out") == "3%"
    assert at(composed, "training", "data", "held_out") == "extra/held.yaml:2:11"
    assert value(composed, "training", "checkpoints", "every_steps") == 7
    assert at(composed, "training", "checkpoints", "every_steps") == "save/often.yaml:1:14"
    moved = compose("mine.yaml", ["extra=held", "save@training.checkpoints=often"])
    assert moved.diagnostics == ()


def test_interpolation_names_both_ends(folder: Path) -> None:
    write(folder, MINE + "  attention: {delta: {heads: '${training.wide}'}}\ntraining:\n  wide: many\n")
    composed = compose("mine.yaml")
    _, diagnostics = validate(composed)
    bad = next(d for d in diagnostics if d.field == "model.attention.delta.heads")
    assert str(bad.where) == "mine.yaml:9:30"
    assert bad.because == (
        "model.attention.delta.heads is ${training.wide} (mine.yaml:9:30)",
        "training.wide is written at mine.yaml:11:9",
    )


def test_interpolation_of_a_section_and_of_a_sibling(folder: Path) -> None:
    text = MINE + "  attention: {delta: {key_width: '${.heads}'}}\n"
    composed = compose(
        str(write(folder, text)), ["model.attention.latent.value_width=${model.attention.delta.heads}"]
    )
    assert value(composed, "model", "attention", "delta", "key_width") == 4
    assert value(composed, "model", "attention", "latent", "value_width") == 4
    whole = compose(str(write(folder, MINE + "  vision: ${model.attention}\n")))
    assert value(whole, "model", "vision", "delta", "heads") == 4


def test_config_dir_comes_before_ours(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "groups"
    ours = (our_folder() / "cluster/cpu_2.yaml").read_text()
    write(own, ours.replace("nodes: 1", "nodes: 3"), "cluster/cpu_2.yaml")
    write(own, WHOLE, "tiny.yaml")
    assert value(compose("mine.yaml", config_dir=own), "cluster", "nodes") == 3
    assert value(compose("tiny", config_dir=own), "name") == "whole"
    assert value(compose("k3", ["cluster=cpu_2"], config_dir=own), "cluster", "nodes") == 3


def test_device_of_ones_own(folder: Path) -> None:
    text = (our_folder() / "device/h200.yaml").read_text().replace("name: H200", "name: Ours")
    write(folder, text, "device/ours.yaml")
    composed = compose("mine.yaml", ["cluster.device=ours"])
    line, column = place(text, "name: Ours", "Ours")
    assert at(composed, "cluster", "device", "name") == f"device/ours.yaml:{line}:{column}"


def test_group_is_added_where_none_is_named(folder: Path) -> None:
    write(folder, "defaults: [model: mine, training: tiny, _self_]\nname: x\n")
    blueprint, diagnostics = validate(compose("mine.yaml", ["cluster=h200_1"]))
    assert diagnostics == []
    assert blueprint is not None
    assert blueprint.cluster.device.name == "H200"


def test_name_and_path_give_the_same(folder: Path) -> None:
    by_name = compose("tiny")
    assert compose(str(by_name.path)).data == by_name.data


def test_folder_with_odd_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "a b, 'c' [d] é=1", WHOLE)
    blueprint, _ = validate(compose(str(path)))
    assert blueprint is not None


def test_composing_twice_leaves_no_state(folder: Path) -> None:
    first = compose("mine.yaml", ["training.seed=7"])
    assert value(first, "training", "seed") == 7
    assert "seed" not in compose("mine.yaml").data["training"]


def test_anchors_and_merge_keys_keep_their_places(tmp_path: Path) -> None:
    text = "base: &b {width: 3, depth: 4}\nnext:\n  <<: *b\n  depth: 5\nlast: *b\n"
    document = parse_document(tmp_path / "x.yaml", text)
    assert document.diagnostics == ()
    assert document.data["next"] == {"depth": 5, "width": 3}
    assert document.location(("next", "width")).line == 1
    assert document.location(("next", "depth")).line == 4
    assert document.data["last"] == {"width": 3, "depth": 4}


def test_scalars_follow_yaml_1_2(tmp_path: Path) -> None:
    text = "a: 3:1\nb: yes\nc: 010\nd: 1e-4\ne: 8_192\nf: 2026-01-01\ng: .5\nh: ~\ni: 0x10\nj: -3\nk: 1.\n"
    data = parse_document(tmp_path / "x.yaml", text).data
    assert data == {
        "a": "3:1",
        "b": "yes",
        "c": 10,
        "d": 1e-4,
        "e": 8192,
        "f": "2026-01-01",
        "g": 0.5,
        "h": None,
        "i": 16,
        "j": -3,
        "k": 1.0,
    }


def test_aliases_cannot_explode(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 9)]
    document = parse_document(tmp_path / "x.yaml", "\n".join(lines))
    assert "aliases expand" in document.diagnostics[0].summary


def test_place_helper_counts_from_one() -> None:
    assert place("a\n bc", "c") == (2, 3)
