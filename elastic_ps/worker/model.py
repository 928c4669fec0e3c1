"""A model's tensors as the parameter server sees them: described by names, laid out in flat memory.

All parameters of one dtype are laid one after the other into one flat tensor, in the order of the buckets,
so that a bucket is a slice of it. On the CPU the model's parameters become views of that memory, and a
pulled bucket is received straight into the model. What is on another device, or in another order in memory
(`channels_last`), stays where it is; pulled values are copied to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set

import torch
from torch.nn.parameter import is_lazy

from elastic_ps.codec import as_bytes, as_tensor, dtype_of, name_of, naming
from elastic_ps.codec.optimizers import Optimizers, try_out
from elastic_ps.codec.several import kinds_of, parts_of
from elastic_ps.core.partition import ITEM_SIZE, Bucket, Layout, Rule, TensorSpec, uncompiled, within
from elastic_ps.core.settings import (
    CONSTRUCTED,
    MAX_NORM,
    Settings,
    check_constraints,
    check_one_limit,
    plain_group,
)
from elastic_ps.data.prepared import check_wrapper
from elastic_ps.errors import InvalidModel, UsageError
from elastic_ps.transport.memory import Allocate, shared_if_possible
from elastic_ps.worker.local_world import LocalWorld
from elastic_ps.worker.overlaps import overlaps
from elastic_ps.worker.registered import Registered
from elastic_ps.worker.seal import Seal
from elastic_ps.worker.staging import Staging


class Described:
    """What a model and its optimizer are, for the first call to the parameter server.

    Attributes:
        specs: the tensors, in order of registration: parameters, then persistent buffers.
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
    ) -> None:
        """Look at both; nothing is changed.

        Args:
            averaged, broadcast, own, summed: names of modules, parameters or buffers that the optimizer does
                not train: those that the script changes, of which the job keeps the mean, or one worker's
                values, those that the job leaves alone, and those to which it adds all workers' changes.
            optimizers: those that the job may have; torch's without it.

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
            for name, kind, settings in zip(names, kinds_of(optimizer), groups, strict=True):
                if ":" in name:
                    try_out(name, kind, settings)
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
        self.registered = Registered(model, [uncompiled(name) for name in own])
        self.own = [tensor for name, tensor in {**parameters, **buffers}.items() if said.get(name) == "own"]
        for name, parameter in parameters.items():
            group = group_of.get(id(parameter), -1)
            if name in said:
                if group >= 0 and parameter.requires_grad:
                    raise InvalidModel(f"the optimizer trains {name}, so do not name it in {said[name]}")
                self._add_changing(name, parameter, said[name])
            else:
                if not (parameter.is_floating_point() or parameter.is_complex()):
                    group = -1  # of a quantised layer, say; an optimizer may have it, and never steps it
                self._add(name, parameter, Rule.GRADIENT if group >= 0 else Rule.CONSTANT, group)
        for name, buffer in buffers.items():
            self._add_changing(name, buffer, said.get(name, "averaged"))
        pairs = zip(self.specs, self.tensors, strict=True)
        if not any(
            spec.rule is Rule.GRADIENT and tensor.requires_grad and tensor.numel() for spec, tensor in pairs
        ):
            raise InvalidModel(
                f"{type(model).__name__} has no trainable parameter: no parameter of the optimizer has "
                "requires_grad=True and at least one element"
            )

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
                    f"{uncompiled(first)} and {uncompiled(second)} share memory, which would be cut apart: "
                    "the parameter server keeps each tensor by itself. If they are one weight of one shape, "
                    "assign the same parameter, as in decoder.weight = encoder.weight. If one is a view of "
                    "the other, such as its transpose, make the view in forward, as in "
                    "torch.nn.functional.linear(x, self.encoder.weight.t()). With strategy: all-reduce "
                    "memory that is shared stays as it is"
                )

    def _add_changing(self, name: str, tensor: torch.Tensor, said: str) -> None:
        """Add what the script changes and no optimizer trains, unless it is said to be the worker's own."""
        if said == "broadcast":
            self._add(name, tensor, Rule.BROADCAST, -1)
        elif said == "summed":
            if tensor.dtype is torch.bool:
                raise InvalidModel(f"{name} is of torch.bool, which cannot be summed: use torch.uint8")
            self._add(name, tensor, Rule.SUM, -1)
        elif said == "averaged":
            self._add(name, tensor, Rule.MEAN if tensor.is_floating_point() else Rule.MAXIMUM, -1)

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
        self.specs.append(TensorSpec(name, tuple(tensor.shape), dtype, rule, group, aliases, frozen))
        self.tensors.append(tensor)

    @staticmethod
    def settings(optimizer: torch.optim.Optimizer) -> Settings:
        """The optimizer's hyperparameters as they are now. Raises InvalidModel if one is not plain."""
        return Settings(tuple(plain_group(group, i) for i, group in enumerate(optimizer.param_groups)))


