"""From a checkpoint folder to text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from shipway.compiler.cli.app import run as shipway
from shipway.compiler.emit.build import build as write_build
from shipway.runtime.build_folder import import_model
from shipway.runtime.checkpoint_folder import MARKER, folder_of
from shipway.runtime.data.patches import ImageFormat, patchify
from shipway.runtime.data.sources.rendered_text import RenderedText
from shipway.runtime.data.sources.streams import image_format
from shipway.runtime.data.tokenizers import ByteLevel
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.generation.__main__ import main as generation
from shipway.runtime.generation.pictures import read_pictures
from shipway.runtime.generation.text import Completion, Sampling, complete
from shipway.runtime.generation.weights import choose_checkpoint, load_model, save_weights
from shipway.schemas.run import RECORD_FILE, RunRecord
from tests.templates.generated import build, load, tokens_of, variant
from tests.templates.test_build import plan_of

CPU = torch.device("cpu")


def save(model: torch.nn.Module, root: Path, step: int) -> Path:
    """A checkpoint as the trainer leaves it."""
    folder = folder_of(root, step)
    save_weights(model, folder, "sha256:0")
    return folder


def test_loaded_model_is_the_one_that_was_saved(tmp_path: Path) -> None:
    model = variant("hybrid")
    trained = build(model).eval()
    loaded = load_model(load(model), save(trained, tmp_path, 1), CPU, torch.float32)
    tokens = tokens_of(model, 2, 10)
    assert torch.equal(loaded(tokens), trained(tokens))


def test_weights_take_the_compute_precision_but_for_those_that_must_not(tmp_path: Path) -> None:
    model = variant("hybrid")
    loaded = load_model(load(model), save(build(model), tmp_path, 1), CPU, torch.bfloat16)
    assert loaded.head.weight.dtype == torch.bfloat16
    assert loaded.layers["0"].attention.a_log.dtype == torch.float32
    assert loaded.layers["1"].feed_forward.router.weight.dtype == torch.float32


def test_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    trained = build(variant("all delta"))
    whole = save(trained, tmp_path, 10)
    (save(trained, tmp_path, 20) / MARKER).unlink()
    assert choose_checkpoint(tmp_path) == whole
    next(whole.glob("*.distcp")).write_bytes(b"torn")
    with pytest.raises(Fatal, match="no finished checkpoint"):
        choose_checkpoint(tmp_path)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    saved = save(build(variant("hybrid")), tmp_path, 1)
    other = load(variant("hybrid", width=48))
    with pytest.raises(Fatal, match="does not fit this model"):
        load_model(other, saved, CPU, torch.float32)


class Recited(torch.nn.Module):
    """A model that says given texts, one byte a step, then ends the document."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.spoken = [[*text.encode(), ByteLevel.end] for text in texts]

    def generate(self, prompts: list[torch.Tensor], tokens: int, *sampling: object) -> Iterator[torch.Tensor]:
        for step in range(tokens):
            yield torch.tensor([spoken[min(step, len(spoken) - 1)] for spoken in self.spoken])


def test_characters_are_not_cut_by_streaming() -> None:
    completion = Completion("a")
    pieces = list(complete(Recited("né – 日本"), ByteLevel(), [completion], Sampling()))
    assert [piece.text for piece in pieces] == list("né – 日本")
    assert completion.text == "né – 日本"
    assert completion.ended


def test_each_completion_ends_with_its_own_document() -> None:
    completions = [Completion("a"), Completion("b")]
    list(complete(Recited("ab", "abcdef"), ByteLevel(), completions, Sampling(tokens=4)))
    assert [c.text for c in completions] == ["ab", "abcd"]
    assert [c.ended for c in completions] == [True, False]


def test_the_same_seed_gives_the_same_text() -> None:
    model = build(variant("hybrid", vocabulary=259)).eval()
    texts = []
    for seed in (1, 1, 2):
        completion = Completion("abc")
        list(complete(model, ByteLevel(), [completion], Sampling(tokens=12, temperature=1.0, seed=seed)))
        texts.append(completion.tokens)
    assert texts[0] == texts[1] != texts[2]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(Fatal, match="at least one token"):
        list(complete(Recited("a"), ByteLevel(), [Completion("")], Sampling()))


def test_a_picture_stands_before_its_prompt(tmp_path: Path) -> None:
    model = variant("vision", vocabulary=260)
    built = build(model).eval()
    records = RenderedText(2, seed=0)
    paths = [tmp_path / f"{index}.png" for index in range(2)]
    for index, path in enumerate(paths):
        Image.fromarray(records.pixels(index, *records.size(index))).save(path)
    format_ = image_format("a test", model, ByteLevel())
    pictures = read_pictures(paths, format_)
    completions = [Completion(""), Completion("ab")]
    list(complete(built, ByteLevel(), completions, Sampling(tokens=4, temperature=0), pictures))

    for index, completion in enumerate(completions):
        cut = patchify(records.pixels(index, *records.size(index)), format_)
        tokens = [format_.token] * format_.tokens(*records.size(index)) + [*completion.prompt.encode()]
        images = (torch.from_numpy(cut.values), torch.tensor([[cut.rows, cut.columns]]))
        alone = list(built.generate([torch.tensor(tokens)], 4, temperature=0, images=images))
        expected = [int(token) for token in alone]
        end = expected.index(ByteLevel.end) if ByteLevel.end in expected else None
        assert completion.tokens == expected[:end]


