"""The optimizers of the parameter server: which may run, their state, and their arguments.

The permitted ones of torch and our own treat every element separately. A user's class is tried before it is
used, see `try_out`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic_ps.codec.delayed import OURS
from elastic_ps.codec.memory import name_of
from elastic_ps.codec.several import SEPARATOR, Kind, name_of_all, parts_of
from elastic_ps.core.partition import ITEM_SIZE, TensorSpec
from elastic_ps.core.settings import KEEP_ZEROS, LIMITS, check_optimizer
from elastic_ps.errors import InvalidJob, InvalidModel
from elastic_ps.process.lifecycle import import_own


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of gradients, and of the values that the optimizer steps, the *master*.

    Half precision is too coarse for sums of small numbers (Micikevicius et al. 2018, "Mixed Precision
    Training").
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


LAZY: Mapping[str, Sequence[str]] = {
    "SGD": ("momentum", "weight_decay"),
    "Adagrad": ("weight_decay",),
    "SparseAdam": (),
}
"""The optimizers that can leave rows without a gradient alone, and their hyperparameters that must be 0."""


def check_tables(tensors: Iterable[TensorSpec], optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidModel if an optimizer would change rows of a table that have no gradient.

    Or if `SparseAdam` would get a dense gradient, which it does not take.

    Args:
        optimizer: the name of its class, or those of each parameter group; see `Optimizers.name_of`.
        groups: the hyperparameters of each parameter group.
    """
    names = optimizer.split(SEPARATOR)
    for tensor in tensors:
        if tensor.group < 0:
            continue
        name, group = names[tensor.group % len(names)], groups[tensor.group]
        if not tensor.sparse:
            if name == "SparseAdam":
                raise InvalidModel(
                    f"{tensor.name} has dense gradients here, which SparseAdam does not take. Use it for the "
                    "weights of nn.Embedding(..., sparse=True) and nn.EmbeddingBag(..., sparse=True) alone, "
                    f"on parameter servers and with one process for each worker. {_SEVERAL}"
                )
            continue
        if name not in LAZY:
            raise InvalidModel(
                f"{tensor.name} has sparse gradients, but {name} changes all rows in each step, also those "
                f"without a gradient. Use one of {', '.join(LAZY)} for it, or sparse=False. {_SEVERAL}"
            )
        for key in (*LAZY[name], *LIMITS, KEEP_ZEROS):
            if group.get(key):
                raise InvalidModel(
                    f"{tensor.name} has sparse gradients, but {key}={group[key]!r} of parameter group "
                    f"{tensor.group} is about all rows in each step, also those without a gradient. Leave "
                    f"{key} out for it, by a parameter group of its own, or use sparse=False"
                )


_SEVERAL = (
    "A job may have several optimizers: session.optimizer({'tables': torch.optim.SparseAdam(tables), 'rest': "
    "torch.optim.Adam(rest)}, model)"
)


def second_momentum(groups: Iterable[Mapping[str, Any]], sent: float) -> str:
    """Why an optimizer cannot have these groups if gradients already have momentum; "" if it can.

    Args:
        sent: the momentum that workers apply to their gradients; 0 for none.
    """
    if not sent:
        return ""
    for number, group in enumerate(groups):
        for name in ("momentum", "betas"):
            own = group.get(name, 0)
            if own[0] if isinstance(own, Sequence) and own else own:
                return (
                    f"{name} is {own} in parameter group {number} of the optimizer, but compression.options "
                    f"has momentum {sent} already, and there cannot be two. Use torch.optim.SGD(..., "
                    "momentum=0), and no scheduler that sets one, or leave it out of the options"
                )
    return ""


