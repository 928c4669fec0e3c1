"""Chooses the codec of each part of a model, for gradients and values; the same on workers and servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import torch

from elastic_ps.api.codecs import with_options
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
"""The codecs by their names in `spec.compression`, except `none`."""

VALUES: Mapping[str, type[Codec]] = {"bf16": Bf16}
"""The codecs of values. They have no random numbers and no state: equal values give equal bytes."""

DELTAS: Mapping[str, type[Codec]] = {
    "changed": Changed,
    "int8": Int8,
    "int4": Int4,
    "topk": TopK,
    "signsgd": SignSGD,
}
"""The codecs of changes of values. They keep no state."""

_SIDE = 256
"""The rows and columns of the random matrix that codecs are tried on; see `Plan.sent`."""


class Run(NamedTuple):
    """Consecutive pieces of a bucket that are encoded together.

    Attributes:
        name: the name of the codec.
        codec: the codec; None: the elements are sent unchanged.
        elements: their slice of the bucket.
    """

    name: str
    codec: Codec | None
    elements: slice

    @property
    def length(self) -> int:
        return int(self.elements.stop - self.elements.start)


class Plan:
    """Chooses codecs by `spec.compression`.

    Attributes:
        compression: the compression.
        name: the name of the default codec of gradients.
        auto: the default codec if the worker has to choose it; else None.
        values, deltas: the names of the codecs of values, and of their changes.
    """

    def __init__(self, compression: Compression) -> None:
        """Raises InvalidJob if a codec does not exist, cannot be imported or does not take its options, or if
        the package of the lossless one is missing.
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
        self.values, self._values = self._followed(NONE if changes else chosen, values)
        self.deltas, self._deltas = NONE, None
        if changes:
            deltas = _build(chosen, DELTAS[chosen], compression.values_options)
            self.deltas, self._deltas = self._followed(*_named(chosen, deltas))

    def _followed(self, name: str, codec: Codec | None) -> tuple[str, Codec | None]:
        """A codec and its name, followed by the lossless one if the job has one."""
        if self._lossless == NONE:
            return name, codec
        return f"{name}+{self._lossless}", LOSSLESS[self._lossless](codec or Plain())

    @property
    def names(self) -> list[str]:
        """The names of all codecs, sorted, with versions if they have any; `none` if there are no others."""
        names = {self.name, self.values, self.deltas, *(name for _, name, _ in self._rules[:-1])}
        return sorted(names - {NONE}) or [NONE]

    @cached_property
    def momentum(self) -> float:
        """The momentum that workers apply to gradients, from the first codec that has any; 0 if none has."""
        codecs = (codec for _, _, codec in [self._rules[-1], *self._rules])
        return next((codec.momentum for codec in codecs if codec is not None and codec.momentum), 0.0)

    @property
    def encodes(self) -> bool:
        """Whether any gradient is encoded."""
        return self._lossless != NONE or any(codec is not None for _, _, codec in self._rules)

    @property
    def sent(self) -> float:
        """An estimate of the share of a model's bytes that is sent: the mean of gradients and values, above
        0.

        It is measured with random numbers and the default codec. It is 1 for codecs of the user, and if
        workers choose. With `changed`, as many values are sent as gradients.
        """
        _, name, codec = self._rules[-1]
        known = codec is None or type(codec) in BUILT_IN.values()
        if known and codec is not None and codec.by_piece:
            codec = codec.for_matrix(_SIDE, _SIDE)
        gradients = _share(self._followed(name, codec)[1]) if known else 1.0
        if self._deltas is not None and self._deltas.bits:
            return gradients
        return (gradients + _share(self._deltas or self._values)) / 2

    def of(self, tensor: TensorSpec) -> tuple[str, Codec | None]:
        """The codec of a tensor, by the first rule that matches one of its names."""
        return next((name, codec) for match, name, codec in self._rules if _matches(match, tensor))

    def unmatched(self, tensors: Iterable[TensorSpec]) -> list[str]:
        """The patterns of rules that match none of these tensors."""
        return [match for match, *_ in self._rules[:-1] if not any(_matches(match, each) for each in tensors)]

    @property
    def encodes_values(self) -> bool:
        """Whether values are encoded, so that all workers have the same decoded ones."""
        return self._values is not None or self._deltas is not None

    def of_values(self, layout: Layout, bucket: Bucket) -> Codec | None:
        """The codec of a bucket's values; None: they are sent unchanged.

        That holds for values that no optimizer steps or that are frozen when the job begins, since they are
        sent once, and for half precision and `float64`.
        """
        return self._values if _changes(layout, bucket) else None

    def of_deltas(self, layout: Layout, bucket: Bucket) -> Codec | None:
        """The codec of changes of a bucket's values; None: all values are sent again."""
        return self._deltas if _changes(layout, bucket) else None

    def as_pulled(self, layout: Layout, bucket: Bucket, values: torch.Tensor) -> torch.Tensor:
        """These values as a worker decodes them; `values` itself if they are sent unchanged."""
        codec = self.of_values(layout, bucket)
        if codec is None:
            return values
        decoded = torch.empty_like(values)
        codec.decode(codec.encode(values, {}, torch.Generator()), decoded)
        return decoded

    def runs(self, layout: Layout, bucket: Bucket) -> list[Run]:
        """The runs of a bucket; empty if it is sent unchanged. Only gradients are encoded, and no tables."""
        if (
            not self.encodes
            or bucket.rule is not Rule.GRADIENT
            or layout.width(bucket)
            or not bucket.dtype.endswith(("16", "32", "64"))
        ):
            return []
        runs: list[Run] = []
        stop = 0
        for piece in bucket.pieces:
            coded = self._of_piece(layout.tensors[piece.tensor], piece, bucket)
            start, stop = stop, stop + piece.length
            if runs and runs[-1][:2] == coded and not (coded[1] is not None and coded[1].by_piece):
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
        name, codec = self.of(tensor)
        if codec is not None and codec.by_piece:
            rows, rest = divmod(piece.length, tensor.row)
            codec = codec.for_matrix(rows, tensor.row) if not rest else None
        exact = codec is not None and codec.lossless
        if codec is None or (exact and bucket.dtype == "float64"):  # codecs get float32
            return NONE, None
        return name, codec


