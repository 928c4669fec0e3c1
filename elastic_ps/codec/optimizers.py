"""The optimizers of the parameter server: which may run, their state, and their arguments.

Most treat every element separately. Those that look at whole tensors (`steps_whole_tensors`) get tensors in
their shapes, which are divided neither into buckets nor among shards. A user's class is tried before it is
used, see `try_out`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_ps.codec.delayed import OURS
from elastic_ps.codec.memory import name_of
from elastic_ps.codec.several import SEPARATOR, Kind, name_of_all, parts_of
from elastic_ps.core.partition import ITEM_SIZE, TensorSpec
from elastic_ps.core.settings import KEEP_ZEROS, LIMITS, WHOLE_TENSORS, check_optimizer
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
                    f"on parameter servers. {_SEVERAL}"
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
                    f"{tensor.group} acts on all rows in each step, also those without a gradient. Leave "
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
                    "momentum=0), and no scheduler that sets one, or leave it out of compression.options"
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
        kind: Kind | None = OURS.get(name) or getattr(torch.optim, name, None)
        if kind is None:
            raise InvalidModel(f"torch {torch.__version__} of the parameter server has no optimizer {name}")
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


def steps_whole_tensors(kind: Kind) -> bool:
    """Whether the step of a class looks at whole tensors in their shapes, as with norms of parameters.

    A user's class says so by its attribute `whole_tensors`; that of transformers is known by its name.
    """
    known = is_of_torch(kind) or getattr(kind, "__module__", "") == "transformers.optimization"
    return (known and kind.__name__ in WHOLE_TENSORS) or bool(getattr(kind, "whole_tensors", False))


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


class StateEntry(NamedTuple):
    """An entry of the state that an optimizer keeps for a parameter.

    Attributes:
        dtype: a key of `ITEM_SIZE`.
        scalar: its shape is not the parameter's, so that it counts for all of the elements.
        shape: its shape.
        number: the type of a number of Python: int, float or bool; None: it is a tensor.
    """

    dtype: str
    scalar: bool
    shape: tuple[int, ...]
    number: type | None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def kept_state(
    kind: Kind, group: Mapping[str, Any], dtype: torch.dtype, shape: Sequence[int]
) -> dict[str, StateEntry]:
    """The state that an optimizer keeps for a parameter after one step, by key.

    The parameter is flat unless the class steps whole tensors: one without dimensions has one element.

    Args:
        group: the hyperparameters of the parameter's group.
        dtype, shape: those of the parameter.

    Raises:
        TypeError, ValueError, RuntimeError: the optimizer does not take these hyperparameters, or cannot
            step.
        InvalidModel: the shape of an entry does not follow from that of the parameter.
    """
    own: tuple[int, ...] = (math.prod(shape),)
    if steps_whole_tensors(kind):
        own = tuple(shape)
        few, more = _small(len(own)), _small(len(own), 3)
        state = _first_state(kind, group, torch.zeros(few, dtype=dtype, device="cpu"))
        others = _first_state(kind, group, torch.zeros(more, dtype=dtype, device="cpu"))
        sizes = dict(zip(zip(few, more, strict=True), own, strict=True)) | {(1, 1): 1}
        shapes = {
            key: _shape_for(key, list(zip(_shape_of(value), _shape_of(others.get(key)), strict=False)), sizes)
            for key, value in state.items()
        }
    else:
        state = _first_state(kind, group, torch.zeros(2, dtype=dtype, device="cpu"))
        shapes = {key: own if _shape_of(value) else () for key, value in state.items()}
    kept = {}
    for key, value in state.items():
        tensor, shape = isinstance(value, torch.Tensor), shapes[key]
        name = name_of(value.dtype) if tensor else "float64"
        kept[key] = StateEntry(name, shape != own, shape, None if tensor else type(value))
    return kept


def _small(dims: int, first: int = 2) -> tuple[int, ...]:
    """The shape of a small parameter whose dimensions differ in size, the first one having this one."""
    return tuple(range(first, first + dims))


def _shape_of(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _shape_for(
    key: str, found: Sequence[tuple[int, int]], sizes: Mapping[tuple[int, int], int]
) -> tuple[int, ...]:
    """The shape of an entry.

    Args:
        found: each dimension of it for two small parameters.
        sizes: what each dimension of those is in the parameter itself.
    """
    if any(each not in sizes for each in found):
        raise InvalidModel(
            f"its state has a tensor {key!r} with a dimension that is neither 1 nor one of the parameter's; "
            "only numbers, and tensors with such dimensions, can be saved"
        )
    return tuple(sizes[each] for each in found)


def usual_state(
    kind: Kind, group: Mapping[str, Any], dtype: torch.dtype, shape: Sequence[int] = (2,)
) -> dict[str, tuple[str, bool]]:
    """Like `kept_state`: key -> (dtype, whether it is a scalar). Raises the same."""
    kept = kept_state(kind, group, dtype, shape)
    return {key: (each.dtype, each.scalar) for key, each in kept.items()}


def restored(
    kind: Kind, group: Mapping[str, Any], shape: Sequence[int], saved: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """The state of a parameter as the optimizer keeps it.

    Args:
        shape: of the parameter.
        saved: the entries: flat, or without dimensions.
    """
    whole = steps_whole_tensors(kind)
    plain = is_of_torch(kind) and not whole and kind is not torch.optim.SparseAdam
    kept = {} if plain else kept_state(kind, group, torch.float32, shape)
    state: dict[str, Any] = {}
    for key, value in saved.items():
        if key in kept and (number := kept[key].number) is not None:
            state[key] = number(value.item())
        elif key in kept and whole:
            state[key] = value.reshape(kept[key].shape)
        else:
            state[key] = value.view(tuple(shape)) if value.dim() else value
    return state


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


VALUE = "value"
"""The key of a tensor's own elements. Except for the next two, other keys are of the optimizer's state."""

MASTER = "master"
"""The key of the values in single precision that the optimizer steps, if `VALUE` is rounded from them."""

PULLED = "pulled"
"""The key of the values that workers have, if these follow `VALUE` by encoded deltas."""

RESERVED = (VALUE, MASTER, PULLED)


def try_out(
    name: str, kind: Kind, group: Mapping[str, Any], shapes: Collection[Sequence[int]] = ((2, 3),)
) -> None:
    """Make a few steps with a user's class on small parameters.

    They are stepped together, and each by itself, as in different buckets. Unless the class steps whole
    tensors, a matrix is also cut in two pieces. If it does, it also steps a parameter of each shape once,
    which takes the memory of one such parameter at a time with its gradient and state.

    Args:
        group: the hyperparameters of a parameter group.
        shapes: the shapes of the parameters of the group.

    Raises:
        InvalidModel: it fails; or the results differ, so that the model cannot be divided into buckets; or
            its state cannot be saved.
    """
    whole_tensors = steps_whole_tensors(kind)
    dims = sorted({len(shape) for shape in shapes})
    try:
        with torch.device("cpu"):  # whatever a script has set as its default
            random = torch.Generator("cpu").manual_seed(0)
            matrix = torch.randn(2, 3, generator=random) * torch.tensor([[1.0], [4.0]])
            values = [matrix.view(-1)[:4], matrix.view(-1)[4:]]
            if whole_tensors:
                values = [torch.randn(_small(d), generator=random) * n for d in dims for n in (1, 4)]
            steps = [[torch.randn(each.shape, generator=random) for each in values] for _ in range(4)]
            pieces = whole = _stepped(kind, group, values, steps)
            if whole_tensors:
                for shape in {(*shape,) for shape in shapes}:
                    _check_shape(kind, group, shape)
            else:
                joined = [torch.cat(step).view(2, 3) for step in steps]
                whole = _stepped(kind, group, [matrix], [[each] for each in joined])
            apart = torch.cat(
                [
                    _stepped(kind, group, [each], [[step[number]] for step in steps])
                    for number, each in enumerate(values)
                ]
            )
            again = _stepped(kind, group, values, steps, saved_after=2)
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
            "optimizer has to treat every element separately, without norms, shapes or random numbers. If "
            "its step looks at whole parameters, each by itself, write whole_tensors = True into its class: "
            "they are not cut then"
        )
    if not _close(pieces, apart):
        raise InvalidModel(
            f"the optimizer {name} cannot run on the parameter server: it steps a parameter differently when "
            "there are others. The parameter server divides them among buckets, each of which has an "
            "optimizer of its own, so a step of a parameter must not depend on other parameters"
        )
    if not _close(pieces, again):
        raise InvalidModel(
            f"the state of the optimizer {name} cannot be saved: after a restart from it, the optimizer "
            "steps differently. It has to keep everything that a step needs in self.state[parameter], as "
            "numbers and copies: the memory of gradients is used again"
        )


def _check_shape(kind: Kind, group: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raise InvalidModel if the state of a parameter of this shape is not what `kept_state` says."""
    expected = kept_state(kind, group, torch.float32, shape)
    state = _first_state(kind, group, torch.zeros(shape))
    found = {key: _shape_of(value) for key, value in state.items()}
    if found != {key: each.shape for key, each in expected.items()}:
        raise InvalidModel(
            f"for a parameter of shape {list(shape)}, its state differs from that of a small one: it has "
            f"{_shapes_in_words(found)} instead of "
            f"{_shapes_in_words({key: each.shape for key, each in expected.items()})}. Its keys and "
            "dimensions must not depend on how large a parameter is, or no checkpoint can be resumed"
        )


