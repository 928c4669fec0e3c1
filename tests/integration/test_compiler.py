"""The compiler is imported when it is used, and then knows all that it was told before."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import sys, torch
from elastic_ps.process import compiler

compiler.defer()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    schedule.step()

def loaded():
    return hasattr(sys.modules["torch._dynamo"], "__file__")

def told(method):
    return getattr(method.__wrapped__, "__dynamo_disable", method.__wrapped__)

step()
optimizer.load_state_dict(optimizer.state_dict())
assert not loaded() and "sympy" not in sys.modules, "who only trains does without it"
assert told(torch.optim.Optimizer.zero_grad) is torch.optim.Optimizer.zero_grad.__wrapped__
"""
COMPILES = """
compiled = torch.compile(model, backend="eager")
x = torch.randn(3, 4)
assert torch.equal(compiled(x), model(x))
assert loaded()
step()
assert told(torch.optim.Optimizer.zero_grad) is not torch.optim.Optimizer.zero_grad.__wrapped__
compiler.defer()
assert loaded(), "what is there stays"
"""
LOOKS_THROUGH_ALL_MODULES_AND_IMPORTS_A_PART = """
import inspect
assert [inspect.getmodule(frame.frame) for frame in inspect.stack()]
assert not loaded()

import torch._dynamo.config
assert torch._dynamo.config.cache_size_limit > 0
assert loaded()
step()
"""
EXCLUDES_A_FUNCTION = """
@torch.compiler.disable
def own(x):
    assert not torch.compiler.is_compiling()
    return x + 1

assert loaded()
assert torch.equal(torch.compile(lambda x: own(x) * 2, backend="eager")(torch.ones(2)), torch.full((2,), 4.0))
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "script",
    [COMPILES, LOOKS_THROUGH_ALL_MODULES_AND_IMPORTS_A_PART, EXCLUDES_A_FUNCTION],
    ids=["compile", "submodule", "disable"],
)
def test_it_is_there_when_it_is_used(script: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
