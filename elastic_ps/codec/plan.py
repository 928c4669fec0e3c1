"""Which codec each part of a model has, for gradients and values; the same for workers and servers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import torch

from elastic_ps.api.compression import MAX_ERROR, Compression
from elastic_ps.api.fields import AUTO
from elastic_ps.codec import NONE
from elastic_ps.codec.auto import Auto
from elastic_ps.codec.base import Codec, pack
from elastic_ps.codec.builtin import FLOATS, Bf16, Fp16, Int4, Int8, SignSGD, TopK
from elastic_ps.codec.changes import Changed
from elastic_ps.codec.lossless import LOSSLESS, Plain
from elastic_ps.codec.powersgd import PowerSGD
from elastic_ps.core.partition import Bucket, Layout, Piece, Rule, TensorSpec
from elastic_ps.errors import InvalidJob
from elastic_ps.process.lifecycle import import_own

BUILT_IN: Mapping[str, type[Codec]] = {
    "bf16": Bf16,
    "fp16": Fp16,
    "int8": Int8,
    "int4": Int4,
    "topk": TopK,
    "signsgd": SignSGD,
    "powersgd": PowerSGD,
}
"""By the names that `spec.compression` knows, besides `none`."""

VALUES: Mapping[str, type[Codec]] = {"bf16": Bf16}
"""Those of values. The same values always give the same bytes: nothing is drawn, and nothing is kept."""

DELTAS: Mapping[str, type[Codec]] = {
    "changed": Changed,
    "int8": Int8,
    "int4": Int4,
    "topk": TopK,
    "signsgd": SignSGD,
}
"""Those of what a version changes in the values. None of them keeps anything for the next one."""

_SIDE = 256
"""Rows and columns of the matrix of random numbers that codecs are tried on; see `Plan.sent`."""


class Run(NamedTuple):
    """Pieces of a bucket, one after the other, that are encoded together.

    Attributes:
        name: of the codec.
        codec: None: the elements are sent as they are.
        elements: where they are in the bucket.
    """

    name: str
    codec: Codec | None
    elements: slice

    @property
    def length(self) -> int:
        return int(self.elements.stop - self.elements.start)


class Plan:
    """Chooses codecs as `spec.compression` says.

    Attributes:
        compression: what it does.
        name: of the codec of gradients that no rule replaces.
        auto: that codec, if it is one that the worker has to choose; else None.
        values, deltas: the names of the codec of values, and of that of what a version changes in them.
    """

    def __init__(self, compression: Compression) -> None:
        """Raises InvalidJob: a codec does not exist, cannot be imported, or does not take its options; or the
        package of the lossless one is not installed.
        """
        self.compression = compression
        self._lossless = compression.lossless
        allowed = MAX_ERROR if compression.max_error is None else compression.max_error
        self.auto = Auto(allowed) if compression.codec == AUTO else None
        default = _named(compression.codec, self.auto or make(compression.codec, compression.options))
        named = [
            (rule.match, *_named(rule.codec, make(rule.codec, rule.options))) for rule in compression.rules
        ]
        self._rules = [*named, ("*", *default)]
        self.name, _ = self._followed(*default)
        chosen = compression.values
        changes = chosen in DELTAS
        values = VALUES[chosen]() if chosen in VALUES else None
        if compression.values_options and not changes:
            raise InvalidJob(
                f"compression.valuesOptions {dict(compression.values_options)} has no meaning with values "
                f"{chosen}. Leave it out, or set values to one of {', '.join(DELTAS)}"
            )
        self.values, self._values = self._followed(NONE if changes else chosen, values)
        self.deltas, self._deltas = NONE, None
        if changes:
            deltas = _build(chosen, DELTAS[chosen], compression.values_options)
            if deltas.momentum:
                raise InvalidJob(
                    f"compression.valuesOptions has momentum {deltas.momentum}, but only gradients have "
                    "momentum. Leave it out, or set it in compression.options"
                )
            self.deltas, self._deltas = self._followed(*_named(chosen, deltas))

    def _followed(self, name: str, codec: Codec | None) -> tuple[str, Codec | None]:
        """A codec and its name, followed by the lossless one if the job has one."""
        if self._lossless == NONE:
            return name, codec
        return f"{name}+{self._lossless}", LOSSLESS[self._lossless](codec or Plain())

    @property
    def names(self) -> list[str]:
        """Of all codecs, sorted, with their versions if they have some. `none` if there are no others."""
        names = {self.name, self.values, self.deltas, *(name for _, name, _ in self._rules[:-1])}
        return sorted(names - {NONE}) or [NONE]

    @cached_property
    def momentum(self) -> float:
        """What workers make of their gradients, of the first codec that has any; 0 if none has."""
        codecs = (codec for _, _, codec in [self._rules[-1], *self._rules])
        return next((codec.momentum for codec in codecs if codec is not None and codec.momentum), 0.0)

    @property
    def encodes(self) -> bool:
        """Whether any gradient is encoded."""
        return self._lossless != NONE or any(codec is not None for _, _, codec in self._rules)

    @property
    def sent(self) -> float:
        """About the share of a model's bytes that is sent: the mean of gradients and values, above 0.

        It is that of random numbers, with the codec that no rule replaces. What workers choose, and what a
        codec of the user's own makes, is not known: 1. With `changed`, as many values are sent as gradients.
        """
        _, name, codec = self._rules[-1]
        known = codec is None or type(codec) in BUILT_IN.values()
        if known and codec is not None and codec.by_piece:
            codec = codec.for_matrix(_SIDE, _SIDE)
        gradients = _share(self._followed(name, codec)[1]) if known else 1.0
        if self._deltas is not None and self._deltas.bits:
            return gradients
        return (gradients + _share(self._deltas or self._values)) / 2

    def of(self, tensor: str) -> tuple[str, Codec | None]:
        """The codec of a tensor with this name: the one of the first rule that matches."""
        return next((name, codec) for match, name, codec in self._rules if fnmatchcase(tensor, match))

    @property
    def encodes_values(self) -> bool:
        """Whether values do not always travel as they are: workers have what they decode, all alike."""
        return self._values is not None or self._deltas is not None

    def of_values(self, layout: Layout, bucket: Bucket) -> Codec | None:
        """The codec of a bucket's values; None: they are sent as they are.

        So are those that no optimizer steps, or that are frozen when the job begins: nothing is saved by
        rounding what is sent once. Half precision is not made coarser, and `float64` has its reasons.
        """
        return self._values if _changes(layout, bucket) else None

    def of_deltas(self, layout: Layout, bucket: Bucket) -> Codec | None:
        """The codec of what a version changes in a bucket's values; None: all of them are sent again."""
        return self._deltas if _changes(layout, bucket) else None

    def as_pulled(self, layout: Layout, bucket: Bucket, values: torch.Tensor) -> torch.Tensor:
        """What a worker has when it has pulled these values; `values` itself if they are sent as they are."""
        codec = self.of_values(layout, bucket)
        if codec is None:
            return values
        decoded = torch.empty_like(values)
        codec.decode(codec.encode(values, {}, torch.Generator()), decoded)
        return decoded

    def runs(self, layout: Layout, bucket: Bucket) -> list[Run]:
        """The runs of a bucket; none if all of it is sent as it is. Only gradients are encoded."""
        if (
            not self.encodes
            or bucket.rule is not Rule.GRADIENT
            or not bucket.dtype.endswith(("16", "32", "64"))
        ):
            return []
        runs: list[Run] = []
        stop = 0
        for piece in bucket.pieces:
            coded = self._of_piece(layout.tensors[piece.tensor], piece, bucket)
            start, stop = stop, stop + piece.length
            if runs and runs[-1][:2] == coded:
                start = runs.pop().elements.start
            runs.append(Run(*coded, slice(start, stop)))
        # Codecs get float32, so float64 that no other codec has rounded stays as it is.
        exact = bucket.dtype == "float64"
        runs = [
            run if exact and run.codec is None else Run(*self._followed(run.name, run.codec), run.elements)
            for run in runs
        ]
        return runs if any(run.codec is not None for run in runs) else []

    def _of_piece(self, tensor: TensorSpec, piece: Piece, bucket: Bucket) -> tuple[str, Codec | None]:
        """The codec of a piece of a parameter, before the lossless one."""
        name, codec = self.of(tensor.name)
        if codec is not None and codec.by_piece:
            rows, rest = divmod(piece.length, tensor.row)
            codec = codec.for_matrix(rows, tensor.row) if not rest else None
        exact = codec is not None and codec.lossless
        if codec is None or (exact and bucket.dtype == "float64"):  # codecs get float32
            return NONE, None
        return name, codec


