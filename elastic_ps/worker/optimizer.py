"""The optimizer that a script uses. Its step is made on the parameter server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_ps.codec.optimizers import before_each_step
from elastic_ps.codec.several import Several, parameters_of, parts_of
from elastic_ps.codec.state import state_dict_of
from elastic_ps.core.working import Event, State
from elastic_ps.embedding.tables import Tables
from elastic_ps.errors import RefusalCode, Refused, UsageError
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.model.schedule import OTHER_GROUPS
from elastic_ps.worker.runtime.gradients import Gradients
from elastic_ps.worker.runtime.local_steps import LocalSteps
from elastic_ps.worker.runtime.runtime import Runtime
from elastic_ps.worker.strategies.strategy import Strategy

logger = logging.getLogger(__name__)

_SCALED = (
    "a GradScaler divides gradients in scaler.step(optimizer), but they had been sent before, during "
    "backward(). Use session.optimizer(..., overlap=False), which sends them in optimizer.step()"
)

_UNSCALED = "Train without a GradScaler, as with torch.autocast in bfloat16 or float32"
_SCALED_ROWS = f"a GradScaler does not unscale gradients of tables that grow. {_UNSCALED}"
_SCALED_APART = f"the GradScaler of each process of a worker would skip steps of its own. {_UNSCALED}"

_UNSCHEDULED = (
    "the script steps a scheduler itself, so it counts this worker's steps: of N workers each makes about "
    "1/N of them, and after --resume it begins anew. Call session.scheduler(scheduler, interval=...), and "
    "remove scheduler.step()"
)

_STATE = "the optimizer's state is on the parameter server: state_dict() fetches it; it cannot be changed"

_ASSIGNED_ROWS = (
    "session.assign does not take a model with tables that grow, because it assigns no rows. To go back to "
    "earlier values, start the job with `elastic-ps run JOB --resume DIR`"
)


class _Remote(dict[Any, Any]):
    """The state if it is on the parameter server. Uses raise UsageError; but Lightning may see no `items`."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(_STATE)

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __contains__ = _refuse
    get = keys = values = pop = popitem = clear = update = setdefault = _refuse


class _Wrapping(torch.optim.Optimizer):
    """Has the parameter groups of a torch optimizer, and its state if that is on this worker."""

    def __init__(self, wrapped: torch.optim.Optimizer, *, steps_here: bool) -> None:
        self._wrapped, self.steps_here = wrapped, steps_here
        # Optimizer.__init__ copies the groups; schedulers and scripts must see the wrapped one's.
        super().__init__(parameters_of(wrapped.param_groups), wrapped.defaults)
        self.param_groups = wrapped.param_groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's. Raises UsageError when it is used, if it is on the parameter server."""
        return self._wrapped.state if self.steps_here else _Remote()

    @state.setter
    def state(self, state: Any) -> None:
        if "param_groups" in vars(self):  # else in torch's constructor
            if not self.steps_here:
                raise UsageError(_STATE)
            self._wrapped.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Serve torch's constructor only. Raises UsageError afterwards, because the model cannot grow."""
        if len(self.param_groups) == len(self._wrapped.param_groups):
            raise UsageError("parameter groups cannot be added after session.optimizer(...); add them before")
        super().add_param_group(param_group)