def _shapes_in_words(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{key!r} of shape {list(shape)}" for key, shape in shapes.items()) or "nothing"


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
    still = torch.nn.Parameter(torch.ones_like(values[0]))
    optimizer = make(kind, group, [*parameters, still])
    for number, step in enumerate(gradients):
        if number and number == saved_after:
            before, optimizer = optimizer, make(kind, group, [*parameters, still])
            for parameter in parameters:
                optimizer.state[parameter] = _saved(kind, before.state.get(parameter, {}), parameter)
        for parameter, gradient in zip(parameters, step, strict=True):
            if saved_after and parameter.grad is not None:
                parameter.grad.copy_(gradient)  # as the parameter server does: a state must not refer to it
            else:
                parameter.grad = gradient.clone()
        optimizer.step()
    if not torch.equal(still, torch.ones_like(still)):
        raise InvalidModel("it changes a parameter that has no gradient")
    return torch.cat([parameter.detach().view(-1) for parameter in parameters])


def _saved(kind: Kind, state: Mapping[Any, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """A copy of a parameter's state for a checkpoint. Raises InvalidModel if it cannot be saved."""
    copies: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str) or not re.fullmatch(r"\w{1,100}", key, re.ASCII) or key in RESERVED:
            raise InvalidModel(f"its state has the key {key!r}; expected a word other than {RESERVED}")
        if torch.is_tensor(value):
            fits = value.dim() == 0 or value.shape == parameter.shape or steps_whole_tensors(kind)
            if not fits or name_of(value.dtype) not in ITEM_SIZE or value.is_complex():
                raise InvalidModel(
                    f"its state has a tensor {key!r} of {value.dtype} with shape {list(value.shape)}; only "
                    f"numbers, and tensors of the parameter's shape, {list(parameter.shape)}, can be saved"
                )
            copies[key] = value.clone()
        elif isinstance(value, bool | int | float):
            copies[key] = type(value)(float(value))
        else:
            raise InvalidModel(
                f"its state has {key!r}, which is a {type(value).__name__}; only numbers, and tensors of the "
                "parameter's shape, can be saved"
            )
    return copies


_checks: list[Callable[[torch.optim.Optimizer], None]] = []


def before_each_step(check: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
    """Call `check` before the step of any optimizer of this process; returns what ends that.

    Torch's own hooks of that kind must not change while a thread makes a step.
    """
    _checks.append(check)
    return partial(_checks.remove, check)


def _check(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for check in tuple(_checks):
        check(optimizer)


register_optimizer_step_pre_hook(_check)
