"""Takes gradients as backward makes them (`Tensor.register_post_accumulate_grad_hook`), last layer first.

They are handed to the runtime bucket by bucket, so that the network works while backward does. If a script
breaks a rule, an error says what to do.

If parameters are on several devices, autograd runs their hooks on several threads at the same time. A lock
guards what the hooks share; gradients are copied outside of it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from elastic_ps.codec.rows import Rows
from elastic_ps.core.partition import Bucket, Rule
from elastic_ps.errors import UsageError
from elastic_ps.worker.model.flat import Flat
from elastic_ps.worker.runtime.runtime import Runtime

_CHANGED_LATE = (
    "the gradient of {name} was changed or replaced between backward() and optimizer.step(), after it had "
    "been sent. To clip the gradient of the whole batch, as clip_grad_norm_ does in one process, use "
    "session.optimizer(..., max_grad_norm=...) in its place. For other changes, such as GradScaler's, use "
    "session.optimizer(..., overlap=False): it sends each worker's own gradients, as the script has changed "
    "them, in optimizer.step()"
)
_TWICE = (
    "backward() ran a second time before optimizer.step(), but the first gradients have been sent already. "
    "To accumulate gradients, run every backward() but the last in `with optimizer.no_sync():`, or use "
    "session.optimizer(..., overlap=False). To leave out the step after a backward(), call optimizer.skip(). "
    "If the script calls backward() once, it probably uses twice a block that is checkpointed with "
    "use_reentrant=True, which calls backward() for each use: pass use_reentrant=False"
)

_ROWS = -1
"""Stands for the rows of tables that grow among the numbers of parameters."""


class Gradients:
    """The gradients of one step after another.

    The hooks may run on several threads. The rest belongs to the training thread, which waits in backward.

    Args:
        overlap: take gradients while backward runs; else all of them in `take_rest`.
        check: compare each gradient with what was sent, which also notices changes through `.data`.
        lend: the strategy leaves contributions as they are. So after a hook has taken a gradient, the
            parameter has the contribution as its gradient, and there are no two copies of it.

    Attributes:
        drop_rows: drops the gradients of rows that no step was made with.
    """

    def __init__(
        self, flat: Flat, runtime: Runtime, *, overlap: bool, check: bool = False, lend: bool = False
    ) -> None:
        self._flat, self._runtime, self._overlap, self._check = flat, runtime, overlap, check
        self._lend, self._synchronise = lend and not check, True
        self._trainable = [i for i, spec in enumerate(flat.layout.tensors) if spec.rule is Rule.GRADIENT]
        rules = enumerate(spec.rule for spec in flat.layout.tensors)
        self._buffers = [i for i, rule in rules if rule not in (Rule.GRADIENT, Rule.CONSTANT)]
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._taken: dict[int, tuple[torch.Tensor, int]] = {}  # the gradient, and how often it was changed
        self._waiting: dict[int, int] = {}
        self._hooked = False  # backward() has made gradients
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # see `note_by_hand`
        self._ran: set[int] = set()  # the parameters that the present backward() has reached
        self.drop_rows: Callable[[], object] = lambda: None
        self.reset()
        for index in self._trainable:
            self._hook(index)
        runtime.gradients = self

    def reset(self) -> None:
        """The next gradient is the first of a step."""
        self._taken.clear()
        self._ran.clear()
        self._latest: int | None = None  # the last parameter that a backward() has reached
        self._waiting = {b.index: len(b.pieces) for b in self._flat.layout.pushed}
        self.note_by_hand()

    def void(self) -> None:
        """Drop all gradients: their records were skipped, or handed to others."""
        self.reset()
        self.drop_rows()
        for index in self._trainable:
            self._flat.tensors[index].grad = None

    def finite(self) -> bool:
        """Whether there is no infinity or NaN among them. Waits for the device."""
        values = (each._values() if each.is_sparse else each for _, each in self._present_ones())  # noqa: SLF001
        return all(bool(torch.isfinite(each).all()) for each in values)

    @property
    def sent(self) -> bool:
        """Whether gradients of the next step have been taken, so that a change comes too late."""
        return bool(self._taken)

    @property
    def may_make_a_step(self) -> bool:
        """Whether a parameter has a gradient, which backward() has made or the script has assigned.

        Also if the model has buffers and backward() has never run: steps may be about buffers alone.
        """
        return any(True for _ in self._present_ones()) or (bool(self._buffers) and not self._hooked)

    def note_by_hand(self) -> bool:
        """Note the gradients that the script has set without any backward(). Returns whether some are new."""
        before, present = self._noted, () if self._hooked else self._present_ones()
        self._noted = {index: (weakref.ref(each), each._version) for index, each in present}
        both = ((now, before.get(index)) for index, now in self._noted.items())
        return any(old is None or now[0]() is not old[0]() or now[1] != old[1] for now, old in both)

    def _present_ones(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index in self._trainable:
            if (gradient := self._flat.tensors[index].grad) is not None:
                yield index, gradient

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients of a backward() in here are not taken; they add up in the parameters."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def _hook(self, index: int) -> None:
        def computed(parameter: torch.Tensor) -> None:
            sends = self._account(index) and self._overlap and self._synchronise
            if sends and self._runtime.batches.computed:
                self._take(index, parameter, lend=self._lend)

        parameter = self._flat.tensors[index]
        if not parameter.requires_grad:  # if it is unfrozen later, `take_rest` takes its gradient
            return
        # A parameter and its hook hold each other, where Python's garbage collector does not see it.
        self._runtime.at_close.append(parameter.register_post_accumulate_grad_hook(computed).remove)
        if self._runtime.slices.processes > 1:
            self._runtime.at_close.append(parameter.register_hook(partial(self._counted, index)).remove)

    def _counted(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Make a gradient zero if this process has no record of the batch, and computes on process 0's.

        Its other batches of the same step may have weight.
        """
        batches = self._runtime.batches
        with self._lock:
            records = batches.records_of_backward(begins=batches.fresh or index in self._ran)
        none = not batches.lost and self._runtime.slices.has_none(records)
        return torch.zeros_like(gradient) if none else None

    def made_rows(self) -> bool:
        """Note that backward() has made a gradient of rows. Returns False if it does not count."""
        if not self._account(_ROWS):
            return False
        return not self._runtime.slices.has_none(self._runtime.batches.records_of_backward(begins=False))

    def _account(self, index: int) -> bool:
        """Note that backward() has made a gradient. Returns False if it does not count."""
        batches = self._runtime.batches
        # Lost: the script had loaded it before its step, which was not made. A forked child shares the
        # memory that gradients are sent from.
        if batches.lost or os.getpid() != self._process:
            return False
        with self._lock:
            self._hooked = True
            if first := self._was_cleared(index):
                if batches.fresh and batches.computed:
                    batches.skip_computed()
                self.drop_rows()
            # Another backward() than for the last gradient; one may reach rows several times.
            if first or batches.fresh or (index in self._ran and index != _ROWS):
                self._ran.clear()
                batches.compute()
            self._ran.add(index)
            self._latest = self._latest if index == _ROWS else index
        return True

    def _was_cleared(self, index: int) -> bool:
        """Whether the gradients that the last backward() made of parameters were set to None since."""
        last = self._latest
        kept = last is None or (last != index and self._flat.tensors[last].grad is not None)
        if kept or any(other != index for other, _ in self._present_ones()):
            return False
        if self._ran - {index, _ROWS}:
            return True
        gradient = self._flat.tensors[index].grad if index in self._ran and index != _ROWS else None
        # Adding to a gradient changes it in place, unless it has a graph.
        return gradient is not None and not gradient._version and not gradient.requires_grad

    def own(self) -> None:
        """Let the script have all gradients in memory of their own: that of contributions is in use."""
        for index, gradient in self._present_ones():
            if self._flat.is_lent(index, gradient):
                self._flat.tensors[index].grad = gradient.clone()

    def _take(self, index: int, parameter: torch.Tensor, *, lend: bool = False) -> None:
        """Copy a gradient to where it is sent from; hand over the buckets that are full by it."""
        gradient = parameter.grad
        assert gradient is not None
        with self._lock:
            if index in self._taken:
                raise UsageError(_TWICE)
            if not self._taken:
                self._runtime.begin_step()
            self._taken[index] = gradient, gradient._version
        if not self._flat.is_lent(index, gradient):
            # Within backward, gradients have no history, unless the script asks for it (`create_graph`).
            self._flat.put(index, gradient.detach() if torch.is_grad_enabled() else gradient)
            if lend and (lent := self._flat.lend(index, gradient)) is not None:
                kept = weakref.ref(gradient)
                parameter.grad = lent
                self._taken[index] = lent, lent._version
                del gradient
                if (own := kept()) is not None:  # the script has it: it may read or change it there
                    parameter.grad = own
                    self._taken[index] = own, own._version
        self._fill(index)

    def _fill(self, index: int) -> None:
        """Count a tensor whose contribution was put; hand over the buckets that are complete by it."""
        with self._lock:
            for number in self._flat.buckets_of[index]:
                self._waiting[number] -= 1
                if not self._waiting[number]:
                    bucket = self._flat.layout.buckets[number]
                    self._runtime.ready(bucket, self._present(bucket))

    def _present(self, bucket: Bucket) -> Sequence[bool]:
        return [piece.tensor in self._taken for piece in bucket.pieces if bucket.rule is Rule.GRADIENT]

    def _is_changed(self, index: int, parameter: torch.Tensor) -> bool:
        """Whether the gradient is not what it was when it was taken.

        Changes through `.data` are seen only if values are compared.
        """
        gradient, version = self._taken[index]
        if parameter.grad is not gradient or gradient._version != version:
            return True
        if not self._check:
            return False
        if gradient.is_sparse:
            gradient = Rows.of(gradient).dense(len(gradient)).view(gradient.shape)
        sent = self._flat.writable_contribution(index)
        return not torch.allclose(sent, gradient.to(sent.device), rtol=0, atol=0, equal_nan=True)

    def take_rest(self, only: Collection[int] | None = None) -> None:
        """In `optimizer.step`, take the gradients that no hook has taken, and the buffers.

        Args:
            only: the ids of the parameters that the step is about; nothing was sent of them before. The
                gradients of others count as absent. None: all parameters.

        Raises:
            UsageError: the batch did not come from `session.loader`, or gradients were changed late.
        """
        for index in self._trainable:
            parameter = self._flat.tensors[index]
            if index in self._taken:
                if self._is_changed(index, parameter):
                    raise UsageError(_CHANGED_LATE.format(name=self._flat.layout.tensors[index].name))
            elif parameter.grad is not None and (only is None or id(parameter) in only):
                self._take(index, parameter)
        if not self._taken:
            self._runtime.begin_step()
        with torch.no_grad():
            for index in self._trainable:
                if index not in self._taken:
                    self._flat.clear_contribution(index)
                    self._fill(index)
            for index in self._buffers:
                self._flat.put(index, self._flat.tensors[index])
                self._fill(index)
