"""Every mode, outer rule and codec trains the sample of examples/digits, with nothing else changed.

`python -m benchmarks.accuracy --modes` does the same with more orders of the records, and more workers.
"""

from __future__ import annotations

import pytest

from benchmarks.accuracy import EPOCHS, LEAST, MODES, run
from elastic_ps.api.compression import CODECS, Compression
from elastic_ps.api.consistency import OUTER_RULES, Consistency


def test_none_is_left_out() -> None:
    rules = [Consistency.model_validate(row.consistency) for row in MODES.values()]
    codecs = [Compression.model_validate(row.compression) for row in MODES.values()]
    assert {rule.mode for rule in rules} == {"sync", "bounded", "accumulate", "async", "local"}
    assert {rule.outer for rule in rules} == {None, *OUTER_RULES}
    assert {codec.codec for codec in codecs} == {*CODECS, "auto"}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODES)
def test_it_trains_the_digits(name: str, seed: int) -> None:
    report = run(MODES[name], seed=seed, epochs=EPOCHS)
    assert report["test_accuracy"] >= LEAST
    assert report["diverged"] is None
