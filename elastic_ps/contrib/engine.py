"""`elastic_ps.Engine`: the loop of a script, with hooks, after the engines of torchnet and TorchMPI.

It uses what any script can use: sessions, torch's modules and optimizers. A script that outgrows it writes
the loop itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

import elastic_ps

HOOKS = (
    "on_start",
    "on_start_epoch",
    "on_sample",
    "on_forward",
    "on_backward",
    "on_update",
    "on_end_epoch",
    "on_end",
)
"""The hooks, in the order of their calls."""


@dataclass(kw_only=True)
class State:
    """The state of a loop, which hooks may read and change.

    Attributes:
        model: the model that is trained or tested.
        criterion: called with the model's output and the targets; returns the loss.
        training: whether the loop trains.
        session: the session; None in a test.
        optimizer: the session's optimizer; None in a test.
        epochs: the number of epochs.
        epoch: the current epoch, from 0.
        step: the number of batches that this process has computed.
        sample: the batch, a pair of inputs and targets. `on_sample` may replace it.
        output: the model's output.
        loss: the criterion's result. `on_forward` may replace it.
        metrics: for the hooks' own use.
    """

    model: torch.nn.Module
    criterion: Callable[..., torch.Tensor]
    training: bool
    session: elastic_ps.Session | None = None
    optimizer: elastic_ps.ElasticOptimizer | None = None
    epochs: int = 1
    epoch: int = 0
    step: int = 0
    sample: Any = None
    output: Any = None
    loss: torch.Tensor | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


Hook = Callable[[State], object]
H = TypeVar("H", bound=Hook)


class Engine:
    """Trains and tests, and calls hooks. For one thread only.

    ::

        engine = elastic_ps.Engine()

        @engine.hook
        def on_end_epoch(state):
            print(state.epoch, state.loss)

        engine.train(model, criterion, sgd, data, batch_size=64, epochs=5)
    """

    def __init__(self) -> None:
        self._hooks: dict[str, list[Hook]] = {name: [] for name in HOOKS}

    def hook(self, function: H) -> H:
        """A decorator: call `function(state)` at the hook of its name.

        Several functions of one name are called in the order of their registration.

        Raises:
            UsageError: there is no such hook.
        """
        name = getattr(function, "__name__", repr(function))
        if name not in self._hooks:
            near = difflib.get_close_matches(name, HOOKS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(HOOKS)}"
            raise elastic_ps.UsageError(f"there is no hook {name!r}; {hint}")
        self._hooks[name].append(function)
        return function

    def train(
        self,
        model: torch.nn.Module,
        criterion: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        data: Any,
        batch_size: int | None = None,
        *,
        epochs: int = 1,
        session: elastic_ps.Session | None = None,
        **options: Any,
    ) -> State:
        """Train as a worker of the job, or alone. Blocks until training is over.

        For each epoch: `on_start_epoch`; for each batch of this worker `on_sample`, the forward pass,
        `on_forward`, the backward pass, `on_backward`, the optimizer's step, `on_update`; `on_end_epoch`.
        Before all that `on_start`, after it `on_end`. The loss is reported to the job.

        With overlap, gradients are sent during the backward pass, so `on_backward` must not change them.

        Args:
            optimizer: a new one of torch.optim, for `model`.
            data: a data set of pairs (input, target), or a `DataLoader` over one.
            batch_size: records in a batch of one worker.
            session: None to connect here.
            options: those of `session.loader`, such as `num_workers=2`: these processes load ahead.

        Returns:
            The state at the end. `state.session.is_chief` is true on one worker.

        Raises:
            As `session.optimizer` and `session.loader`.
        """
        session = session or elastic_ps.connect()
        state = State(model=model, criterion=criterion, training=True, session=session, epochs=epochs)
        state.optimizer = session.optimizer(optimizer, model)
        loader = session.loader(data, batch_size, epochs=epochs, **options)
        model.train()
        self._call("on_start", state)
        for epoch in loader.epochs():
            state.epoch = epoch
            self._call("on_start_epoch", state)
            for sample in loader:
                state.optimizer.zero_grad()
                loss = self._forward(state, sample)
                loss.backward()
                self._call("on_backward", state)
                session.report(loss=loss)
                state.optimizer.step()
                state.step += 1
                self._call("on_update", state)
            self._call("on_end_epoch", state)
        self._call("on_end", state)
        return state

    def test(
        self,
        model: torch.nn.Module,
        criterion: Callable[..., torch.Tensor],
        data: Any,
        batch_size: int = 1,
        **options: Any,
    ) -> State:
        """One pass over a data set without gradients, in this process and without a session. Blocks.

        For each batch `on_sample`, the forward pass, `on_forward`; before them `on_start` and
        `on_start_epoch`, after them `on_end_epoch` and `on_end`. The model is in evaluation mode meanwhile,
        and then each of its modules in the mode that it was in.

        Args:
            data: a data set of pairs (input, target), or a `DataLoader` over one.
            options: those of a `DataLoader`.
        """
        state = State(model=model, criterion=criterion, training=False)
        batches = data if isinstance(data, DataLoader) else DataLoader(data, batch_size, **options)
        before = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                self._call("on_start", state)
                self._call("on_start_epoch", state)
                for sample in batches:
                    self._forward(state, sample)
                    state.step += 1
                self._call("on_end_epoch", state)
                self._call("on_end", state)
        finally:
            for module, mode in before.items():  # parents first, since each sets the mode of its own modules
                module.train(mode)
        return state

    def _forward(self, state: State, sample: Any) -> torch.Tensor:
        state.sample = sample
        self._call("on_sample", state)
        inputs, targets = state.sample
        state.output = state.model(inputs)
        state.loss = state.criterion(state.output, targets)
        self._call("on_forward", state)
        return state.loss

    def _call(self, name: str, state: State) -> None:
        for function in self._hooks[name]:
            function(state)
