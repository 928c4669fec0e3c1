"""The source of `session.loader`: a data set, a stream or a DataLoader, with its options."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elastic_ps.api.job import Data
from elastic_ps.data.order import MOST_TEXT, Order
from elastic_ps.data.stream import HuggingFaceStream, IndexedStream
from elastic_ps.errors import InvalidModel, UsageError

_CARRIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "drop_last",
)
"""The options that are copied from a DataLoader that the script passes."""

_EMPTY = (
    "the data set %s is empty; expected at least one record. Look at how the script selects its files or rows"
)

_LOOP = ("__iter__", "_get_iterator")
"""Methods of a DataLoader for the beginning of a loop over it. A job does not call them."""

MOST = 2**32 - 1
"""Epochs of a loop, and records of a batch, at most: what a call for records can say."""

_NOT_OPTIONS = {"sampler", "batch_sampler", "shuffle"}

_KEPT_BATCHES = 8
"""Batches that are kept where records of late steps come back: most are of the last few batches."""


LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_LIBRARIES = ("accelerate", "transformers", *LIGHTNING)


class Source(NamedTuple):
    """Records, and how they are to be fetched.

    Attributes:
        dataset: what the script has given, or what its DataLoader is over.
        readable: what a DataLoader is to fetch from: the same, or a stream's items as `IndexedStream`.
        records: in an epoch.
        shuffle: the order of the records is random.
        drop_last: skip the records of an epoch that do not fill a batch.
        options: of the DataLoader that fetches.
        order: of the records, if blocks of them stay together.
    """

    dataset: Any
    readable: Any
    records: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    options: dict[str, Any]
    order: Order | None = None


def is_count(number: object) -> bool:
    """Whether it is a whole number from 1 to `MOST`."""
    return isinstance(number, Integral) and 1 <= int(number) <= MOST


def read_source(
    given: Any,
    *,
    batch_size: int | None,
    records: int | None,
    data: Data,
    late: bool,
    options: Mapping[str, Any],
) -> Source:
    """Read the arguments of `session.loader`; see there.

    Args:
        data: whether the order is random, if `given` does not say, and the seed.
        late: records of steps that were too late come back all the time, soon after they were read.

    Raises:
        InvalidModel: the data set has no length, or is empty.
        UsageError: an argument or an option cannot be used in a job.
    """
    dataset, shuffle = given, data.shuffle
    if isinstance(given, DataLoader):
        if own := ["batch_size"] * (batch_size is not None) + [*options]:
            raise UsageError(
                f"session.loader got a DataLoader and {', '.join(own)}, but takes its options from the "
                "DataLoader; set them there"
            )
        shuffle, batch_size, dataset = _shuffles(given), given.batch_size, given.dataset
        options = {key: getattr(given, key) for key in _CARRIED}
        options["in_order"] = getattr(given, "in_order", True)  # from torch 2.6 on
    for name in _NOT_OPTIONS & options.keys():
        raise UsageError(
            f"session.loader has no option {name}: the parameter server decides which worker trains "
            "which records. For a random order, set the job's data.shuffle, or shuffle of a DataLoader"
        )
    options = dict(options)
    if not options.pop("in_order", True):
        raise UsageError(
            "in_order is False, but records are counted in the order in which batches were requested; "
            "leave in_order out"
        )
    for name in options.keys() - signature(DataLoader).parameters.keys():
        raise UsageError(f"session.loader got the option {name}, which neither it nor a DataLoader has")
    if batch_size is None or not is_count(batch_size):
        raise UsageError(f"batch_size is {batch_size!r}; expected a whole number from 1 to {MOST}")
    drop_last = bool(options.pop("drop_last", False))
    if not isinstance(dataset, IterableDataset):
        count = _records_of(dataset, records)
        order = _order_of(dataset, count, data, shuffle=shuffle)
        return Source(dataset, dataset, count, batch_size, shuffle, drop_last, options, order)
    fetched = batch_size * max(1, options.get("num_workers") or 0)
    indexed = _indexed(dataset, records, near=fetched, keep=late * _KEPT_BATCHES * fetched, seed=data.seed)
    order = _order_of(dataset, len(indexed), data, shuffle=False)
    return Source(dataset, indexed, len(indexed), batch_size, False, drop_last, options, order)


def _shuffles(source: DataLoader[Any]) -> bool:
    """Whether a DataLoader's order is random. Raises UsageError if it chooses records in its own way."""
    if is_prepared(source):
        raise UsageError(
            f"the DataLoader is a {_name_of(source)}, which divides the records among processes itself. Pass "
            "session.loader the DataLoader that you had before accelerator.prepare(...), or the data set"
        )
    stateful = library_of(source) == "torchdata"  # its own loop only remembers where it is, as the job does
    for name in () if stateful else _LOOP:
        if getattr(type(source), name) is not getattr(DataLoader, name):
            raise UsageError(
                f"the DataLoader is a {_name_of(source)}, which has a {name} of its own. session.loader "
                "makes the batches itself and would not call it. Pass a torch.utils.data.DataLoader, and do "
                "the same in the data set, in collate_fn or in the loop. To fetch ahead, use num_workers and "
                "prefetch_factor. To continue within an epoch, start the job with --resume"
            )
    if isinstance(source.dataset, IterableDataset):
        if source.batch_size is None:
            raise UsageError(
                "the DataLoader has batch_size=None, so an item of the stream is a batch. To make each "
                "item a record, pass session.loader the stream itself, batch_size=1, and "
                "collate_fn=lambda items: items[0]"
            )
        return False
    if source.batch_size is None:
        raise UsageError(
            "the DataLoader has a batch_sampler of its own, or batch_size=None. The parameter server decides "
            "which records make a batch, so pass session.loader the data set and batch_size"
        )
    sampler: Any = source.sampler
    if type(sampler) is SequentialSampler and _is_of_all(sampler, source.dataset):
        return False
    if (
        (type(sampler) is RandomSampler or (stateful and type(sampler).__name__ == "RandomSampler"))
        and library_of(sampler) in ("torch", "torchdata")
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
        and _is_of_all(sampler, source.dataset)
    ):
        return True
    raise UsageError(
        f"the DataLoader has a {type(sampler).__name__}, which chooses records itself. A job trains every "
        "record once in each epoch. Pass session.loader a DataLoader with shuffle=True or False and no "
        "sampler, or a torch.utils.data.Subset of the records that you want"
    )