_KEPT_ELSEWHERE = {
    "buffer": "If the model computes it, as the frequencies of rotary embeddings, register it with "
    "persistent=False. If each worker has its own, name it in session.optimizer(..., own=[...]). Else let "
    "it be dense and real, as torch.view_as_real(...) gives it, and use torch.view_as_complex in forward",
    "parameter": "Let it be dense and real, as torch.view_as_real(...) gives it, and use "
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
    """For each tensor that is named in one of the lists `given`, in which one.

    Raises:
        InvalidModel: a list names nothing, or a tensor is in two.
    """
    said: dict[str, str] = {}
    for what, prefixes in given.items():
        for name in sorted(within(prefixes, names, what)):
            if said.setdefault(name, what) != what:
                raise InvalidModel(f"{name} is named in {said[name]} and in {what}; name it in one of them")
    return said


def _check_unused(optimizer: torch.optim.Optimizer) -> None:
    """Raise InvalidModel if the optimizer has made a step."""
    # Adagrad has a state from the beginning, of step 0.
    if any(not isinstance(state, dict) or state.get("step", 1) > 0 for state in optimizer.state.values()):
        raise InvalidModel(
            "the optimizer has made steps already; pass session.optimizer a new one, or, to begin "
            "with its state, also state=optimizer.state_dict()"
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
                "and a parameter without rows, such as a bias; put that into another group"
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
                "the workers (see BatchNorm and other buffers in docs/scripts.md). If a worker's batch is "
                "too small for that, use GroupNorm, or a larger batch_size and fewer workers"
            )


def _check_embeddings(model: torch.nn.Module, names: Collection[str]) -> None:
    """Raise InvalidModel if `forward` would change a parameter with one of these names."""
    for name, module in model.named_modules():
        weight = uncompiled(f"{name}.weight" if name else "weight")
        embedding = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if embedding and module.max_norm is not None and weight in names:
            raise InvalidModel(
                f"{name or type(model).__name__} is a {type(module).__name__} with max_norm="
                f"{module.max_norm}, whose forward changes its weight, but only the parameter server "
                "changes parameters. Make it without max_norm, and put its weight into a parameter group "
                f'of its own with the limit: {{"params": [...], "{MAX_NORM}": {module.max_norm}}}. The '
                "parameter server then limits the 2-norm of each row after each step"
            )


class Flat:
    """The flat memory of a model: `values` that are pulled and `contributions` that are pushed.

    Attributes:
        layout: as the parameter server cut the model up.
        tensors: the model's tensors, in the layout's order.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        *,
        stepped_here: bool = False,
        world: LocalWorld | None = None,
        registered: Registered | None = None,
    ) -> None:
        """Allocate, copy the model's values in, and make the model use this memory where it can.

        Args:
            stepped_here: the script changes the model between two pulls. So what changes has memory of its
                own, beside the values that were pulled.
            registered: where the model has these tensors.
            world: the processes of this worker. If there are several, they share values and contributions:
                the values are those of process 0, and what scripts change in them, such as buffers, has
                memory of its own in each.
        """
        world = world or LocalWorld()
        self.layout = layout
        self.tensors = tensors
        self._registered = registered
        if stepped_here:
            self._changing = frozenset(Rule) - {Rule.CONSTANT}
        else:
            self._changing = frozenset(Rule) - {Rule.CONSTANT, Rule.GRADIENT}
            if world.alone:
                self._changing = frozenset({Rule.SUM})
        self._own_values = world.leads
        sizes: dict[tuple[str, Rule], int] = {}
        self._offsets: list[int] = []
        starts: dict[int, int] = {}
        for bucket in layout.buckets:
            place = sizes.get((bucket.dtype, bucket.rule), 0)
            self._offsets.append(place)
            for piece in bucket.pieces:
                starts.setdefault(piece.tensor, place - piece.start)
                place += piece.length
            sizes[bucket.dtype, bucket.rule] = place
        pushed = {k: n * ITEM_SIZE[k[0]] for k, n in sizes.items() if k[1] is not Rule.CONSTANT}
        if world.alone:
            self._values = {k: torch.zeros(n, dtype=dtype_of(k[0]), device="cpu") for k, n in sizes.items()}
            parts = [shared_if_possible(list(pushed.values()))]
        else:
            whole = {k: n * ITEM_SIZE[k[0]] for k, n in sizes.items()}
            self._values = _tensors(world.allocate(list(whole.values())), whole)
            parts = [world.allocate(list(pushed.values())) for _ in range(world.size)]
        self._parts = [_tensors(allocate, pushed) for allocate in parts]
        self._contributions = self._parts[world.rank]
        self._sent: dict[int, torch.Tensor] = {}  # what summed tensors were when their changes were put
        self._written: set[int] = set()  # tensors whose contribution may be something else than zero
        self._places = [
            ((spec.dtype, spec.rule), starts.get(index, 0), spec.elements)
            for index, spec in enumerate(layout.tensors)
        ]
        self._contribution = [
            torch.empty(0, device="cpu")
            if spec.rule is Rule.CONSTANT
            else self._view(self._contributions, index)
            for index, spec in enumerate(layout.tensors)
        ]
        self._value_of = [self._slice(self._values, bucket) for bucket in layout.buckets]
        self._value_bytes = [as_bytes(values) for values in self._value_of]
        self._contribution_of = {b.index: self._slice(self._contributions, b) for b in layout.pushed}
        self._contribution_bytes = {index: as_bytes(own) for index, own in self._contribution_of.items()}
        self.buckets_of: list[list[int]] = [[] for _ in layout.tensors]
        for bucket in layout.buckets:
            for piece in bucket.pieces:
                self.buckets_of[piece.tensor].append(bucket.index)
        # The processes of a worker tell each other when a contribution is there, not when it will be.
        devices = {tensor.device for tensor in tensors} if world.alone else set()
        self._staging = Staging(devices, [*self._values.values(), *self._contributions.values()])
        self._tensors_of = [[piece.tensor for piece in bucket.pieces] for bucket in layout.buckets]
        self._addresses: list[int] = []
        self._apart: list[int] = []  # tensors with memory of their own
        self._tied = {index for pair in overlaps(tensors) for index in pair}
        self._received: list[int] = []  # tensors whose memory is that of the values, which change
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                self._adopt(index, tensor)
        self._seal = Seal(
            layout,
            [] if Rule.GRADIENT in self._changing else self._of_rule(Rule.GRADIENT),
            self._of_rule(Rule.CONSTANT),
            tensors,
            self._apart,
            self.value,
        )

    def _of_rule(self, rule: Rule) -> list[torch.Tensor]:
        return [flat for (_, own), flat in self._values.items() if own is rule]

    def _adopt(self, index: int, tensor: torch.Tensor) -> None:
        view = self.value(index)
        if self._own_values:
            view.copy_(tensor)
        changes = self.layout.tensors[index].rule in self._changing
        device = tensor.device.type != "cpu" or self._staging.handles(tensor)
        if changes or device or index in self._tied or not _one_after_the_other(tensor):
            self._apart.append(index)
        elif tensor.numel():
            # The same memory, as a storage of its own: what saves a tensor saves all of its storage.
            memory = torch.frombuffer(as_bytes(view), dtype=view.dtype)
            strides = tensor.stride() if tensor.is_contiguous() else view.stride()
            tensor.data = memory.as_strided(tensor.shape, strides)
            if self.layout.tensors[index].rule is not Rule.CONSTANT:
                self._received.append(index)
        self._addresses.append(tensor.data_ptr())

    def value(self, index: int) -> torch.Tensor:
        """The pulled values of a tensor, in its shape."""
        return self._view(self._values, index)

    def _view(self, memory: dict[tuple[str, Rule], torch.Tensor], index: int) -> torch.Tensor:
        key, start, elements = self._places[index]
        if not elements:
            return torch.empty(self.layout.tensors[index].shape, dtype=dtype_of(key[0]), device="cpu")
        return memory[key][start : start + elements].view(self.layout.tensors[index].shape)

    def contribution(self, index: int) -> torch.Tensor:
        """Where a tensor's gradient (or buffer) is put to be pushed, in its shape.

        Blocks until what was `put` there has arrived.
        """
        self._staging.arrived((index,))
        self._written.add(index)
        return self._contribution[index]

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient to where it is pushed from; from a device that makes copies by itself, begin to.

        Of a tensor whose changes are summed, put those since the values were pulled, or since the last ones.
        If several steps make a version, each has its own then.
        """
        if self.layout.tensors[index].rule is Rule.SUM:
            now = gradient.detach().to("cpu", copy=True)
            before = self._sent.get(index, self.value(index))
            torch.sub(now, before, out=self.contribution(index))
            self._sent[index] = now
            return
        self._written.add(index)
        self._staging.down(index, self._contribution[index], gradient)

    def give(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy to each first tensor, on whatever device, the second one. Blocks until all copies are made.

        They are the values of a version that was made here.
        """
        self._sent.clear()
        self._staging.up(pairs)
        self._staging.settle()

    def clear_contribution(self, index: int) -> None:
        """Make a tensor's contribution zero, if anything was put there since it was."""
        if index in self._written:
            self.contribution(index).zero_()
            self._written.discard(index)

    def _slice(self, memory: dict[tuple[str, Rule], torch.Tensor], bucket: Bucket) -> torch.Tensor:
        start = self._offsets[bucket.index]
        return memory[bucket.dtype, bucket.rule][start : start + bucket.elements]

    def value_of(self, bucket: Bucket) -> torch.Tensor:
        """A bucket's values, flat, of its dtype."""
        return self._value_of[bucket.index]

    def value_bytes(self, bucket: Bucket) -> memoryview:
        """A bucket's values, to receive into."""
        return self._value_bytes[bucket.index]

    def wait_for(self, bucket: Bucket) -> None:
        """Block until what was put into a bucket's contribution has arrived."""
        self._staging.arrived(self._tensors_of[bucket.index])

    def contribution_bytes(self, bucket: Bucket) -> memoryview:
        """A bucket's contribution, to send. Blocks as `wait_for` does."""
        self.wait_for(bucket)
        return self._contribution_bytes[bucket.index]

    def contribution_of(self, bucket: Bucket) -> torch.Tensor:
        """A bucket's contribution, flat, of its dtype. Blocks as `wait_for` does."""
        self.wait_for(bucket)
        return self._contribution_of[bucket.index]

    def is_here(self, bucket: Bucket) -> bool:
        """Whether `wait_for` would not block."""
        return self._staging.are_here(self._tensors_of[bucket.index])

    def contributions_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """As `contribution_of`, of each process of this worker, in order."""
        return [self._slice(part, bucket) for part in self._parts]

    def written(self, bucket: Bucket) -> None:
        """Something was put into the contribution of all of a bucket."""
        self._written |= {piece.tensor for piece in bucket.pieces}

    def check(self, *, thorough: bool = False) -> None:
        """Take over what the script has assigned to buffers.

        Raises UsageError if it has changed what only the job can change.

        Args:
            thorough: look at all tensors, because the values are about to be replaced.
        """
        self.check_memory()
        changed = self._seal.changed(thorough=thorough)
        if changed is None:
            return
        names = [self.layout.tensors[index].name for index in changed]
        which = (", ".join(names[:3]) + (", ..." if len(names) > 3 else "")) or "a parameter"
        outside = [i for i in changed if not self._is_trained(i)]
        if changed and len(outside) == len(changed):
            raise UsageError(
                f"the script has changed {which}, which the optimizer does not train. Checkpoints, and "
                "workers that join, would get the first values. If it is part of the job, for example an "
                "average of the model, name it or its module in session.optimizer(..., averaged=[...]), or "
                "in broadcast=[...] if it cannot be averaged. If each worker has its own, name it in "
                "own=[...]"
            )
        raise UsageError(
            f"the script has changed {which} since the last optimizer.step(). Only the parameter server "
            "changes parameters, so the change would be lost. To make it the next version of the model, call "
            "session.assign(model). Load values before session.optimizer(...). To keep values within "
            "limits, use the options clamp, max_norm and keep_zeros of a parameter group. If the optimizer "
            "does not train a tensor, name it in session.optimizer(..., averaged=[...])"
        )

    def _is_trained(self, index: int) -> bool:
        return self.layout.tensors[index].rule is Rule.GRADIENT and self.tensors[index].requires_grad

    def take_values(self) -> None:
        """Put the model's values, which the script has changed, where contributions are sent from.

        Raises:
            UsageError: what the script has changed is not to be changed, or its values are not finite.
        """
        self.check_memory()
        for index, tensor in enumerate(self.tensors):
            spec = self.layout.tensors[index]
            if spec.rule is Rule.GRADIENT and not bool(torch.isfinite(tensor).all()):
                raise UsageError(f"session.assign: {spec.name} has values that are NaN or infinite")
        if (changed := self._seal.changed_constants()) is not None:
            names = ", ".join(self.layout.tensors[index].name for index in changed[:3]) or "a parameter"
            raise UsageError(
                f"session.assign: {names}: changed, though no optimizer trains it, so that it keeps its "
                "first value. Give it to the optimizer, or name it in session.optimizer(..., averaged=[...])"
            )
        with torch.no_grad():
            for index, tensor in enumerate(self.tensors):
                if self.layout.tensors[index].rule is not Rule.CONSTANT:
                    self.contribution(index).copy_(tensor)
        self._seal.open()

    def expect(self) -> None:
        """Values are about to be pulled. Blocks until the device has those of the last pull."""
        self._staging.settle()
        self._seal.open()

    def check_memory(self) -> None:
        """Take over what the script has assigned to buffers.

        Raises UsageError if the model's tensors were replaced, or moved away from where they are pulled to.
        """
        if self._registered is not None:
            self._registered.settle()
        for tensor, address, spec in zip(self.tensors, self._addresses, self.layout.tensors, strict=True):
            if tensor.data_ptr() != address:
                if tuple(tensor.shape) != spec.shape:
                    raise UsageError(
                        f"{spec.name} had the shape {list(spec.shape)} in session.optimizer(...), and has "
                        f"{list(tensor.shape)} now. If the first forward gives it its shape, run the model "
                        "once on a batch before that call"
                    )
                raise UsageError(
                    f"the memory of {spec.name} was replaced after session.optimizer(...). Move the model "
                    "(.to, .cuda, .half) and load values before that call. If the script changes a tensor "
                    "itself (see `averaged`), it must change it in place"
                )

    @torch.no_grad()
    def gather(self) -> None:
        """Copy what parameters with memory of their own have become to the values. Blocks for the copies."""
        for index in self._apart:
            if self.layout.tensors[index].rule is Rule.GRADIENT:
                self.value(index).copy_(self.tensors[index])

    def publish(self, *, besides: Set[int] = frozenset()) -> None:
        """The values are there: copy them to tensors that have memory of their own.

        Autograd is told of the others: a backward() through the values before them raises, as in torch. What
        is computed next is computed on the new ones. Blocks for the copies within this host's memory.

        Args:
            besides: buckets that were not pulled.
        """
        self._sent.clear()
        pulled = [index for index in self._apart if besides.isdisjoint(self.buckets_of[index])]
        with torch.no_grad():
            self._staging.up((self.tensors[index], self.value(index)) for index in pulled)
        if Rule.GRADIENT in self._changing:
            self._staging.settle()  # the script's own steps may write to the values, too
        for index in self._received:
            if besides.isdisjoint(self.buckets_of[index]):
                torch.autograd.graph.increment_version(self.tensors[index])
        self._seal.close()


def _tensors(
    allocate: Allocate, sizes: Mapping[tuple[str, Rule], int]
) -> dict[tuple[str, Rule], torch.Tensor]:
    """A flat tensor of so many bytes for each dtype and rule."""
    return {key: as_tensor(allocate(nbytes), dtype_of(key[0])) for key, nbytes in sizes.items()}


def _one_after_the_other(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have its elements in their logical order in memory.

    True of a tensor that was expanded, since elements that share memory cannot be trained; not of one that
    was permuted on purpose.
    """
    shared = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.is_contiguous() or shared
