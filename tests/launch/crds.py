"""The parts of four custom resources that our manifests use, closed: a key that is not here is a mistake.

Restated from the types of JobSet v1alpha2 (0.12), Kubeflow Trainer v1alpha1 (2.3) and Volcano v1alpha1, with
the rules that their admission evaluates in CEL and JSON Schema can say.
"""

from __future__ import annotations

from typing import Any

LABEL = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT = {"type": "integer", "minimum": 0}


def closed(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    """An object that has these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A list."""
    return {"type": "array", "items": items, **more}


STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = closed(("name",), name=LABEL, namespace=LABEL, labels=STRINGS, annotations=STRINGS)
CORE = {"type": "object"}
"""A part that is a core kind and is checked as one."""

NETWORK = closed(
    enableDNSHostnames={"type": "boolean"},
    subdomain=LABEL,
    publishNotReadyAddresses={"type": "boolean"},
)
FAILURE_POLICY = closed(
    maxRestarts=COUNT,
    restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
    rules=listed(
        closed(
            ("name", "action"),
            name={"type": "string", "pattern": r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
            action={
                "enum": [
                    "FailJobSet",
                    "RestartJobSet",
                    "RestartJobSetAndIgnoreMaxRestarts",
                    "RestartJob",
                    "RestartJobAndIgnoreMaxRestarts",
                ]
            },
            onJobFailureReasons=listed({"enum": ["PodFailurePolicy", "BackoffLimitExceeded"]}),
            onJobFailureMessagePatterns=listed({"type": "string"}, uniqueItems=True),
            targetReplicatedJobs=listed(LABEL),
        )
    ),
)
JOBSET = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=METADATA,
    spec=closed(
        suspend={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        network=NETWORK,
        failurePolicy=FAILURE_POLICY,
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            # The first in the list cannot depend on another.
            "prefixItems": [{"not": {"required": ["dependsOn"]}}],
            "items": {"required": ["dependsOn"]},
            "contains": closed(
                ("name", "template"),
                name=LABEL,
                replicas=COUNT,
                dependsOn=listed(
                    closed(("name", "status"), name=LABEL, status={"enum": ["Ready", "Complete"]}), maxItems=1
                ),
                template=CORE,
            ),
        },
    ),
)
TRAINING_RUNTIME = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainingRuntime"},
    metadata=METADATA,
    spec=closed(
        ("template",),
        mlPolicy=closed(
            numNodes={"type": "integer", "minimum": 1},
            torch=closed(numProcPerNode={"type": "integer", "minimum": 1}),
        ),
        template=closed(
            metadata=closed(labels=STRINGS, annotations=STRINGS),
            spec=closed(
                ("replicatedJobs",),
                network=NETWORK,
                failurePolicy=FAILURE_POLICY,
                replicatedJobs=listed(
                    closed(("name", "template"), name=LABEL, replicas=COUNT, template=CORE), minItems=1
                ),
            ),
        ),
    ),
)
"""Its template is a JobSet's; the job that trains has the label of the ancestor step `trainer`."""

VOLCANO_POLICY = closed(
    ("action",),
    action={"enum": ["AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob", "ResumeJob"]},
    event={"enum": ["PodFailed", "PodEvicted", "PodPending", "TaskCompleted", "Unknown", "*"]},
    exitCode={"type": "integer", "not": {"const": 0}},
) | {"oneOf": [{"required": ["event"]}, {"required": ["exitCode"]}]}

VOLCANO = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "batch.volcano.sh/v1alpha1"},
    kind={"const": "Job"},
    metadata=METADATA,
    spec=closed(
        ("tasks",),
        schedulerName={"type": "string", "maxLength": 63},
        queue=LABEL,
        minAvailable=COUNT,
        maxRetry=COUNT,
        ttlSecondsAfterFinished=COUNT,
        plugins={"type": "object", "additionalProperties": listed({"type": "string"})},
        policies=listed(VOLCANO_POLICY),
        tasks=listed(
            closed(
                ("name", "template"),
                name=LABEL,
                replicas=COUNT,
                policies=listed(VOLCANO_POLICY),
                template=CORE,
            ),
            minItems=1,
        ),
    ),
)

_CONTAINER_PATCH = closed(("name",), name=LABEL, volumeMounts=listed(CORE), securityContext=CORE)
_POD_PATCH = closed(affinity=CORE, containers=listed(_CONTAINER_PATCH), volumes=listed(CORE))
"""A patch may not set the grace period: that is the runtime's own."""
TRAINJOB = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=METADATA,
    spec=closed(
        ("runtimeRef",),
        suspend={"type": "boolean"},
        runtimeRef=closed(("name",), name=LABEL, apiGroup={"type": "string"}, kind={"type": "string"}),
        trainer=closed(
            image={"type": "string", "maxLength": 500},
            command=listed({"type": "string"}, maxItems=128),
            args=listed({"type": "string"}, maxItems=128),
            numNodes=COUNT,
            numProcPerNode={"type": "integer", "minimum": 1},
            resourcesPerNode=CORE,
            env=listed(
                # Admission rejects these: the controller owns them.
                closed(
                    ("name",),
                    name={"type": "string", "not": {"pattern": "^PET_"}},
                    value={"type": "string"},
                    valueFrom=CORE,
                )
            ),
        ),
        runtimePatches=listed(
            closed(
                ("manager",),
                manager={"type": "string", "minLength": 1, "maxLength": 253},
                trainingRuntimeSpec=closed(
                    template=closed(
                        spec=closed(
                            replicatedJobs=listed(
                                closed(
                                    ("name",),
                                    name=LABEL,
                                    template=closed(
                                        spec=closed(
                                            template=closed(
                                                metadata=closed(labels=STRINGS, annotations=STRINGS),
                                                spec=_POD_PATCH,
                                            )
                                        )
                                    ),
                                )
                            )
                        )
                    )
                ),
            )
        ),
    ),
)
