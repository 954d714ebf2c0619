"""The cluster third of a blueprint: devices, links, storage, price, and how jobs are started."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from shipway.schemas.base import Schema
from shipway.schemas.quantities import Bytes, BytesPerSecond, FlopsPerSecond, Ratio, Seconds


class PeakRates(Schema):
    """Dense arithmetic peaks of one device, by number format."""

    bf16: FlopsPerSecond
    fp32: FlopsPerSecond
    fp8: FlopsPerSecond | None = None


class Device(Schema):
    """One accelerator, from its vendor's datasheet."""

    name: str
    """Name as the catalogue has it."""
    kind: Literal["cuda", "rocm", "cpu"] = "cuda"
    """Software family."""
    reported_names: tuple[str, ...] = ()
    """Beginnings of the name that the driver reports, to tell a wrong device before a run."""
    memory: Bytes
    """Memory that a program can use, as the driver reports it."""
    memory_bandwidth: BytesPerSecond
    """Peak bandwidth of the device's memory."""
    peak: PeakRates
    """Dense arithmetic peaks."""
    link_bandwidth: BytesPerSecond
    """Scale-up bandwidth of one device, each direction (NVLink, xGMI)."""
    host_bandwidth: BytesPerSecond
    """Device to host copy bandwidth, each direction."""
    launch_overhead: Seconds = 4e-6
    """Host time to start one kernel."""
    context_bytes: Bytes = 600_000_000
    """Memory taken by the driver's context and the libraries' workspaces."""
    source: str
    """Where the figures were read."""

    def answers_to(self, name: str) -> bool:
        """Whether a driver that gives `name` speaks of this device; any does where no names are known.

        What follows a known name is its variant ("NVIDIA H200 NVL"), unless it goes on as a word (H20, H200).
        """
        known = self.reported_names
        rests = [name.removeprefix(start) for start in known if name.startswith(start)]
        return not known or any(not rest[:1].isalnum() for rest in rests)


class Network(Schema):
    """The scale-out network."""

    nics_per_node: PositiveInt = 8
    """Network interfaces per node."""
    nic_bandwidth: BytesPerSecond
    """Bandwidth of one interface, each direction."""
    latency: Seconds = 5e-6
    """One-way latency between nodes."""
    oversubscription: Ratio = 1.0
    """Bandwidth of the leaves to that of the spine, such as 3:1."""
    nodes_per_leaf: PositiveInt | None = None
    """Nodes below one leaf switch, inside which there is no oversubscription; null: all of them."""


class Storage(Schema):
    """Shared storage for data and checkpoints, over the whole cluster."""

    write_bandwidth: BytesPerSecond = 50e9
    """Aggregate write bandwidth."""
    read_bandwidth: BytesPerSecond = 100e9
    """Aggregate read bandwidth."""


class LocalTarget(Schema):
    """torchrun on this machine."""

    kind: Literal["local"] = "local"
    environment: dict[str, str] = Field(default={})
    """Environment variables that describe this machine."""


class SlurmTarget(Schema):
    """sbatch and srun."""

    kind: Literal["slurm"] = "slurm"
    partition: str | None = None
    """Partition, if the site needs one."""
    account: str | None = None
    """Account, if the site needs one."""
    qos: str | None = None
    """Quality of service, if the site needs one."""
    time_limit: Seconds = 24 * 3600.0
    """Longest run of one job; a stage that takes longer saves, is requeued and goes on."""
    container: str | None = None
    """Image: a .sif file for Apptainer, anything else for enroot through pyxis."""
    cpus_per_node: PositiveInt | None = None
    """Cores that a job asks for on each node; null: all of the node's, unbound."""
    spare_nodes: NonNegativeInt = 0
    """Nodes that are allocated on top, to take the place of those that fail the pre-flight."""
    restarts: PositiveInt = 50
    """Times that a job is brought back after preemption, a time limit or a failure."""
    environment: dict[str, str] = Field(default={})
    """Environment variables that describe the site (socket interface, HCA list)."""


