"""Jobs, and changes of jobs, that the definition, the models and a cluster are to refuse alike."""

from __future__ import annotations

from typing import Any

CLAIM = {"storage": "1Gi"}
LOCAL: dict[str, Any] = {"mode": "local", "steps": 3}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("worker.replicas is below worker.minReplicas", {"worker": {"replicas": 1, "minReplicas": 2}}),
    ("worker.replicas is above worker.maxReplicas", {"worker": {"replicas": 3, "maxReplicas": 2}}),
    (
        "consistency.backupWorkers and deterministic cannot be combined",
        {"consistency": {"deterministic": True, "backupWorkers": 1}},
    ),
    (
        "consistency.backupWorkers and globalBatchSize cannot be combined",
        {"consistency": {"globalBatchSize": 8, "backupWorkers": 1}},
    ),
    (
        "consistency.globalBatchSize works only with mode sync",
        {"consistency": {"mode": "async", "globalBatchSize": 8}},
    ),
    (
        "consistency.balance works only with globalBatchSize or with mode local",
        {"consistency": {"balance": "speed"}},
    ),
    (
        "consistency.balance works only with outer diloco or average",
        {"consistency": LOCAL | {"outer": "easgd", "balance": "speed"}},
    ),
    (
        "consistency.balance speed and deterministic cannot be combined",
        {"consistency": {"globalBatchSize": 8, "deterministic": True, "balance": "speed"}},
    ),
    (
        "worker.replicas is above consistency.globalBatchSize",
        {"worker": {"replicas": 3}, "consistency": {"globalBatchSize": 2}},
    ),
    (
        "consistency.maxStaleness must be set with mode bounded, and only then",
        {"consistency": {"mode": "bounded"}},
    ),
    (
        "consistency.maxStaleness must be set with mode bounded, and only then",
        {"consistency": {"maxStaleness": 3}},
    ),
    (
        "consistency.deterministic works only with mode sync",
        {"consistency": {"mode": "async", "deterministic": True}},
    ),
    (
        "consistency.backupWorkers works only with mode sync",
        {"consistency": {"mode": "async", "backupWorkers": 1}},
    ),
    ("consistency.reads works only with mode async", {"consistency": {"reads": "inconsistent"}}),
    (
        "consistency.stalenessScale works only with mode async or bounded",
        {"consistency": {"stalenessScale": "inverse"}},
    ),
    (
        "consistency.maxStalenessP99 works only with mode async or bounded or sync",
        {"consistency": LOCAL | {"maxStalenessP99": 2}},
    ),
    (
        "consistency.maxStalenessP99 and deterministic cannot be combined",
        {"consistency": {"deterministic": True, "maxStalenessP99": 2}},
    ),
    (
        "consistency.maxStalenessP99 and backupWorkers cannot be combined",
        {"consistency": {"backupWorkers": 1, "maxStalenessP99": 2}},
    ),
    (
        "consistency.maxStalenessP99 and globalBatchSize cannot be combined",
        {"consistency": {"globalBatchSize": 8, "maxStalenessP99": 2}},
    ),
    (
        "compression.maxError works only with codec auto",
        {"compression": {"codec": "int8", "maxError": 0.1}},
    ),
    ("consistency.gradients must be set with mode accumulate", {"consistency": {"gradients": 2}}),
    ("consistency.gradients must be set with mode accumulate", {"consistency": {"mode": "accumulate"}}),
    ("consistency.steps must be set with mode local, and only then", {"consistency": {"mode": "local"}}),
    ("consistency.steps must be set with mode local, and only then", {"consistency": {"steps": 3}}),
    ("consistency.fragments works only with mode local", {"consistency": {"fragments": 2}}),
    ("consistency.fragments is above consistency.steps", {"consistency": LOCAL | {"fragments": 1000}}),
    ("consistency.overlap works only with mode local", {"consistency": {"overlap": 1}}),
    (
        "consistency.overlap has to be below the steps between two exchanges",
        {"consistency": LOCAL | {"overlap": 1000}},
    ),
    (
        "consistency.overlap does not work with outer easgd",
        {"consistency": LOCAL | {"steps": 9, "overlap": 1, "outer": "easgd"}},
    ),
    ("consistency.quorum works only with mode local", {"consistency": {"quorum": 1}}),
    (
        "consistency.quorum works only with outer diloco or average",
        {"consistency": LOCAL | {"quorum": 1, "outer": "easgd"}},
    ),
    ("consistency.quorum is above worker.minReplicas", {"consistency": LOCAL | {"quorum": 2}}),
    ("consistency.grace works only with mode local", {"consistency": {"grace": "1s"}}),
    ("consistency.grace works only with quorum", {"consistency": LOCAL | {"grace": "1s"}}),
    ("consistency.outer works only with mode local", {"consistency": {"outer": "diloco"}}),
    ("consistency.outerLearningRate works only with mode local", {"consistency": {"outerLearningRate": 0.5}}),
    ("consistency.outerMomentum works only with mode local", {"consistency": {"outerMomentum": 0.5}}),
    (
        "consistency.outerLearningRate works only with outer diloco or delayed or easgd or downpour",
        {"consistency": LOCAL | {"outer": "average", "outerLearningRate": 0.5}},
    ),
    (
        "consistency.outerMomentum works only with outer diloco or delayed",
        {"consistency": LOCAL | {"outer": "downpour", "outerMomentum": 0.5}},
    ),
    ("consistency.outerNesterov works only with mode local", {"consistency": {"outerNesterov": False}}),
    (
        "consistency.outerNesterov works only with outer diloco",
        {"consistency": LOCAL | {"outer": "delayed", "outerNesterov": False}},
    ),
    (
        "consistency.outerLearningRate must be at most 1 with outer easgd",
        {"consistency": LOCAL | {"outer": "easgd", "outerLearningRate": 1.5}},
    ),
    ("parameterServer.bucketBytes must be 0 or at least 1024", {"parameterServer": {"bucketBytes": 512}}),
    ("a job with several shards or with standbys needs checkpoint", {"parameterServer": {"replicas": 2}}),
    (
        "a job with several shards or with standbys needs checkpoint",
        {"parameterServer": {"durability": "standby"}},
    ),
    ("unencryptedAllReduce works only with strategy all-reduce", {"unencryptedAllReduce": True}),
    *(
        ("do not work with strategy all-reduce", {"strategy": "all-reduce", **fields})
        for fields in (
            {"parameterServer": {"replicas": 2, "checkpoint": {"volumeClaim": CLAIM}}},
            {"parameterServer": {"durability": "standby", "checkpoint": {"volumeClaim": CLAIM}}},
            {"parameterServer": {"overlap": "always"}},
            {"consistency": LOCAL},
        )
    ),
    *(
        (
            "volumeClaim, existingClaim and resumeFrom cannot be combined",
            {"parameterServer": {"checkpoint": volumes}},
        )
        for volumes in (
            {"volumeClaim": CLAIM, "existingClaim": "mine"},
            {"volumeClaim": CLAIM, "resumeFrom": {"job": "earlier"}},
            {"existingClaim": "mine", "resumeFrom": {"job": "earlier"}},
        )
    ),
    *(
        ("resumeFrom needs either job or claim", {"parameterServer": {"checkpoint": {"resumeFrom": source}}})
        for source in ({}, {"claim": None}, {"job": "earlier", "claim": "mine"})
    ),
    (
        "order.buffer works only with blocks of several records",
        {"data": {"order": {"blocks": 1, "buffer": 2}}},
    ),
]
"""Words of the refusal, and the spec that is refused."""

