"""The tensors that scripts keep on a parameter server (`session.server`): one shard's slices of them.

They have nothing to do with the model, its versions and its terms: what a worker pushes is applied when it
comes, and they live as long as this process does. That a tensor is lost with the process is never hidden:
each call names the `life` of the process and the `birth` of the tensor that it means. Both have changed when
the values are not those that the caller knows of.

Which worker's values a tensor begins with is decided by its *home*, the shard of its first slice. See
docs/protocol.md.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from elastic_ps.core.names import LONGEST_NAME, is_name
from elastic_ps.core.partition import ITEM_SIZE
from elastic_ps.errors import RefusalCode, Refused
from elastic_ps.tensors.limits import USUAL, TensorLimits
from elastic_ps.tensors.spread import PushRule, Slice, size_of, spread

MOST_DIMENSIONS = 64


class Sender(NamedTuple):
    """A worker's process. `instance` names it for all time."""

    worker: int
    instance: str


class Birth(NamedTuple):
    """Which of the tensors of a name, one after the other, one is. No two have the same.

    Attributes:
        number: from 1; 0 for none. Later ones have higher numbers, unless the home was started again.
        origin: the life of the home that has given the number.
    """

    number: int
    origin: int


UNBORN = Birth(0, 0)


class Place(NamedTuple):
    """Which tensor a call means: the one of this name and `birth`, in this `life` of the process."""

    name: str
    birth: Birth
    life: int


class Declared(NamedTuple):
    """What a shard says of a tensor.

    Attributes:
        birth: of the tensor of this name that is there; UNBORN: none is.
        life: of this process.
        bring: the caller is to send its values. For a query: some of the shard's slices are not there.
        pending: another worker is bringing it; ask again.
    """

    birth: Birth
    life: int
    bring: bool = False
    pending: bool = False


