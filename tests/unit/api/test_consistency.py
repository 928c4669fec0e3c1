from __future__ import annotations

from typing import Any

import pytest

from elastic_ps.errors import InvalidJob
from tests.testing.harness import make_spec

ASYNC = {"mode": "async"}
BOUNDED = {"mode": "bounded", "maxStaleness": 4}


def accumulate(gradients: int) -> dict[str, Any]:
    return {"mode": "accumulate", "gradients": gradients}


def local(steps: int, outer: str | None = None, **options: Any) -> dict[str, Any]:
    chosen = {"outer": outer} if outer else {}
    return {"mode": "local", "steps": steps, **chosen, **options}


@pytest.mark.parametrize(
    ("consistency", "reason"),
    [
        # bounded
        ({"mode": "bounded"}, "needs maxStaleness: the number of versions"),
        (
            {"maxStaleness": 3},
            "maxStaleness 3 has no meaning with mode sync; leave it out, or set mode: bounded",
        ),
        ({"mode": "bounded", "maxStaleness": 0}, "greater than or equal to 1"),
        (BOUNDED | {"backupWorkers": 1}, "backupWorkers works only with mode sync"),
        (BOUNDED | {"deterministic": True}, "deterministic works only with mode sync"),
        ({"reads": "inconsistent"}, "reads inconsistent has no meaning with mode sync; leave it out, or set"),
        (BOUNDED | {"reads": "consistent"}, "reads consistent has no meaning with mode bounded"),
        (
            ASYNC | {"reads": "dirty"},
            "consistency.reads: input should be 'consistent' or 'inconsistent', got",
        ),
        (
            ASYNC | {"stalenessScale": "invers"},
            "there is no stalenessScale 'invers'; expected one of damped, inverse, none, or module:function",
        ),
        (
            {"stalenessScale": "inverse"},
            "stalenessScale inverse has no meaning with mode sync; leave it out, or set mode: async or b",
        ),
        (
            {"mode": "accumulate", "gradients": 3, "maxStalenessP99": 2},
            "maxStalenessP99 2 has no meaning with mode accumulate; leave it out, or set mode: async or",
        ),
        (
            {"maxStalenessP99": 2, "deterministic": True},
            "maxStalenessP99 2 cannot be combined with deterministic",
        ),
        (
            {"maxStalenessP99": 2, "backupWorkers": 1},
            "maxStalenessP99 2 cannot be combined with backupWorkers",
        ),
        (ASYNC | {"maxStalenessP99": -1}, "greater than or equal to 0"),
        (ASYNC | {"maxStaleness": 3}, "maxStaleness 3 has no meaning with mode async; leave it out, or set"),
        (ASYNC | {"gradients": 3}, "gradients 3 has no meaning with mode async"),
        (ASYNC | {"backupWorkers": 1}, "backupWorkers works only with mode sync"),
        # accumulate
        ({"mode": "accumulate"}, "mode accumulate needs gradients: the number of steps"),
        (
            {"gradients": 3},
            "gradients 3 has no meaning with mode sync; leave it out, or set mode: accumulate",
        ),
        (
            {"mode": "bounded", "maxStaleness": 1, "gradients": 3},
            "gradients 3 has no meaning with mode bounded",
        ),
        (accumulate(0), "consistency.gradients: input should be greater than or equal to 1, got 0"),
        (accumulate(2) | {"maxStaleness": 3}, "maxStaleness 3 has no meaning with mode accumulate"),
        (accumulate(2) | {"backupWorkers": 1}, "backupWorkers works only with mode sync"),
        (accumulate(2) | {"deterministic": True}, "deterministic works only with mode sync"),
        ({"mode": "eventual"}, "consistency.mode: input should be 'sync', .*'accumulate'.*got 'eventual'"),
        # local
        ({"mode": "local"}, "mode local needs steps: the number of steps that a worker makes by itself"),
        (local(0), "consistency.steps: input should be greater than or equal to 1, got 0"),
        ({"steps": 3}, "steps 3 has no meaning with mode sync; leave it out, or set mode: local"),
        ({"mode": "async", "outer": "easgd"}, "outer easgd has no meaning with mode async"),
        (local(2, "adagrad"), "consistency.outer: input should be 'diloco', .* or 'downpour', got 'adagrad'"),
        (local(2, reads="consistent"), "reads consistent has no meaning with mode local"),
        (local(2, backupWorkers=1), "backupWorkers works only with mode sync"),
        (local(2, deterministic=True), "deterministic works only with mode sync"),
        (
            local(2, "average", outerLearningRate=0.5),
            "outerLearningRate 0.5 has no meaning with outer average; leave it out, or set outer: diloco or",
        ),
        (local(2, "easgd", outerMomentum=0.5), "outerMomentum 0.5 has no meaning with outer easgd"),
        (
            local(2, "easgd", outerLearningRate=1.5),
            "outerLearningRate is 1.5; expected at most 1 with outer easgd",
        ),
        (local(2, outerLearningRate=0), "consistency.outerLearningRate: input should be greater"),
        (local(2, outerMomentum=1), "consistency.outerMomentum: input should be less"),
        # fragments
        (local(2, fragments=0), "consistency.fragments: input should be greater than or equal to 1, got 0"),
        (local(2, fragments=3), "fragments 3 is above steps 2: .* Set fragments to 2 or less"),
        ({"fragments": 2}, "fragments 2 has no meaning with mode sync; leave it out, or set mode: local"),
        # quorum
        (local(2, quorum=0), "quorum: input should be greater than or equal to 1, got 0"),
        (local(2, "easgd", quorum=1), "quorum 1 has no meaning with outer easgd"),
        (local(2, grace="1s"), "grace has no meaning without quorum"),
        (local(2, quorum=1, grace="soon"), "'soon' is not a duration; .* 500ms, or auto$"),
        ({"quorum": 1}, "quorum 1 has no meaning with mode sync"),
        ({"grace": "auto"}, "grace auto has no meaning with mode sync"),
        ({"grace": "90s"}, "grace 90s has no meaning with mode sync"),
        (local(2, "delayed", outerNesterov=False), "outerNesterov: false has no meaning with outer delayed"),
        # overlap
        (
            local(4, overlap=4),
            "overlap 4 is too large: there are 4 steps between two exchanges.* Set overlap to 3",
        ),
        (local(9, fragments=3, overlap=3), "there are 3 steps between two exchanges"),
        (
            local(4, "easgd", overlap=1),
            "overlap 1 has no meaning with outer easgd, where a worker goes on from",
        ),
        ({"overlap": 1}, "overlap 1 has no meaning with mode sync; leave it out, or set mode: local"),
        (local(4, overlap=-1), "greater than or equal to 0"),
        # globalBatchSize
        ({"globalBatchSize": 0}, "greater than or equal to 1"),
        (
            {"globalBatchSize": 8, "backupWorkers": 1},
            "backupWorkers 1 cannot be combined with globalBatchSize",
        ),
        (
            {"mode": "async", "globalBatchSize": 8},
            "globalBatchSize 8 has no meaning with mode async; leave it out, or set mode: sync",
        ),
        (
            {"balance": "speed"},
            "balance speed has no meaning without globalBatchSize; set that, or mode: local",
        ),
        (
            {"mode": "local", "steps": 2, "outer": "easgd", "balance": "speed"},
            "balance speed has no meaning with outer easgd, where nobody waits",
        ),
        (
            {"globalBatchSize": 8, "balance": "speed", "deterministic": True},
            "balance speed cannot be combined with deterministic: true",
        ),
        ({"globalBatchSize": 8, "balance": "fast"}, "input should be 'even' or 'speed'"),
    ],
)
def test_what_does_not_go_together_is_refused(consistency: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidJob, match=reason):
        make_spec(consistency=consistency)


@pytest.mark.parametrize(
    ("worker", "consistency", "reason"),
    [
        (
            {"replicas": 4, "minReplicas": 2},
            local(2, quorum=3),
            "consistency.quorum 3 is above worker.minReplicas 2, .* Set worker.minReplicas to 3 or more",
        ),
        (
            {"replicas": 3},
            {"globalBatchSize": 2},
            "replicas 3 is above consistency.globalBatchSize 2, so some workers",
        ),
    ],
)
def test_too_many_or_too_few_workers_are_refused(
    worker: dict[str, int], consistency: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidJob, match=reason):
        make_spec(consistency=consistency, worker=worker)
