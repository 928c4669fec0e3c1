"""The optimizer that a script uses: its step happens on the parameter server.

Gradients are taken as backward makes them (`Tensor.register_post_accumulate_grad_hook`), last layer first,
and handed to the send thread bucket by bucket, so that the network works while backward does. Rules that
a script has to keep are checked, and a message says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_ps.codec import dtype_of
from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.core.settings import Settings, plain
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.worker.model import Described, Flat

if TYPE_CHECKING:
    from elastic_ps.worker.session import Session

Interval: TypeAlias = Literal["step", "epoch"]
"""When a script steps a scheduler: after every optimizer step, or after every epoch."""

_CHANGED_LATE = (
    "the gradient of {name} was changed between backward() and optimizer.step(), when it had been sent "
    "already (clip_grad_norm_ and GradScaler do that). Use session.optimizer(..., overlap=False), which "
    "sends the gradients in optimizer.step()"
)
_TWICE = (
    "backward() ran a second time before optimizer.step(), and the first gradients have been sent already. "
    "To accumulate gradients, run all but the last backward() in `with optimizer.no_sync():`, "
    "or use session.optimizer(..., overlap=False)"
)


class ElasticOptimizer(torch.optim.Optimizer):
    """Stands for a torch optimizer whose state lives on the parameter server.

    `param_groups` are the wrapped optimizer's: changing a hyperparameter (by hand or by any scheduler of
    `torch.optim.lr_scheduler`) takes effect on the parameter server with the next step. Made by
    `Session.optimizer`. Not thread-safe: it belongs to the thread that trains.
    """

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        flat: Flat,
        session: Session,
        *,
        overlap: bool,
    ) -> None:
        # Optimizer.__init__ would copy the groups; schedulers and scripts must see the wrapped one's.
        self.defaults = wrapped.defaults
        self._wrapped = wrapped
        self._session = session
        self._flat = flat
        self._overlap = overlap
        self._synchronise = True
        self._trainable = [i for i, spec in enumerate(flat.layout.tensors) if spec.rule is Rule.GRADIENT]
        self._buffers = [
            i for i, spec in enumerate(flat.layout.tensors) if spec.rule in (Rule.MEAN, Rule.MAXIMUM)
        ]
        self._taken: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._schedulers: list[LRScheduler] = []
        self._intervals: list[Interval | None] = []
        self._initial: list[dict[str, Any]] = []
        self._scheduler_steps: tuple[int, ...] = ()
        self._reset()
        self._hooks = [self._hook(index) for index in self._trainable]
        super().__init__(wrapped.param_groups, wrapped.defaults)
        self.param_groups = wrapped.param_groups

    def _hook(self, index: int) -> Any:
        def taken(parameter: torch.Tensor) -> None:
            self._session._batches.computed()
            if self._overlap and self._synchronise:
                self._take(index, parameter)

        parameter = self._flat.tensors[index]
        if not parameter.requires_grad:  # if it is unfrozen later, `step` takes its gradient
            return None
        return parameter.register_post_accumulate_grad_hook(taken)

    def _reset(self) -> None:
        self._taken.clear()
        self._waiting = {b.index: len(b.pieces) for b in self._flat.layout.pushed}

    # --- gradients

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Copy a gradient to where it is sent from; hand over the buckets that are full by it."""
        if index in self._taken:
            raise UsageError(_TWICE)
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            name = self._flat.layout.tensors[index].name
            raise InvalidModel(f"the gradient of {name} is sparse; use nn.Embedding(..., sparse=False)")
        if not self._taken:
            self._session._begin_step()
        with torch.no_grad():
            self._flat.contribution(index).copy_(gradient)
        self._taken[index] = gradient._version
        self._fill(index)

    def _fill(self, index: int) -> None:
        for number in self._flat.buckets_of[index]:
            self._waiting[number] -= 1
            if not self._waiting[number]:
                bucket = self._flat.layout.buckets[number]
                self._session._exchange_ready(bucket, self._present(bucket))

    def _present(self, bucket: Bucket) -> Sequence[bool]:
        if bucket.rule is not Rule.GRADIENT:
            return ()
        return [piece.tensor in self._taken for piece in bucket.pieces]

    def _take_rest(self) -> None:
        """In `step`: what no hook has taken, absent gradients, and the buffers."""
        for index in self._trainable:
            parameter = self._flat.tensors[index]
            if index in self._taken:
                if parameter.grad is None or parameter.grad._version != self._taken[index]:
                    raise UsageError(_CHANGED_LATE.format(name=self._flat.layout.tensors[index].name))
            elif parameter.grad is not None:
                self._take(index, parameter)
        if not self._taken:
            self._session._begin_step()
        with torch.no_grad():
            for index in self._trainable:
                if index not in self._taken:
                    self._flat.contribution(index).zero_()
                    self._fill(index)
            for index in self._buffers:
                self._flat.contribution(index).copy_(self._flat.tensors[index])
                self._fill(index)

    # --- torch.optim.Optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send what is left of the gradients and wait for the next version of the model. Blocks.

        Raises:
            UsageError: the batch did not come from `session.loader`, or gradients were changed late.
            Refused, ConnectionLost: the parameter server did not take the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._session._before_step()
        self._flat.check_memory()
        self._take_rest()
        settings = self.settings()
        self._reset()
        self._session._finish_step(settings.to_json())
        self._scheduler_steps = self._positions()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self._wrapped.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of a backward() in here stay on the worker and are added up; DDP's convention.

        Divide the loss by the number of backward() calls, as one does with torch's own optimizers.
        """
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, fetched from the parameter server, in torch's own format. Blocks.

        `load_state_dict` of the same class of torch optimizer reads it.
        """
        numbers = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        state: dict[int, dict[str, Any]] = {}
        for reply, body in self._session._optimizer_state():
            spec = self._flat.layout.tensors[reply.tensor]
            number = numbers[id(self._flat.tensors[reply.tensor])]
            value = torch.frombuffer(bytearray(body), dtype=dtype_of(reply.dtype))
            entries = state.setdefault(number, {})
            if reply.scalar:
                entries[reply.key] = value.reshape(())
            else:
                whole = entries.setdefault(reply.key, torch.zeros(spec.shape, dtype=value.dtype))
                whole.view(-1)[reply.start : reply.start + value.numel()] = value
        groups, counter = [], iter(range(len(numbers)))
        for group in self.param_groups:
            rest = {key: value for key, value in group.items() if key != "params"}
            groups.append({**rest, "params": [next(counter) for _ in group["params"]]})
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002
        """Not possible: raises UsageError that says what to do."""
        raise UsageError(
            "the optimizer's state lives on the parameter server and cannot be loaded by a worker. "
            "To go on from a checkpoint, start the job with `elastic-ps run JOB --resume DIR`"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while torch builds the object; the model cannot grow afterwards. Raises UsageError."""
        if hasattr(self, "_hooks") and len(self.param_groups) < len(self._wrapped.param_groups):
            super().add_param_group(param_group)
            return
        raise UsageError("parameter groups cannot be added after session.optimizer(...); add them before")

    # --- settings

    @property
    def stepped(self) -> bool:
        """Whether the script has stepped a scheduler since its last optimizer step."""
        return self._positions() != self._scheduler_steps

    def settings(self) -> Settings:
        """Hyperparameters and scheduler states as they are now."""
        return Settings(
            Described.settings(self._wrapped).groups,
            tuple(_plain_state(scheduler) for scheduler in self._schedulers),
            stepped=self.stepped,
        )

    def adopt(self, settings: Settings, *, catch_up: bool | None = None) -> None:
        """Take over the settings of the longest-serving worker, those of the last step.

        Args:
            catch_up: None: the step was this worker's too, so the script is about to step its schedulers if
                it does so after every step. Else that has been done: make up for it, where the script has
                said how often it steps a scheduler, or else if this is true. (Not for ReduceLROnPlateau:
                what it would be stepped with is not known here.)
        """
        for group, values in zip(self.param_groups, settings.groups, strict=True):
            group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in values.items()})
        if not settings.schedulers:  # of version 0, before the first step
            for scheduler, initial in zip(self._schedulers, self._initial, strict=True):
                scheduler.load_state_dict(dict(initial))
            return
        for scheduler, state in zip(self._schedulers, settings.schedulers, strict=False):
            scheduler.load_state_dict(dict(state))
        self._scheduler_steps = self._positions()
        if catch_up is not None:
            self.step_schedulers(otherwise=catch_up)

    def step_schedulers(self, *, otherwise: bool) -> None:
        """Step those that the script steps after every step, or has not told of if `otherwise`."""
        self._opt_called = True  # for torch's warning: the optimizer has made a step, on the parameter server
        for scheduler, interval in zip(self._schedulers, self._intervals, strict=True):
            every_step = interval == "step" or (interval is None and otherwise)
            if every_step and not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    @property
    def per_epoch(self) -> bool:
        """Whether there are schedulers, and the script steps all of them after epochs."""
        return bool(self._intervals) and set(self._intervals) == {"epoch"}

    @property
    def guesses(self) -> bool:
        """Whether the script has not told of all schedulers how often it steps them."""
        return None in self._intervals

    def _positions(self) -> tuple[int, ...]:
        return tuple(scheduler.last_epoch for scheduler in self._schedulers)

    def add_scheduler(self, scheduler: LRScheduler, interval: Interval | None) -> None:
        """Keep a scheduler's state on the parameter server."""
        self._schedulers.append(scheduler)
        self._intervals.append(interval)
        self._initial.append(_plain_state(scheduler))
        self._scheduler_steps = self._positions()


def _plain_state(scheduler: LRScheduler) -> dict[str, Any]:
    """The part of a scheduler's state that changes and can be sent."""
    state = {}
    for key, value in scheduler.state_dict().items():
        try:
            state[key] = plain(value, where=key)
        except InvalidModel:
            continue
    return state