def _share(codec: Codec | None) -> float:
    """What it leaves of the bytes of random numbers, when it has warmed up."""
    if codec is None:
        return 1.0
    random = torch.Generator("cpu").manual_seed(0)
    sample = torch.randn(_SIDE * _SIDE, generator=random, **FLOATS)
    return pack(codec.encode(sample, {"version": 1 << 40}, random)).nbytes / sample.nbytes


def _changes(layout: Layout, bucket: Bucket) -> bool:
    """Whether an optimizer steps the bucket, in single precision."""
    frozen = all(layout.tensors[piece.tensor].frozen for piece in bucket.pieces)
    return bucket.rule is Rule.GRADIENT and not frozen and bucket.dtype == "float32"


def _named(name: str, codec: Codec | None) -> tuple[str, Codec | None]:
    """A codec and its name, which says its version if it has one."""
    return (f"{name} version {codec.version}" if codec is not None and codec.version else name), codec


def make(name: str, options: Mapping[str, Any]) -> Codec | None:
    """A codec by its name, or by `module:Class`; None for `none`.

    Raises:
        InvalidJob: there is no such codec, or it does not take these options.
    """
    if ":" in name:
        return _build(name, _imported(name), options)
    if name in BUILT_IN:
        return _build(name, BUILT_IN[name], options)
    if name != NONE:
        known = ", ".join([NONE, *BUILT_IN])
        raise InvalidJob(f"compression.codec is {name!r}; expected one of {known}, or module:Class")
    if options:
        raise InvalidJob(f"compression: the codec {NONE} takes no options; given: {', '.join(options)}")
    return None