def _is_of_all(sampler: Any, dataset: Any) -> bool:
    """Whether a sampler of torch's chooses among all records, and not, for example, among `range(1000)`."""
    if sampler.data_source is dataset or not hasattr(dataset, "__len__"):  # that is refused later
        return True
    return len(sampler.data_source) == len(dataset)


def _name_of(given: object) -> str:
    return f"{type(given).__module__}.{type(given).__name__}"


def _records_of(dataset: Any, records: int | None) -> int:
    """How many records a map-style data set has."""
    name = type(dataset).__name__
    if instead := _instead_of(dataset):
        raise UsageError(f"session.loader got a {name}, which is not a data set: {instead}")
    if isinstance(dataset, type):
        raise UsageError(f"session.loader got the class {dataset.__name__}; expected an instance")
    if not hasattr(dataset, "__len__"):
        raise InvalidModel(
            f"{name} has no length and no index, so its records cannot be handed out exactly once; use a "
            "map-style data set (with __len__ and __getitem__), or a torch.utils.data.IterableDataset"
        )
    if records is not None:
        raise UsageError(
            f"records={records} is for streams, but {name} is a map-style data set, whose length says how "
            "many records it has. To train a part of them, pass a torch.utils.data.Subset"
        )
    if len(dataset) < 1:
        raise InvalidModel(_EMPTY % name)
    return len(dataset)


