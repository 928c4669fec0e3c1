"""Decides whether a worker sends gradients while backward runs, and says why if it does not."""

from __future__ import annotations

from enum import Enum

from elastic_ps.api.consistency import Consistency
from elastic_ps.api.job import OverlapSetting
from elastic_ps.core.partition import SMALLEST_BUCKET_BYTES, Layout, Rule


class Overlap(Enum):
    """The choice; the value is the reason. The names are part of the protocol."""

    USED = "they fill several buckets"
    LOCAL = "mode local sends none"
    SCRIPT = "session.optimizer got overlap=False"
    OPTIMIZERS = "the script has several optimizers"
    NEVER = "parameterServer.overlap is never"
    STALE = "the mode is async or bounded"
    ONE_BUCKET = "they fit into one bucket, see parameterServer.overlap"
    CROWDED = "the workers take every core, see parameterServer.overlap"

    @property
    def in_hooks(self) -> bool:
        """True if gradients are copied while backward runs. The script must not change them afterwards."""
        return self not in (Overlap.LOCAL, Overlap.SCRIPT, Overlap.OPTIMIZERS, Overlap.NEVER)

    def __str__(self) -> str:
        """The choice and the reason in a sentence."""
        if self is Overlap.USED:
            return "gradients are sent during backward"
        return f"gradients are not sent during backward: {self.value}"


def choose(
    setting: OverlapSetting,
    consistency: Consistency,
    layout: Layout,
    *,
    script: bool,
    named: bool,
    crowded: bool,
) -> Overlap:
    """The choice for a worker. With `always`, `layout` has small buckets; see `smallest_bucket`.

    Args:
        setting: the job's `parameterServer.overlap`.
        script: what the script has passed to `session.optimizer` as `overlap`.
        named: the script has passed several optimizers by their names.
        crowded: the buckets are large because the workers take every core of their host.
    """
    if consistency.mode == "local":
        return Overlap.LOCAL
    if not script:
        return Overlap.SCRIPT
    if named:
        return Overlap.OPTIMIZERS
    if setting == "never":
        return Overlap.NEVER
    if consistency.may_be_stale:
        return Overlap.STALE
    sizes = [bucket.nbytes for bucket in layout.pushed if bucket.rule is Rule.GRADIENT]
    if len(sizes) > 1:
        return Overlap.USED
    return Overlap.CROWDED if crowded and sum(sizes) > SMALLEST_BUCKET_BYTES else Overlap.ONE_BUCKET


def smallest_bucket(setting: OverlapSetting, usual: int = SMALLEST_BUCKET_BYTES) -> int:
    """The smallest size of a bucket, in bytes; 1 where a small model is to have several, too."""
    return 1 if setting == "always" else usual
