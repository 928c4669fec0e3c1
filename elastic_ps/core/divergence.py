"""Judges by the reported loss whether a job learns, and advises what to change if it does not.

A loss is noisy, so means over windows are compared, each a small part of the job. Not every loss falls while
a model learns: a GAN's generator is judged by a critic that also learns, and in reinforcement learning a loss
moves around zero. So a loss that is ever negative has no bound to fall to, and only has to be finite. Any
other loss has to be bad for long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from elastic_ps.api.compression import MAX_ERROR, Compression
from elastic_ps.api.consistency import Consistency
from elastic_ps.api.fields import AUTO

WINDOWS = 50
"""The number of windows of a job."""

LONG = 0.1
"""The part of the job after which a bad loss is not chance."""

LATE = 0.5
"""The part of the job in which a loss may not have fallen yet, for example during a warm-up."""

FEWEST = 30
"""The number of losses before which they are not judged: a window has less than one of them then."""

FAR = 10.0
"""A loss is far above the best if it is above this multiple of it, and above the loss at the start."""

BETTER = 0.98
"""A loss is no better than at the start from this multiple on. A dead network reaches 0.995."""

NEVER_BETTER = 0.95
"""If no window is below this multiple of the first loss, the first steps may have made the model worse."""

CLEARLY_BETTER = 0.9
"""A loss that was found no better than at the start is better again below this multiple of it."""

AT_ONCE = 3.0
"""If the first window's mean is above this multiple of the first loss, the model has diverged within it."""

STEADY = 0.06
"""If losses change more from one to the next, the first one is chance: no loss has to be below it."""

NEWEST = 0.1
"""The weight of the newest change in the mean change."""


class Finding(NamedTuple):
    """Why a job does not learn. `reason`: one word, as in a condition; `text`: for a person."""

    reason: str
    text: str


@dataclass
class Trend:
    """A summary of the losses so far.

    Attributes:
        at: the part of the job that was done at the newest loss, from 0 to 1.
        losses: the number of finite losses.
        unjudged: whether their size is not judged: one was negative, or the first one came after `LONG`.
        first: the first loss; None before there is one.
        start: the mean of the first window, or of the second if the model had exploded in the first; None
            before its end.
        last, change: the newest loss, and the mean change from one loss to the next, as a part of the larger.
        best, latest: the least and the last mean of a window; 0 before there is a `start`. If the model has
            diverged within the first window, `best` begins with `first`.
        window, count, mean: the open window's number, the number of its losses, and their mean.
        above, flat: the window since which the loss has been far above its best, or no better than at the
            start; None if it is not.
        odd: the last time, as in `at`, that a loss was not finite; None if all have been finite for `LONG`.
    """

    at: float = 0.0
    losses: int = 0
    unjudged: bool = False
    first: float | None = None
    start: float | None = None
    last: float = 0.0
    change: float = 0.0
    best: float = 0.0
    latest: float = 0.0
    window: int = 0
    count: int = 0
    mean: float = 0.0
    above: int | None = None
    flat: int | None = None
    odd: float | None = None

    def add(self, done: float, loss: float) -> None:
        """Add a loss.

        Args:
            done: the part of the job that is done, from 0 to 1; not less than before.
            loss: the loss of a version; NaN if a gradient was not finite.
        """
        self.at = done
        if not math.isfinite(loss):
            self.odd = done
            return
        if self.odd is not None and done - self.odd >= LONG:
            self.odd = None
        if self.first is None:
            self.first, self.unjudged = loss, done > LONG
        self.unjudged |= loss < 0
        window = int(done * WINDOWS)
        if self.count and window != self.window:
            self._close(self.first)
        if self.losses and (larger := max(loss, self.last)) > 0:
            self.change += NEWEST * (abs(loss - self.last) / larger - self.change)
        self.losses, self.last = self.losses + 1, loss
        self.window, self.count = window, self.count + 1
        self.mean += (loss - self.mean) / self.count

    def _close(self, first: float) -> None:
        """Close the open window."""
        mean = self.mean
        back = self.start is not None and self.latest == self.start > AT_ONCE * max(first, mean)
        if self.start is None or back:  # the model had exploded in the first window
            self.start = mean
            self.best = first if self._at_once else mean
        far = mean > max(FAR * self.best, first if self._at_once else self.start)
        self.best = min(self.best, mean)
        flat = mean >= (CLEARLY_BETTER if self._no_better else BETTER) * self._untrained
        self.above = (self.window if self.above is None else self.above) if far else None
        self.flat = (self.window if self.flat is None else self.flat) if flat else None
        self.latest = mean
        self.count = 0

    @property
    def _at_once(self) -> bool:
        """Whether the model seems to have diverged within the first window; never where losses are noisy."""
        return self.change <= STEADY and (self.start or 0.0) > AT_ONCE * (self.first or math.inf)

    @property
    def _untrained(self) -> float:
        """The loss before anything was learned: that of the first window, or the first one of all."""
        first, start = self.first or math.inf, self.start or 0.0
        alone = self.change <= STEADY and (self._at_once or self.best >= NEVER_BETTER * first)
        return min(first, start) if alone else start

    def begin_again(self) -> None:
        """Begin a term: remember how good the loss was, and forget the finding.

        The user may have changed something, so a problem has to last for as long again.
        """
        self.at, self.count = 0.0, 0
        self.above = self.flat = self.odd = None

    @property
    def found(self) -> Finding | None:
        """Why the job does not learn; None if it does, or if that is unknown."""
        if self.odd is not None:
            return Finding("LossNotFinite", "a loss or a gradient was NaN or infinite")
        if self.unjudged or self.losses < FEWEST or self.start is None:
            return None
        now = f"the loss is {self.latest:.4g}"
        if self._lasts(self.above):
            text = f"{now}, and has been far above its best, {self.best:.4g}, for a tenth of the job"
            return Finding("LossFarAboveBest", text)
        if self._no_better:
            text = f"{now} after {self.at:.0%} of the job, no better than at the start, when it was "
            return Finding("LossNoBetter", f"{text}{self._untrained:.4g}")
        return None

    @property
    def _no_better(self) -> bool:
        return self.at >= LATE and self._lasts(self.flat)

    def _lasts(self, since: int | None) -> bool:
        return since is not None and self.window - since >= LONG * WINDOWS


