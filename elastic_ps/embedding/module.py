"""`Embedding` and `EmbeddingBag`: layers whose rows are in a table that grows.

In forward a layer looks up the rows of the ids of its batch, each once, and makes them a leaf of the graph.
Backward leaves the sum of each row's gradients there, and a hook hands it to the `Pending` of the
layer's `Source`, which keeps it until the step.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch._compile import _disable_dynamo

from elastic_ps.codec import name_of
from elastic_ps.embedding.init import Ids, Init, hashed
from elastic_ps.embedding.optimizers import RowOptimizer
from elastic_ps.embedding.stored import parts_in, spec_from_text
from elastic_ps.embedding.table import State, Table, TableSpec, WhenFull, default_init
from elastic_ps.errors import ModelMismatch, UsageError

logger = logging.getLogger(__name__)

_UNTRAINED = (
    "backward() has made gradients of rows of the table %r, but no step trains them: the layer is not part "
    "of the model that session.optimizer(...) was given, or session.optimizer(...) was not called yet. Make "
    "the layer part of that model. If its rows are to stay as they are, call layer.requires_grad_(False)"
)

_MOST = 16
"""The most gradients that are kept apart, each with memory of its own."""

Mode: TypeAlias = Literal["sum", "mean", "max"]
Given: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[Any]


class Gradient(NamedTuple):
    """The gradients of the rows of one batch, from one backward.

    Attributes:
        ids: each once, ascending.
        values: the sum of the gradients of each, of shape (ids, dim).
        counts: how often each id has occurred.
    """

    ids: Ids
    values: torch.Tensor
    counts: Ids


class Pending:
    """The gradients of a table's next step. `add` may be called from any thread.

    Attributes:
        counts: called for each gradient before it is kept; whether its batch counts. None: there are no
            steps.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.counts: Callable[[], bool] | None = None
        self._warned = False
        self._lock = threading.Lock()
        self._gradients: list[Gradient] = []

    def add(self, gradient: Gradient) -> None:
        """Keep a gradient, if its batch counts."""
        if self.counts is not None and not self.counts():
            return
        if self.counts is None:
            if not self._warned:
                self._warned = True
                logger.warning(_UNTRAINED, self.spec.name)
            return
        with self._lock:
            self._gradients.append(gradient)
            if len(self._gradients) == _MOST:
                self._gradients = [coalesced(self._gradients, self.spec)]

    def clear(self) -> None:
        """Forget all."""
        self._gradients = []

    def take(self) -> Gradient:
        """The sum of the gradients that have come since the last call."""
        taken, self._gradients = self._gradients, []
        ids, values, counts = coalesced(taken, self.spec)
        return Gradient(ids, values, np.maximum(counts, 1))

    def __reduce__(self) -> Any:
        """A copy of a model has no gradients."""
        return Pending, (self.spec,)


class Source(Protocol):
    """Where a layer's rows are.

    Attributes:
        pending: takes the gradients that backward makes.
    """

    pending: Pending

    def lookup(self, ids: Ids) -> torch.Tensor:
        """The values of these rows, each id once; see `Table.lookup`."""


