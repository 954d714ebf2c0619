"""Overrides that give the demo, or the large design, each kind of target."""

from tests.launch.builds import TWO_NODES

KUBERNETES = ("cluster.target.kind=kubernetes", "+cluster.target.image=registry.example/tiny:1.0")
AIHC = (
    "cluster.target.kind=aihc",
    "+cluster.target.resource_pool=cce-e1",
    "+cluster.target.queue=training",
    "+cluster.target.image=registry.example/tiny:1.0",
    "+cluster.target.storage_path=/shipway",
    "+cluster.target.gpu_resource=baidu.com/a800_80g_cgpu",
)
SSH = ("cluster.target.kind=ssh", "+cluster.target.hosts=[127.0.0.1, localhost]")
SLURM = ("cluster.target.kind=slurm",)
ON_GPUS = ("small_h200", "cluster=h100_8x8")
ALL = {
    "local-cpu": ("tiny",),
    "local-gpu": ("small_h200", "cluster=h100_8"),
    "slurm-cpu": ("tiny", *TWO_NODES, *SLURM),
    "slurm-gpu": (*ON_GPUS, "+cluster.target.partition=gpu", "+cluster.target.spare_nodes=1"),
    "slurm-apptainer": (*ON_GPUS, "+cluster.target.container=/images/small.sif"),
    "slurm-pyxis": (*ON_GPUS, "+cluster.target.container=/images/small.sqsh"),
    "ssh": ("tiny", *TWO_NODES, *SSH),
    "jobset": ("tiny", *TWO_NODES, *KUBERNETES),
    "trainjob": ("tiny", *TWO_NODES, *KUBERNETES, "+cluster.target.flavour=trainjob"),
    "volcano": ("tiny", *TWO_NODES, *KUBERNETES, "+cluster.target.flavour=volcano"),
    "aihc": ("tiny", *TWO_NODES, *AIHC),
}
"""Blueprint and overrides by the name of a case."""
