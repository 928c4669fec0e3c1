"""Whether a job learns nothing, by the loss that its scripts report, and what to change then.

A loss is noisy, so what is compared are means over windows, each a small part of the job. And not every loss
falls while a model learns: a GAN's generator is judged by a critic that learns, too, and in reinforcement
learning a loss goes up and down around zero. So a loss that is ever negative is judged only by whether it is
finite, since it has no bound to fall to; and any other has to be bad for long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from elastic_ps.api.compression import Compression
from elastic_ps.api.consistency import Consistency

WINDOWS = 50
"""Into how many parts of equal size a job is divided."""

LONG = 0.1
"""Of the job: what lasts for so long is no chance."""

LATE = 0.5
"""Of the job: until then a loss that has not fallen may do so yet, as while the learning rate warms up."""

FEWEST = 30
"""Losses before which nothing is said of their size: a window has less than one of them then."""

FAR = 10.0
"""Times the best loss, and above that of the start: far above the best."""

BETTER = 0.98
"""Times the loss at the start: from there on it is no better. A network that has died comes to 0.995."""

NEVER_BETTER = 0.95
"""Times the first loss: if no window came below that, the first steps may have made the model worse."""

CLEARLY_BETTER = 0.9
"""Times the loss at the start: below that it is better again, when it was found to be no better."""

AT_ONCE = 3.0
"""Times the first loss: if the mean of the first window is above that, the model has diverged within it."""


class Finding(NamedTuple):
    """That a job learns nothing: `reason` is one word, as in a condition, `text` is for a person."""

    reason: str
    text: str


@dataclass
class Trend:
    """What is remembered of the losses so far.

    Attributes:
        at: how much of the job was done at the newest one, from 0 to 1.
        losses: how many were finite.
        unjudged: their size says nothing: one was negative, or the first one came after `LONG`.
        first: the first of them; None before.
        start: what it was before anything was learned: the mean of the first window, or `first` if the model
            diverged within it. None before that is over.
        best, latest: of the means of windows, the least and the last; 0 before there is a `start`.
        window, count, mean: the open window's number, how many losses it has, and their mean.
        above, flat: since which window the loss has been far above its best, and no better than at the start;
            None: it is not.
        odd: when, as in `at`, one was not finite last; None if all have been finite for `LONG` since.
    """

    at: float = 0.0
    losses: int = 0
    unjudged: bool = False
    first: float | None = None
    start: float | None = None
    best: float = 0.0
    latest: float = 0.0
    window: int = 0
    count: int = 0
    mean: float = 0.0
    above: int | None = None
    flat: int | None = None
    odd: float | None = None

    def add(self, done: float, loss: float) -> None:
        """There is another loss.

        Args:
            done: how much of the job is done, from 0 to 1; not less than before.
            loss: that a version was made with; NaN if a gradient was not finite.
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
        self.losses += 1
        self.window, self.count = window, self.count + 1
        self.mean += (loss - self.mean) / self.count

    def _close(self, first: float) -> None:
        """The open window is over."""
        mean = self.mean
        if self.start is None:
            self.start = self.best = first if mean > AT_ONCE * first else mean
        far = mean > max(FAR * self.best, self.start)
        best = self.best = min(self.best, mean)
        start = min(first, self.start) if best >= NEVER_BETTER * first else self.start
        flat = mean >= (CLEARLY_BETTER if self._no_better else BETTER) * start
        self.above = (self.window if self.above is None else self.above) if far else None
        self.flat = (self.window if self.flat is None else self.flat) if flat else None
        self.latest = mean
        self.count = 0

    def begin_again(self) -> None:
        """A term continues from here: remember how good the loss was, and forget what was found.

        A person may have changed something. So that is found again only when it has lasted for as long again.
        """
        self.at, self.count = 0.0, 0
        self.above = self.flat = self.odd = None

    @property
    def found(self) -> Finding | None:
        """Why the job learns nothing; None if it does, or if that cannot be said."""
        if self.odd is not None:
            return Finding("LossNotFinite", "a loss, or a gradient, was NaN or infinite")
        if self.unjudged or self.losses < FEWEST or self.start is None:
            return None
        now = f"the loss is {self.latest:.4g}"
        if self._lasts(self.above):
            text = f"{now}, and has been far above its best, {self.best:.4g}, for a tenth of the job"
            return Finding("LossFarAboveBest", text)
        if self._no_better:
            text = f"{now} after {self.at:.0%} of the job, no better than at the start, when it was "
            return Finding("LossNoBetter", f"{text}{self.start:.4g}")
        return None

    @property
    def _no_better(self) -> bool:
        return self.at >= LATE and self._lasts(self.flat)

    def _lasts(self, since: int | None) -> bool:
        return since is not None and self.window - since >= LONG * WINDOWS


def advice(finding: Finding, consistency: Consistency, compression: Compression) -> str:
    """What to change in a job of this kind, in sentences."""
    ways = ["lower the learning rate", *_of_mode(consistency), *_of_codecs(compression)]
    text = f"Try one of these: {'; '.join(ways)}"
    if finding.reason == "LossNotFinite":
        return f"{text}. If the loss has not grown before, look for the record, or the operation, behind it"
    return (
        f'{text}. Report a loss that is not meant to fall, as a GAN\'s, by another name than "loss", as in '
        'session.metric("generator_loss", value): it is not judged then'
    )


def _of_mode(consistency: Consistency) -> list[str]:
    steps, staleness = consistency.steps or 1, consistency.max_staleness or 1
    if consistency.mode == "local":
        fewer = [f"set consistency.steps to fewer than {steps}"] if steps > 1 else []
        return [*fewer, *(["set consistency.outer: average"] if consistency.outer != "average" else [])]
    if not consistency.may_be_stale:
        return ["limit the norm of the gradient, as max_grad_norm of session.optimizer does"]
    ways = ["set consistency.stalenessScale: damped"] if consistency.scale != "damped" else []
    if consistency.mode == "async":
        return [*ways, "set consistency.mode: bounded, with a small maxStaleness"]
    return [*ways, *([f"set consistency.maxStaleness to less than {staleness}"] if staleness > 1 else [])]


EXACT = ("none", "changed", "bf16", "fp16", "int8")
"""Codecs that lose too little of a gradient, or of a value, to keep a model from learning."""


def _of_codecs(compression: Compression) -> list[str]:
    lossy = {compression.codec, *(rule.codec for rule in compression.rules)} - {*EXACT}
    ways = [
        f"send gradients with a codec that loses less than {each}, as int8 does" for each in sorted(lossy)
    ]
    if compression.values not in EXACT:
        ways.append(f"send values with a codec that loses less than {compression.values}, as bf16 does")
    return ways