class KubernetesTarget(Schema):
    """A JobSet, TrainJob or Volcano job."""

    kind: Literal["kubernetes"] = "kubernetes"
    flavour: Literal["jobset", "trainjob", "volcano"] = "jobset"
    """Which controller runs it."""
    namespace: str = "default"
    """Namespace."""
    image: str | None = None
    """Container image with its tag or digest."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of a device."""
    rdma_resource: str | None = None
    """Resource name of a network interface, where the cluster has one."""
    queue: str | None = None
    """Kueue queue name."""
    checkpoint_claim: str = "shipway-checkpoints"
    """Persistent volume claim that holds the run's folder."""
    topology_key: str | None = None
    """Node label of the domain (rack, block) that a stage should have for itself; with Kueue, fit into."""
    runtime: str | None = None
    """ClusterTrainingRuntime that a TrainJob refers to; null: one of the run's own, with its restarts."""
    shared_memory: Bytes = 64_000_000_000
    """Size of /dev/shm, which data workers and NCCL use."""
    secret: str | None = None
    """Secret whose keys become environment variables; never written out by Shipway."""
    restarts: PositiveInt = 50
    """Times that a job is brought back after a failure; preemptions do not count."""
    environment: dict[str, str] = Field(default={})
    """Environment variables that describe the site."""


class AihcTarget(Schema):
    """Baidu AI Cloud's AIHC on CCE."""

    kind: Literal["aihc"] = "aihc"
    resource_pool: str
    """Resource pool id."""
    queue: str
    """Queue id."""
    image: str
    """Container image with its tag or digest."""
    storage_path: str
    """Path inside the file system that is mounted for the run's folder."""
    storage: str = "pfs"
    """Name of the parallel file system (such as pfs-oYQuh4)."""
    gpu_resource: str
    """Resource name of a device, such as baidu.com/h800_80g_cgpu."""
    priority: Literal["high", "normal", "low"] = "normal"
    """Scheduling priority."""
    endpoint: str = "https://aihc.bj.baidubce.com"
    """Address of the service in the pool's region."""
    restarts: PositiveInt = 3
    """Times that the platform brings a job back whatever its failure; it is said to take no more than 3."""
    environment: dict[str, str] = Field(default={})
    """Environment variables that describe the site."""


class SshTarget(Schema):
    """torchrun over ssh on a list of hosts."""

    kind: Literal["ssh"] = "ssh"
    hosts: tuple[str, ...] = Field(min_length=1)
    """Hosts, one per node; those beyond the nodes that a stage takes are to spare."""
    workdir: str = "shipway"
    """Folder on storage that all hosts share, below the home folder unless absolute."""
    python: str = "python3"
    """Python with Shipway installed, on the hosts."""
    options: tuple[str, ...] = ()
    """Options for ssh and rsync, such as `-p`, `2222`."""
    restarts: PositiveInt = 50
    """Times that a run is brought back after a failure."""
    environment: dict[str, str] = Field(default={})
    """Environment variables that describe the site."""


Target = Annotated[
    LocalTarget | SlurmTarget | KubernetesTarget | AihcTarget | SshTarget, Field(discriminator="kind")
]


class Cluster(Schema):
    """A homogeneous cluster."""

    name: str
    """Name of the cluster."""
    device: Device
    """Accelerator: a name from the `device` catalogue, or its figures written out."""
    nodes: PositiveInt
    """Nodes."""
    devices_per_node: PositiveInt = 8
    """Devices per node."""
    link_domain: PositiveInt | None = None
    """Devices joined by the scale-up links (72 in a GB200 NVL72); null: one node."""
    network: Network | None = None
    """Scale-out network; needed when there is more than one node."""
    storage: Storage = Storage.by_default()
    """Storage."""
    host_memory: Bytes = 2_000_000_000_000
    """Host memory per node."""
    price_per_device_hour: NonNegativeFloat = 0.0
    """Price of one device for one hour, US dollars."""
    target: Target = LocalTarget.by_default()
    """How jobs are started."""

    @property
    def devices(self) -> int:
        """Devices in the cluster."""
        return self.nodes * self.devices_per_node
