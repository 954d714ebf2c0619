"""Each broken blueprint gives one clear error, at its place, and exit status 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from shipway.compiler.cli.app import run
from shipway.compiler.codes import codes
from shipway.compiler.compose import compose
from shipway.compiler.validate import validate
from tests.compiler.blueprint_files import WHOLE, changed, place, write


@dataclass(frozen=True)
class Broken:
    """A mistake in the whole blueprint: what is written, and what must be said of it."""

    name: str
    old: str
    new: str
    code: str
    at: str
    """Text in `new` (or elsewhere in the file) where the error must point."""
    says: str
    """Part of the error's summary, reasons, legal values or help."""


NETWORKLESS = "cluster:\n  name: here\n  nodes: 1\n  devices_per_node: 6\n  device: cpu\n"

BROKEN = [
    Broken("text for a number", "width: 64", "width: wide", "BP100", "wide", "whole number"),
    Broken("quoted number", "layers: 4", 'layers: "4"', "BP100", '"4"', "quotes"),
    Broken("fraction for a count", "layers: 4", "layers: 4.5", "BP100", "4.5", "whole number"),
    Broken("null for a section", "activation: {kind: swiglu}", "activation:", "BP100", "activation", "null"),
    Broken(
        "a list for a mapping",
        "delta:\n      heads: 4",
        "delta:\n      - heads: 4",
        "BP002",
        "key_width",
        "YAML",
    ),
    Broken("a list for a section", "activation: {kind: swiglu}", "activation: [1]", "BP100", "[1]", "a list"),
    Broken("a list for a whole section", NETWORKLESS, "cluster: [cpu]\n", "BP100", "[cpu]", "a list"),
    Broken("unknown key", "kv_rank: 32", "kv_rnk: 32", "BP101", "kv_rnk", "Did you mean `kv_rank`?"),
    Broken("unknown section", "name: whole", "name: whole\nmodle: {}", "BP101", "modle", "`model`"),
    Broken("missing value", "      active: 2\n", "", "BP102", "experts:\n      routed", "active"),
    Broken("misspelt kind", "kind: bounded", "kind: bonded", "BP105", "bonded", "Did you mean `bounded`?"),
    Broken("kind left out", "{kind: swiglu}", "{beta: 1}", "BP105", "activation", "situ, swiglu"),
    Broken("bad choice", "[delta, latent]", "[delta, latnet]", "BP103", "latnet", "latent"),
    Broken("negative size", "inner_width: 32", "inner_width: -32", "BP104", "-32", "above 0"),
    Broken("unknown unit", "tokens: 64Ki", "tokens: 64Kx", "BP100", "64Kx", "Ki"),
    Broken("not a number", "peak: 1e-3", "peak: .nan", "BP104", ".nan", "finite"),
    Broken("infinity", "minimum: -5.0", "minimum: -.inf", "BP104", "-.inf", "finite"),
    Broken("bad name", "name: whole", "name: my model", "BP106", "my model", "letters"),
    Broken(
        "no stages",
        WHOLE[WHOLE.index("    - name: one") : WHOLE.index("cluster:")],
        "    []\n",
        "BP107",
        "[]",
        "1",
    ),
    Broken("duplicate key", "width: 64", "width: 64\n  width: 65", "BP004", "width: 65", "twice"),
    Broken("tab", "  width: 64", "\twidth: 64", "BP002", "\t", "tab"),
    Broken("unclosed bracket", "[delta, latent]", "[delta, latent", "BP002", ":\n      heads", "YAML"),
    Broken("missing colon", "nodes: 1", "nodes 1", "BP002", "devices_per_node", "YAML"),
    Broken("tag", "width: 64", "width: !!python/name:os.system 64", "BP002", "!!python", "tag"),
    Broken("second document", "cluster:\n", "---\ncluster:\n", "BP002", "---", "document"),
    Broken(
        "interpolation to nothing",
        "width: 64",
        "width: ${model.wdth}",
        "BP021",
        "${model.wdth}",
        "model.wdth",
    ),
    Broken("unclosed interpolation", "width: 64", "width: ${model.", "BP020", "${model.", "well-formed"),
    Broken(
        "interpolation to itself", "width: 64", "width: ${model.width}", "BP021", "${model.width}", "itself"
    ),
    Broken("unknown resolver", "width: 64", "width: ${ask:me}", "BP021", "${ask:me}", "ask"),
    Broken(
        "environment without",
        "width: 64",
        "width: ${oc.env:SHIPWAY_NOT_SET}",
        "BP021",
        "${oc",
        "SHIPWAY_NOT_SET",
    ),
    Broken("value to be given", "width: 64", "width: ???", "BP022", "???", "model.width=..."),
    Broken("device unknown", "device: cpu", "device: h1000", "BP011", "h1000", "h100"),
    Broken(
        "kind without dimensions",
        "[delta, latent]",
        "[delta, grouped]",
        "BP200",
        "grouped",
        "model.attention.grouped",
    ),
    Broken("pattern does not fill", "layers: 4", "layers: 5", "BP201", "[delta, latent]", "layers: 4"),
    Broken("too many active", "active: 2", "active: 9", "BP204", "9", "1 to 7"),
    Broken("groups", "active: 2", "active: 2\n      groups: 3", "BP205", "3", "2, 4"),
    Broken("decay beyond range", "minimum: -5.0", "minimum: -6.0", "BP206", "-6.0", "-5.54"),
    Broken(
        "odd rotary",
        "kv_rank: 32",
        "kv_rank: 32\n      rope_width: 7\n      position: {kind: rotary}",
        "BP208",
        "7",
        "6, 8",
    ),
    Broken(
        "value heads",
        "heads: 4\n      key_width",
        "heads: 4\n      value_heads: 6\n      key_width",
        "BP203",
        "6",
        "4, 8",
    ),
    Broken("batch not in sequences", "global_batch: 4Ki", "global_batch: 1000", "BP300", "1000", "768, 1024"),
    Broken(
        "decay and warm-up",
        "{kind: cosine, peak: 1e-3}",
        "{kind: wsd, peak: 1e-3, warmup: 60%, decay: 50%}",
        "BP306",
        "50%",
        "110%",
    ),
    Broken("rate ends high", "peak: 1e-3}", "peak: 1e-3, final: 1e-2}", "BP307", "1e-2", "above its peak"),
    Broken("unknown source", "name: one", "name: one\n      mix: {stdlb: 1}", "BP302", "1}", "`stdlib`"),
    Broken(
        "weightless mix", "name: one", "name: one\n      mix: {stdlib: 0}", "BP303", "{stdlib: 0}", "weight"
    ),
    Broken("small vocabulary", "vocabulary: 272", "vocabulary: 256", "BP304", "256", "259"),
    Broken(
        "missing tokenizer",
        "training:\n",
        "training:\n  data: {tokenizer: {kind: file, path: no.json}}\n",
        "BP305",
        "no.json",
        "no.json",
    ),
    Broken("reinforcement learning", "- name: one", "- kind: rl\n      name: one", "BP309", "rl", "pretrain"),
    Broken(
        "no network",
        NETWORKLESS,
        NETWORKLESS.replace("nodes: 1", "nodes: 2") + "  target: {kind: slurm}\n",
        "BP400",
        "2\n  devices",
        "network",
    ),
    Broken(
        "local over nodes",
        NETWORKLESS,
        NETWORKLESS.replace("nodes: 1", "nodes: 2") + "  network: {nic_bandwidth: 50GB/s}\n",
        "BP405",
        "2\n  devices",
        "slurm",
    ),
    Broken(
        "a secret",
        NETWORKLESS,
        NETWORKLESS + "  target: {kind: local, environment: {HF_TOKEN: abc}}\n",
        "BP407",
        "abc",
        "looks like a secret",
    ),
    Broken(
        "who is which rank",
        NETWORKLESS,
        NETWORKLESS + "  target: {kind: local, environment: {RANK: '1'}}\n",
        "BP407",
        "'1'",
        "belongs to the launcher",
    ),
    Broken("link domain", "nodes: 1", "nodes: 1\n  link_domain: 4", "BP401", "4", "3, 2, 6"),
    Broken(
        "tensor parallel",
        "training:\n",
        "training:\n  layout: {tensor_parallel: 3}\n",
        "BP402",
        "3}",
        "heads",
    ),
    Broken(
        "expert parallel",
        "training:\n",
        "training:\n  layout: {expert_parallel: 3}\n",
        "BP402",
        "3}",
        "routed experts",
    ),
    Broken(
        "context parallel",
        "training:\n",
        "training:\n  layout: {context_parallel: 3}\n",
        "BP402",
        "3}",
        "256",
    ),
    Broken(
        "too many devices",
        "training:\n",
        "training:\n  layout: {data_parallel_shard: 16}\n",
        "BP403",
        "16}",
        "6",
    ),
    Broken(
        "schedule",
        "training:\n",
        "training:\n  layout: {schedule: dualpipev, virtual_stages: 3}\n",
        "BP402",
        "3}",
        "2",
    ),
    Broken("micro-batch", "training:\n", "training:\n  micro_batch: 3\n", "BP402", "3\n  stages", "16"),
    Broken(
        "defaults not a list", "name: whole", "defaults: model\nname: whole", "BP010", "model\nname", "list"
    ),
    Broken("defaults entry", "name: whole", "defaults: [{model: 3}]\nname: whole", "BP010", "3}", "entry"),
    Broken(
        "missing config",
        "name: whole",
        "defaults: [model: tinny, _self_]\nname: whole",
        "BP011",
        "tinny",
        "`tiny`",
    ),
    Broken(
        "missing group",
        "name: whole",
        "defaults: [modle: tiny, _self_]\nname: whole",
        "BP011",
        "tiny",
        "`model`",
    ),
    Broken(
        "defaults name itself",
        "name: whole",
        "defaults: [mine, _self_]\nname: whole",
        "BP013",
        "mine",
        "circle",
    ),
]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_one_located_error(case: Broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHIPWAY_NOT_SET", raising=False)
    text = changed(case.old, case.new)
    write(tmp_path, text)

    blueprint, diagnostics = validate(compose("mine.yaml"))

    assert blueprint is None
    errors = [d for d in diagnostics if d.severity == "error"]
    assert [d.code for d in errors] == [case.code], errors
    (error,) = errors
    assert error.where is not None
    assert error.where.file == "mine.yaml"
    base = case.new if case.at in case.new else text
    line, column = place(text, base, case.at)
    assert (error.where.line, error.where.column) == (line, column), error
    words = " ".join([error.summary, *error.because, ", ".join(error.legal), error.help])
    assert case.says in words
    assert error.code in codes()


def test_whole_blueprint_is_valid(tmp_path: Path) -> None:
    blueprint, diagnostics = validate(compose(str(write(tmp_path, WHOLE))))
    assert blueprint is not None
    assert diagnostics == []


FILES = [
    ("empty.yaml", b"", "BP003", "empty"),
    ("comment.yaml", b"# nothing\n", "BP003", "empty"),
    ("latin.yaml", b"name: caf\xe9\n", "BP001", "UTF-8"),
    ("control.yaml", b"name: a\x00b\n", "BP002", "not allowed"),
    ("list.yaml", b"- name: x\n", "BP012", "mapping"),
    ("scalar.yaml", b"hello\n", "BP012", "mapping"),
    ("loop.yaml", b"name: x\nmodel: &m\n  a: *m\n", "BP002", "alias"),
]


@pytest.mark.parametrize(("name", "content", "code", "says"), FILES, ids=[f[0] for f in FILES])
def test_unusable_file(
    name: str, content: bytes, code: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, content, name)
    assert run(["plan", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"error[{code}]" in printed.err
    assert says in printed.err
    assert name in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("name", ["nowhere.yaml", "./folder", "no/such/file.yaml", "tinny", "notes.txt", ""])
def test_no_such_blueprint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("name: x\n")
    assert run(["plan", name]) == 2
    error = capsys.readouterr().err
    assert "error[BP0" in error
    assert "Traceback" not in error


def test_cycle_over_files(tmp_path: Path) -> None:
    write(tmp_path, "defaults: [model: a, _self_]\nname: x\n")
    write(tmp_path, "defaults: [b]\nwidth: 1\n", "model/a.yaml")
    write(tmp_path, "defaults: [a]\nwidth: 2\n", "model/b.yaml")
    _, diagnostics = validate(compose(str(tmp_path / "mine.yaml")))
    (error,) = diagnostics
    assert error.code == "BP013"
    assert error.where is not None
    assert error.where.file.endswith("model/b.yaml")
    assert error.where.column == 12
    assert "model/a.yaml → model/b.yaml → model/a.yaml" in error.because[0]


def test_mistakes_in_several_files_are_told_at_once(tmp_path: Path) -> None:
    write(tmp_path, "defaults: [model: a, training: b, cluster: none, _self_]\nname: x\n")
    write(tmp_path, "width: [1\n", "model/a.yaml")
    write(tmp_path, "stages: 1\nstages: 2\n", "training/b.yaml")
    _, diagnostics = validate(compose(str(tmp_path / "mine.yaml")))
    assert sorted(d.code for d in diagnostics) == ["BP002", "BP004", "BP011"]


def test_mistakes_of_all_kinds_are_told_at_once(tmp_path: Path) -> None:
    text = WHOLE.replace("width: 64", "wdth: 64").replace("active: 2", "active: 99")
    text = text.replace("global_batch: 4Ki", "global_batch: 4Kx").replace("device: cpu", "device: gpu")
    _, diagnostics = validate(compose(str(write(tmp_path, text))))
    assert sorted(d.code for d in diagnostics) == ["BP011", "BP100", "BP101", "BP102"]


def test_rules_run_in_sections_whose_types_are_right(tmp_path: Path) -> None:
    text = WHOLE.replace("active: 2", "active: 99").replace("nodes: 1", "nodes: many")
    _, diagnostics = validate(compose(str(write(tmp_path, text))))
    assert sorted(d.code for d in diagnostics) == ["BP100", "BP204"]


def test_unbounded_decay_is_a_warning(tmp_path: Path) -> None:
    text = changed("{kind: bounded, minimum: -5.0}", "{kind: unbounded}")
    blueprint, diagnostics = validate(compose(str(write(tmp_path, text))))
    assert blueprint is not None
    assert [(d.code, d.severity) for d in diagnostics] == [("BP207", "warning")]


OVERRIDES = [
    ("model.width", "BP030", "no `=`"),
    ("model.width==", "BP030", "syntax"),
    ("training.seed=1,2", "BP031", "several"),
    ("hydra.run.dir=x", "BP031", "Hydra's own"),
    ("model.width.x=1", "BP032", "single value"),
    ("training.stages.7.context=8", "BP032", "1 entries"),
    ("~model.wdth", "BP032", "width"),
    ("cluster=h800_256x9", "BP011", "`h800_256x8`"),
    ("model.widht=3", "BP101", "`width`"),
    ("model.width=x", "BP100", "whole number"),
]


@pytest.mark.parametrize(("override", "code", "says"), OVERRIDES, ids=[o[0] for o in OVERRIDES])
def test_broken_override_names_its_number(override: str, code: str, says: str, tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    blueprint, diagnostics = validate(compose(str(tmp_path / "mine.yaml"), ["training.seed=3", override]))
    assert blueprint is None
    assert [d.code for d in diagnostics] == [code]
    (error,) = diagnostics
    assert error.where is not None
    assert error.where.file == "override 2"
    assert error.where.source_line == override
    assert says in " ".join([error.summary, *error.because, *error.legal, error.help])


def composed_errors(folder: Path, text: str, *overrides: str) -> list[str]:
    """Codes of a blueprint laid over ours, each error with a place."""
    write(folder, text)
    _, diagnostics = validate(compose(str(folder / "mine.yaml"), overrides))
    assert all(d.where is not None and d.where.line for d in diagnostics)
    return [d.code for d in diagnostics]


def test_a_list_over_a_mapping_names_the_key(tmp_path: Path) -> None:
    text = "defaults: [tiny, _self_]\nmodel:\n  feed_forward:\n    mix: [dense]\n"
    write(tmp_path, text)
    _, (error,) = validate(compose(str(tmp_path / "mine.yaml")))
    assert error.code == "BP016"
    assert "`model.feed_forward.mix`" in error.summary
    assert error.where is not None
    assert (error.where.line, error.where.column) == place(text, "[dense]")


def test_sections_that_are_not_there(tmp_path: Path) -> None:
    assert composed_errors(tmp_path, "defaults: [model: tiny]\nname: x\n") == ["BP102", "BP102"]
    assert composed_errors(tmp_path, "defaults: [optional model: none]\nname: x\n") == ["BP102"] * 3
    assert composed_errors(tmp_path, "defaults: [tiny, _self_]\nhydra: {}\n") == ["BP101"]
    assert composed_errors(tmp_path, "defaults: [tiny, _self_]\n", "cluster=null") == ["BP011"]
    assert composed_errors(tmp_path, "defaults: [tiny, _self_]\ncluster: ${nope}\n") == ["BP021"]


def test_malformed_package_header(tmp_path: Path) -> None:
    write(tmp_path, "# @package a b\nwidth: 3\n", "model/odd.yaml")
    assert composed_errors(tmp_path, "defaults: [tiny, override model: odd]\n") == ["BP010"]


def test_enormous_numbers_end_at_once(tmp_path: Path) -> None:
    big = "9" * 30
    text = "defaults: [tiny, _self_]\n"
    assert composed_errors(tmp_path, text, f"model.layers={big}") == ["BP104"]
    assert composed_errors(tmp_path, text, f"model.feed_forward.experts.groups={big}") == ["BP205"]
    assert composed_errors(tmp_path, text, f"cluster.nodes={big}") == ["BP400", "BP405"]


@pytest.mark.parametrize("value", ["nan", "1e400"])
@pytest.mark.parametrize(
    "field",
    ["model.vocabulary", "model.residual.kind", "model.attention", "training.stages", "cluster.nodes"],
)
def test_a_number_that_is_not_finite_hides_nothing(field: str, value: str, tmp_path: Path) -> None:
    text = "defaults: [tiny, _self_]\nmodel: {wdth: 3}\ntraining: {checkpoints: {every_steps: x}}\n"
    write(tmp_path, text)
    _, diagnostics = validate(compose(str(tmp_path / "mine.yaml"), [f"{field}={value}"]))
    found = {(d.code, d.field) for d in diagnostics}
    assert found >= {("BP104", field), ("BP101", "model.wdth"), ("BP100", "training.checkpoints.every_steps")}
    assert len(found) == 3
