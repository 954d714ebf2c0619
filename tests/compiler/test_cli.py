"""The command line: what goes where, and the exit status."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shipway.compiler.cli.app import ORDER, run
from tests.compiler.blueprint_files import WHOLE, changed, write

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the whole blueprint in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    write(tmp_path, WHOLE)
    return tmp_path


def data(capture: Capture) -> object:
    """Standard output, which must be JSON and nothing else."""
    return json.loads(capture.readouterr().out)


def shell(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_plan_prints_json_alone(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "--json"]) == 0
    plan = data(capsys)
    assert isinstance(plan, dict)
    assert plan["parameters"]["total"] > 0
    stage = plan["stages"][0]
    for key in ("layout", "step_seconds", "tokens_per_second", "mfu"):
        assert key in stage
    assert stage["memory"]["peak_bytes"] > 0
    assert stage["memory"]["items"]


def test_plan_tables_and_quiet(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml"]) == 0
    printed = capsys.readouterr()
    assert "whole" in printed.out
    assert "\x1b[" not in printed.out
    assert run(["plan", "mine.yaml", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_why_answers_for_every_stage(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "--why", "cp=3", "--json"]) == 0
    answer = data(capsys)
    assert isinstance(answer, dict)
    assert answer["asked"] == {"context_parallel": 3}
    assert {stage["outcome"] for stage in answer["stages"]} == {"illegal"}
    assert all(stage["reasons"] for stage in answer["stages"])
    assert run(["plan", "mine.yaml", "--why", "recompute=full"]) == 0
    assert "recompute full" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("more", [["--why", "tpp=3"], ["--why", "tp=2", "--diff", "mine.yaml"]])
def test_why_refuses_nonsense(more: list[str], folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", *more]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "--why" in printed.err


def test_exit_code_without_diff_is_refused(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "--exit-code"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "give --diff too" in printed.err


def test_errors_go_to_stderr_or_into_json(folder: Path, capsys: Capture) -> None:
    write(folder, changed("width: 64", "wdth: 64"))
    assert run(["plan", "mine.yaml"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error[BP101]" in printed.err
    assert " --> mine.yaml:4:3" in printed.err
    assert "4 |   wdth: 64\n  |   ^" in printed.err
    assert run(["plan", "mine.yaml", "--json"]) == 2
    told = data(capsys)
    assert isinstance(told, dict)
    assert [d["code"] for d in told["diagnostics"]] == ["BP102", "BP101"]
    assert told["diagnostics"][1]["where"]["line"] == 4


def test_usage_errors(folder: Path, capsys: Capture) -> None:
    for arguments in (["plan"], ["plan", "--no-such", "mine.yaml"], ["plam", "mine.yaml"], ["show"]):
        assert run(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "CL001" in printed.err
    assert run(["plan", "--json", "--no-such"]) == 2
    assert isinstance(data(capsys), dict)


def test_no_arguments_print_help(capsys: Capture) -> None:
    assert run([]) == 2
    assert "Usage" in capsys.readouterr().out
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ORDER:
        assert command in text


def test_nothing_fits(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "cluster.device.memory=400MB"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error[PL001]" in printed.err
    assert "mine.yaml:" in printed.err


def test_a_campaign_for_which_nothing_can_be_drawn_is_refused(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shipway.compiler.campaign.TRIES", 1)
    assert run(["verify", "mine.yaml", "cluster.device.memory=400MB", "--campaign", "1", "--json"]) == 3
    answer = data(capsys)
    assert isinstance(answer, dict)
    (error,) = answer["diagnostics"]
    assert error["code"] == "PL001"
    assert "nothing could be drawn" in error["summary"]
    assert "without --campaign" in error["help"]


def test_out_show_and_diff(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "--out", "plans/old.json"]) == 0
    capsys.readouterr()
    assert run(["show", "plans/old.json", "--json"]) == 0
    assert capsys.readouterr().out == (folder / "plans/old.json").read_text()
    assert run(["plan", "mine.yaml", "--diff", "plans/old.json", "--exit-code"]) == 0
    assert capsys.readouterr().out == "No difference.\n"
    changed_width = ["plan", "mine.yaml", "model.width=128", "--diff", "plans/old.json"]
    assert run([*changed_width, "--exit-code"]) == 6
    assert "~ blueprint.model.width: 64 → 128" in capsys.readouterr().out
    assert run([*changed_width, "--json"]) == 0
    told = data(capsys)
    assert isinstance(told, dict)
    assert {"change": "~", "path": "blueprint.model.width", "old": 64, "new": 128} in told["changes"]


def test_show_refuses_what_is_no_plan(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "--out", "p.json", "-q"]) == 0
    text = (folder / "p.json").read_text()
    (folder / "edited.json").write_text(text.replace('"layers": 4', '"layers": 6'))
    (folder / "cut.json").write_text(text[:200])
    (folder / "other.json").write_text("[1]")
    (folder / "object.json").write_text("{}")
    says = {
        "edited.json": "does not match its own hash",
        "cut.json": "cut.json is not valid JSON: ",
        "other.json": "other.json is not a plan (",
        "object.json": "object.json is not a plan (",
        "none.json": "cannot be read",
        ".": "",
    }
    for name, words in says.items():
        assert run(["show", name]) == 2
        told = capsys.readouterr().err
        assert "error[PL011]" in told
        assert words in told


def test_a_blueprint_that_is_no_regular_file_is_refused_as_such(capsys: Capture) -> None:
    assert run(["validate", "/dev/null"]) == 2
    assert "/dev/null is not a regular file" in capsys.readouterr().err


def test_piped_output_heeds_columns_and_has_no_trailing_spaces(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["plan", "mine.yaml", "--out", "p.json", "-q"]) == 0
    for columns, rule in (("90", 90), ("", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert run(["show", "p.json"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert {len(line) for line in lines if line.endswith("──")} == {rule}
        assert [line for line in lines if line != line.rstrip()] == []
        assert [line for line in lines if line.startswith(("GiB", "MiB", "sequence", "layers"))] == []


def test_build_from_blueprint_and_from_plan(folder: Path, capsys: Capture) -> None:
    assert run(["build", "mine.yaml", "--json"]) == 0
    built = data(capsys)
    assert isinstance(built, dict)
    assert built["folder"] == "build/whole"
    assert "model.py" in built["written"]
    assert run(["plan", "mine.yaml", "--out", "p.json", "-q"]) == 0
    assert run(["build", "p.json", "--json"]) == 0
    again = data(capsys)
    assert isinstance(again, dict)
    assert again["written"] == []
    assert again["plan_hash"] == built["plan_hash"]


def test_build_keeps_edited_files(folder: Path, capsys: Capture) -> None:
    assert run(["build", "mine.yaml", "-q"]) == 0
    (folder / "build/whole/model.py").write_text("# mine now\n")
    assert run(["build", "mine.yaml"]) == 4
    assert "error[EN002]" in capsys.readouterr().err
    assert (folder / "build/whole/model.py").read_text() == "# mine now\n"
    assert run(["build", "mine.yaml", "--force", "-q"]) == 0
    assert "# mine now" not in (folder / "build/whole/model.py").read_text()


def test_the_way_over_edited_files_is_the_command_as_typed(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "training.seed=4", "--out", "my.plan.json", "-q"]) == 0
    assert run(["build", "my.plan.json", "--out", "b2", "-q"]) == 0
    (folder / "b2/model.py").write_text("# mine now\n")
    assert run(["build", "my.plan.json", "--out", "b2"]) == 4
    assert "shipway build my.plan.json --out b2 --force" in capsys.readouterr().err
    assert run(["build", "mine.yaml", "training.seed=4", "-o", "b2"]) == 4
    assert "shipway build mine.yaml training.seed=4 --out b2 --force" in capsys.readouterr().err


def test_stale_plan_is_refused(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "training.seed=4", "--out", "p.json", "-q"]) == 0
    assert run(["build", "p.json", "-q"]) == 0
    write(folder, "# a comment changes nothing\n" + WHOLE)
    assert run(["build", "p.json", "-q"]) == 0
    write(folder, changed("active: 2", "active: 3"))
    for arguments in (["build", "p.json"], ["launch", "build/whole"], ["launch", "p.json", "--dry-run"]):
        assert run(arguments) == 5
        error = capsys.readouterr().err
        assert "error[PL010]" in error
        assert "~ model.feed_forward.experts.active: 2 → 3" in error
        again = (
            "build mine.yaml training.seed=4 --out build/whole" if "build/whole" in arguments else "plan mine"
        )
        assert f"gain: shipway {again}" in error
    write(folder, "nonsense: [")
    assert run(["build", "p.json", "--json"]) == 5
    assert isinstance(data(capsys), dict)


def test_plan_without_its_blueprint_says_so(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "--out", "p.json", "-q"]) == 0
    (folder / "mine.yaml").unlink()
    assert run(["build", "p.json"]) == 0
    assert "nothing checks that the plan is current" in capsys.readouterr().err


def test_config_dir_is_part_of_the_origin(folder: Path, capsys: Capture) -> None:
    write(folder, "name: there\nnodes: 1\ndevices_per_node: 2\ndevice: cpu\n", "own/cluster/two.yaml")
    assert run(["plan", "tiny", "cluster=two", "--config-dir", "own", "--out", "p.json", "-q"]) == 0
    assert json.loads((folder / "p.json").read_text())["origin"] == [
        "tiny",
        "cluster=two",
        "--config-dir=own",
    ]
    assert run(["build", "p.json", "-q"]) == 0
    write(folder, "name: there\nnodes: 1\ndevices_per_node: 1\ndevice: cpu\n", "own/cluster/two.yaml")
    assert run(["build", "p.json"]) == 5


def test_launch_dry_run_prints_what_would_run(folder: Path, capsys: Capture) -> None:
    assert run(["launch", "mine.yaml", "--dry-run"]) == 0
    assert "build/whole" in capsys.readouterr().out
    assert run(["launch", "build/whole", "--dry-run", "--json"]) == 0
    told = data(capsys)
    assert isinstance(told, dict)
    assert told["commands"]
    assert not (folder / "runs").exists()


def test_launch_refuses_a_folder_that_is_no_build(folder: Path, capsys: Capture) -> None:
    (folder / "empty").mkdir()
    assert run(["launch", "empty"]) == 4
    assert "error[EN002]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "nosuch.json"], "there is no plan file nosuch.json"),
        (["launch", "nosuch.json"], "there is no plan file nosuch.json"),
        (["validate", "nosuch.json"], "there is no file nosuch.json"),
        (["launch", "nosuch"], "there is no build folder nosuch, and no blueprint of this name"),
        (["launch", "build/nosuch"], "there is no build folder build/nosuch"),
        (["plan", "-"], "not read from standard input"),
        (["plan", "/dev/stdin"], "Write it to a file first"),
    ],
)
def test_what_is_not_there_is_called_what_was_meant(
    arguments: list[str], says: str, folder: Path, capsys: Capture
) -> None:
    assert run(arguments) in (2, 4)
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_build_that_was_edited_or_is_stale_names_how_to_build_again(folder: Path, capsys: Capture) -> None:
    assert run(["build", "mine.yaml", "-q"]) == 0
    file = folder / "build/whole/plan.json"
    edited = file.read_text().replace('"layers": 4', '"layers": 6')
    assert edited != file.read_text()
    file.write_text(edited)
    assert run(["launch", "build/whole", "--dry-run"]) == 2
    assert "shipway build mine.yaml --out build/whole --force" in capsys.readouterr().err
    assert run(["build", "mine.yaml", "-q", "--force"]) == 0
    write(folder, changed("active: 2", "active: 3"))
    assert run(["launch", "build/whole", "--dry-run"]) == 5
    assert "Build again: shipway build mine.yaml --out build/whole" in capsys.readouterr().err


def test_frozen_things_take_no_overrides(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "--out", "p.json", "-q"]) == 0
    assert run(["build", "p.json", "training.seed=1"]) == 2
    assert "frozen" in capsys.readouterr().err


def test_init_is_valid_as_it_is(folder: Path, capsys: Capture) -> None:
    assert run(["init"]) == 0
    assert "shipway plan blueprint.yaml" in capsys.readouterr().out
    assert run(["validate", "blueprint.yaml"]) == 0
    assert (folder / ".shipway/schema/blueprint.json").is_file()
    assert run(["init"]) == 4
    assert run(["init", "--force", "-q"]) == 0
    assert run(["init", "my model", "-q"]) == 0
    assert run(["validate", "my model.yaml", "-q"]) == 0


@contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """As on a full disk: what is longer cannot be written."""
    before, writes = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    sys.dont_write_bytecode = True  # Python 3.11 would leave modules cut short for who loads them next
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes


def test_a_full_disk_leaves_what_was_there(folder: Path, capsys: Capture) -> None:
    Path("old.json").write_text("mine")
    there = sorted(folder.rglob("*"))
    with small_files(8192):
        for more in (
            ["--out", "old.json"],
            ["--out", "new/p.json"],
            ["--trace", "t.json"],
            ["--html", "r.html"],
        ):
            assert run(["plan", "mine.yaml", "-q", *more]) == 4
        assert run(["init", "x.yaml"]) == 4
        assert run(["build", "mine.yaml"]) == 4
    assert capsys.readouterr().err.count("error[EN003]") == 6
    assert sorted(folder.rglob("*")) == there
    assert Path("old.json").read_text() == "mine"


def test_writing_keeps_links_and_permissions(folder: Path) -> None:
    Path("real.json").touch(0o600)
    Path("link.json").symlink_to("real.json")
    assert run(["plan", "mine.yaml", "-q", "--out", "link.json"]) == 0
    assert Path("link.json").is_symlink()
    assert Path("real.json").stat().st_mode & 0o777 == 0o600
    assert json.loads(Path("real.json").read_text())["hash"]
    assert run(["plan", "mine.yaml", "-q", "--out", "/dev/null"]) == 0


def test_writing_where_that_is_impossible(folder: Path, capsys: Capture) -> None:
    assert run(["plan", "mine.yaml", "--out", "mine.yaml/p.json"]) == 4
    assert "error[EN003]" in capsys.readouterr().err
    assert run(["build", "mine.yaml", "--out", "mine.yaml/x"]) == 4
    assert "error[EN003]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        ("BP402", "divide"),
        ("bp402", "divide"),
        ("training.stages.context", "packed sequence"),
        ("training.stages.0.context", "packed sequence"),
        ("kv_rank", "Latent rank"),
        ("model.feed_forward", "experts"),
        ("bubble", "pipeline"),
        ("step_time", "Seconds"),
        ("parity", "make parity"),
        ("FSDP64", "share parameters"),
        ("all_to_all", "each other rank"),
        ("ZeRO 3", "frees"),
    ],
)
def test_explain(subject: str, says: str, capsys: Capture) -> None:
    assert run(["explain", subject]) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("subject", "near"), [("BP40", "BP400"), ("kv_rnk", "kv_rank"), ("bubbel", "bubble")]
)
def test_explain_offers_the_nearest(subject: str, near: str, capsys: Capture) -> None:
    assert run(["explain", subject]) == 2
    assert near in capsys.readouterr().err


def test_explain_takes_several_and_offers_nothing_far(capsys: Capture) -> None:
    assert run(["explain", "step", "time", "BP402", "kept activations"]) == 0
    text = capsys.readouterr().out
    for words in ("Seconds of one optimizer step", "divide", "keeps for backward"):
        assert words in text
    assert run(["explain", "bubble", "weather"]) == 2
    printed = capsys.readouterr()
    assert "pipeline rank waits" in printed.out
    assert "nothing is known of `weather`" in printed.err
    assert "Did you mean" not in printed.err


def test_schema_of_each_group(tmp_path: Path, capsys: Capture) -> None:
    for group in ("blueprint", "model", "training", "cluster", "device"):
        assert run(["schema", group]) == 0
        assert isinstance(data(capsys), dict)
    assert run(["schema", "modle"]) == 2
    assert "`model`" in capsys.readouterr().err
    assert run(["schema", "--out", str(tmp_path / "s")]) == 0
    assert len(list((tmp_path / "s").iterdir())) == 5


def test_doctor_lists_what_is_there(capsys: Capture) -> None:
    status = run(["doctor", "--json"])
    told = data(capsys)
    assert isinstance(told, dict)
    topics = {finding["topic"] for finding in told["findings"]}
    assert {"python", "torch", "torchrun", "disk", "kernel delta_rule"} <= topics
    assert status == (4 if any(f["state"] == "problem" for f in told["findings"]) else 0)


def test_every_pass_can_be_dumped(folder: Path, capsys: Capture) -> None:
    from shipway.compiler.dump import PASSES as DUMPED
    from shipway.compiler.pipeline import PASSES

    assert tuple(p.name for p in PASSES) == DUMPED
    for name in DUMPED:
        assert run(["plan", "mine.yaml", f"--dump-after={name}"]) == 0
        text = capsys.readouterr().out
        assert "model.width: 64  # mine.yaml:4:10" in text if name == "compose" else json.loads(text)
    assert run(["plan", "mine.yaml", "--dump-after=serch"]) == 2
    assert "`search`" in capsys.readouterr().err


def test_internal_error_is_one_line(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("made for this test")

    monkeypatch.setattr("shipway.compiler.pipeline.make_plan", fail)
    monkeypatch.delenv("SHIPWAY_TRACEBACK", raising=False)
    assert run(["plan", "mine.yaml"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Please report" in error
    assert run(["plan", "mine.yaml", "--json"]) == 1
    assert isinstance(data(capsys), dict)
    monkeypatch.setenv("SHIPWAY_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run(["plan", "mine.yaml"])


def test_planning_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from shipway.compiler.cli.app import run; status = run(['plan', 'mine.yaml', '-q']);"
        "heavy = {'torch', 'tensorboard', 'pyarrow', 'tokenizers'} & set(sys.modules);"
        "sys.exit(status if status else 9 if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, check=False).returncode == 0


def test_help_imports_little(folder: Path) -> None:
    code = (
        "import sys; from shipway.compiler.cli.app import run; run(['plan', '--help']);"
        "sys.exit(bool({'hydra', 'omegaconf', 'numpy', 'networkx', 'torch', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--dump-after" in done.stdout


def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    script = Path(sys.executable).with_name("shipway")
    command = f"{script} plan mine.yaml --json | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", ["plan mine.yaml", "plan mine.yaml --json", "plan --nope --json"])
def test_output_that_cannot_be_written_is_said_on_stderr(arguments: str, folder: Path) -> None:
    script = Path(sys.executable).with_name("shipway")
    done = shell(["bash", "-c", f"{script} {arguments} > /dev/full"], folder)
    assert done.returncode == 4
    assert "error[EN003]: output cannot be written: no space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "internal" not in done.stderr


def test_completion_offers_blueprints(folder: Path) -> None:
    script = Path(sys.executable).with_name("shipway")
    environment = {
        **os.environ,
        "_SHIPWAY_COMPLETE": "complete_bash",
        "COMP_WORDS": "shipway plan k",
        "COMP_CWORD": "2",
    }
    done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, check=False)
    assert {"k3", "kimi_k2"} <= set(done.stdout.split())


def test_calibrate_writes_what_plan_then_uses_and_names(folder: Path, capsys: Capture) -> None:
    rows = {
        "name": "mine",
        "environment": {"device": "cpu", "devices": 1, "torch": "2", "date": "2026-01-02", "command": "x"},
        "memory_bytes": 0,
        "context_bytes": 0,
        "rows": [{"operation": "launch", "sizes": {"calls": 1}, "seconds": 5e-3}],
    }
    (folder / "rows.json").write_text(json.dumps(rows))
    assert run(["calibrate", "cpu", "--rows", "rows.json", "--out", "mine.json", "--quiet"]) == 0
    before = plan_of(folder, capsys)
    after = plan_of(folder, capsys, "--calibration", "mine.json")
    assert after["calibration"] == "mine: cpu, measured 2026-01-02"
    assert after["stages"][0]["step_seconds"] > before["stages"][0]["step_seconds"]


def calibration_of(device: str, folder: Path) -> str:
    """A file of h200's default figures, as if measured on the named device."""
    rows = {
        "name": "mine",
        "environment": {"device": device, "devices": 1, "torch": "2", "date": "2026-01-02", "command": "x"},
        "memory_bytes": 0,
        "context_bytes": 0,
        "rows": [],
    }
    (folder / "rows.json").write_text(json.dumps(rows))
    assert run(["calibrate", "h200", "--rows", "rows.json", "--out", "mine.json", "--quiet"]) == 0
    return "mine.json"