def advice(finding: Finding, consistency: Consistency, compression: Compression) -> str:
    """Advice on what to change in a job of this kind."""
    ways = ["lower the learning rate", *_of_mode(consistency), *_of_codecs(compression)]
    text = f"Try one of these: {'; '.join(ways)}"
    if finding.reason == "LossNotFinite":
        return (
            f"{text}. If the loss has not grown before, look for the record or the operation that causes it"
        )
    return (
        f"{text}. If the loss is not meant to fall, like that of a GAN, report it under a name other than "
        '"loss", such as session.metric("generator_loss", value): then it is not judged'
    )


def _of_mode(consistency: Consistency) -> list[str]:
    steps, staleness = consistency.steps or 1, consistency.max_staleness or 1
    if consistency.mode == "local":
        fewer = [f"set consistency.steps to fewer than {steps}"] if steps > 1 else []
        other = "start a new job with consistency.outer: average"
        return [*fewer, *([other] if consistency.outer != "average" else [])]
    if not consistency.may_be_stale:
        return ["limit the norm of the gradient with max_grad_norm of session.optimizer"]
    ways = ["set consistency.stalenessScale: damped"] if consistency.scale != "damped" else []
    if consistency.mode == "async":
        return [*ways, "set consistency.mode: bounded, with a small maxStaleness"]
    return [*ways, *([f"set consistency.maxStaleness to less than {staleness}"] if staleness > 1 else [])]


EXACT = ("none", "changed", "bf16", "fp16", "int8")
"""Codecs that lose too little to keep a model from learning."""


def _of_codecs(compression: Compression) -> list[str]:
    lossy = {compression.codec, *(rule.codec for rule in compression.rules)} - {*EXACT, AUTO}
    ways = [
        f"send gradients with a codec that loses less than {each}, such as int8" for each in sorted(lossy)
    ]
    most = MAX_ERROR if compression.max_error is None else compression.max_error
    if compression.codec == AUTO and most:
        ways.append(f"set compression.maxError to less than {most:g}")
    if compression.values not in EXACT:
        ways.append(f"send values with a codec that loses less than {compression.values}, such as bf16")
    return ways
