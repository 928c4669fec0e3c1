"""A worker that sends what the parameter server cannot decode ends, and costs the others nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ps.api.compression import Compression
from elastic_ps.codec.base import Codec, Encoded
from elastic_ps.codec.builtin import TopK
from elastic_ps.codec.places import LOW
from elastic_ps.codec.plan import Plan
from elastic_ps.errors import InvalidJob, Refused
from elastic_ps.worker.session import Session
from tests.testing.harness import Numbers, make_mlp, running_job
from tests.testing.oracle import assert_each_record_once, assert_equal_up_to_round_off, mse, replay
from tests.testing.polling import LIMIT
from tests.testing.trained import Models, sgd, training


class Longer(Codec):
    """A user's own, of which a worker has a version that makes more elements."""

    lossless = True

    def __init__(self, more: int = 0) -> None:
        self._more = more

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        return Encoded({"values": torch.cat((tensor, torch.zeros(self._more)))})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        out.copy_(encoded.tensors["values"])


class Elsewhere(TopK):
    """All elements, at places that a worker may have wrong."""

    def __init__(self, away: int = 0) -> None:
        super().__init__(ratio=1.0, dtype="float32")
        self._away = away

    def encode(self, tensor: torch.Tensor, state: dict[str, Any], random: torch.Generator) -> Encoded:
        encoded = super().encode(tensor, state, random)
        return Encoded({**encoded.tensors, LOW: encoded.tensors[LOW] + self._away})

    def decode(self, encoded: Encoded, out: torch.Tensor) -> None:
        """The worker looks at what it has left over, of places that are right."""
        places = encoded.tensors[LOW] - self._away
        super().decode(Encoded({**encoded.tensors, LOW: places}), out)


class Versioned(Longer):
    """A user's own, which says what it sends."""

    version = "1"


HERE = "tests.integration.test_codecs_refused"
TORN = {"codec": f"{HERE}:Elsewhere", "rules": [{"match": "*bias", "codec": "none"}]}
OWN = {"codec": f"{HERE}:Versioned"}
OF_A_RULE = {"codec": "none", "rules": [{"match": "*bias", **OWN}]}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("usual", "of_worker_1", "words"),
    [
        (
            {"codec": f"{HERE}:Longer"},
            {"codec": f"{HERE}:Longer", "options": {"more": 1}},
            r"cannot be decoded: RuntimeError: .*size",
        ),
        (TORN, {**TORN, "options": {"away": 1 << 14}}, r"cannot be decoded: .*places are 1638\d to 16"),
        ({"codec": "none"}, {"codec": "bf16"}, r"has the codecs bf16; this job has none\. .*same code"),
        (OWN, {"codec": "none"}, r"has the codecs none; this job has .*Versioned version 1\."),
        (OF_A_RULE, {"codec": "none"}, r"has the codecs none; this job has .*Versioned version 1\."),
        (OWN, OWN, r"Versioned version 2; this job has .*Versioned version 1\."),
    ],
    ids=["another shape", "torn", "with a codec", "without", "without a rule", "another version"],
)
def test_the_worker_is_named_and_the_others_train_everything(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    usual: dict[str, Any],
    of_worker_1: dict[str, Any],
    words: str,
    shards: int,
) -> None:
    """Its code makes something else of the job's compression. Nothing of what it has sent is in the model."""
    data, models = Numbers(120), Models()
    joined = threading.Event()

    def script(session: Session) -> None:
        model = make_mlp()
        try:
            optimizer = session.optimizer(sgd(model), model)
        except Exception:
            joined.set()
            raise
        models[session.worker] = model
        for x, y in session.loader(data, 4):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if session.worker == 0 and session.version == 3:
                assert joined.wait(LIMIT)

    def differing(session: Session) -> None:
        with pytest.raises((Refused, InvalidJob), match=f"(?s)worker 1 .*{words}"):
            script(session)

    server = {"replicas": shards, "bucketBytes": 1024}
    with running_job(tmp_path, compression=usual, parameterServer=server) as job:
        job.start(0, script)
        job.until(lambda: job.version >= 3, "version 3")
        with monkeypatch.context() as patch:
            patch.setattr(Versioned, "version", "2")
            other = Plan(Compression.model_validate(of_worker_1))
        # Worker 1 has another version of this package, and one process has only one.
        monkeypatch.setattr("elastic_ps.worker.runtime.membership.Plan", lambda _: other)
        job.start(1, differing)
        job.until(lambda: joined.is_set() or training(job, 1), "worker 1 is refused or takes part")
        joined.set()
        job.join()
        commits, spec = job.commits(), job.spec
    assert_each_record_once(commits, records=len(data), epochs=1)
    assert {c["worker"] for commit in commits for c in commit["contributions"]} == {0}
    assert_equal_up_to_round_off(models[0], make_mlp(), lambda m: replay(commits, data, m, sgd, spec))