class ElasticOptimizer(_Wrapping):
    """Takes the place of a torch optimizer, whose state is on the parameter server.

    In mode `local`, and with `strategy: all-reduce`, the torch optimizer itself steps, with its state here.

    `param_groups` are those of the wrapped optimizer. When a script or a scheduler of
    `torch.optim.lr_scheduler` changes a hyperparameter in them, the parameter server uses the new value from
    the next step on. Made by `Session.optimizer`. Not thread-safe: only the training thread may use it.

    If the session was given several optimizers, this stands for all, and `optimizers["critic"]` is one.
    `scheduled` says whether `session.scheduler` was given one, or the script was told to.
    """

    second_step = (  # what is said of it; an integration says it in the words of its library
        "a second step is made with the same batch, but each batch of session.loader(...) is for one step: "
        "{first}.step() or {second}.step(). Choose by {choose}. Or let all optimizers step at once, with "
        'the step() of what session.optimizer(...) returned. See "Two networks in turn" in docs/cookbook.md'
    )

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        flat: Flat,
        runtime: Runtime,
        *,
        check: bool = False,
        own: Sequence[torch.Tensor] = (),
        tables: Tables | None = None,
    ) -> None:
        super().__init__(wrapped, steps_here=runtime.spec.steps_on_workers)
        self._runtime, self._flat, self._tables = runtime, flat, tables
        self._stepping = self.scheduled = False
        parts = wrapped.parts if isinstance(wrapped, Several) else {}
        local = runtime.spec.consistency.mode == "local"
        in_hooks, lend = runtime.overlap.in_hooks, not self.steps_here
        self._gradients = Gradients(flat, runtime, overlap=in_hooks, check=check, lend=lend)
        self._local = LocalSteps(flat, runtime, self._gradients, self._make_step) if local else None
        self._parts = {name: OptimizerPart(self, name, part) for name, part in parts.items()}
        self._trained = {
            id(part): frozenset(id(p) for group in part.param_groups for p in group["params"])
            for part in parts.values()
        }
        if tables is not None:
            tables.begin(self.param_groups, self._gradients.made_rows)
            self._gradients.drop_rows = tables.clear
            runtime.send_rows = tables.send
        if not self.steps_here:  # else the wrapped one's step calls its hooks
            for name, part in parts.items():
                _call_hooks_of(part, self._parts[name])
            for part in parts_of(wrapped):
                _call_hooks_of(part, self)
        self._groups, self._thread = self._groups_now(), threading.get_ident()
        self._own = {id(tensor) for tensor in own}
        runtime.at_close.append(before_each_step(self._check_other))
        runtime.make_step = self._make_step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by `torch.amp.GradScaler.step`, which takes false for an optimizer that knows of no scale.

        Raises UsageError if gradients have been sent with its scale in them, the model has tables that grow,
        or this worker has several processes.
        """
        if self._tables is not None or not self._runtime.world.alone:
            raise UsageError(_SCALED_APART if self._tables is None else _SCALED_ROWS)
        if self._gradients.sent:
            raise UsageError(_SCALED)
        return False

    @property
    def owes_step(self) -> bool:
        """Whether backward() has run on records that no step was made with yet."""
        return bool(self._runtime.batches.computed)

    def __getitem__(self, name: str) -> OptimizerPart:
        """One of several optimizers. Raises UsageError: there is none with this name."""
        if name not in self._parts:
            known = ", ".join(map(repr, self._parts)) or "one optimizer without a name"
            raise UsageError(f"there is no optimizer {name!r}: session.optimizer(...) was given {known}")
        return self._parts[name]

    def _check_other(self, other: torch.optim.Optimizer) -> None:
        """Called before the step of any optimizer. Raises UsageError if it must not make one."""
        if self._stepping:
            return  # also the one within another, as SAM has it
        if any(other is wrapped for wrapped in (self._wrapped, *parts_of(self._wrapped))):
            raise UsageError(
                "step() was called on the torch optimizer that was passed to session.optimizer(...), so only "
                "this worker's model would change. Call it on the optimizer that session.optimizer(...) "
                "returns, as in optimizer = session.optimizer(optimizer, model)"
            )
        if other is self or isinstance(other, OptimizerPart) or threading.get_ident() != self._thread:
            return
        beside = {id(p) for group in other.param_groups for p in group["params"]} - self._own
        if self._runtime.batches.in_batch and beside:
            raise UsageError(
                f"a second optimizer ({type(other).__name__}) makes a step in the loop over the loader. It "
                "changes parameters on this worker only, so they would become different on each worker. A "
                "job's optimizers are those that session.optimizer(...) was given: pass it all of them, as "
                "in session.optimizer({'generator': ..., 'critic': ...}, model). If each worker is to train "
                "parameters of its own, name them in session.optimizer(..., own=[...])"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the gradients that are not sent yet, and wait for the next version of the model. Blocks.

        Raises:
            UsageError: the batch did not come from `session.loader`, a gradient was changed after it was
                sent, or the torch optimizer has other parameter groups than `session.optimizer` was given.
            InvalidModel: the script, or a scheduler, has set a momentum beside that of the codec.
            Refused, ConnectionLost: the parameter server did not accept the step.

        In mode `local` the wrapped optimizer takes a step; only an exchange blocks. The processes of a worker
        take the same step, with the mean of their gradients, so they wait for each other.

        With several optimizers, all of them take a step.

        Without any gradient no step is made, as in torch. A batch that gets no backward() is skipped.
        """
        return self.step_of(None, closure)

    def step_of(self, part: torch.optim.Optimizer | None, closure: Callable[[], Any] | None) -> Any:
        """Step the parameters of one of the wrapped optimizers alone; None: of all."""
        if [*map(id, self._groups_now())] != [*map(id, self._groups)]:
            raise UsageError(OTHER_GROUPS)
        if self._parts:
            self._require_batch()
        if not (self._runtime.steps or self.scheduled or self._local):
            steps = [each.step for each in (self, *self._parts.values(), *parts_of(self._wrapped))]
            self.scheduled = any(hasattr(step, "_wrapped_by_lr_sched") for step in steps)  # marked by torch
            if self.scheduled:
                logger.warning(_UNSCHEDULED)
        if self._local is not None and not self._runtime.batches.lost:
            return self._local.step(closure, part)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._runtime.batches.lost:
            self._runtime.batches.mixes_lost = False
            self._gradients.drop_rows()
            logger.info("no step is made with this batch: others get its records, or training was stopped")
            return loss
        if self._runtime.has_no_step:
            return loss
        self._runtime.backward_ended()
        self._flat.check()
        self._gradients.take_rest(None if part is None else self._trained[id(part)])
        self._gradients.reset()
        if self._tables is not None:
            self._tables.prepare(self.param_groups)
        counts = False
        try:
            counts = self._runtime.finish_step()
        finally:
            if not counts:  # threads may still send what it has computed
                self._gradients.own()
        if self._tables is not None:
            self._tables.ended(counts, self._runtime.version)
        for each in parts_of(self._wrapped):  # for a scheduler that was made before `session.optimizer`
            vars(each)["_opt_called"] = True
        return loss

    def _groups_now(self) -> list[object]:
        """The parameter groups of the script's and the wrapped optimizers, each with its parameters."""
        optimizers = (self, *self._parts.values(), *parts_of(self._wrapped))
        return [
            one for each in optimizers for group in each.param_groups for one in (group, *group["params"])
        ]

    def _require_batch(self) -> None:
        """Raise UsageError if one of several optimizers has made a step with this batch."""
        batches = self._runtime.batches
        if batches.in_batch and not batches.may_step:
            first, second = ([f"optimizers[{name!r}]" for name in self._parts] * 2)[:2]
            choose = "session.version, which is the same on all workers"
            if self._local is not None:  # the version changes only when values are exchanged
                choose = "the number of the batch, as enumerate counts it"
            raise UsageError(self.second_step.format(first=first, second=second, choose=choose))

    def _make_step(
        self, closure: Callable[[], Any] | None = None, part: torch.optim.Optimizer | None = None
    ) -> Any:
        """The wrapped optimizer, or the `part` of it, makes a step on this worker."""
        stepping = self._wrapped if part is None else part
        self._stepping = True
        try:
            return stepping.step() if closure is None else stepping.step(closure)
        finally:
            self._stepping = False

    def check_scheduler(self, scheduler: LRScheduler) -> None:
        """Note that the session was given a scheduler. Raise UsageError if it is one of another optimizer."""
        scheduled = getattr(scheduler, "optimizer", self).param_groups
        if not any(group is mine for group in scheduled for mine in self.param_groups):
            raise UsageError(
                f"the {type(scheduler).__name__} belongs to another optimizer, so the job would not use it. "
                "Create it with the optimizer that session.optimizer(...) returned"
            )
        self.scheduled = True

    def assign(self) -> None:
        """See `Session.assign`. If another worker's were assigned meanwhile, this worker gets those. Blocks.

        Raises:
            UsageError: the values cannot be assigned, or not here.
            Refused, ConnectionLost: the parameter server did not take them.
        """
        runtime, strategy = self._runtime, self._runtime.strategy
        if self._tables is not None:
            raise UsageError(_ASSIGNED_ROWS)
        if strategy.cannot_assign:
            raise UsageError(strategy.cannot_assign)
        if strategy.under_way is not None or runtime.batches.computed:
            raise UsageError(
                "session.assign was called in the middle of a step. Call it after optimizer.step()"
            )
        if not runtime.spec.consistency.may_assign:
            raise UsageError(
                "session.assign needs consistency.mode sync, without backupWorkers, globalBatchSize, "
                "maxStalenessP99 or deterministic"
            )
        self._gradients.own()
        self._flat.put_values()
        base = strategy.version
        takes_part: bool | None = None
        while takes_part is None:
            base = min(base, strategy.version)
            with runtime.rejoining():
                takes_part = _assign_since(runtime, strategy, base)
        if strategy.version != base + 1:
            runtime.schedule.take_over(runtime.in_force)
        if runtime.records.computing and not takes_part:
            runtime.drop_all()

    def skip(self) -> None:
        """Make no step with the batches in hand, for example because the loss is not finite.

        Their gradients are dropped, and nobody trains their records: the job's report counts them as skipped.
        A batch without backward(), or whose gradients `zero_grad` drops before `step`, is skipped anyway.
        """
        self._runtime.skip()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like torch's. The records of gradients that it drops before a step count as skipped."""
        self.zero_grad_of(self._wrapped, set_to_none)

    def zero_grad_of(self, wrapped: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Like `zero_grad`, of the wrapped optimizer, or of one of several."""
        self._gradients.drop_rows()  # also of gradients that a step has failed with
        if not self._runtime.working.in_step:  # it makes no step with what it has computed
            self._runtime.log_skipped(self._runtime.batches.reopen())
        if not (set_to_none and type(wrapped).zero_grad is torch.optim.Optimizer.zero_grad):
            wrapped.zero_grad(set_to_none)
            self._gradients.note_by_hand()
            return
        # As torch does; but its call takes as long as the hooks of a small step.
        for group in wrapped.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def no_sync(self) -> AbstractContextManager[None]:
        """While this is open, backward() adds up gradients on the worker and sends none, as `no_sync` of DDP.

        Divide the loss by the number of backward() calls, as with torch's own optimizers.
        """
        return self._gradients.accumulating()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, fetched from the parameter server, in torch's own format. Blocks.

        `load_state_dict` of the same class of torch optimizer reads it. In mode `local`, and with `strategy:
        all-reduce`, it is this worker's. Of several optimizers, the state of each by its name.
        """
        if self.steps_here:
            state = self._wrapped.state_dict()
        elif self._runtime.world.leads:
            client, state = self._runtime.client, {}
            while not state:
                with self._runtime.rejoining():
                    entries = (
                        each for shard in range(client.shards) for each in client.optimizer_state(shard)
                    )
                    state = state_dict_of(entries, self._flat.layout, self._flat.tensors, self._wrapped)
        else:
            raise UsageError(
                "optimizer.state_dict() fetches the state from the parameter server, and works only in "
                "process 0 of a worker. Call it where session.is_chief is true, or where LOCAL_RANK is 0"
            )
        return self._wrapped.split(state) if isinstance(self._wrapped, Several) else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UsageError, because a worker cannot load the state. The message says what to do.

        In mode `local` the state is this worker's own, and is loaded.
        """
        if self._local is not None:
            wrapped = self._wrapped
            wrapped.load_state_dict(wrapped.join(state_dict) if isinstance(wrapped, Several) else state_dict)
            self.param_groups = self._wrapped.param_groups
            self._groups = self._groups_now()
            return
        raise UsageError(
            "a worker cannot load the optimizer's state, because the state is on the parameter server. To "
            "continue from a checkpoint, start the job with `elastic-ps run JOB --resume DIR`. If accelerate "
            "or Hugging Face's Trainer called this, use elastic_ps.integrations: docs/guides/huggingface.md"
        )


class OptimizerPart(_Wrapping):
    """One of several optimizers that train a model together: `optimizers["critic"]`.

    It is used as torch's own. In its step the gradients of other optimizers' parameters count as absent.
    """

    def __init__(self, whole: ElasticOptimizer, name: str, wrapped: torch.optim.Optimizer) -> None:
        self._whole, self._name = whole, name
        super().__init__(wrapped, steps_here=whole.steps_here)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._whole._step_supports_amp_scaling  # noqa: SLF001 (torch's name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Like `ElasticOptimizer.step`, which raises the same; other optimizers' parameters stay. Blocks."""
        return self._whole.step_of(self._wrapped, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like `ElasticOptimizer.zero_grad`, of this optimizer's parameters."""
        self._whole.zero_grad_of(self._wrapped, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """This optimizer's part of `ElasticOptimizer.state_dict`, in torch's own format. Blocks."""
        state: dict[str, Any] = self._whole.state_dict()[self._name]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like `ElasticOptimizer.load_state_dict`, which raises the same; others keep theirs."""
        self._whole.load_state_dict({**self._whole.state_dict(), self._name: state_dict})


def _call_hooks_of(other: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Have each step of `optimizer` call the hooks that the other one has then."""

    def calling(hooks: Mapping[int, Callable[..., Any]]) -> Callable[..., None]:
        def call(*given: Any) -> None:
            for hook in list(hooks.values()):
                hook(*given)

        return call

    optimizer.register_step_pre_hook(calling(other._optimizer_step_pre_hooks))  # noqa: SLF001 (no other way)
    optimizer.register_step_post_hook(calling(other._optimizer_step_post_hooks))  # noqa: SLF001


def _assign_since(runtime: Runtime, strategy: Strategy, base: int) -> bool:
    """Assign what the contributions hold, until some values were assigned since `base`, and pull them.

    Returns whether this worker takes part in the open round.
    """
    while not (reply := runtime.client.assign(base)).done:
        if reply.version > base and runtime.working.state is not State.VOID:
            logger.warning(
                "session.assign replaces version %d with values made from version %d: steps between are lost",
                reply.version,
                base,
            )
        runtime.working.note(Event.GIVE_UP)  # until it is done
        try:
            strategy.assign(runtime.new_step(reply.version), reply.attempt)
        except Refused as refusal:
            if refusal.code not in (RefusalCode.STALE_ATTEMPT, RefusalCode.LATE):
                raise
    runtime.steps += 1  # it is made, or known to be void
    runtime.working.note(Event.TELL)
    strategy.fetch(reply.version, contributor=reply.takes_part)
    return reply.takes_part