def _instead_of(given: Any) -> str:
    """Say what to pass instead of an object that has no records. Returns "" for a data set."""
    if isinstance(given, str | bytes):
        return "to read files, pass a data set, such as TextDataset or TarDataset of elastic_ps.data"
    if isinstance(given, Mapping) and 0 not in given:
        return f"pass the value of one of its keys: {', '.join(map(str, given))}"
    if isinstance(given, tuple):
        kinds = {(each.shape, each.dtype) for each in given if isinstance(each, torch.Tensor) and each.ndim}
        lengths = {shape[0] for shape, _ in kinds}
        if len(given) > 1 and len(kinds) == len(given) and len(lengths) == 1:
            return "pass torch.utils.data.TensorDataset(*tensors), which makes each row a record"
    return ""


def _order_of(dataset: Any, records: int, data: Data, *, shuffle: bool) -> Order | None:
    """The order of records that are read in blocks. Raises UsageError: it says impossible numbers."""
    blocks, name = data.order.blocks, type(dataset).__name__
    sizes: Any = getattr(dataset, "block_sizes", None)
    if blocks == 1 or (blocks is None and not callable(sizes)):
        if data.order.buffer > 1:
            raise UsageError(
                f"data.order.buffer is {data.order.buffer}, but nothing says which records are a block: "
                f"{name} has no block_sizes(). Set data.order.blocks to a number of records"
            )
        return None
    if callable(keep := getattr(dataset, "keep_blocks", None)):
        keep(data.order.buffer + 1)
    try:
        found = blocks or [int(each) for each in sizes()]
        order = Order(records, found, data.order.buffer, shuffle, data.seed)
        if (size := len(order.to_text())) > MOST_TEXT:
            raise ValueError(
                f"the sizes of {len(order.sizes)} blocks take {size} bytes as text; at most {MOST_TEXT} are "
                "possible. Make larger blocks, or set data.order.blocks to a number of records"
            )
        return order
    except ValueError as error:
        raise UsageError(f"{'data.order.blocks' if blocks else f'{name}.block_sizes()'}: {error}") from None


def _indexed(
    stream: IterableDataset[Any], records: int | None, *, near: int, keep: int, seed: int
) -> IndexedStream:
    if "_ex_iterable" in vars(stream):  # of Hugging Face's `datasets`
        if any(getattr(stream, name, None) for name in ("_distributed", "_starting_state_dict")):
            raise UsageError(
                "the stream comes from split_dataset_by_node or has loaded a state_dict, so it lacks items "
                "that other workers have. Pass session.loader the whole stream, which the job divides"
            )
        stream = HuggingFaceStream(stream)
    name, length = type(stream).__name__, _length(stream)
    if is_prepared(stream):
        raise UsageError(
            f"the stream is a {_name_of(stream)}, which divides its items among processes itself. Pass "
            "session.loader the stream that it was made of"
        )
    if records is None and length is None:
        raise InvalidModel(
            f"{name} is a stream without a length, but records can be counted exactly once only if their "
            "number is known. Pass session.loader(..., records=N), with the items of an epoch, or give the "
            'stream a __len__. See "Streams" in docs/guides/data.md'
        )
    if records is not None and records < 1:
        raise UsageError(f"records is {records}; expected the number of items in an epoch, at least 1")
    if length == 0:
        raise InvalidModel(_EMPTY % name)
    if records is not None and length is not None and records > length:
        raise UsageError(f"records is {records}, but the __len__ of {name} is {length}")
    count = length if records is None else records
    assert count is not None
    said = "its __len__" if records is None else f"records={records}"
    return IndexedStream(
        stream, records=count, said=said, ends=records is None, near=near, keep=keep, seed=seed
    )


def _length(stream: IterableDataset[Any]) -> int | None:
    """A stream's length; None if it has none. torch's own streams may have a `__len__` that only raises."""
    if not hasattr(stream, "__len__"):
        return None
    try:
        return len(stream)
    except (TypeError, NotImplementedError):
        return None


def is_prepared(given: object) -> bool:
    """Whether this is of a library that has prepared it to divide work among processes itself."""
    return library_of(given) in _LIBRARIES


def library_of(given: object) -> str:
    """The name of the library that its class is of, which need not be installed."""
    return type(given).__module__.partition(".")[0]
