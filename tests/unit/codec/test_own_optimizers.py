"""Which optimizers a job's parameter servers run, and how one of the user's own is tried out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ps.api.job import parse_spec
from elastic_ps.codec.optimizers import Optimizers, StateEntry, kept_state, restored, try_out, usual_state
from elastic_ps.errors import InvalidJob, InvalidModel
from tests.testing import optimizers

OWN = "tests.testing.optimizers"
LION = f"{OWN}:Lion"


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def test_torch_s_have_their_names_and_the_user_s_their_places() -> None:
    allowed = Optimizers([LION])
    assert allowed.name_of(torch.optim.Adam(parameters())) == "Adam"
    assert allowed.name_of(optimizers.Lion(parameters())) == LION
    assert allowed.class_of("Adam") is torch.optim.Adam
    assert allowed.class_of(LION) is optimizers.Lion


def test_the_default_device_of_a_script_is_not_for_what_is_tried_out() -> None:
    """`meta` stands in for a GPU."""
    usual = usual_state(torch.optim.Adam, {"lr": 0.1}, torch.float32)
    with torch.device("meta"):
        try_out(LION, optimizers.Lion, {"lr": 0.1})
        assert usual_state(torch.optim.Adam, {"lr": 0.1}, torch.float32) == usual
        kept = kept_state(torch.optim.Adafactor, {"lr": 0.1}, torch.float32, [4, 7])
        assert kept["row_var"].shape == (4, 1)


@pytest.mark.parametrize("name", [LION, "os:system", "LBFGS", "Optimizer"])
def test_what_the_job_does_not_name_is_not_imported(name: str) -> None:
    with pytest.raises(InvalidModel, match=f"the optimizer {name} cannot run on the parameter server"):
        Optimizers().class_of(name)


def test_a_class_that_the_job_does_not_name_says_what_to_write() -> None:
    with pytest.raises(InvalidModel, match=rf"parameterServer: \{{optimizers: \['{LION}'\]\}}"):
        Optimizers().name_of(optimizers.Lion(parameters()))


def test_a_class_within_a_function_is_to_be_moved_out_of_it() -> None:
    class Own(torch.optim.SGD):
        pass

    with pytest.raises(
        InvalidModel, match=r"\['tests.unit.codec.test_own_optimizers:Own'\]\}, once it is defined out"
    ):
        Optimizers().name_of(Own(parameters()))


def test_the_same_class_from_elsewhere_is_another_one() -> None:
    class Lion(optimizers.Lion):
        pass

    Lion.__module__, Lion.__qualname__ = "__main__", "Lion"
    with pytest.raises(InvalidModel, match=rf"is a __main__\.Lion, .*: from {OWN} import Lion"):
        Optimizers([LION]).name_of(Lion(parameters()))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.to.be_found:Lion", "be imported: ModuleNotFoundError.*for the parameter server"),
        (f"{OWN}:Tiger", "be imported: AttributeError"),
        (f"{OWN}:NOT_ONE", "is not a subclass of torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_imported_is_named(name: str, words: str) -> None:
    with pytest.raises(InvalidJob, match=rf"parameterServer\.optimizers, {name} .*{words}"):
        Optimizers([name])


@pytest.mark.parametrize("name", ["Lion", "module.Lion", "a:b:c", "../x:y", 3])
def test_a_name_is_module_and_class(name: Any) -> None:
    with pytest.raises(InvalidJob, match=r"parameterServer\.optimizers\.0"):
        parse_spec({"entrypoint": "a:b", "parameterServer": {"optimizers": [name]}}, source="job")


@pytest.mark.parametrize(
    "kind", [optimizers.Lion, optimizers.Counted, torch.optim.Adam, torch.optim.SGD, torch.optim.NAdam]
)
def test_what_treats_each_element_by_itself_may_run(kind: type[torch.optim.Optimizer]) -> None:
    try_out("own", kind, {"lr": 0.1})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (optimizers.Normed, r"steps pieces of a parameter differently from the whole.* whole_tensors = True"),
        (optimizers.Together, "steps a parameter differently when there are others"),
        (optimizers.Sketched, "'sketch' with a dimension that is neither 1 nor one of the parameter's"),
        (optimizers.Forgetful, "after a restart from it, the optimizer steps differently"),
        (optimizers.Referring, "as numbers and copies: the memory of gradients is used again"),
        (optimizers.Listed, "its state has 'before', which is a list"),
        (optimizers.Factored, r"a tensor 'first' of torch\.float32 with shape \[1\]"),
        (optimizers.Failing, "it fails with NotImplementedError"),
    ],
)
def test_what_cannot_run_says_why(kind: type[torch.optim.Optimizer], words: str) -> None:
    with pytest.raises(InvalidModel, match=f"optimizer own .*{words}"):
        try_out("own", kind, {"lr": 0.1})


def test_hyperparameters_that_it_does_not_take_are_said() -> None:
    with pytest.raises(InvalidModel, match=r"own .*it fails with ValueError: lr is -1"):
        try_out("own", optimizers.Lion, {"lr": -1, "betas": [0.9, 0.99], "decay": 0.0})


def test_numbers_are_numbers_again() -> None:
    group = {"lr": 0.1}
    assert usual_state(optimizers.Counted, group, torch.float32) == {"step": ("float64", True)}
    saved = {"step": torch.tensor(7.0, dtype=torch.float64), "other": torch.ones(2)}
    found = restored(optimizers.Counted, group, [2], saved)
    assert (found["step"], type(found["step"])) == (7, int)
    assert torch.equal(found["other"], saved["other"])


@pytest.mark.parametrize("kind", [optimizers.Lamb, optimizers.Lars])
@pytest.mark.parametrize("shapes", [[(2,)], [(20, 3)], [(), (2,), (2, 3, 4, 5)]])
def test_what_steps_each_tensor_by_itself_may_run(
    kind: type[torch.optim.Optimizer], shapes: list[tuple[int, ...]]
) -> None:
    try_out("own", kind, {"lr": 0.1}, shapes)


def test_a_state_that_depends_on_sizes_is_refused() -> None:
    try_out("own", optimizers.Sized, {"lr": 0.1}, [(4, 20), (20,)])
    with pytest.raises(
        InvalidModel,
        match=r"own cannot run.* of shape \[6, 20\].* has 'row' of shape \[6, 1\] instead of 'full' of shape",
    ):
        try_out("own", optimizers.Sized, {"lr": 0.1}, [(4, 20), (6, 20)])


def test_the_shapes_of_the_state_follow_from_that_of_the_parameter() -> None:
    group = {"lr": 0.1}
    assert kept_state(torch.optim.Adafactor, group, torch.float64, [4, 7, 9]) == {
        "step": StateEntry("float32", True, (), None),
        "row_var": StateEntry("float64", True, (4, 7, 1), None),
        "col_var": StateEntry("float64", True, (4, 1, 9), None),
    }
    assert kept_state(torch.optim.Adafactor, group, torch.float32, [5, 1])["row_var"].scalar is False
    assert kept_state(torch.optim.Muon, group, torch.float32, [4, 7]) == {
        "momentum_buffer": StateEntry("float32", False, (4, 7), None)
    }
    assert kept_state(torch.optim.Adam, group, torch.float32, [4, 7])["exp_avg"].shape == (28,)
    saved = {"row_var": torch.arange(28.0), "step": torch.tensor(3.0)}
    found = restored(torch.optim.Adafactor, group, [4, 7, 9], saved)
    assert (found["row_var"].shape, found["step"]) == ((4, 7, 1), 3)
