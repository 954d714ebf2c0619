"""Every script that is written: it parses, ShellCheck has nothing to say, and it names the plan it is of."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shipway.compiler.launch.files import launch_files
from shipway.compiler.launch.slurm import expected_restarts
from tests.launch.builds import jobs_of, planned
from tests.launch.targets import ALL, ON_GPUS, SLURM, TWO_NODES

SCRIPTS = (".sh", ".sbatch")


@pytest.mark.parametrize("case", ALL)
def test_scripts_parse_and_pass_shellcheck(case: str, tmp_path: Path) -> None:
    paths = []
    for name, text in launch_files(planned(*ALL[case])).items():
        if name.endswith(SCRIPTS):
            path = tmp_path / name.replace("/", "_")
            path.write_text(text)
            paths.append(str(path))
    assert paths
    for path in paths:
        parsed = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
        assert parsed.returncode == 0, parsed.stderr
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, *paths], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("case", ALL)
def test_every_file_names_its_plan_and_the_command_that_writes_it(case: str) -> None:
    plan = planned(*ALL[case])
    for name, text in launch_files(plan).items():
        if name.endswith((*SCRIPTS, ".yaml", "Dockerfile", ".def")):
            assert plan.hash in text, name
            assert f"Regenerate:  shipway build {plan.origin[0]}" in text, name


@pytest.mark.parametrize("case", ALL)
def test_the_same_plan_gives_the_same_bytes(case: str) -> None:
    assert launch_files(planned(*ALL[case])) == launch_files(planned(*ALL[case]))


def test_stages_have_a_script_each_in_the_order_of_the_programme() -> None:
    files = launch_files(planned("tiny", *TWO_NODES, *SLURM))
    assert [name for name in files if name.endswith(".sbatch")] == [
        "launch/slurm/01-short.sbatch",
        "launch/slurm/02-long.sbatch",
    ]


def test_a_script_asks_for_the_plans_nodes_and_devices() -> None:
    script = launch_files(planned(*ALL["slurm-gpu"]))
    jobs = jobs_of(*ALL["slurm-gpu"])
    text = script[f"launch/slurm/{jobs.stages[0].slug}.sbatch"]
    assert f"#SBATCH --nodes={jobs.stages[0].nodes + 1}  # of these 1 to spare" in text
    assert "#SBATCH --gpus-per-node=8" in text
    assert "#SBATCH --ntasks-per-node=1" in text
    assert "#SBATCH --partition=gpu" in text
    assert "gpus-per-task" not in text


def test_the_warning_before_the_time_limit_is_as_long_as_a_save() -> None:
    jobs = jobs_of(*ALL["slurm-gpu"])
    text = launch_files(planned(*ALL["slurm-gpu"]))[f"launch/slurm/{jobs.stages[0].slug}.sbatch"]
    assert f"#SBATCH --signal=B:USR1@{jobs.save_seconds} " in text
    bytes_per_parameter = 12  # a master copy and two moments in fp32
    written = planned(*ALL["slurm-gpu"]).parameters.total * bytes_per_parameter
    assert jobs.save_seconds > written / jobs.cluster.storage.write_bandwidth


def test_a_stage_longer_than_the_time_limit_is_requeued_often_enough() -> None:
    jobs = jobs_of(*ALL["slurm-gpu"], "+cluster.target.time_limit=30min")
    hours = sum(stage.hours for stage in jobs.stages)
    jobs_needed = hours * 3600 / (1800 - jobs.save_seconds)
    assert jobs_needed - len(jobs.stages) <= expected_restarts(jobs) <= jobs_needed


@pytest.mark.parametrize("case", [("tiny",), ON_GPUS], ids=["cpu", "gpu"])
def test_every_build_has_an_image_on_a_pinned_base_with_a_wheel_and_itself(
    case: tuple[str, ...],
) -> None:
    plan = planned(*case)
    files = launch_files(plan)
    docker, apptainer = files["container/Dockerfile"], files["container/apptainer.def"]
    (base,) = [line.removeprefix("FROM ") for line in docker.splitlines() if line.startswith("FROM ")]
    assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[\w.-]*", base), "one version"
    assert f"From: {base}" in apptainer
    assert f"shipway-{plan.shipway}-" in docker
    assert f"container/shipway-{plan.shipway}-py3-none-any.whl /opt/" in apptainer
    assert "COPY . /opt/shipway/build" in docker
    assert "enroot import" in files["container/enroot.sh"]


def test_no_node_falls_back_to_itself() -> None:
    for case in ALL:
        for name, text in launch_files(planned(*ALL[case])).items():
            if name.endswith(SCRIPTS):
                assert "localhost}" not in text, name
                assert "|| echo localhost" not in text, name
                assert "SLURM_LAUNCH_NODE_IPADDR" not in text, name


def test_node_script_refuses_to_start_without_a_meeting_place(tmp_path: Path) -> None:
    script = tmp_path / "node.sh"
    script.write_text(launch_files(planned(*ALL["slurm-cpu"]))["launch/node.sh"])
    environment = {"PATH": "/usr/bin:/bin", "SHIPWAY_BUILD": "b", "SHIPWAY_RUN": "r", "SHIPWAY_NODES": "2"}
    environment["SHIPWAY_JOB"] = "1"
    done = subprocess.run(
        ["bash", script, "train", "short"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "SHIPWAY_HEAD: where the nodes meet, host:port" in done.stderr


def test_allocator_and_flight_recorder_are_set_on_gpus_only() -> None:
    on_gpus = launch_files(planned(*ALL["slurm-gpu"]))["launch/node.sh"]
    on_cpus = launch_files(planned(*ALL["slurm-cpu"]))["launch/node.sh"]
    for setting in ("PYTORCH_ALLOC_CONF=expandable_segments:True", "TORCH_NCCL_ASYNC_ERROR_HANDLING=3"):
        assert f"export {setting}" in on_gpus
        assert setting not in on_cpus
    assert "NCCL_DEBUG" not in on_gpus


def test_the_blueprints_environment_wins_over_the_defaults() -> None:
    case = (*ALL["slurm-gpu"], "+cluster.target.environment={OMP_NUM_THREADS: '8', NCCL_IB_HCA: mlx5}")
    text = launch_files(planned(*case))["launch/node.sh"]
    assert text.count("export OMP_NUM_THREADS=") == 1
    assert "export OMP_NUM_THREADS=8" in text
    assert "export NCCL_IB_HCA=mlx5" in text
