"""A model and its optimizer as the parameter server sees them: tensors described by names, or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch.nn.parameter import is_lazy

from elastic_ps.adapters import peft
from elastic_ps.adapters.base import Base
from elastic_ps.codec import name_of, naming, overlaps
from elastic_ps.codec.optimizers import Optimizers, check_tables, try_out
from elastic_ps.codec.several import kinds_of, parts_of
from elastic_ps.core.partition import ITEM_SIZE, Rule, TensorSpec, uncompiled, within
from elastic_ps.core.settings import (
    CONSTRUCTED,
    MAX_NORM,
    Settings,
    check_constraints,
    check_one_limit,
    plain_group,
)
from elastic_ps.embedding.tables import described_tables
from elastic_ps.errors import InvalidModel
from elastic_ps.worker.model.checks import Registered, check_wrapper


class ModelDescription:
    """A description of a model and its optimizer, for the first call to the parameter server.

    Attributes:
        specs: the job's tensors, in order of registration: parameters, then persistent buffers.
        every: these, and what the worker has that has to be the same for all.
        tensors: the model's own, in the same order.
        optimizer: name of the optimizer's class; `module:Class` of one of the user's. Of several, the names
            of each parameter group's.
        own: the model's tensors that the job leaves alone.
        registered: where the model has the others.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        averaged: Sequence[str] = (),
        broadcast: Sequence[str] = (),
        own: Sequence[str] = (),
        summed: Sequence[str] = (),
        optimizers: Optimizers | None = None,
        tables: bool = True,
        base: str | None = None,
    ) -> None:
        """Look at both; nothing is changed.

        Args:
            averaged, broadcast, own, summed: names of modules, parameters or buffers that the optimizer does
                not train: those that the script changes, of which the job keeps the mean, or one worker's
                values, those that the job leaves alone, and those to which it adds all workers' changes.
            optimizers: those that the job may have; torch's without it.
            tables: whether only the rows of sparse gradients are sent. Else the job makes them dense.
            base: with "external", what no optimizer trains is the worker's own; see `adapters.base.Base`.

        Raises:
            InvalidModel: the parameter server cannot train this; the message says what to do.
        """
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(parameter):
                raise InvalidModel(
                    f"{name} is lazy and has no shape: run the model once on a batch before you create the "
                    "optimizer"
                )
            if parameter.is_meta:
                raise InvalidModel(
                    f"{name} is on the meta device and has no values: call model.to_empty(device=...) and "
                    "initialise the model before you create the optimizer"
                )
        known = optimizers or Optimizers()
        for part in parts_of(optimizer):
            check_wrapper(part)
        self.optimizer = known.name_of(optimizer)
        first = 0
        for part in parts_of(optimizer):
            _check_unused(part)
            _check_arguments(part, first)
            first += len(part.param_groups)
        check_one_limit(optimizer.param_groups)
        if ":" in self.optimizer:
            groups = self.settings(optimizer).groups
            names = [known.name_of(part) for part in parts_of(optimizer) for _ in part.param_groups]
            shapes = [{(*p.shape,) for p in group["params"]} for group in optimizer.param_groups]
            for name, kind, settings, each in zip(names, kinds_of(optimizer), groups, shapes, strict=True):
                if ":" in name:
                    try_out(name, kind, settings, each or [(2, 3)])
        group_of = {
            id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        parameters = naming.parameters(model)
        _check_known(optimizer, parameters)
        persistent = naming.saved(model)
        self._names: dict[int, list[str]] = {}
        for name, tensor in persistent.items():
            self._names.setdefault(id(tensor), []).append(name)
        buffers = naming.buffers(model, persistent)
        self.specs: list[TensorSpec] = []
        self.tensors: list[torch.Tensor] = []
        names = [*parameters, *buffers]
        said = _named({"averaged": averaged, "broadcast": broadcast, "own": own, "summed": summed}, names)
        _check_normalisation(model)
        _check_embeddings(model, {*parameters} - said.keys())
        if base not in (None, "external"):
            raise InvalidModel(f"base is {base!r}; expected 'external', or None: the job keeps all tensors")
        trained = {id(p) for p in parameters.values() if id(p) in group_of and p.requires_grad}
        frozen = Base(model, trained=trained, besides=said) if base else None
        outside = frozen.tensors if frozen is not None else {}
        check = frozen.check if frozen is not None else None
        self.registered = Registered(model, [uncompiled(name) for name in own], check)
        modules, kinds = model.modules() if tables else (), (torch.nn.Embedding, torch.nn.EmbeddingBag)
        self._tables = {id(each.weight) for each in modules if isinstance(each, kinds) and each.sparse}
        self.own = [tensor for name, tensor in {**parameters, **buffers}.items() if said.get(name) == "own"]
        for name, parameter in parameters.items():
            group = group_of.get(id(parameter), -1)
            if name in outside:
                continue
            if name in said:
                if group >= 0 and parameter.requires_grad:
                    raise InvalidModel(f"the optimizer trains {name}, so do not name it in {said[name]}")
                self._add_changing(name, parameter, said[name])
            else:
                if not (parameter.is_floating_point() or parameter.is_complex()):
                    group = -1  # of a quantised layer, say; an optimizer may have it, and never steps it
                self._add(name, parameter, Rule.GRADIENT if group >= 0 else Rule.CONSTANT, group)
        for name, buffer in buffers.items():
            if name not in outside:
                self._add_changing(name, buffer, said.get(name, "averaged"))
        check_tables(self.specs, self.optimizer, optimizer.param_groups)
        stepped = (t for s, t in zip(self.specs, self.tensors, strict=True) if s.rule is Rule.GRADIENT)
        if not any(tensor.requires_grad and tensor.numel() for tensor in stepped):
            raise InvalidModel(
                f"{type(model).__name__} has no trainable parameter: no parameter of the optimizer has "
                "requires_grad=True and at least one element"
            )
        self.every = self.specs + ([] if frozen is None else frozen.specs() + peft.described(model))
        self.every += described_tables(model)

    @cached_property
    def tables(self) -> list[TensorSpec]:
        """The tensors with sparse gradients."""
        return [spec for spec in self.specs if spec.sparse]

    def require_apart(self, model: torch.nn.Module) -> None:
        """Raise InvalidModel if a parameter that is trained shares memory with another tensor of the model.

        For parameter servers, which step each parameter by itself.
        """
        rules = {id(tensor): spec.rule for spec, tensor in zip(self.specs, self.tensors, strict=True)}
        every = (*model.named_parameters(), *model.named_buffers())
        # On a device values are copied into the memory that is there: what is not the job's goes along.
        named = [(name, t) for name, t in every if id(t) in rules or t.device.type == "cpu"]
        for pair in overlaps([tensor for _, tensor in named]):
            (first, one), (second, other) = (named[index] for index in pair)
            if Rule.GRADIENT in (rules.get(id(one)), rules.get(id(other))):
                raise InvalidModel(
                    f"{uncompiled(first)} and {uncompiled(second)} share memory, which the job would "
                    "separate: the parameter server keeps each tensor by itself. If they are one weight of "
                    "one shape, assign the same parameter, as in decoder.weight = encoder.weight. If one is "
                    "a view of the other, such as its transpose, make the view in forward, as in "
                    "torch.nn.functional.linear(x, self.encoder.weight.t()). With strategy: all-reduce "
                    "memory that is shared stays as it is"
                )

    def _add_changing(self, name: str, tensor: torch.Tensor, said: str) -> None:
        """Add what the script changes and no optimizer trains, unless it is said to be the worker's own."""
        if said == "summed" and tensor.dtype is torch.bool:
            raise InvalidModel(f"{name} has the dtype torch.bool, which cannot be summed: use torch.uint8")
        mean = Rule.MEAN if tensor.is_floating_point() else Rule.MAXIMUM
        rules = {"broadcast": Rule.BROADCAST, "summed": Rule.SUM, "averaged": mean}
        if said in rules:
            self._add(name, tensor, rules[said], -1)

    def _add(self, name: str, tensor: torch.Tensor, rule: Rule, group: int) -> None:
        dtype = name_of(tensor.dtype)
        if dtype not in ITEM_SIZE or tensor.is_sparse or (rule is Rule.GRADIENT and tensor.is_complex()):
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            raise InvalidModel(
                f"the {kind} {name} is a {tensor.layout} tensor of {tensor.dtype}, which a job cannot keep. "
                f"{_KEPT_ELSEWHERE[kind]}"
            )
        aliases = tuple(other for other in self._names.get(id(tensor), []) if other != name)
        frozen = rule is Rule.GRADIENT and not tensor.requires_grad
        sparse = rule is Rule.GRADIENT and id(tensor) in self._tables
        self.specs.append(TensorSpec(name, tuple(tensor.shape), dtype, rule, group, aliases, frozen, sparse))
        self.tensors.append(tensor)

    @staticmethod
    def settings(optimizer: torch.optim.Optimizer) -> Settings:
        """The optimizer's hyperparameters as they are now. Raises InvalidModel if one is not plain."""
        return Settings(tuple(plain_group(group, i) for i, group in enumerate(optimizer.param_groups)))


_KEPT_ELSEWHERE = {
    "buffer": "If the model computes it, as the frequencies of rotary embeddings, register it with "
    "persistent=False. If each worker keeps values of its own there, name it in session.optimizer(..., "
    "own=[...]). Otherwise store torch.view_as_real(...) of it, and use torch.view_as_complex in forward",
    "parameter": "Store it dense and real, with torch.view_as_real(...), and use "
    "torch.view_as_complex in forward. If no optimizer trains it, make it a buffer with persistent=False, or "
    "name it in session.optimizer(..., own=[...])",
}


def _check_known(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise InvalidModel if the optimizer trains a parameter that the model has not."""
    known = {id(parameter) for parameter in parameters.values()}
    given = [
        (f"param_groups[{index}]['params'][{place}], of shape {list(parameter.shape)}", id(parameter))
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
    unknown = [what for what, key in given if key not in known]
    if not unknown:
        return
    advice = (
        "Make each a parameter of the model before you create the optimizer, as in model.loss_weights = "
        "torch.nn.Parameter(...). If it is of another module, such as a loss or a head, put both modules "
        "into one torch.nn.ModuleDict, and pass that as the model"
    )
    if len(unknown) == len(given):
        advice = (
            "Create the optimizer with the parameters of the model that you pass, after all that replaces "
            "them, such as copy.deepcopy, load_state_dict(assign=True) and wrappers of other libraries"
        )
    raise InvalidModel(
        f"{len(unknown)} of the optimizer's {len(given)} parameters are not parameters of the model, so the "
        f"job would neither train nor save them: {'; '.join(unknown[:3])}{'; ...' if unknown[3:] else ''}. "
        f"{advice}"
    )


def _named(given: Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, str]:
    """Return the list of `given` that names a tensor, for each that one of them names.

    Raises:
        InvalidModel: a list names nothing, or a tensor is in two.
    """
    said: dict[str, str] = {}
    for what, prefixes in given.items():
        for name in sorted(within(prefixes, names, what)):
            if said.setdefault(name, what) != what:
                raise InvalidModel(f"{name} is named in {said[name]} and {what}; name it in one of them")
    return said


def _check_unused(optimizer: torch.optim.Optimizer) -> None:
    """Raise InvalidModel if the optimizer has made a step."""
    # Adagrad has a state from the beginning, of step 0.
    if any(not isinstance(state, dict) or state.get("step", 1) > 0 for state in optimizer.state.values()):
        raise InvalidModel(
            "the optimizer has made steps already; pass session.optimizer a new one. To keep the state, "
            "also pass state=old_optimizer.state_dict()"
        )


def _check_arguments(optimizer: torch.optim.Optimizer, first: int) -> None:
    """Raise InvalidModel for what the optimizer was told and the parameter server would not do.

    Of the parameter groups of all optimizers, its own begin with number `first`.
    """
    for index, group in enumerate(optimizer.param_groups, first):
        if group.get("differentiable"):
            raise InvalidModel(
                f"param_groups[{index}] has differentiable=True, but the step is made on the parameter "
                "server, and no gradient can flow through it; set differentiable=False"
            )
        check_constraints(group, index)
        if group.get(MAX_NORM) is not None and any(p.dim() < 2 for p in group["params"]):
            raise InvalidModel(
                f"param_groups[{index}] has {MAX_NORM}={group[MAX_NORM]}, which limits the norm of each row, "
                "but one of its parameters has no rows, such as a bias; move that parameter to another group"
            )
        for key in CONSTRUCTED & group.keys():
            if group[key] != optimizer.defaults[key]:
                raise InvalidModel(
                    f"param_groups[{index}] has {key}={group[key]}, but torch.optim."
                    f"{type(optimizer).__name__} takes it only from its constructor, which got "
                    f"{optimizer.defaults[key]}; pass it to the constructor"
                )


def _check_normalisation(model: torch.nn.Module) -> None:
    """Raise InvalidModel if `forward` would compute statistics together with other workers."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise InvalidModel(
                f"{uncompiled(name) or 'the model'} is a {type(module).__name__}, which computes its "
                "statistics over the batches of all processes of a torch.distributed group. Workers have no "
                "such group, so it would use the worker's own batch, as BatchNorm does. Leave "
                "convert_sync_batchnorm out and use BatchNorm: the job averages its running statistics over "
                "the workers (BatchNorm and other buffers in docs/guides/scripts.md). If a worker's batch is "
                "too small for that, use GroupNorm, or a larger batch_size and fewer workers"
            )


def _check_embeddings(model: torch.nn.Module, names: Collection[str]) -> None:
    """Raise InvalidModel if `forward` would change a parameter with one of these names."""
    for name, module in model.named_modules():
        weight = uncompiled(f"{name}.weight" if name else "weight")
        embedding = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if embedding and module.max_norm is not None and weight in names:
            raise InvalidModel(
                f"{name or type(model).__name__} is a {type(module).__name__} with max_norm, whose forward "
                "changes its weight, but only the optimizer changes parameters. Make it without max_norm, "
                f'and give its weight a parameter group of its own, with "{MAX_NORM}": {module.max_norm}. In '
                "mode local, limit its rows in the script instead, after optimizer.step()"
            )