def _matches(pattern: str, tensor: TensorSpec) -> bool:
    return any(fnmatchcase(name, pattern) for name in (tensor.name, *tensor.aliases))


def _share(codec: Codec | None) -> float:
    """The share of random numbers' bytes that a codec sends, after its warm-up."""
    if codec is None:
        return 1.0
    random = torch.Generator("cpu").manual_seed(0)
    sample = torch.randn(_SIDE * _SIDE, generator=random, **FLOATS)
    return pack(codec.encode(sample, {"version": 1 << 40}, random)).nbytes / sample.nbytes


def _changes(layout: Layout, bucket: Bucket) -> bool:
    """Whether an optimizer steps the bucket, in single precision, and it is of no table."""
    frozen = all(layout.tensors[piece.tensor].frozen for piece in bucket.pieces)
    dense = bucket.rule is Rule.GRADIENT and not layout.width(bucket)
    return dense and not frozen and bucket.dtype == "float32"


def _named(name: str, codec: Codec | None) -> tuple[str, Codec | None]:
    """A codec and its name, with its version if it has one."""
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
    """Create a codec. Raises InvalidJob if it does not take these options."""
    try:
        codec = with_options(kind, name, options)
    except ValueError as error:
        raise InvalidJob(f"compression: {error}") from error
    _check_momentum(name, codec)
    return codec


def _check_momentum(name: str, codec: Codec) -> None:
    """Raise InvalidJob if a codec has a momentum that workers cannot apply."""
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
