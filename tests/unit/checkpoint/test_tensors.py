"""A file of tensors is hashed while it is written."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_ps.checkpoint import tensors
from elastic_ps.codec.state import Stored
from tests.testing import machine

ELEMENTS = tensors.LARGE // 4 + 3


def one_after_the_other() -> Iterator[Stored]:
    """Tensors in the same memory, as a parameter server gives them."""
    memory = torch.empty(ELEMENTS)
    for number in range(3):
        elements = ELEMENTS if number != 1 else 5
        yield Stored(number, 0, "value", memory[:elements].copy_(torch.arange(float(elements)) + number))


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "no threads"])
def test_the_digest_is_that_of_the_file(
    tmp_path: Path, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = [
        Stored(stored.tensor, stored.start, stored.key, stored.value.clone())
        for stored in one_after_the_other()
    ]
    path = tmp_path / "shard-0-of-1.safetensors"
    if not threads:
        machine.fails(monkeypatch, threading.Thread, "start", RuntimeError("can't start new thread"))
    written = tensors.write(path, described, one_after_the_other())
    text = path.read_bytes()
    assert (written.size, written.sha256) == (len(text), hashlib.sha256(text).hexdigest())
    assert text.endswith(b"".join(stored.value.numpy().tobytes() for stored in described))
