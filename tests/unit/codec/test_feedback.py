"""What codecs have left over counts as long as its step does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ps.codec.feedback import Feedback, Update

TERM, VERSION = 1, 7


def tensor(value: float) -> torch.Tensor:
    return torch.full((3,), value)


class Steps:
    """A worker that sends nothing of a step, or all that waits: what each step leaves over is known."""

    def __init__(self) -> None:
        self.feedback = Feedback()
        self.number = -1

    def push(
        self,
        gradient: float,
        *,
        sends: float = 0.0,
        version: int = VERSION,
        attempt: int = 0,
        term: int = TERM,
    ) -> None:
        """The next step is encoded and pushed."""
        self.number += 1
        self.feedback.begin(self.number)
        self.feedback.pushed((term, version, attempt))
        waiting = self.feedback.rests.get(0)
        total = tensor(gradient) + (0.0 if waiting is None else waiting)
        self.feedback.note(0, Update(waiting, total - sends), {0: {"step": self.number}})

    def again(self, attempt: int) -> None:
        self.feedback.pushed((TERM, VERSION, attempt))

    def in_sums(self) -> None:
        self.feedback.applied(in_sums=True)

    def in_model(self) -> None:
        self.feedback.applied(in_sums=False)

    def settle(self, made: int, *, version: int = VERSION, term: int = TERM) -> None:
        self.feedback.settle(made=made, term=term, version=version)

    @property
    def left(self) -> float:
        waiting = self.feedback.rests.get(0)
        return 0.0 if waiting is None else float(waiting[0])


def begun() -> Steps:
    """One step is in the model: it has left 100 over. Two more, with 1 and 10, are in a round's sums."""
    steps = Steps()
    steps.push(100, version=VERSION - 1)
    steps.in_model()
    for gradient in (1, 10):
        steps.push(gradient)
        steps.in_sums()
    assert steps.left == 111
    return steps


def test_when_the_round_is_committed_all_of_its_steps_count() -> None:
    steps = begun()
    steps.push(1000)
    steps.in_model()
    steps.settle(0, version=VERSION + 5)
    assert steps.left == 1111


def test_when_the_round_starts_again_only_the_step_that_is_pushed_again_counts() -> None:
    steps = begun()
    steps.push(1000, sends=500)
    steps.again(1)
    steps.in_model()
    assert steps.left == 600


def test_what_a_void_step_would_have_sent_later_was_sent_too_much() -> None:
    """The last step has sent all that waited. The next one makes up for what should not have been sent."""
    steps = begun()
    steps.push(1000, sends=1111)
    steps.again(2)
    steps.in_model()
    assert steps.left == -11


def test_steps_of_the_new_attempt_are_not_void_by_it() -> None:
    steps = begun()
    steps.push(1000, attempt=1)
    assert steps.left == 100
    steps.in_sums()
    steps.push(10_000, attempt=1)
    steps.in_sums()
    assert steps.left == 11_100
    steps.push(100_000, attempt=2)
    steps.in_model()
    assert steps.left == 100_100


@pytest.mark.parametrize(("made", "left"), [(3, 111), (1, 100)])
def test_a_later_version_tells_what_became_of_them(made: int, left: int) -> None:
    """As when the worker was turned away after them, and hears of the round no more."""
    steps = begun()
    steps.settle(made)
    assert steps.left == 111, "the round is still open"
    steps.settle(made, version=VERSION + 1)
    assert steps.left == left


@pytest.mark.parametrize(("made", "left"), [(4, 1111), (1, 100)])
def test_a_new_term_continues_with_them_or_without(made: int, left: int) -> None:
    """The step that was being pushed may be in the model, though this worker has never heard of it."""
    steps = begun()
    steps.push(1000)
    steps.settle(made, term=TERM + 1, version=VERSION + (made == 4))
    assert steps.left == left
    steps.push(10_000, term=TERM + 1)
    assert steps.left == left


def test_a_worker_that_comes_again_to_the_same_round_does_not_know_yet() -> None:
    steps = begun()
    steps.push(1000)
    steps.settle(1)
    assert steps.left == 1111
    steps.settle(1, version=VERSION + 1)
    assert steps.left == 100


def test_a_step_that_is_given_up_leaves_nothing_over() -> None:
    steps = begun()
    steps.push(1000)
    steps.push(10_000)
    steps.in_model()
    assert steps.left == 10_111


def test_what_codecs_keep_goes_back_too() -> None:
    steps = begun()
    assert steps.feedback.state(0, 0) == {"step": 2}
    steps.settle(1, version=VERSION + 1)
    assert steps.feedback.state(0, 0) == {"step": 0}
    steps.feedback.forget_states()
    assert steps.feedback.state(0, 0) == {}
    assert steps.left == 100, "what is left over is not a codec's own"


@given(st.data())
def test_what_is_in_the_model_and_what_waits_are_the_gradients_of_its_steps(data: st.DataObject) -> None:
    """However rounds go: committed, started again, or over without the worker, in any order."""
    steps, arrived, given_ = Steps(), 0.0, 0.0
    version, attempt = 0, 0
    open_: list[tuple[float, float]] = []  # gradients, and what was sent, in the sums of the open round
    for place in range(data.draw(st.integers(1, 12))):
        gradient, sends = float(2**place), float(data.draw(st.integers(0, 50)))
        steps.push(gradient, sends=sends, version=version, attempt=attempt)
        match data.draw(st.sampled_from(["sums", "commit", "restart", "behind", "lost"])):
            case "restart":  # it is pushed again, and in the sums
                attempt += 1
                open_ = [(gradient, sends)]
                steps.feedback.pushed((TERM, version, attempt))
                steps.in_sums()
            case "sums":
                open_.append((gradient, sends))
                steps.in_sums()
            case "commit":
                open_.append((gradient, sends))
                given_, arrived = given_ + sum(g for g, _ in open_), arrived + sum(s for _, s in open_)
                open_, version, attempt = [], version + 1, 0
                steps.in_model()
            case "behind":  # the step is void; the others are in the version, as the worker hears later
                made = steps.number if open_ else 0
                given_, arrived = given_ + sum(g for g, _ in open_), arrived + sum(s for _, s in open_)
                open_, version, attempt = [], version + 1, 0
                steps.settle(made, version=version)
            case "lost":  # and so are the others
                open_, version, attempt = [], version + 1, 0
                steps.settle(0, version=version)
    steps.settle(0, version=version + 1)
    assert steps.left == given_ - arrived
