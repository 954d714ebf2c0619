"""Every diagnostic code with its longer explanation, for `shipway explain`."""

from __future__ import annotations

from shipway.compiler.frozen import frozen


@frozen
class Code:
    """A code of a diagnostic."""

    code: str
    title: str
    explanation: str
    example: str = ""
    """A correct form, as YAML or a command."""


_CODES = (
    # Reading files
    Code(
        "BP001",
        "A file cannot be read",
        "The path names nothing, a folder, a file without permission, or bytes that are not UTF-8 text.",
        "shipway validate my_model.yaml",
    ),
    Code(
        "BP002",
        "Not valid YAML",
        "The text breaks YAML's grammar. Tabs never indent; a key needs `: ` with a space; brackets and "
        "quotes must close. Tags such as `!!python/...` and recursive aliases are refused. Scalars follow "
        "YAML 1.2: `yes` and `3:1` are text, `1e-4` is a number.",
        "training:\n  seed: 1",
    ),
    Code("BP003", "An empty file", "A blueprint or a config needs at least one key.", "name: mine"),
    Code(
        "BP004",
        "A key is written twice",
        "YAML would silently keep the last of two equal keys in one mapping, so a value would be lost.",
    ),
    # Composition
    Code(
        "BP010",
        "A defaults list is malformed",
        "`defaults` is a list; each entry chooses a config of a group, names a config beside this file, or "
        "is `_self_`, which says where this file's own values are laid in.",
        "defaults:\n  - model: tiny\n  - training: tiny\n  - cluster: cpu_2\n  - _self_",
    ),
    Code(
        "BP011",
        "No config of that name",
        "Groups are folders (model/, training/, cluster/, device/). They are looked for beside the "
        "blueprint, in --config-dir, and among those that come with Shipway, in this order.",
        "shipway plan k3 cluster=h800_256x8",
    ),
    Code(
        "BP012",
        "A mapping was expected",
        "The file holds a list or a single value where keys and values must stand.",
        "name: mine\nmodel: {width: 128}",
    ),
    Code(
        "BP013",
        "A cycle in defaults",
        "A config reaches itself through defaults lists, so there is no order to merge them in.",
    ),
    Code("BP014", "No such config folder", "--config-dir must name a folder that exists."),
    Code(
        "BP015",
        "No such blueprint",
        "A name without `/` and without `.yaml` is looked for in --config-dir and among the blueprints "
        "that come with Shipway; anything else is taken as the path of a file.",
        "shipway plan tiny\nshipway plan ./mine.yaml",
    ),
    Code(
        "BP016",
        "Hydra cannot compose this",
        "The defaults lists and group choices do not go together. A mapping in one file and a list in "
        "another at the same key cannot be laid over each other; use an override, or give the key one form.",
    ),
    Code(
        "BP020",
        "A malformed interpolation",
        "`${...}` refers to another value by its dotted path, or calls a resolver as `${name:argument}`. "
        "Both braces must close. Write `\\${` for a literal dollar and brace.",
        "peak: ${training.peak_rate}",
    ),
    Code(
        "BP021",
        "An interpolation that cannot be resolved",
        "It names a key that does not exist, leads back to itself, or calls a resolver that fails. Paths "
        "start at the blueprint's root; `${.x}` is a sibling, `${..x}` one level up.",
    ),
    Code("BP022", "A value that you must give", "`???` marks a value without a default."),
    Code(
        "BP030",
        "An override cannot be read",
        "Overrides follow Hydra's grammar: key=value, group=config, +key=value, ~key. Values with special "
        "characters need quotes, for Hydra and for the shell.",
        "shipway plan k3 cluster=h800_256x8 training.micro_batch=2",
    ),
    Code(
        "BP031",
        "An override that a plan cannot take",
        "Sweeps (a=1,2) and Hydra's own settings have no meaning here; a plan is one choice of everything.",
    ),
    Code(
        "BP032",
        "An override of a place that does not exist",
        "List entries are counted from zero and must exist; below a single value nothing can be set.",
        "training.stages.0.context=16K",
    ),
    # Types and keys
    Code(
        "BP100",
        "A value of the wrong type",
        "Types are strict: a number in quotes is text. Quantities take units: 8K, 64Ki, 2.8T, 141GB, "
        "400Gb/s, 3:1, 30min, 1%.",
    ),
    Code("BP101", "An unknown key", "A key that no part of the blueprint's language knows is never ignored."),
    Code("BP102", "A missing value", "This key has no default; `shipway explain FIELD` says what it means."),
    Code("BP103", "Not one of the legal values", "The value must be one of a fixed set."),
    Code("BP104", "Out of bounds", "The number is too small, too large, or not finite."),
    Code(
        "BP105",
        "Which kind?",
        "This section comes in several kinds; the key `kind` chooses, and decides which keys there are.",
        "optimizer:\n  kind: muon",
    ),
    Code("BP106", "A malformed text", "The text does not have the form that is needed here."),
    Code("BP107", "Too few or too many entries", "The list or the mapping has the wrong number of entries."),
    # The model
    Code(
        "BP200",
        "A kind without its dimensions",
        "The mix names a kind of layer, so the section with that kind's dimensions must be there.",
        "attention:\n  mix: {pattern: [delta]}\n  delta: {heads: 4}",
    ),
    Code(
        "BP201",
        "The mix does not fill the layers",
        "`head`, then `pattern` a whole number of times, then `tail` must come to exactly `layers`; a list "
        "must have one entry for each layer.",
        "layers: 9\nattention:\n  mix:\n    pattern: [delta, delta, delta, latent]\n    tail: [latent]",
    ),
    Code(
        "BP202",
        "Dimensions that no layer uses",
        "A section gives dimensions of a kind that is not in the mix.",
    ),
    Code(
        "BP203",
        "Heads do not divide",
        "Query heads share key-value heads in equal groups; value heads are a multiple of query heads.",
    ),
    Code(
        "BP204",
        "More active experts than there are",
        "A token passes `active` of `routed` experts; quantile balancing also needs the next best score, "
        "so there `active` must be smaller than `routed`.",
    ),
    Code(
        "BP205",
        "Expert groups do not fit",
        "Group-limited routing cuts the routed experts into equal groups and takes a token's experts from "
        "`active_groups` of them.",
    ),
    Code(
        "BP206",
        "The decay leaves the number range",
        "Within a tile of 16 tokens the chunkwise algorithm forms exp(-G) of the cumulative log-decay G. "
        "With |minimum| x 16 at most ln(3.39e38) = 88.7 that stays finite in bf16 and fp32; beyond, it "
        "overflows to infinity. -5 is the lowest whole number that holds (80).",
        "decay: {kind: bounded, minimum: -5.0}",
    ),
    Code(
        "BP207",
        "Unbounded decay",
        "g = -exp(A) softplus(z) has no lower bound, so the diagonal tiles need a slower pairwise path. It "
        "is right for models that were published so; for a new one take `kind: bounded`.",
    ),
    Code("BP208", "Rotary width must be even", "Rotary embedding turns channels in pairs."),
    Code(
        "BP209", "A setting without effect", "The setting belongs to something that this model does not have."
    ),
    # The training programme
    Code(
        "BP300",
        "The batch is not a whole number of sequences",
        "`global_batch` counts the tokens of one optimizer step, so it must be a multiple of `context`.",
        "context: 8K\nglobal_batch: 512Ki  # 64 sequences",
    ),
    Code("BP301", "Two stages of one name", "A stage's name is the name of its folder in a run."),
    Code("BP302", "An unknown data source", "A stage's `mix` weighs sources that `data.sources` defines."),
    Code("BP303", "A mix without weight", "At least one source must have a weight above zero."),
    Code(
        "BP304",
        "The tokenizer is larger than the vocabulary",
        "Each token needs a row of the embedding. The bytes tokenizer has 259 tokens: 256 bytes, begin, "
        "end and padding.",
    ),
    Code("BP305", "A file that does not exist", "Paths are relative to the blueprint's folder."),
    Code(
        "BP306",
        "Warm-up and decay overlap",
        "A warmup-stable-decay schedule's warm-up and decay are shares of the same steps, at most 1.",
    ),
    Code("BP307", "The rate ends above its peak", "`final` must not exceed `peak`."),
    Code(
        "BP308",
        "Fewer tokens than one step",
        "The stage would do a single optimizer step on more tokens than it asks for.",
    ),
    Code(
        "BP309",
        "A stage of kind rl",
        "Shipway plans and runs pre-training stages. Reinforcement learning needs rollouts, a reward and a "
        "reference policy, which this version does not run, so it refuses rather than ignore it.",
    ),
    # Cluster and layout
    Code(
        "BP400",
        "Several nodes and no network",
        "A cluster of more than one node needs its scale-out network: without it communication has no speed.",
        "network:\n  nics_per_node: 8\n  nic_bandwidth: 400Gb/s",
    ),
    Code(
        "BP401",
        "The link domain does not fit",
        "Devices joined by scale-up links come in whole nodes.",
    ),
    Code(
        "BP402",
        "A pinned degree does not divide",
        "A parallel degree must divide what it cuts. What is not pinned is searched.",
        "layout: {tensor_parallel: 2}",
    ),
    Code(
        "BP403",
        "The layout needs more devices than there are",
        "pipeline x data x context x tensor parallel is the number of devices that a layout takes.",
    ),
    Code(
        "BP404",
        "The runtime cannot run this",
        "A plan offers what the runtime runs and nothing else.",
    ),
    Code(
        "BP405",
        "Target and cluster disagree",
        "The way jobs are started does not fit the cluster's size.",
    ),
    Code(
        "BP406",
        "fp8 is not possible here",
        "Products in fp8 need a CUDA device that has them, contexts of whole groups of 16 tokens, and "
        "projections wide enough that rounding their operands takes less time than the faster product saves.",
        "cluster: {device: h200}\ntraining:\n  precision: {compute: fp8}",
    ),
    Code(
        "BP407",
        "A variable that may not stand in a blueprint",
        "Rank, world size and rendezvous belong to the launcher. Secrets would be written into plans and "
        "scripts: export them where you launch (Slurm), or name a Secret (Kubernetes).",
        "cluster:\n  target:\n    environment: {NCCL_IB_HCA: mlx5}",
    ),
    # Plans
    Code(
        "PL001",
        "Nothing fits",
        "No layout of this stage fits the devices' memory, or the hosts' where it offloads something, or the "
        "pinned parts leave no legal layout. Unless layout.offload is pinned, host memory was tried too.",
    ),
    Code(
        "PL010",
        "The plan is stale",
        "The blueprint that this plan was made from has changed since, so the plan promises something else. "
        "Make it anew.",
        "shipway plan NAME --out plan.json",
    ),
    Code(
        "PL011", "Not a plan", "The file is not a plan that this version can read, or it was edited by hand."
    ),
    # The command line
    Code(
        "CL001",
        "Wrong usage",
        "The command does not take this option or argument; --help lists what it takes.",
    ),
    Code("CL002", "No such choice", "The option or argument takes one of a few names."),
    Code(
        "CL003",
        "Nothing to explain",
        "`explain` knows diagnostic codes, fields of a blueprint, terms of a plan.",
    ),
    Code(
        "CL004",
        "Figures of another device",
        "Calibrations hold shares of one device's peaks: a CPU's say nothing of a GPU, and another GPU's "
        "are a guess.",
    ),
    Code(
        "IN001",
        "An internal error",
        "A mistake of Shipway's, not of yours. SHIPWAY_TRACEBACK=1 shows where; please report it with the "
        "command and the blueprint.",
    ),
    # Environment
    Code("EN001", "The environment lacks something", "`shipway doctor` lists what is there and what is not."),
    Code(
        "EN002",
        "Not as Shipway wrote it",
        "The folder is no build folder, or files in it were edited since. `build --force` overwrites them.",
    ),
    Code("EN003", "A file cannot be written", "It exists already, or the folder does not allow it."),
    Code(
        "EX001",
        "No published family can hold the model",
        "`export` and `import` know deepseek_v3, kimi_linear and kimi_k3; each is told with what it has not.",
    ),
    Code(
        "DA001",
        "The data cannot be used as asked",
        "A source, a folder of shards or a tokenizer is missing, there already, or of another kind.",
    ),
    # Launching
    Code("LA001", "Not a build folder", "There is no plan.json in it.", "shipway build tiny"),
    Code(
        "LA002", "A plan of another version", "The plan cannot be read by this version. Plan and build again."
    ),
    Code(
        "LA003",
        "A plan that was edited",
        "The plan's hash no longer fits its content, so nothing that was promised about it holds.",
    ),
    Code(
        "LA004",
        "A variable that may not stand in a plan",
        "As BP407, of a plan that another version made: plan and build again.",
    ),
    Code(
        "LA005",
        "A build folder with files missing",
        "Every run reads plan.json and model.py, and a scheduler runs what is in launch/. Build again.",
        "shipway build tiny --force",
    ),
    Code(
        "LA006",
        "A build file that was edited",
        "You may edit model.py on purpose; if you did not, `shipway build --force` writes it anew.",
    ),
    Code(
        "LA007",
        "The run's folder cannot be written",
        "A run keeps its record, logs and checkpoints in it; `--runs DIR` names another place.",
    ),
    Code("LA010", "No sbatch", "Slurm's commands are only on its login nodes; `--dry-run` works anywhere."),
    Code("LA011", "No such image", "The container image must be a file on storage that the nodes share."),
    Code("LA012", "Too short a time limit", "One save would take half of the job's time."),
    Code("LA020", "Too large for this machine", "The local target runs on one machine only."),
    Code("LA021", "Devices are missing", "The plan counts on devices that this machine does not have."),
    Code("LA022", "Another device", "A plan is bound to its device: memory and speed decide the layout."),
    Code("LA023", "One machine", "A local run has no other machine to go to when a node is to be left out."),
    Code("LA030", "No kubectl", "The cluster is reached through kubectl and its current context."),
    Code(
        "LA031",
        "The controller cannot chain stages",
        "A TrainJob and a Volcano job have one size. A JobSet starts one job after another.",
        "cluster:\n  target: {kind: kubernetes, flavour: jobset}",
    ),
    Code("LA032", "A plan too large for a ConfigMap", "A ConfigMap takes a million bytes."),
    Code("LA033", "No image", "Build and push container/Dockerfile of the build folder; then name its tag."),
    Code("LA034", "An image that is not pinned", "Name a tag other than latest, or a digest."),
    Code("LA040", "No ssh", "The hosts are reached with an OpenSSH client."),
    Code("LA050", "No keys for the cloud", "They are read from the environment and never written anywhere."),
    Code("LA051", "AIHC cannot chain stages", "An AIHC job has one size; pin layouts of equal size."),
    Code(
        "LA052",
        "AIHC cannot be told which nodes to stay off",
        "CreateJob has no field for it. Cordon the node in the console or with kubectl, then resume.",
        "kubectl cordon 192.168.12.46",
    ),
    Code("LA060", "No such run", "`shipway list` shows the runs in a folder."),
    Code("LA061", "The run is not at rest", "It runs, or waits for nodes: `shipway stop` ends it first."),
    Code("LA062", "The build has another plan", "A run goes on with the plan that it was launched with."),
    Code(
        "LA063",
        "A run's record that cannot be read",
        "Its run.json was cut, edited, or is not yours to read.",
    ),
    Code("LA064", "A scheduler's command is missing", "Ask where the cluster's commands are: a login node."),
    Code(
        "LA065", "The run is not running", "Only a running job can be profiled; a done one has no more steps."
    ),
)


def codes() -> dict[str, Code]:
    """All codes."""
    return {code.code: code for code in _CODES}