class LocalSource:
    """A table in this process."""

    def __init__(self, spec: TableSpec) -> None:
        self.table = Table(spec)
        self.pending = Pending(spec)

    def lookup(self, ids: Ids) -> torch.Tensor:
        """See `Source`."""
        return self.table.lookup(ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalSource:
        """A copy of a model that is trained, such as its average, looks up the same rows, and trains none."""
        copied = copy.copy(self)
        copied.pending = Pending(self.pending.spec)
        if self.pending.counts is None:
            copied.table = copy.deepcopy(self.table, memo)
        else:
            warn_of_copy(self.pending.spec)
        return copied


def warn_of_copy(spec: TableSpec) -> None:
    """Say that a copy of a model has no rows of its own."""
    logger.warning(
        "a copy of the model was made after session.optimizer(...), so it looks up the rows of the table %r "
        "that are trained. To keep the rows as they are now, keep a checkpoint",
        spec.name,
    )


def coalesced(gradients: Sequence[Gradient], spec: TableSpec) -> Gradient:
    """The sum of several gradients of a table, in the order in which they are given."""
    if len(gradients) == 1:
        ids, values, counts = gradients[0]
        return Gradient(ids, values.to("cpu", spec.torch_dtype), counts)
    every = [each.ids for each in gradients] or [np.empty(0, dtype=np.int64)]
    ids, inverse = np.unique(np.concatenate(every), return_inverse=True)
    total = torch.zeros(len(ids), spec.dim, dtype=spec.torch_dtype, device="cpu")
    counts = np.zeros(len(ids), dtype=np.int64)
    start = 0
    for each in gradients:
        places = inverse[start : start + len(each.ids)]
        total.index_add_(0, torch.from_numpy(places), each.values.to("cpu", spec.torch_dtype))
        counts[places] += each.counts
        start += len(each.ids)
    return Gradient(ids, total, counts)


def mean_of(weighted: Sequence[tuple[Gradient, float]], weight: float | None, spec: TableSpec) -> Gradient:
    """The weighted mean of some gradients of a table.

    Args:
        weighted: each with its weight.
        weight: the sum of the weights, with those of steps that have no gradient; None: of a single step.
    """
    if weight is None:
        return coalesced([each for each, _ in weighted], spec)
    scaled = [each._replace(values=each.values * own) for each, own in weighted]
    total = coalesced(scaled, spec)
    return total._replace(values=total.values / weight)


class _Rows(NamedTuple):
    """The rows of a batch: `places` has that of each id given, `padding` that of the padding's id."""

    values: torch.Tensor
    places: torch.Tensor
    padding: int | None


class _Layer(torch.nn.Module):
    def __init__(self, spec: TableSpec, padding_idx: int | str | None) -> None:
        super().__init__()
        if padding_idx is not None and np.ndim(padding_idx):
            raise UsageError(f"padding_idx={padding_idx!r} of the table {spec.name!r}: expected one id")
        given = [] if padding_idx is None else [padding_idx]
        self.padding_idx = next(map(int, as_ids(given, spec.name, torch.device("cpu"))[0]), None)
        self.spec = replace(spec, padding_idx=self.padding_idx)
        self.source: Source = LocalSource(self.spec)
        self._trained, self._told = True, set[str]()
        # Where rows go that strings ask for; `Module.to` moves it.
        self.register_buffer("_where", torch.empty(0), persistent=False)
        self._where: torch.Tensor

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether this layer trains its rows. A call for the whole model does not reach its layers."""
        self._trained = requires_grad
        if not requires_grad and self.spec.expire_after is not None and "frozen" not in self._told:
            self._told.add("frozen")
            logger.warning(
                "the table %r is not trained from here on, and its rows expire %s after they were last "
                "trained. To keep them, create it without expire_after",
                *(self.spec.name, self.spec.expire_after),
            )
        return super().requires_grad_(requires_grad)

    @property
    def table(self) -> Table:
        """The table, which is in this process.

        Raises:
            UsageError: it is elsewhere.
        """
        if isinstance(self.source, LocalSource):
            return self.source.table
        raise UsageError(f"the rows of the table {self.spec.name!r} are not in this process")

    @_disable_dynamo  # torch.compiler.disable would import the compiler at once
    def _rows(self, given: Given) -> tuple[_Rows, torch.Size]:
        """The rows of some ids, and the shape in which the ids were given."""
        ids, shape, device = as_ids(given, self.spec.name, self._where.device)
        unique, places, counts = np.unique(ids, return_inverse=True, return_counts=True)
        values = self.source.lookup(unique)
        padding = None
        if self.padding_idx is not None:
            place = int(np.searchsorted(unique, self.padding_idx))
            if place < len(unique) and unique[place] == self.padding_idx:
                padding = place
        values = values.to(device)
        if torch.is_grad_enabled() and self._trained and len(unique):
            values.requires_grad_()
            self._watch(values, unique, counts, padding)
        where = torch.from_numpy(places.reshape(-1)).to(device)
        return _Rows(values, where, padding), shape

    def _watch(self, values: torch.Tensor, ids: Ids, counts: Ids, padding: int | None) -> None:
        """Hand the gradient of these rows to the source when backward has made it."""
        pending, left = self.source.pending, [counts]

        def computed(rows: torch.Tensor) -> None:
            gradient, rows.grad = rows.grad, None
            assert gradient is not None
            gradient = gradient.detach()  # it has a graph with `create_graph=True`
            # Ids occur in forward, so another backward of it has none.
            counts = left[0]
            left[0] = np.zeros_like(counts)
            if padding is None:
                pending.add(Gradient(ids, gradient, counts))
                return
            keep = np.delete(np.arange(len(ids)), padding)
            part = gradient[torch.from_numpy(keep).to(gradient.device)]
            pending.add(Gradient(ids[keep], part, counts[keep]))

        values.register_post_accumulate_grad_hook(computed)

    def get_extra_state(self) -> State:
        """The table's rows, for `state_dict`; empty if they are not in this process."""
        return self.table.state() if isinstance(self.source, LocalSource) else {}

    def set_extra_state(self, state: State) -> None:
        """Load the table's rows, for `load_state_dict`.

        Raises:
            ModelMismatch: see `Table.load_state`; or the state was saved in a job, and has no rows.
            UsageError: there are rows in it, but the table's are not in this process.
        """
        if state:
            self.table.load_state(state)
        elif isinstance(self.source, LocalSource):
            raise ModelMismatch(
                f"the state_dict was saved in a job, so it has no rows of the table {self.spec.name!r}. Load "
                "a checkpoint of the job instead, with elastic_ps.load_checkpoint(directory, model)"
            )
        elif "loaded" not in self._told:
            self._told.add("loaded")
            text = "a state_dict was loaded that has no rows of the table %r, which stay as they are now. To "
            logger.warning(text + "go back to a version with its rows, load a checkpoint", self.spec.name)

    @staticmethod
    def load_rows(
        layers: Sequence[_Layer], parts: Iterable[Mapping[str, torch.Tensor]], described: Iterable[str]
    ) -> None:
        """Replace the rows of all layers of a model by those of a checkpoint, as `Reader.rows` gives them.

        `described`: the descriptions of all tables that the job has, also of those without rows.

        Raises, before anything is changed:
            ModelMismatch: the checkpoint has other tables.
            UsageError: the rows of a layer are not in this process.
            CheckpointCorrupt: see `parts_in`.
        """
        known = {spec.name: spec for spec in map(spec_from_text, described)}
        present, new = {layer.spec.name: layer.table for layer in layers}, dict[str, Table]()
        if absent := sorted(known.keys() - present.keys()):
            raise ModelMismatch(f"the table {absent[0]!r} of the checkpoint is not in the model")
        for layer in layers:
            if (spec := known.get(layer.spec.name)) is None:
                said = ", ".join(map(repr, sorted(known))) or "none"
                raise ModelMismatch(f"the checkpoint has no table {layer.spec.name!r}; it has {said}")
            layer.spec.require_same(spec, here="this layer", there="the checkpoint")
            new[spec.name] = Table(spec)
        for spec, part in parts_in(parts):
            new[spec.name].merge(part)
        first: dict[str, Source] = {}
        for layer in layers:  # those of one table share it
            layer.source = first.setdefault(layer.spec.name, layer.source)
            layer.table.replace(new[layer.spec.name])

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.spec.name!r}, {self.spec.dim}{padding}"


