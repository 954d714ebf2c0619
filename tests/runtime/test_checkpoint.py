"""Checkpoints through torch's distributed checkpoint, on real ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shipway.runtime.checkpoint import Checkpointer
from shipway.runtime.checkpoint_folder import folder_of
from shipway.runtime.distributed import host_groups
from shipway.runtime.exit_codes import Fatal, Retryable
from shipway.runtime.shards import local_tensor, sharded_axes
from shipway.runtime.trainer import Trainer
from shipway.schemas.layout import Layout, Offload
from tests.runtime.ranks import run_ranks
from tests.runtime.training_cases import make_trainer, run_steps, whole_parameters

LAYOUTS = {
    1: Layout(micro_batch=8),
    2: Layout(data_parallel_shard=2, micro_batch=4),
    4: Layout(data_parallel_replicate=2, data_parallel_shard=2, micro_batch=2),
}


def checkpointer(root: Path, asynchronous: bool = True) -> Checkpointer:
    return Checkpointer(root, host_groups(), keep_last=2, asynchronous=asynchronous, plan_hash="sha256:1")


def state_of(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_tensors()}


def layout_of(world: int, offload: Offload) -> Layout:
    """With the optimizer's state where it is asked for."""
    return LAYOUTS[world].model_copy(update={"offload": offload})


def save_and_go_on(
    root: Path, world: int, offload: Offload = "none"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps, a save, two more steps: their losses, and the whole parameters at the end."""
    layout = layout_of(world, offload)
    trainer = make_trainer(layout)
    run_steps(trainer, range(2))
    writer = checkpointer(root)
    writer.save(2, state_of(trainer), {"optimizer_steps": 2}, layout)
    losses = [result.loss for result in run_steps(trainer, range(2, 4))]
    writer.close()
    assert world == 1 or uneven(trainer), "a row that does not divide is part of what is shown here"
    return losses, whole_parameters(trainer)


def uneven(trainer: Trainer) -> bool:
    """Whether some parameter has more rows on this rank than an equal share, or fewer."""
    return any(
        local_tensor(p).shape[0] * p.device_mesh.size(axis) != p.shape[0]
        for p in trainer.model.named_parameters().values()
        for axis in sharded_axes(p)
        if len(sharded_axes(p)) == 1 and p.placements[axis].dim == 0
    )


def restore_and_go_on(
    root: Path, world: int, offload: Offload = "none"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same two further steps, from the checkpoint."""
    trainer = make_trainer(layout_of(world, offload), seed=99)
    reader = checkpointer(root)
    newest = reader.newest()
    assert newest is not None
    folder, manifest = newest
    reader.restore(folder, state_of(trainer))
    trainer.optimizer.step_count = manifest.progress["optimizer_steps"]
    losses = [result.loss for result in run_steps(trainer, range(2, 4))]
    return losses, whole_parameters(trainer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, torch.Tensor]]:
    """A checkpoint that two ranks wrote in the background, and how they went on."""
    root = tmp_path_factory.mktemp("checkpoints")
    losses, parameters = run_ranks(save_and_go_on, 2, root, 2)[0]
    return root, losses, parameters


def test_same_layout_goes_on_bit_for_bit(
    saved: tuple[Path, list[float], dict[str, torch.Tensor]],
) -> None:
    root, losses, parameters = saved
    found, whole = run_ranks(restore_and_go_on, 2, root, 2)[0]
    assert found == losses
    assert all(torch.equal(whole[name], value) for name, value in parameters.items())


@pytest.mark.parametrize("world", [1, 4])
def test_other_numbers_of_ranks_go_on_the_same(
    saved: tuple[Path, list[float], dict[str, torch.Tensor]], world: int
) -> None:
    root, losses, parameters = saved
    found, whole = run_ranks(restore_and_go_on, world, root, world)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    for name, value in parameters.items():
        torch.testing.assert_close(whole[name], value, rtol=2e-3, atol=2e-4, msg=name)


@pytest.fixture(scope="module")
def saved_from_host_memory(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[float], dict[str, torch.Tensor]]:
    """As `saved`, by ranks whose optimizer keeps its state in host memory."""
    root = tmp_path_factory.mktemp("offloaded")
    losses, parameters = run_ranks(save_and_go_on, 2, root, 2, "optimizer")[0]
    return root, losses, parameters


def test_state_saved_from_host_memory_goes_on_bit_for_bit_on_the_device(
    saved_from_host_memory: tuple[Path, list[float], dict[str, torch.Tensor]],
    saved: tuple[Path, list[float], dict[str, torch.Tensor]],
) -> None:
    root, losses, parameters = saved_from_host_memory
    assert losses == saved[1], "where the state is kept changes nothing"
    found, whole = run_ranks(restore_and_go_on, 2, root, 2, "none")[0]
    assert found == losses
    assert all(torch.equal(whole[name], value) for name, value in parameters.items())


@pytest.mark.parametrize(("world", "offload"), [(1, "optimizer"), (4, "optimizer")])
def test_state_saved_from_host_memory_goes_on_on_other_numbers_of_ranks(
    saved_from_host_memory: tuple[Path, list[float], dict[str, torch.Tensor]], world: int, offload: Offload
) -> None:
    root, losses, parameters = saved_from_host_memory
    found, whole = run_ranks(restore_and_go_on, world, root, world, offload)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    for name, value in parameters.items():
        torch.testing.assert_close(whole[name], value, rtol=2e-3, atol=2e-4, msg=name)


def back_to_back(root: Path) -> tuple[list[str], float, str, str]:
    """Saves without a pause while values change; then a torn one, a missing name, a full disk."""
    rank = dist.get_rank()
    writer = checkpointer(root)
    for step in range(1, 6):
        value = torch.full((1000,), float(step))
        writer.save(step, {"model": {"w": value}}, {"step": step}, Layout())
        value.fill_(-1.0)  # training goes on before the writer is done
        dist.barrier()  # and its collectives on other groups neither wait for the writer nor disturb it
    writer.wait()
    kept = sorted(folder.name for folder in root.iterdir())
    if rank == 0:
        (folder_of(root, 5) / "complete.json").unlink()
    dist.barrier()
    newest = writer.newest()
    assert newest is not None
    target = {"model": {"w": torch.zeros(1000)}}
    writer.restore(newest[0], target)
    with pytest.raises(Fatal) as missing:
        writer.restore(newest[0], {"model": {"other": torch.zeros(3)}})
    if rank == 0:
        shutil.rmtree(root)
        root.write_text("a file where the folder should be")
    dist.barrier()
    reason = ""
    if rank == 0:
        writer.save(6, {"model": {"w": torch.zeros(2)}}, {}, Layout())
        with pytest.raises(Retryable) as full:
            writer.wait()
        reason = str(full.value)
    return kept, float(target["model"]["w"].mean()), str(missing.value), reason


def test_saves_back_to_back_keep_their_own_values_and_the_last_two(tmp_path: Path) -> None:
    kept, restored, missing, failed = run_ranks(back_to_back, 2, tmp_path / "checkpoints")[0]
    assert kept == ["step-00000004", "step-00000005"]
    assert restored == 4.0, "the torn newest is passed over, and the copy is of the moment of the save"
    assert "other" in missing
    assert "could not be written" in failed