@dataclass
class _Kept:
    """A tensor, or what of it is there.

    Attributes:
        slices: those of this shard, by their first element.
        values: of those that have arrived.
        holder: who brings it, as the tensor's home knows.
        until: time at which a tensor that is not complete is given up.
        last: of each process that has pushed, the number of its last push and the slice that was part of it.
    """

    shape: tuple[int, ...]
    dtype: str
    birth: Birth
    nbytes: int
    slices: Mapping[int, Slice]
    holder: Sender | None
    until: float
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    last: OrderedDict[Sender, tuple[int, int]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def complete(self) -> bool:
        return len(self.values) == len(self.slices)


class Tensors:
    """A shard's slices. Thread-safe; nothing blocks for longer than an addition takes.

    Args:
        shard, shards: which of how many this is.
        bucket_bytes: see `spread`.
        most_bytes: that all slices together may take.
        clock: the time in seconds, which only grows.
        life: names this process; a random number if it is not given.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        *,
        bucket_bytes: int,
        most_bytes: int,
        clock: Callable[[], float],
        life: int | None = None,
        limits: TensorLimits = USUAL,
    ) -> None:
        self._limits = limits
        self._shard, self._shards = shard, shards
        self._bucket_bytes, self._most_bytes = bucket_bytes, most_bytes
        self._clock = clock
        self.life = life or secrets.randbits(62) + 1
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._births = 0
        self._used = False

    @property
    def used(self) -> bool:
        """Whether a worker has asked for a tensor, so that workers need this shard."""
        with self._lock:
            return self._used

    @property
    def nbytes(self) -> int:
        """What the slices take, also those that are still to come."""
        with self._lock:
            return self._nbytes

    @property
    def _nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    # --- beginning and end

    def declare(
        self,
        who: Sender,
        name: str,
        shape: Sequence[int],
        dtype: str,
        *,
        above: int = 0,
        lost: Birth = UNBORN,
    ) -> Declared:
        """A worker wants this tensor, whose home is here. The first one brings the values.

        Args:
            above: other shards have tensors of this name up to that number; a new one gets a higher one.
            lost: a tensor that another shard has lost. It begins anew.

        Raises:
            Refused: INVALID: there is one with another shape or dtype, there is no room, or no such tensor
                can be.
        """
        with self._lock:
            self._used = True
            now = self._sweep()
            kept = self._kept.get(name)
            if kept is not None and kept.birth != lost:
                self._require_same(kept, name, shape, dtype)
                if kept.complete:
                    return Declared(kept.birth, self.life)
                if kept.holder != who:
                    return Declared(kept.birth, self.life, pending=True)
                kept.until = now + self._limits.bring.total_seconds()
                if kept.birth.number > above:
                    return Declared(kept.birth, self.life, bring=True)
            self._births = max(self._births, above) + 1
            birth = Birth(self._births, self.life)
            self._make(name, shape, dtype, birth, now, holder=who)
            return Declared(birth, self.life, bring=True)

    def look(self, name: str, shape: Sequence[int], dtype: str, *, birth: Birth) -> Declared:
        """Whether this shard, which is not the tensor's home, has all of its slices. Raises Refused."""
        with self._lock:
            self._used = True
            if not self._slices(name, shape, dtype):
                return Declared(birth, self.life)
            kept = self._kept.get(name)
            present = kept is not None and kept.birth == birth and kept.complete
            return Declared(kept.birth if kept is not None else UNBORN, self.life, bring=not present)

    def expect(
        self, who: Sender, name: str, shape: Sequence[int], dtype: str, *, birth: Birth, start: int
    ) -> Slice | None:
        """A worker is about to bring a slice. Returns which one; None: it would replace a later tensor.

        Raises:
            Refused: see `declare`; GONE: at the tensor's home another one brings it now.
        """
        with self._lock:
            now = self._sweep()
            kept = self._kept.get(name)
            if kept is None or kept.birth != birth:
                if self._home(name) == self._shard:
                    raise self._gone(name)
                if kept is not None and kept.birth.number >= birth.number:
                    return None
                kept = self._make(name, shape, dtype, birth, now, holder=None)
            if kept.holder not in (None, who):
                raise self._gone(name)
            self._require_same(kept, name, shape, dtype)
            kept.until = now + self._limits.bring.total_seconds()
            return self._slice(kept, name, start)

    def put(self, who: Sender, name: str, *, birth: Birth, start: int, values: torch.Tensor) -> None:
        """The slice that `expect` has named is here. The first copy of it counts.

        Args:
            values: flat; copied.

        Raises:
            Refused: GONE: another tensor has taken its place meanwhile.
        """
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or kept.birth != birth or kept.holder not in (None, who):
                raise self._gone(name)
            if start not in kept.values:
                kept.values[start] = values.clone()
            if kept.complete:
                kept.holder = None

    def free(self, name: str, *, birth: Birth) -> bool:
        """Forget a tensor. Returns whether it was there; of another birth it is not."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or kept.birth != birth:
                return False
            del self._kept[name]
            return True

    # --- values

    def find(self, place: Place, start: int) -> tuple[Slice, str]:
        """Which slice of which dtype a push is for. Raises Refused (GONE, MALFORMED)."""
        with self._lock:
            kept = self._get(place)
            return self._slice(kept, place.name, start), kept.dtype

    def push(
        self,
        who: Sender,
        number: int,
        place: Place,
        *,
        start: int,
        rule: PushRule,
        values: torch.Tensor | None = None,
    ) -> bool:
        """Change a slice, once for each number. Returns False if that was done before.

        A process numbers its pushes, and sends the slices of each in the order of their elements; so what
        does not come after the last one has come before.

        Args:
            values: flat, of the slice's length and dtype; None with the rule `zero`.

        Raises:
            Refused: GONE: the tensor was freed, or lost with this shard.
        """
        with self._lock:
            kept = self._get(place)
        with kept.lock:
            if (number, start) <= kept.last.get(who, (-1, -1)):
                return False
            target = kept.values[start]
            if rule == "zero":
                target.zero_()
            else:
                assert values is not None
                (target.add_ if rule == "add" else target.copy_)(values)
            kept.last[who] = (number, start)
            kept.last.move_to_end(who)
            if len(kept.last) > self._limits.senders:
                kept.last.popitem(last=False)
            return True

    def pull(self, place: Place) -> Iterator[tuple[int, torch.Tensor]]:
        """Each of the shard's slices, in order: its first element, and a copy. Raises Refused (GONE)."""
        with self._lock:
            kept = self._get(place)
        for start in kept.slices:
            with kept.lock:
                values = kept.values[start].clone()
            yield start, values

    # --- the lock is held

    def _home(self, name: str) -> int:
        return spread(name, (1,), "uint8", bucket_bytes=self._bucket_bytes, shards=self._shards)[0].shard

    def _slices(self, name: str, shape: Sequence[int], dtype: str) -> dict[int, Slice]:
        """This shard's slices of such a tensor. Raises Refused (INVALID) if there can be none such."""
        if not is_name(name):
            text = f"a tensor's name has 1 to {LONGEST_NAME} printable characters; given: {name[:300]!r}"
            raise Refused(RefusalCode.INVALID, text)
        if dtype not in ITEM_SIZE:
            text = f"the tensor {name!r} has dtype {dtype[:50]}; expected one of {', '.join(ITEM_SIZE)}"
            raise Refused(RefusalCode.INVALID, text)
        if len(shape) > MOST_DIMENSIONS or not size_of(shape, dtype):
            text = f"the tensor {name!r} has no elements, or more than {MOST_DIMENSIONS} dimensions"
            raise Refused(RefusalCode.INVALID, text)
        if size_of(shape, dtype) > self._most_bytes * self._shards:  # before it is cut into its slices
            raise self._no_room(name, size_of(shape, dtype), self._most_bytes * self._shards)
        slices = spread(name, shape, dtype, bucket_bytes=self._bucket_bytes, shards=self._shards)
        return {each.start: each for each in slices if each.shard == self._shard}

    def _make(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        birth: Birth,
        now: float,
        *,
        holder: Sender | None,
    ) -> _Kept:
        """A tensor of which nothing is here yet; one of the same name is dropped."""
        slices = self._slices(name, shape, dtype)
        if holder is not None and 0 not in slices:
            text = f"the tensor {name!r} is not at home on shard {self._shard}"
            raise Refused(RefusalCode.MALFORMED, text)
        before = self._kept.get(name)
        nbytes = sum(each.length for each in slices.values()) * ITEM_SIZE[dtype]
        free = self._most_bytes - self._nbytes + (before.nbytes if before is not None else 0)
        if nbytes > free:
            raise self._no_room(name, nbytes, free)
        if before is None and len(self._kept) >= self._limits.tensors:
            most = self._limits.tensors
            text = f"there are {most} tensors already, so there is no place for {name!r}; free some"
            raise Refused(RefusalCode.INVALID, text)
        kept = _Kept(
            tuple(shape), dtype, birth, nbytes, slices, holder, now + self._limits.bring.total_seconds()
        )
        self._kept[name] = kept
        return kept

    def _no_room(self, name: str, nbytes: int, free: int) -> Refused:
        return Refused(
            RefusalCode.INVALID,
            f"the tensor {name!r} needs {nbytes} bytes on parameter server {self._shard}, which has room for "
            f"{max(0, free)} (parameterServer.tensorBytes: {self._most_bytes}). Free others, set more "
            "tensorBytes, or more parameterServer.replicas",
        )

    def _sweep(self) -> float:
        """Drop what nobody brings to an end any more; returns the time."""
        now = self._clock()
        for name, kept in list(self._kept.items()):
            if not kept.complete and now > kept.until:
                del self._kept[name]
        return now

    def _get(self, place: Place) -> _Kept:
        name, birth, life = place
        if life != self.life:
            raise Refused(
                RefusalCode.GONE,
                f"the tensor {name!r} is lost: parameter server {self._shard}, which had a part of it, was "
                "started again. Call session.server.init with the values to go on from",
            )
        kept = self._kept.get(name)
        if kept is None or kept.birth != birth or not kept.complete:
            raise self._gone(name)
        return kept

    def _gone(self, name: str) -> Refused:
        return Refused(
            RefusalCode.GONE,
            f"the tensor {name!r} that this worker has initialised is there no more: it was freed, or "
            "initialised anew. Call session.server.init again",
        )

    def _require_same(self, kept: _Kept, name: str, shape: Sequence[int], dtype: str) -> None:
        if (kept.shape, kept.dtype) != (tuple(shape), dtype):
            raise Refused(
                RefusalCode.INVALID,
                f"this worker has {name!r} as {dtype}{list(shape)}, but it was initialised as "
                f"{kept.dtype}{list(kept.shape)}. All workers must give the same shape and dtype, or another "
                "name",
            )

    def _slice(self, kept: _Kept, name: str, start: int) -> Slice:
        try:
            return kept.slices[start]
        except KeyError:
            text = f"no slice of {name!r} on shard {self._shard} begins at element {start}"
            raise Refused(RefusalCode.MALFORMED, text) from None