def test_calibrate_measures_only_the_device_it_is_asked_for(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(["calibrate", "h200", "--quick", "--out", "mine.json"]) == 4
    assert "a calibration of H200 cannot be measured here" in capsys.readouterr().err
    assert not (folder / "mine.json").exists()


@pytest.mark.parametrize(
    ("device", "status", "says"),
    [("cpu", 2, "error[CL004]"), ("NVIDIA H100", 0, "warning[CL004]"), ("NVIDIA H200", 0, "")],
)
def test_a_calibration_of_another_device_does_not_pass_unseen(
    device: str, status: int, says: str, folder: Path, capsys: Capture
) -> None:
    file = calibration_of(device, folder)
    assert run(["plan", "tiny", "cluster=h200_1", "--calibration", file]) == status
    error = capsys.readouterr().err
    assert says in error
    assert ("CL004" in error) == bool(says)


@pytest.mark.parametrize(
    "arguments", [["cpux"], ["cpu", "--rows", "nowhere.json"], ["cpu", "--rows", "mine.yaml"]]
)
def test_calibrate_refuses_what_it_cannot_use(arguments: list[str], folder: Path, capsys: Capture) -> None:
    assert run(["calibrate", *arguments, "--out", "c.json"]) in (2, 4)
    assert "error" in capsys.readouterr().err


def plan_of(folder: Path, capsys: Capture, *options: str) -> dict[str, object]:
    """The plan of the folder's blueprint on a CPU, as data."""
    assert run(["plan", "tiny", "--json", *options]) == 0
    plan = data(capsys)
    assert isinstance(plan, dict)
    return plan