FIXED: list[tuple[str, dict[str, Any]]] = [
    ("entrypoint", {"entrypoint": "another:main"}),
    ("arguments", {"arguments": {"epochs": 3}}),
    ("consistency.deterministic", {"consistency": {"deterministic": True}}),
    ("consistency.globalBatchSize", {"consistency": {"globalBatchSize": 2}}),
    ("consistency", {"consistency": {"mode": "local", "steps": 3}}),
    ("evaluator", {"evaluator": None}),
    ("evaluator.entrypoint", {"evaluator": {"entrypoint": "another:main"}}),
    ("evaluator.arguments", {"evaluator": {"arguments": {"epochs": 3}}}),
    ("evaluator.every", {"evaluator": {"every": 7}}),
    ("evaluator.backlog", {"evaluator": {"backlog": 7}}),
    ("evaluator.best", {"evaluator": {"best": {"metric": "prec@1", "mode": "max"}}}),
    ("strategy", {"strategy": "all-reduce"}),
    ("data", {"data": {"seed": 7}}),
    ("data", {"data": {"order": {"blocks": 7}}}),
    ("parameterServer.bucketBytes", {"parameterServer": {"bucketBytes": 65536}}),
    ("parameterServer.overlap", {"parameterServer": {"overlap": "always"}}),
    ("parameterServer.replicas", {"parameterServer": {"replicas": 2}}),
    ("parameterServer.durability", {"parameterServer": {"durability": "standby"}}),
    ("checkpoint.volumeClaim", {"parameterServer": {"checkpoint": {"volumeClaim": {"storage": "2Gi"}}}}),
    ("checkpoint.volumeClaim", {"parameterServer": {"checkpoint": {"volumeClaim": None}}}),
    ("checkpoint.existingClaim", {"parameterServer": {"checkpoint": {"existingClaim": "mine"}}}),
    ("checkpoint.resumeFrom", {"parameterServer": {"checkpoint": {"resumeFrom": {"job": "earlier"}}}}),
]
"""A field that cannot change, and a change of it."""