class Optimizers:
    """The classes of optimizers that a job's parameter servers run.

    Args:
        own: the user's classes, as `module:Class`. No other class is imported, whatever a worker or a
            checkpoint asks for.

    Raises:
        InvalidJob: one cannot be imported, or is not an optimizer.
    """

    def __init__(self, own: Sequence[str] = ()) -> None:
        self._own = {name: _imported(name) for name in own}

    def class_of(self, name: str) -> Kind:
        """The class with this name. Raises InvalidModel if no such class may run on the parameter server."""
        if ":" in name:
            if name not in self._own:
                raise InvalidModel(
                    f"the optimizer {name} cannot run on the parameter server: the job names "
                    f"{', '.join(self._own) or 'none'} in parameterServer.optimizers"
                )
            return self._own[name]
        check_optimizer(name)
        kind: Kind = OURS.get(name) or getattr(torch.optim, name)
        return kind

    def classes_of(self, name: str, groups: int) -> list[Kind]:
        """The class of each parameter group of an optimizer, or of several, with this name.

        Raises:
            InvalidModel: see `class_of`; or the name has another number of groups.
        """
        names = name.split(SEPARATOR)
        if len(names) == 1:
            return [self.class_of(name)] * groups
        if len(names) != groups:
            raise InvalidModel(
                f"the optimizers {name} have {len(names)} parameter groups, but there are {groups}"
            )
        return [self.class_of(each) for each in names]

    def name_of(self, optimizer: torch.optim.Optimizer) -> str:
        """The name of an optimizer's class, or for several optimizers those of each parameter group.

        Raises:
            InvalidModel: the parameter server does not run it; the message says what to do.
        """
        return name_of_all(parts_of(optimizer), self._name_of_one)

    def _name_of_one(self, optimizer: torch.optim.Optimizer) -> str:
        kind = type(optimizer)
        if _computes_by_itself(optimizer):
            raise InvalidModel(
                f"the optimizer {kind.__module__}.{kind.__qualname__} cannot run on the parameter server, "
                "which gets one gradient for each step: its step computes gradients again (a closure), or "
                "wraps another optimizer. Use consistency: {mode: local}, where the worker runs any "
                "optimizer itself, and call optimizer.step(closure) if it needs one"
            )
        for name, own in self._own.items():
            if kind is own:
                return name
        if kind is not (OURS.get(kind.__name__) or getattr(torch.optim, kind.__name__, None)):
            raise InvalidModel(_not_allowed(kind, self._own))
        check_optimizer(kind.__name__)
        return kind.__name__


def _computes_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is not torch's, and needs more than a gradient, like SAM and Lookahead."""
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    needs = closure is not None and closure.default is closure.empty
    within = any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())
    return not is_of_torch(kind) and (needs or within)


def _not_allowed(kind: Kind, own: Mapping[str, Kind]) -> str:
    full = f"{kind.__module__}.{kind.__qualname__}"
    for name in own:
        if name.endswith(f":{kind.__qualname__}"):
            return (
                f"the optimizer is a {full}, but the parameter server runs {name}, which is another class. "
                f"Import it in the script: from {name.partition(':')[0]} import {kind.__qualname__}"
            )
    module = kind.__module__ if kind.__module__ != "__main__" else "MODULE"
    within = "<locals>" in kind.__qualname__
    move = ", once it is defined outside of any function," if within else ","
    return (
        f"the optimizer is a {full}, but the parameter server runs only classes of torch.optim, and no "
        f"subclasses of them, unless the job names them: parameterServer: {{optimizers: "
        f"['{module}:{kind.__name__ if within else kind.__qualname__}']}}{move} in a module that the "
        "parameter server can import. With consistency: {mode: local} the worker runs any optimizer itself"
    )


def _imported(name: str) -> Kind:
    what = "in parameterServer.optimizers,"
    kind = import_own(name, what=what, whose="the workers and for the parameter server")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InvalidJob(f"in parameterServer.optimizers, {name} is not a subclass of torch.optim.Optimizer")
    found: Kind = kind
    return found


def is_of_torch(kind: Kind) -> bool:
    """Whether it is a class of `torch.optim` itself."""
    return getattr(torch.optim, kind.__name__, None) is kind