def test_a_file_that_is_no_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(Fatal, match=r"a\.png is not a readable picture"):
        read_pictures([tmp_path / "a.png"], ImageFormat(4, 2, 259))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build, and a run of it that has saved its initial weights once."""
    root = tmp_path_factory.mktemp("generate")
    plan = plan_of("tiny")
    write_build(plan, root / "build")
    model = import_model(root / "build").Model()
    model.init_weights(torch.Generator().manual_seed(0))
    save(model, root / "runs" / "first" / "checkpoints", 1)
    entry = RunRecord(
        id="first",
        name="tiny",
        plan_hash=plan.hash,
        target="local",
        build=str(root / "build"),
        launched_at="2026-01-01T00:00:00Z",
    )
    (root / "runs" / "first" / RECORD_FILE).write_text(json.dumps(entry.model_dump(mode="json")))
    return root


def generate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from shipway.compiler.cli import main; main()", "generate", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_command_finds_the_builds_newest_run_and_continues_the_prompt(run: Path) -> None:
    ran = generate("build", "--prompt", "def f", "--tokens", "5", "--device", "cpu", cwd=run)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("def f")
    assert ran.stderr == "from runs/first, step 1\n"


def test_command_gives_all_completions_as_json(run: Path) -> None:
    arguments = ("--prompt", "a", "--prompt", "b", "--tokens", "3", "--device", "cpu", "--json")
    completions = json.loads(generate("runs/first", *arguments, cwd=run).stdout)["completions"]
    assert [completion["prompt"] for completion in completions] == ["a", "b"]
    assert all(len(completion["tokens"]) == 3 or completion["ended"] for completion in completions)


def test_command_says_that_it_falls_back_from_what_is_not_finished(run: Path) -> None:
    entry = json.loads((run / "runs" / "first" / RECORD_FILE).read_text())
    newer = run / "runs" / "newer"
    torn = folder_of(run / "runs" / "first" / "checkpoints", 2)
    for folder in (folder_of(newer / "checkpoints", 5), torn):
        folder.mkdir(parents=True)
    (newer / RECORD_FILE).write_text(json.dumps({**entry, "launched_at": "2026-02-01T00:00:00Z"}))
    try:
        ran = generate("build", "--prompt", "a", "--tokens", "1", "--device", "cpu", cwd=run)
    finally:
        shutil.rmtree(newer)
        torn.rmdir()
    assert ran.returncode == 0, ran.stderr
    unfinished, torn_step, used = ran.stderr.splitlines()
    assert unfinished.startswith("the newest run, runs/newer, has no finished checkpoint yet")
    assert torn_step.startswith("falling back from runs/first, step 2: it was not finished")
    assert used == "from runs/first, step 1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_one_line(run: Path) -> None:
    ran = generate("build", "--prompt", "a", "--device", "cuda", cwd=run)
    assert ran.returncode == 4
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stderr.startswith("error[EN001]: --device cuda: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("-p", "a", "--top-p", "0"),
        ("-p", "a", "--top-p", "1.5"),
        ("-p", "a", "--top-p", "nan"),
        ("-p", ""),
        ("--tokens", "3"),
        ("-p", "a", "--image", "a.png", "--image", "b.png"),
    ],
)
def test_sampling_that_cannot_be_is_wrong_usage(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert shipway(["generate", "build", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error[CL001]: --")


def test_the_runtime_takes_no_empty_share(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        generation(["build", "checkpoints", "--prompt", "a", "--top-p", "0"])
    assert left.value.code == 2
    assert "not above 0" in capsys.readouterr().err


def test_a_model_that_does_not_see_takes_no_picture(run: Path) -> None:
    ran = generate("build", "--image", "a.png", "--device", "cpu", cwd=run)
    assert ran.returncode == 2
    assert ran.stderr == "error[CL001]: --image: the model has no `vision` to see pictures with\n"


def test_json_has_what_is_wrong_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, first = str(run / "build"), str(run / "runs" / "first" / "checkpoints")
    for arguments, status, words in (
        ([first, "--weights", "average"], 4, "average"),
        ([first, "--image", "a.png"], 2, "no `vision`"),
        ([build], 4, "has no finished checkpoint"),
    ):
        assert generation([build, *arguments, "--prompt", "a", "--device", "cpu", "--json"]) == status
        (told,) = json.loads(capsys.readouterr().out)["diagnostics"]
        assert words in told["summary"]


def test_a_checkpoint_that_is_not_there_is_wrong_usage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run / "build"), "--checkpoint", "nowhere"]
    for command in (["generate", *arguments, "-p", "a"], ["export", *arguments, "--out", "o"]):
        assert shipway(command) == 2
        assert "--checkpoint: nowhere does not exist" in capsys.readouterr().err


def test_command_says_what_is_missing(run: Path) -> None:
    for arguments in (("nothing",), ("build", "--runs", "elsewhere")):
        ran = generate(*arguments, "--prompt", "a", cwd=run)
        assert ran.returncode == 4
        assert "error" in ran.stderr
        assert "Traceback" not in ran.stderr