class Embedding(_Layer):
    """A `torch.nn.Embedding` whose table has no size: any id of int64 has a row.

    An id that was never trained has its first values, which depend only on the seed, the table's name and
    the id. Its row is created in the step that trains it. Evaluation creates none.

    The rows are not parameters of the model: they have an optimizer of their own, which steps together with
    that of `session.optimizer(...)`. In a job they are on the parameter servers. docs/guides/embeddings.md
    says which jobs train them.

    Args:
        name: the table's. Layers with the same name share one table, if they are in one model.
        dim: the number of values in a row.
        init: `elastic_ps.embedding.uniform(low, high)`, `normal(mean, std)` or `constant(value)`. By default
            uniform, with the standard deviation 1 / sqrt(dim).
        optimizer: one of `elastic_ps.embedding`, such as `RowwiseAdagrad(lr=0.05)`.
        admit_after: an id gets a row when it has occurred this often in training. Before, it has its first
            values, and its gradients are dropped.
        expire_after: a row is dropped after this many versions without its id. None: never. Or a time, such
            as "7d", "12h", "30m" or "90s"; a pause between two versions counts for 1/32 of it at most.
        padding_idx: an id, or a string, whose row is 0 and is never trained.
        table_bytes, when_full: see `TableSpec`.
        seed: another one gives other first values.
        dtype: torch.float32 or torch.float64.

    Raises:
        UsageError: an argument is out of its range.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        optimizer: RowOptimizer,
        init: Init | None = None,
        admit_after: int = 1,
        expire_after: int | str | None = None,
        padding_idx: int | str | None = None,
        table_bytes: int | None = None,
        when_full: WhenFull = "refuse",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        spec = TableSpec(
            name=name,
            dim=dim,
            init=default_init(dim) if init is None else init,
            optimizer=optimizer,
            seed=seed,
            dtype=name_of(dtype),
            admit_after=admit_after,
            expire_after=expire_after,
            table_bytes=table_bytes,
            when_full=when_full,
        )
        super().__init__(spec, padding_idx)

    def forward(self, ids: Given) -> torch.Tensor:
        """The rows of some ids.

        Args:
            ids: a tensor of whole numbers of any shape and on any device, or a list or array of strings or of
                whole numbers. A string's id is `elastic_ps.embedding.hashed`.

        Returns:
            A tensor of the shape of the ids and then dim, on their device; for lists, on the module's.

        Raises:
            UsageError: these are no ids.
        """
        rows, shape = self._rows(ids)
        # The backward of torch's embedding takes twice as long. That of a padding is dropped in `_watch`.
        found = rows.values.index_select(0, rows.places)
        return found.view(*shape, self.spec.dim)


class EmbeddingBag(Embedding):
    """A `torch.nn.EmbeddingBag` whose table has no size: the sum, mean or maximum of each bag's rows.

    Args:
        mode: "sum", "mean" or "max". An empty bag gives 0.
        include_last_offset: the last of `offsets` is the number of ids, as in torch.

    The other arguments are those of `Embedding`. Ids that are `padding_idx` are left out of their bags.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        mode: Mode = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        if mode not in get_args(Mode):
            raise UsageError(f"EmbeddingBag has mode={mode!r}; expected one of {', '.join(get_args(Mode))}")
        super().__init__(name, dim, **options)
        self.mode: Mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: Given,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The reduction of each bag.

        Args:
            ids: of shape (bags, ids of a bag), or of shape (ids,) with `offsets`.
            offsets: where each bag begins, of shape (bags,), ascending from 0.
            per_sample_weights: by which each row is multiplied, of the shape of the ids; for mode "sum".

        Returns:
            A tensor of shape (bags, dim).

        Raises:
            UsageError: these are no ids, offsets or weights.
        """
        rows, shape = self._rows(ids)
        places, weights = rows.places, per_sample_weights
        if len(shape) == 2 and offsets is None:
            offsets = torch.arange(0, max(places.numel(), 1), max(shape[1], 1), device=places.device)
            if not places.numel():
                offsets = torch.zeros(shape[0], dtype=torch.int64, device=places.device)
            last = False
        elif len(shape) == 1 and offsets is not None:
            offsets, last = self._checked(offsets, len(places)).to(places.device), self.include_last_offset
        else:
            raise UsageError(
                "EmbeddingBag takes ids of shape (bags, ids per bag), or ids of shape (ids,) with offsets; "
                f"the ids have shape {tuple(shape)}, with{'out' * (offsets is None)} offsets"
            )
        if weights is not None:
            found = tuple(weights.shape) if isinstance(weights, torch.Tensor) else type(weights).__name__
            if self.mode != "sum" or found != tuple(shape):
                raise UsageError(
                    f"per_sample_weights needs mode='sum' and a tensor of the shape of the ids, "
                    f"{tuple(shape)}; given: mode={self.mode!r}, {found}"
                )
            weights = weights.reshape(-1).to(rows.values)
        values = rows.values
        if not len(values):  # torch wants a row, even if all bags are empty
            values = values.new_zeros(1, self.spec.dim)
        return torch.nn.functional.embedding_bag(
            places,
            values,
            offsets,
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=last,
            padding_idx=rows.padding,
        )

    def _checked(self, offsets: torch.Tensor, ids: int) -> torch.Tensor:
        """Raise UsageError if these are no offsets of so many ids."""
        if not isinstance(offsets, torch.Tensor) or offsets.dim() != 1 or offsets.dtype not in _WHOLE:
            raise UsageError("EmbeddingBag: offsets must be a tensor of whole numbers with one dimension")
        given = offsets.to(torch.int64)
        last = ids if not self.include_last_offset or not len(given) else int(given[-1])
        right = (
            (len(given) or not (ids or self.include_last_offset))
            and (not len(given) or int(given[0]) == 0)
            and bool((given.diff() >= 0).all())
            and (not len(given) or int(given[-1]) <= ids)
            and last == ids
        )
        if not right:
            ending = f", and end with {ids}" if self.include_last_offset else f", none above {ids}"
            raise UsageError(
                f"EmbeddingBag: offsets must begin with 0 and ascend{ending}, for {ids} ids; given: "
                f"{given[:20].tolist()}{'...' * (len(given) > 20)}"
            )
        return given


_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def as_ids(given: Given, table: str, device: torch.device) -> tuple[Ids, torch.Size, torch.device]:
    """Ids as a flat array, the shape that they have, and the device for their rows.

    Raises:
        UsageError: these are no ids.
    """
    if isinstance(given, torch.Tensor):
        if given.dtype not in _WHOLE or given.layout is not torch.strided:
            raise _no_ids(table, f"a tensor of {given.dtype}, {given.layout}")
        flat = given.detach().reshape(-1).to("cpu", torch.int64)
        return flat.numpy(), given.shape, given.device
    try:
        array = np.asarray(given)
    except ValueError as error:
        said = "lists of different lengths. Pad them, or use EmbeddingBag with offsets"
        raise _no_ids(table, said) from error
    shape = torch.Size(array.shape)
    if array.dtype.kind == "U" and not isinstance(given, np.ndarray):
        array = np.asarray(given, dtype=object)  # numpy makes strings of numbers that are beside strings
    if array.dtype.kind == "U" or (array.dtype == object and all(isinstance(s, str) for s in array.flat)):
        return hashed([str(each) for each in array.flat]), shape, device
    if array.size == 0:
        return np.empty(0, dtype=np.int64), shape, device
    if array.dtype.kind not in "iu" or (
        array.dtype.kind == "u" and array.max() > np.uint64(np.iinfo(np.int64).max)
    ):
        raise _no_ids(table, f"an array of {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64).reshape(-1), shape, device


def _no_ids(table: str, given: str) -> UsageError:
    return UsageError(
        f"the ids of the table {table!r} are {given}. Expected whole numbers from -2**63 to 2**63 - 1 in a "
        "tensor of a signed dtype or uint8, or in a list; or strings"
    )
