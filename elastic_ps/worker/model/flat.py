"""The flat memory of a model, and the copies between it and the model's devices.

All parameters of one dtype are laid one after the other into one flat tensor, in the order of the buckets,
so that a bucket is a slice of it. On the CPU the model's parameters become views of that memory, and a
pulled bucket is received straight into the model. A tensor on another device, in memory of several processes
(`share_memory`), or in another order (`channels_last`), stays where it is; pulled values are copied to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch

from elastic_ps.codec import as_bytes, as_tensor, dtype_of, overlaps
from elastic_ps.codec.devices import Staging
from elastic_ps.codec.lending import WORTHWHILE, Loans
from elastic_ps.codec.rows import Arrivals, Rows, put
from elastic_ps.core.partition import ITEM_SIZE, Bucket, Layout, Rule
from elastic_ps.errors import UsageError
from elastic_ps.transport.memory import Allocate, shared_if_possible
from elastic_ps.worker.model.checks import Registered, WriteDetector
from elastic_ps.worker.wire.local_world import LocalWorld


class Flat:
    """The flat memory of a model: `values` that are pulled and `contributions` that are pushed.

    Attributes:
        layout, tensors: as given.
        buckets_of: for each tensor, the indexes of its buckets.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        *,
        stepped_here: bool = False,
        world: LocalWorld | None = None,
        registered: Registered | None = None,
    ) -> None:
        """Allocate, copy the model's values in, and make the model use this memory where it can.

        Args:
            tensors: the model's tensors, in the layout's order.
            stepped_here: the script changes the model between two pulls, so that the tensors which change
                have memory of their own, beside the values that were pulled.
            registered: where the model has these tensors.
            world: the processes of this worker. If there are several, they share values and contributions.
                The values are those of process 0, and each has its own memory of what scripts change, such
                as buffers.
        """
        world = world or LocalWorld()
        self.layout, self.tensors, self._registered = layout, tensors, registered
        changing = {Rule.SUM} if world.alone and not stepped_here else {*Rule} - {Rule.CONSTANT}
        self._changing = changing if stepped_here else changing - {Rule.GRADIENT}
        self._own_values = world.leads
        sizes: dict[Key, int] = {}
        self._offsets: list[int] = []
        starts: dict[int, int] = {}
        self.buckets_of: list[list[int]] = [[] for _ in layout.tensors]
        for bucket in layout.buckets:
            key = _key(layout, bucket)
            place = sizes.get(key, 0)
            self._offsets.append(place)
            for piece in bucket.pieces:
                starts.setdefault(piece.tensor, place - piece.start)
                place += piece.length
                self.buckets_of[piece.tensor].append(bucket.index)
            sizes[key] = place
        pushed = {k: n * ITEM_SIZE[k[0]] for k, n in sizes.items() if k[1] is not Rule.CONSTANT}
        if world.alone:
            self._values = {k: torch.zeros(n, dtype=dtype_of(k[0]), device="cpu") for k, n in sizes.items()}
            parts = [shared_if_possible(list(pushed.values()))]
        else:
            whole = {k: n * ITEM_SIZE[k[0]] for k, n in sizes.items()}
            self._values = _tensors(world.allocate(list(whole.values())), whole)
            parts = [world.allocate(list(pushed.values())) for _ in range(world.size)]
        self._rank, self._pushed = world.rank, pushed
        self._sent: dict[int, torch.Tensor] = {}  # what summed tensors were when their changes were put
        self._written: set[int] = set()  # tensors whose contribution may be something else than zero
        self._places = [
            ((spec.dtype, spec.rule, spec.sparse), starts.get(index, 0), spec.elements)
            for index, spec in enumerate(layout.tensors)
        ]
        self._set_parts([_tensors(allocate, pushed) for allocate in parts])
        self._value_of = [self._slice(self._values, bucket) for bucket in layout.buckets]
        self._value_bytes = [as_bytes(values) for values in self._value_of]
        # The processes of a worker tell each other when a contribution is there, not when it will be.
        devices = {tensor.device for tensor in tensors} if world.alone else set()
        staged = [memory for key, memory in self._contributions.items() if not key[2]]
        self._staging = Staging(devices, [*self._values.values(), *staged])
        self._lends = world.alone and not any(map(self._is_away, tensors))
        self._loans, self._arrived = Loans(), Arrivals()
        self._rows: dict[int, Rows] = {}  # contributions of tables' buckets
        self._tensors_of = [[piece.tensor for piece in bucket.pieces] for bucket in layout.buckets]
        self._addresses, self._kinds = list[int](), [(tensor.device, tensor.dtype) for tensor in tensors]
        self._apart: list[int] = []  # tensors with memory of their own
        self._tied = {index for pair in overlaps(tensors) for index in pair}
        self._received: list[int] = []  # tensors whose memory is that of the values, which change
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                self._adopt(index, tensor)
        self._writes = WriteDetector(
            layout,
            [] if Rule.GRADIENT in self._changing else self._of_rule(Rule.GRADIENT),
            self._of_rule(Rule.CONSTANT),
            tensors,
            self._apart,
            self.value,
        )

    def _of_rule(self, rule: Rule) -> list[torch.Tensor]:
        return [flat for key, flat in self._values.items() if key[1] is rule and not key[2]]

    def _adopt(self, index: int, tensor: torch.Tensor) -> None:
        view = self.value(index)
        if self._own_values:
            view.copy_(tensor)
        changes = self.layout.tensors[index].rule in self._changing
        if changes or self._is_away(tensor) or index in self._tied or not _one_after_the_other(tensor):
            self._apart.append(index)
        elif tensor.numel():
            # The same memory, as a storage of its own: what saves a tensor saves all of its storage.
            memory = torch.frombuffer(as_bytes(view), dtype=view.dtype)
            strides = tensor.stride() if tensor.is_contiguous() else view.stride()
            tensor.data = memory.as_strided(tensor.shape, strides)
            if self.layout.tensors[index].rule is not Rule.CONSTANT:
                self._received.append(index)
        self._addresses.append(tensor.data_ptr())

    def _is_away(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu" or tensor.is_shared() or self._staging.handles(tensor)

    def _set_parts(self, parts: Sequence[dict[Key, torch.Tensor]]) -> None:
        """Use this memory for contributions, of each process of this worker."""
        specs, self._parts, self._contributions = self.layout.tensors, parts, parts[self._rank]
        changing = [i for i, spec in enumerate(specs) if spec.rule is not Rule.CONSTANT]
        self._contribution = {index: self._view(self._contributions, index) for index in changing}
        self._contribution_of = {b.index: self._slice(self._contributions, b) for b in self.layout.pushed}

    def value(self, index: int) -> torch.Tensor:
        """The pulled values of a tensor, in its shape."""
        return self._view(self._values, index)

    def _view(self, memory: dict[Key, torch.Tensor], index: int) -> torch.Tensor:
        key, start, elements = self._places[index]
        if not elements:
            return torch.empty(self.layout.tensors[index].shape, dtype=dtype_of(key[0]), device="cpu")
        return memory[key][start : start + elements].view(self.layout.tensors[index].shape)

    def writable_contribution(self, index: int) -> torch.Tensor:
        """The place where a tensor's gradient (or buffer) is put to be pushed, in its shape.

        Blocks until what was `put` there has arrived.
        """
        self._staging.arrived((index,))
        self._reclaim(index)
        self._written.add(index)
        for number in self.buckets_of[index]:
            if (rows := self._rows.get(number)) is not None:
                rows.fill(self._contribution_of[number].view(-1, rows.values.shape[1]))
                del self._rows[number]  # not before: a thread may be about to send either
        return self._contribution[index]

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient to where it is pushed from. A copy from a device with streams only begins.

        Of a tensor whose changes are summed, put what has changed since the pull, or since the last call: if
        several steps make a version, each has its own change.
        """
        if self.layout.tensors[index].rule is Rule.SUM:
            now = gradient.detach().to("cpu", copy=True)
            before = self._sent.get(index, self.value(index))
            torch.sub(now, before, out=self.writable_contribution(index))
            self._sent[index] = now
            return
        if gradient.is_sparse:
            rows = Rows.of(gradient)
            if self.layout.tensors[index].sparse:
                for number in self.buckets_of[index]:
                    bucket = self.layout.buckets[number]
                    (piece,), width = bucket.pieces, self.layout.width(bucket)
                    stop = piece.start + piece.length
                    self._rows[number] = rows.between(piece.start // width, stop // width)
                return
            gradient = rows.dense(len(gradient)).view(gradient.shape)
        self._reclaim(index)
        self._written.add(index)
        self._forget_rows(index)
        self._staging.down(index, self._contribution[index], gradient)

    def lend(self, index: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient that was `put` last, in the memory that it is pushed from.

        The parameter may have it in place of its own, whose memory is then free. The script may change it
        between two steps, since the next gradient is `put` over it.

        Returns None if that would not be the same for the script, or saves too little memory.
        """
        there = self._contribution[index]
        pays = self._lends and there.nbytes >= WORTHWHILE
        alike = pays and type(gradient) is torch.Tensor and gradient.layout is torch.strided
        if not (alike and gradient.is_contiguous() and gradient.dtype is there.dtype):
            return None
        # A changed one: backward has added to memory that was there before, which the script may know of.
        own = gradient._version or gradient.requires_grad or self.layout.tensors[index].sparse
        return None if own else self._loans.lend(index, there)

    def is_lent(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient lies in the memory that it is pushed from."""
        here = self._loans.in_use(index) and gradient.layout is torch.strided and gradient.is_contiguous()
        return here and gradient.data_ptr() == self._contribution[index].data_ptr()

    def _reclaim(self, index: int) -> None:
        """A contribution is about to be overwritten. If the script keeps a gradient there, leave it that.

        Contributions are in other memory then, and nothing is lent any more.
        """
        if self._loans.in_use(index):
            self._lends, self._loans = False, Loans()
            other = _tensors(shared_if_possible(list(self._pushed.values())), self._pushed)
            for key, memory in other.items():
                memory.copy_(self._contributions[key])
            self._set_parts([other])  # threads may be sending from either

    def give(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the values of a version that was made here, from each pair's second tensor to its first.

        The first ones may be on any device. Blocks until all copies are made.
        """
        self._sent.clear()
        self._staging.up(pairs)
        self._staging.settle()

    def clear_contribution(self, index: int) -> None:
        """Make a tensor's contribution zero, if anything was put there since it was."""
        self._forget_rows(index)
        if index in self._written:
            self.writable_contribution(index).zero_()
            self._written.discard(index)

    def _forget_rows(self, index: int) -> None:
        for number in self.buckets_of[index]:
            self._rows.pop(number, None)

    def rows_of(self, bucket: Bucket) -> Rows | None:
        """A bucket's contribution, if it has rows of a table."""
        return self._rows.get(bucket.index)

    def set_rows(self, bucket: Bucket, rows: Rows) -> None:
        """Let a bucket's contribution be these rows of a table."""
        self._rows[bucket.index] = rows

    def take_rows(self, bucket: Bucket, rows: Rows | None) -> None:
        """Write rows of a bucket that a version has changed. None: all of the bucket has been received."""
        if (width := self.layout.width(bucket)) and rows is not None:
            put(self._value_of[bucket.index].view(-1, width), *rows)
            rows = Rows(rows.numbers + bucket.pieces[0].start // width, rows.values)
        if width:
            self._arrived.note(bucket.pieces[0].tensor, None if rows is None else rows.numbers)

    def _slice(self, memory: dict[Key, torch.Tensor], bucket: Bucket) -> torch.Tensor:
        start = self._offsets[bucket.index]
        return memory[_key(self.layout, bucket)][start : start + bucket.elements]

    def value_of(self, bucket: Bucket) -> torch.Tensor:
        """A bucket's values, flat, of its dtype."""
        return self._value_of[bucket.index]

    def value_bytes(self, bucket: Bucket) -> memoryview:
        """A bucket's values, to receive into, or to send."""
        return self._value_bytes[bucket.index]

    def wait_for(self, bucket: Bucket) -> None:
        """Block until what was put into a bucket's contribution has arrived."""
        self._staging.arrived(self._tensors_of[bucket.index])

    def contribution_of(self, bucket: Bucket) -> torch.Tensor:
        """A bucket's contribution, flat, of its dtype. Blocks as `wait_for` does."""
        self.wait_for(bucket)
        return self._contribution_of[bucket.index]

    def is_here(self, bucket: Bucket) -> bool:
        """Whether `wait_for` would not block."""
        return self._staging.are_here(self._tensors_of[bucket.index])

    def contributions_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """Like `contribution_of`, of each process of this worker, in order."""
        return [self._slice(part, bucket) for part in self._parts]

    def written(self, bucket: Bucket) -> None:
        """Note that all of a bucket has a contribution."""
        self._written |= {piece.tensor for piece in bucket.pieces}

    def check(self, *, thorough: bool = False) -> None:
        """Take over what the script has assigned to buffers.

        Raises UsageError if it has changed tensors that only the job can change; `thorough`: looks at all.
        """
        self.check_memory()
        if (changed := self._writes.changed(thorough=thorough)) is None:
            return
        names = [self.layout.tensors[index].name for index in changed]
        which = (", ".join(names[:3]) + (", ..." if len(names) > 3 else "")) or "a parameter"
        specs = self.layout.tensors
        outside = [
            i for i in changed if specs[i].rule is not Rule.GRADIENT or not self.tensors[i].requires_grad
        ]
        if changed and len(outside) == len(changed):
            raise UsageError(
                f"the script has changed {which}, which the optimizer does not train. Checkpoints, and "
                "workers that join, would get the initial values. If it is part of the job, for example an "
                "average of the model, name it or its module in session.optimizer(..., averaged=[...]), or "
                "in broadcast=[...] if it cannot be averaged. If each worker has its own, name it in "
                "own=[...]"
            )
        raise UsageError(
            f"the script has changed {which} since the last optimizer.step(). Only the parameter server "
            "changes parameters, so the change would be lost. To make it the next version of the model in "
            "mode sync, call session.assign(model). Load values before session.optimizer(...). To keep them "
            "within limits, use the options clamp, max_norm and keep_zeros of a parameter group. If the "
            "optimizer does not train a tensor, name it in session.optimizer(..., averaged=[...])"
        )

    def check_given(self) -> None:
        """Raise UsageError if the script has changed parameters that it trains here since they were given."""
        self.check_memory()
        for index in self._apart:
            spec = self.layout.tensors[index]
            if spec.rule is Rule.GRADIENT and not torch.equal(self.tensors[index].cpu(), self.value(index)):
                raise UsageError(
                    f"the script has changed {spec.name} since session.optimizer(...), which has given the "
                    "model the values of the job. Load values before session.optimizer(...)"
                )

    def put_values(self) -> None:
        """Put the model's values, which the script has changed, where contributions are sent from.

        Raises:
            UsageError: the script has changed a tensor without optimizer, or values are not finite.
        """
        self.check_memory()
        for index, tensor in enumerate(self.tensors):
            spec = self.layout.tensors[index]
            if spec.rule is Rule.GRADIENT and not bool(torch.isfinite(tensor).all()):
                raise UsageError(f"session.assign: {spec.name} has values that are NaN or infinite")
        if (changed := self._writes.changed_constants()) is not None:
            names = ", ".join(self.layout.tensors[index].name for index in changed[:3]) or "a parameter"
            raise UsageError(
                f"session.assign: no optimizer trains {names}, so its changes would be lost. Pass it to the "
                "optimizer, or name it in session.optimizer(..., averaged=[...])"
            )
        with torch.no_grad():
            for index, tensor in enumerate(self.tensors):
                if self.layout.tensors[index].rule is not Rule.CONSTANT:
                    self.writable_contribution(index).copy_(tensor)
        self._writes.open()

    def expect(self) -> None:
        """Values are about to be pulled. Blocks until the device has those of the last pull."""
        self._staging.settle()
        self._writes.open()

    def check_memory(self) -> None:
        """Take over what the script has assigned to buffers.

        Raises UsageError if the model's tensors were replaced, or moved away from where they are pulled to.
        """
        if self._registered is not None:
            self._registered.settle()
        for index, (tensor, spec) in enumerate(zip(self.tensors, self.layout.tensors, strict=True)):
            if tensor.shape != spec.shape:
                raise UsageError(
                    f"{spec.name} had the shape {list(spec.shape)} in session.optimizer(...), and has "
                    f"{list(tensor.shape)} now. If the first forward sets its shape, run the model "
                    "once on a batch before that call"
                )
            if tensor.data_ptr() != self._addresses[index] and not self._has_moved(index, tensor):
                raise UsageError(
                    f"the memory of {spec.name} was replaced after session.optimizer(...). Move the model "
                    "(.to, .cuda, .half, .share_memory) and load values before that call. A tensor that the "
                    "script changes itself, such as those in averaged=[...], must be changed in place"
                )

    def _has_moved(self, index: int, tensor: torch.Tensor) -> bool:
        """Return True if an RNN's `flatten_parameters`, say, has moved it within its device."""
        free = index in self._apart and index not in self._tied
        changes = self.layout.tensors[index].rule in self._changing
        if not free or (tensor.device, tensor.dtype) != self._kinds[index]:
            return False
        if moved := changes or torch.equal(tensor.cpu(), self.value(index)):
            self._addresses[index] = tensor.data_ptr()
        return moved

    @torch.no_grad()
    def gather(self) -> None:
        """Copy parameters with memory of their own to the values. Blocks for the copies."""
        for index in self._apart:
            if self.layout.tensors[index].rule is Rule.GRADIENT:
                self.value(index).copy_(self.tensors[index])

    def publish(self, *, excluded: Set[int] = frozenset()) -> None:
        """Give the model the values that were pulled. Blocks for the copies within this host's memory.

        They are copied to tensors with memory of their own. The version counters of the others grow, so that
        a backward() through older values raises, as in torch. A device computes next on the new values.

        Args:
            excluded: buckets that were not pulled.
        """
        self._sent.clear()
        pulled = [index for index in self._apart if excluded.isdisjoint(self.buckets_of[index])]
        whole, rows = self._arrived.take()
        # Only process 0 knows which rows have arrived.
        copied = [i for i in pulled if i in whole or not (self._own_values and self.layout.tensors[i].sparse)]
        with torch.no_grad():
            self._staging.up((self.tensors[index], self.value(index)) for index in copied)
            for index in rows.keys() & set(pulled):
                tensor, numbers = self.tensors[index], rows[index]
                tensor[numbers.to(tensor.device)] = self.value(index)[numbers].to(tensor.device)
        if Rule.GRADIENT in self._changing:
            self._staging.settle()  # the script's own steps may write to the values, too
        for index in self._received:
            if excluded.isdisjoint(self.buckets_of[index]):
                torch.autograd.graph.increment_version(self.tensors[index])
        self._writes.close()


Key = tuple[str, Rule, bool]
"""The common properties of the tensors in one flat memory: dtype, rule, and whether they are tables."""


def _key(layout: Layout, bucket: Bucket) -> Key:
    return bucket.dtype, bucket.rule, layout.width(bucket) > 0


def _tensors(allocate: Allocate, sizes: Mapping[Key, int]) -> dict[Key, torch.Tensor]:
    """A flat tensor of so many bytes for each key."""
    return {key: as_tensor(allocate(nbytes), dtype_of(key[0])) for key, nbytes in sizes.items()}


def _one_after_the_other(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be laid out in its logical order in memory.

    True for one that was expanded, since elements that share memory cannot be trained. False for one that was
    permuted on purpose.
    """
    shared = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.is_contiguous() or shared