def constructor_arguments(kind: Kind, group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group that the optimizer's constructor takes.

    The constructor checks them, and some only count there: Adagrad's creates the first state.
    """
    known = inspect.signature(kind).parameters
    return {key: value for key, value in group.items() if key in known}


def make(kind: Kind, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer of these parameters with the hyperparameters of a group.

    Raises:
        TypeError, ValueError: the optimizer does not take them.
    """
    arguments: Any = constructor_arguments(kind, group)
    return kind([{**group, "params": list(parameters)}], **arguments)


def step_unseen(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without torch's wrappers for hooks and profilers."""
    unseen_step(type(optimizer))(optimizer)


def unseen_step(kind: Kind) -> Callable[[torch.optim.Optimizer], object]:
    """The step of an optimizer class for `step_unseen`, looked up once for many steps."""
    step: Callable[..., object] = kind.step
    if not is_of_torch(kind):
        found: Callable[..., object] = getattr(step, "__wrapped__", step)
        return found
    bare: Callable[..., object] = inspect.unwrap(step)

    def without_history(optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            bare(optimizer)

    return without_history


def usual_state(kind: Kind, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, tuple[str, bool]]:
    """The state that an optimizer keeps for a parameter after one step: key -> (dtype, whether a scalar).

    The parameter is flat, like all of them on the parameter server: one without dimensions has one element.

    Args:
        group: the hyperparameters of the parameter's group.
        dtype: the dtype of the parameter.

    Raises:
        TypeError, ValueError, RuntimeError: the optimizer does not take these hyperparameters, or cannot
        step.
    """
    state = _first_state(kind, group, torch.zeros(2, dtype=dtype, device="cpu"))
    return {
        key: (name_of(value.dtype), value.dim() == 0) if torch.is_tensor(value) else ("float64", True)
        for key, value in state.items()
    }


def usual_numbers(kind: Kind, group: Mapping[str, Any]) -> dict[str, type]:
    """The keys of that state that are numbers of Python, and of which type they are: int, float or bool."""
    if is_of_torch(kind) and kind is not torch.optim.SparseAdam:
        return {}
    state = _first_state(kind, group, torch.zeros(2, device="cpu"))
    return {key: type(value) for key, value in state.items() if not torch.is_tensor(value)}


def _first_state(kind: Kind, group: Mapping[str, Any], values: torch.Tensor) -> Mapping[str, Any]:
    """The state that an optimizer keeps for a parameter with these values after one step."""
    with torch.device("cpu"):  # whatever a script has set as its default
        parameter = torch.nn.Parameter(values)
        optimizer = make(kind, group, [parameter])
        parameter.grad = torch.ones_like(parameter)
        if kind is torch.optim.SparseAdam:
            parameter.grad = parameter.grad.to_sparse()
        step_unseen(optimizer)
        state: Mapping[str, Any] = optimizer.state[parameter]
    return state


def with_numbers(state: Mapping[str, Any], numbers: Mapping[str, type]) -> dict[str, Any]:
    """Restore the Python numbers of a saved state, in which all entries are tensors."""
    return {key: numbers[key](value.item()) if key in numbers else value for key, value in state.items()}


VALUE = "value"
"""The key of a tensor's own elements. Except for the next two, other keys are of the optimizer's state."""

MASTER = "master"
"""The key of the values in single precision that the optimizer steps, if `VALUE` is rounded from them."""

PULLED = "pulled"
"""The key of the values that workers have, if these follow `VALUE` by encoded deltas."""

RESERVED = (VALUE, MASTER, PULLED)


def try_out(name: str, kind: Kind, group: Mapping[str, Any]) -> None:
    """Make a few steps with a user's class on a matrix, and on the same elements in two pieces.

    Args:
        group: the hyperparameters of a parameter group.

    Raises:
        InvalidModel: it fails; or the results differ, so that the model cannot be cut into buckets; or its
            state cannot be saved.
    """
    try:
        with torch.device("cpu"):  # whatever a script has set as its default
            random = torch.Generator("cpu").manual_seed(0)
            values = torch.randn(2, 3, generator=random) * torch.tensor([[1.0], [4.0]])
            gradients = [torch.randn(2, 3, generator=random) for _ in range(4)]
            whole = _stepped(kind, group, [values], [[each] for each in gradients])
            cut = [[*each.view(-1).split(4)] for each in gradients]
            pieces = _stepped(kind, group, [*values.view(-1).split(4)], cut)
            again = _stepped(kind, group, [*values.view(-1).split(4)], cut, saved_after=2)
    except InvalidModel as error:
        raise InvalidModel(f"the optimizer {name} cannot run on the parameter server: {error}") from None
    except Exception as error:
        raise InvalidModel(
            f"the optimizer {name} cannot run on the parameter server: tried out on a small parameter, it "
            f"fails with {type(error).__name__}: {error}"
        ) from error
    if not _close(whole, pieces):
        raise InvalidModel(
            f"the optimizer {name} cannot run on the parameter server: it steps pieces of a parameter "
            "differently from the whole. The parameter server cuts parameters into buckets, so an "
            "optimizer has to treat every element separately, without norms, shapes or random numbers"
        )
    if not _close(pieces, again):
        raise InvalidModel(
            f"the state of the optimizer {name} cannot be saved: after a restart from it, the optimizer "
            "steps differently. It has to keep everything that a step needs in self.state[parameter] and "
            "param_groups"
        )


def _close(some: torch.Tensor, others: torch.Tensor) -> bool:
    return torch.allclose(some, others, rtol=1e-5, atol=1e-6)


def _stepped(
    kind: Kind,
    group: Mapping[str, Any],
    values: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    *,
    saved_after: int = 0,
) -> torch.Tensor:
    """All elements after these steps, beside a parameter that has no gradient.

    Args:
        gradients: for each step, the gradients of all parameters.
        saved_after: after this step another optimizer continues with the state of the first one.

    Raises:
        InvalidModel: the state cannot be saved.
    """
    parameters = [torch.nn.Parameter(each.clone()) for each in values]
    still = torch.nn.Parameter(torch.ones(1))
    optimizer = make(kind, group, [*parameters, still])
    for number, step in enumerate(gradients):
        if number and number == saved_after:
            before, optimizer = optimizer, make(kind, group, [*parameters, still])
            for parameter in parameters:
                optimizer.state[parameter] = _saved(before.state.get(parameter, {}), parameter)
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    if not torch.equal(still, torch.ones(1)):
        raise InvalidModel("it changes a parameter that has no gradient")
    return torch.cat([parameter.detach().view(-1) for parameter in parameters])


def _saved(state: Mapping[Any, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """A copy of a parameter's state for a checkpoint. Raises InvalidModel if it cannot be saved."""
    copies: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str) or not re.fullmatch(r"\w{1,100}", key, re.ASCII) or key in RESERVED:
            raise InvalidModel(f"its state has the key {key!r}; expected a word, and none of {RESERVED}")
        if torch.is_tensor(value):
            fits = value.dim() == 0 or value.shape == parameter.shape
            if not fits or name_of(value.dtype) not in ITEM_SIZE or value.is_complex():
                raise InvalidModel(
                    f"its state has a tensor {key!r} of {value.dtype} with shape {list(value.shape)}; what "
                    f"can be saved are numbers, and tensors of the parameter's shape, {list(parameter.shape)}"
                )
            copies[key] = value.clone()
        elif isinstance(value, bool | int | float):
            copies[key] = type(value)(float(value))
        else:
            raise InvalidModel(
                f"its state has {key!r}, which is a {type(value).__name__}; what can be saved are numbers, "
                "and tensors of the parameter's shape"
            )
    return copies
