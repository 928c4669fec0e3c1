"""Whatever a model is made of, a job can go on from each of its checkpoints, and plain torch can read it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.checkpoint import plain
from elastic_ps.checkpoint.store import Store
from elastic_ps.core.partition import partition
from elastic_ps.server.job.record import require_usable
from elastic_ps.worker.session import Session
from tests.integration.test_frozen import Adapted
from tests.integration.test_scripts_parameters import Odd, Quantised
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import mse
from tests.testing.trained import adam, sgd

BUCKET, SHARDS = 1024, 2
SERVER = {
    "replicas": SHARDS,
    "bucketBytes": BUCKET,
    "checkpoint": {"interval": "1h", "everyVersions": 1},
}
LARGEST_SEED = (1 << 63) - 1


def two_classes(model: torch.nn.Sequential) -> dict[str, torch.optim.Optimizer]:
    return {"first": adam(model[:2]), "rest": sgd(model[2:])}


@pytest.mark.parametrize(
    ("make_model", "make"),
    [
        pytest.param(Odd, adam, id="tied, frozen, scalar and empty"),
        pytest.param(Quantised, sgd, id="integers"),
        pytest.param(Adapted, sgd, id="a large frozen layer", marks=pytest.mark.nightly),
        pytest.param(lambda: make_mlp().bfloat16(), adam, id="half precision"),
        pytest.param(make_mlp, two_classes, id="several optimizers"),
    ],
)
def test_each_checkpoint_is_one_to_go_on_from(
    tmp_path: Path, make_model: Callable[[], torch.nn.Module], make: Callable[[Any], Any]
) -> None:
    store = Store(tmp_path / "kept")

    def look(session: Session, model: torch.nn.Module) -> None:
        version = session.version
        job.until(lambda: job.status().progress.durable_version == version, "the version is on disk")
        found, problems = store.newest(partial(require_usable, spec=job.spec))
        assert (found.version, problems) == (version, [])
        layout = job.servers[0].node.shard.layout
        assert partition(found.specs, bucket_bytes=BUCKET, shards=SHARDS) == layout
        with store.open(version) as reader:
            values = plain.state_dict(reader)
        assert values.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.equal(values[name], value), name

    def script(session: Session) -> None:
        model = make_model()
        dtype = next(model.parameters()).dtype
        optimizer = session.optimizer(make(model), model)
        for step, (x, y) in enumerate(session.loader(Numbers(24), 4)):
            optimizer.zero_grad()
            mse(model, x.to(dtype), y.to(dtype)).backward()
            if step == 3:
                job.restart(0)
            optimizer.step()
            look(session, model)

    data = {"seed": LARGEST_SEED}
    with running_job(tmp_path, checkpoints=store.directory, data=data, parameterServer=SERVER) as job:
        job.start(0, script)
        job.join()
        assert job.status().term == 2
        assert job.version == 6