def _build(name: str, kind: type[Codec], options: Mapping[str, Any]) -> Codec:
    """Raises InvalidJob: it does not take these options."""
    try:
        inspect.signature(kind).bind(**options)
        codec = kind(**options)
    except (TypeError, ValueError) as error:
        takes = ", ".join(str(p).partition(":")[0] for p in inspect.signature(kind).parameters.values())
        raise InvalidJob(
            f"compression: the codec {name} does not take the options {dict(options)}: {error}. It takes: "
            f"{takes or 'none'}"
        ) from error
    _check_momentum(name, codec)
    return codec


def _check_momentum(name: str, codec: Codec) -> None:
    """Raise InvalidJob if a codec has a momentum that no worker can make."""
    momentum: object = codec.momentum
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise InvalidJob(f"the codec {name} has momentum {momentum!r}; expected a number from 0 to below 1")
    if momentum and not codec.feedback:
        raise InvalidJob(
            f"the codec {name} has momentum {momentum}, but no feedback. Workers compute momentum "
            "only for codecs that keep what they do not send: set feedback = True in the class, or leave "
            "momentum at 0"
        )


def _imported(name: str) -> type[Codec]:
    kind = import_own(name, what="the codec", whose="the workers and for the parameter server")
    if not (isinstance(kind, type) and issubclass(kind, Codec)):
        raise InvalidJob(f"the codec {name} is not a subclass of elastic_ps.codec.base.Codec")
    return kind
