"""The moving average of the weights: its rule, the same under every sharding, saved, and what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shipway.runtime.average import Average
from shipway.runtime.build_folder import import_model
from shipway.runtime.checkpoint_folder import checkpoint_folders, folder_of, read_marker
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.generation.weights import load_model, save_weights
from shipway.runtime.mesh import MeshPool
from shipway.schemas.layout import Layout
from tests.runtime.ranks import run_ranks
from tests.runtime.small_plan import small_plan, write_build
from tests.runtime.test_resume import start
from tests.runtime.training_cases import make_trainer, run_steps
from tests.templates.generated import build as build_model
from tests.templates.generated import load, variant

LAYOUTS = {
    1: [Layout(micro_batch=8)],
    4: [
        Layout(data_parallel_replicate=2, data_parallel_shard=2, expert_parallel=2, micro_batch=2),
    ],
}
STEPS = 2


def test_early_averages_follow_the_weights_and_later_ones_keep_the_decay() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    average = Average({"w": weight}, decay=0.5)
    expected, seen = torch.zeros(3), []
    for step in range(1, 30):
        weight.data += 1.0
        decay = 0.0 if step == 1 else min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight.detach()
        average.update(step)
        seen.append(float(weight.detach()[0] - average.values["w"][0]))
        torch.testing.assert_close(average.values["w"], expected)
    assert seen[0] == 0
    assert seen[-1] == pytest.approx(1.0, abs=1e-4), "a ramp is followed at a distance of d / (1 - d)"


def test_weights_come_back_bit_for_bit_also_when_evaluation_fails() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.1, 2.2], dtype=torch.bfloat16))
    before = weight.detach().clone()
    average = Average({"w": weight}, decay=0.9)
    average.values["w"].copy_(torch.tensor([0.30001, 0.7]))

    def fail() -> None:
        with average.in_place():
            assert weight[0].item() == pytest.approx(0.3, rel=1e-2)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fail()
    assert torch.equal(weight, before)
    assert average.values["w"][0] == torch.tensor(0.30001), "and the average has lost no digit"


def averages(world: int) -> list[dict[str, torch.Tensor]]:
    """Whole averages after a few steps under each layout of this world; names of this rank's parameters."""
    found, pool = [], MeshPool(torch.device("cpu"))
    for layout in LAYOUTS[world]:
        trainer = make_trainer(layout, pool=pool)
        trainer.average = Average(trainer.model.named_parameters(), decay=0.5)
        run_steps(trainer, range(STEPS), rate=0.01)
        values = trainer.average.values.items()
        found.append({n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for n, v in values})
    return found


def test_average_is_one_ranks_under_every_sharding() -> None:
    (one,) = run_ranks(averages, 1, 1)[0]
    ranks = run_ranks(averages, 4, 4)
    for index, layout in enumerate(LAYOUTS[4]):
        assert set(ranks[0][index]) == set(one), layout
        for name, value in ranks[0][index].items():
            torch.testing.assert_close(value, one[name], rtol=2e-3, atol=2e-4, msg=f"{layout}: {name}")


def test_average_is_saved_resharded_and_what_generates(tmp_path: Path) -> None:
    options = {"ema": {"decay": 0.5}, "checkpoints": {"every_steps": 100}, "evaluation": {"sequences": 2}}
    layout = Layout(data_parallel_shard=2, micro_batch=2)
    build = write_build(small_plan({"only": 4}, [layout], sequences=4, **options), tmp_path / "build")
    run_ranks(start, 2, build, tmp_path / "broken", 2)
    run_ranks(start, 1, build, tmp_path / "broken")  # goes on with one rank instead of two
    run_ranks(start, 2, build, tmp_path / "whole")
    models = {}
    for name in ("broken", "whole"):
        checkpoint = checkpoint_folders(tmp_path / name / "checkpoints")[0]
        assert read_marker(checkpoint).progress["position"]["step"] == 4  # type: ignore[union-attr]
        for weights in (None, "average", "last"):
            models[name, weights] = load_model(
                import_model(build), checkpoint, torch.device("cpu"), torch.float32, weights
            ).state_dict()
    for key, value in models["whole", "average"].items():
        torch.testing.assert_close(models["broken", "average"][key], value, rtol=2e-3, atol=2e-4, msg=key)
        assert torch.equal(models["whole", None][key], value), "the average is what is read unless told"
    weight = "layers.0.attention.output_proj.weight"
    assert not torch.equal(models["whole", "average"][weight], models["whole", "last"][weight])


def test_asking_for_an_average_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = variant("all delta")
    checkpoint = folder_of(tmp_path, 1)
    save_weights(build_model(model), checkpoint, "sha256:0")
    with pytest.raises(Fatal, match=r"sets no training\.ema"):
        load_model(load(model), checkpoint, torch.device("cpu"), torch.float32, "average")
