"""Reads a checkpoint's model for plain PyTorch: into a model, or into one file.

The checkpoint directory is not changed, so its job may be running.
"""

from __future__ import annotations

import contextlib
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from elastic_ps.adapters import base, peft
from elastic_ps.checkpoint import files
from elastic_ps.checkpoint.manifest import MANIFEST
from elastic_ps.checkpoint.store import Store
from elastic_ps.checkpoint.tensors import Reader
from elastic_ps.codec import naming
from elastic_ps.codec.optimizers import MASTER, PULLED, restored
from elastic_ps.codec.several import SEPARATOR, name_of_all
from elastic_ps.core.partition import TABLE, Rule, uncompiled, within
from elastic_ps.core.settings import Settings
from elastic_ps.errors import CheckpointCorrupt, CheckpointUnreadable, ModelMismatch, UserError

FORMATS = (".safetensors", ".pt")

AnyOptimizer = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
"""One optimizer, or several by name, in the order in which the script gives them to `session.optimizer`."""


def load_checkpoint(
    directory: Path | str,
    model: torch.nn.Module,
    optimizer: AnyOptimizer | None = None,
    *,
    version: int | None = None,
    own: Sequence[str] = (),
) -> int:
    """Load a job's checkpoint into a model, and its optimizer's state into an optimizer.

    Needs no job and no session. Blocks for reading and verifying the files. Tensors keep their devices.

    Args:
        directory: the job's checkpoint directory, or one `version-...` directory in it.
        model: a model of the trained class, with tensors of the same names and shapes.
        optimizer: created for `model` as in the script, a mapping if the script has one. It gets the state
            and the hyperparameters, such as the learning rate. With None, only the model is loaded.
        version: the version to load; None for the newest complete checkpoint.
        own: as given to `session.optimizer`: names of modules, parameters or buffers that the job leaves
            alone. No checkpoint has them, and they keep their values.

    Returns:
        The version: the number of optimizer steps that the model has taken.

    Raises:
        InvalidModel: the model has nothing with a name in `own`.
        ModelMismatch: the model or the optimizer does not fit the checkpoint. Neither has been changed.
        UserError: there is no such checkpoint.
        CheckpointCorrupt: the checkpoint is damaged.
        StorageUnavailable: the checkpoint cannot be read at the moment.
    """
    with open_checkpoint(Path(directory), version) as reader:
        values = state_dict(reader)
        left = _ids_of(model, own)
        if outside := base.require(model, peft.tensors(reader.manifest.base)):
            left |= {id(each) for name, each in naming.saved(model).items() if name in outside}
        _require_same(model, values, left, outside)
        optimizers = _listed(optimizer)
        states = _optimizer_states(reader, model, optimizers, left)
        names = {uncompiled(name): name for name in model.state_dict()}
        _load_rows(reader, model)
        model.load_state_dict({names[name]: value for name, value in values.items()}, strict=False)
        for each, state in zip(optimizers, states, strict=True):
            each.load_state_dict(state)
        return reader.manifest.version


def export(
    directory: Path,
    out: Path,
    *,
    version: int | None = None,
    beside: Callable[[Reader], Mapping[str, torch.Tensor]] = lambda _: {},
) -> tuple[int, int]:
    """Write a checkpoint's model as a plain `state_dict` to a file, atomically.

    A name without a dot is that of a directory, for the adapters of a job with `base="external"`, in the
    format of Hugging Face's PEFT: `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        out: the path of the file, which ends with `.safetensors` or `.pt`; or of that directory.
        beside: gives further tensors of the checkpoint for a file, by their names.

    Returns:
        The version, and the number of tensors.

    Raises:
        UserError: `out` has another ending or cannot be written, there is no such checkpoint, it has no
            adapters for a directory, or two tensors have the same name.
        CheckpointCorrupt, StorageUnavailable: see `load_checkpoint`.
    """
    if out.suffix not in ("", *FORMATS):
        raise UserError(
            f"OUT is {out}; expected a name that ends with {' or '.join(FORMATS)}; or, for a directory of "
            "adapters, a name without a dot"
        )
    with open_checkpoint(directory, version) as reader:
        values = state_dict(reader)
        if not out.suffix:
            return reader.manifest.version, _export_adapters(reader, values, out)
        further = beside(reader)
        if twice := sorted(values.keys() & further.keys()):
            raise UserError(
                f"the model and a table both have a tensor {twice[0]!r}; give the table another name"
            )
        values |= further
        temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}.partial")
        try:
            if out.suffix == ".pt":
                torch.save(values, temporary)
            else:  # a format in which no two tensors share their memory
                first = {id(tensor): name for name, tensor in reversed(values.items())}
                apart = {n: t if first[id(t)] == n else t.clone() for n, t in values.items()}
                safetensors.torch.save_file(apart, temporary)
            files.flush(temporary)
            temporary.replace(out)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError for all
            raise UserError(f"cannot write {out}: {error}") from error
        finally:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink()
        return reader.manifest.version, len(values)


def _export_adapters(reader: Reader, values: Mapping[str, torch.Tensor], out: Path) -> int:
    """Write a directory for PEFT; returns the number of tensors. Raises UserError."""
    said = peft.configuration(reader.manifest.base)
    found = peft.adapters(said, values) if said is not None else {}
    if not found:
        raise UserError(
            f"OUT is {out}; expected a name that ends with {' or '.join(FORMATS)}. A name without a dot is "
            "that of a directory for adapters, but the checkpoint has none: its job needs a model of Hugging "
            "Face's PEFT, and session.optimizer(..., base='external')"
        )
    try:
        peft.write(out, found)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {error}") from error
    return sum(len(tensors) for tensors, _ in found.values())


def open_checkpoint(directory: Path, version: int | None) -> Reader:
    """A verified checkpoint; a warning tells if it is not the newest or holds NaN. Raises as above."""
    if (directory / MANIFEST).is_file():
        directory = directory.absolute()
        number = directory.name.removeprefix("version-")
        if number == directory.name or not number.isdecimal():
            raise UserError(
                f"{directory}: the name of a checkpoint's directory must be version-NUMBER, as it was written"
            )
        if version in (None, int(number)):
            directory, version = directory.parent, int(number)
    store = Store(directory)
    problems: list[str] = []
    for candidate in reversed(store.chosen(version)):
        try:
            reader = store.open_whole(candidate)
        except CheckpointUnreadable:
            raise
        except CheckpointCorrupt as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(
                f"a newer checkpoint is damaged, so an older one is used: {problem}",
                RuntimeWarning,
                stacklevel=3,
            )
        if found := reader.not_finite():
            text = f"the checkpoint of version {candidate} holds NaN or Inf in {', '.join(found)}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        return reader
    raise CheckpointCorrupt("; ".join(problems))


def state_dict(reader: Reader) -> dict[str, torch.Tensor]:
    """The model's tensors by name. A shared tensor is there under each of its names."""
    values: dict[str, torch.Tensor] = {}
    for index, spec in enumerate(reader.manifest.specs):
        value = reader.value(index, 0, spec.elements).view(spec.shape)
        values |= dict.fromkeys((spec.name, *spec.aliases), value)
    return values


def _ids_of(model: torch.nn.Module, own: Sequence[str]) -> set[int]:
    """The ids of the tensors that are named, also by module. Raises InvalidModel."""
    tensors = {**naming.parameters(model), **naming.buffers(model, naming.saved(model))}
    return {id(tensors[name]) for name in within(own, list(tensors), "own")}


def _require_same(
    model: torch.nn.Module, values: Mapping[str, torch.Tensor], left: Set[int], outside: Set[str]
) -> None:
    """Raise ModelMismatch unless it has these tensors, and others only in `left` (ids) or `outside`."""
    present = {name: t for name, t in naming.saved(model).items() if isinstance(t, torch.Tensor)}
    absent = [
        name
        for name in present
        if name not in values and name not in outside and id(present[name]) not in left
    ]
    wrong = [f"{name} is not in the checkpoint" for name in absent]
    wrong += [f"{name} is not in the model" for name in values if name not in present]
    wrong += [
        f"{name} is in the checkpoint, but own=[...] names it"
        for name in values
        if name in present and id(present[name]) in left
    ]
    wrong += [
        f"{name} has shape {list(present[name].shape)}, but {list(value.shape)} in the checkpoint"
        for name, value in values.items()
        if name in present and present[name].shape != value.shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        hint = ". If the script passes own=[...] to session.optimizer, pass it here, too" if absent else ""
        raise ModelMismatch(f"the model does not fit the checkpoint: {'; '.join(wrong[:8])}{more}{hint}")


def _load_rows(reader: Reader, model: torch.nn.Module) -> None:
    """Load the rows of the model's tables. Raises ModelMismatch, before any is changed."""
    tables = [spec for spec in reader.manifest.base if spec.dtype == TABLE]
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "load_rows")]
    if layers:
        layers[0].load_rows(layers, reader.rows(), [spec.content for spec in tables])
    elif tables:
        raise ModelMismatch(f"{tables[0].name} of the checkpoint is not in the model")


def _listed(optimizer: AnyOptimizer | None) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]


def _optimizer_states(
    reader: Reader, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], left: Set[int]
) -> list[dict[str, Any]]:
    """The `state_dict` of each optimizer, without the tensors in `left`. Raises ModelMismatch."""
    if not optimizers:
        return []
    manifest = reader.manifest
    groups = Settings.from_json(manifest.state["settings"]).groups
    given = name_of_all(optimizers, lambda each: type(each).__name__)
    kept = SEPARATOR.join(name.rpartition(":")[2] for name in manifest.optimizer.split(SEPARATOR))
    if given != kept:
        several = ", which are the classes of all parameter groups" if SEPARATOR in kept + given else ""
        what = "optimizers are" if len(optimizers) > 1 else "optimizer is a"
        raise ModelMismatch(
            f"the {what} {given}, but the checkpoint was made with {manifest.optimizer}{several}"
        )
    count = sum(len(optimizer.param_groups) for optimizer in optimizers)
    if count != len(groups):
        raise ModelMismatch(
            f"the optimizer has {count} parameter groups, but the checkpoint has {len(groups)}"
        )
    own = naming.saved(model)
    places = {
        id(own[name]): index
        for index, spec in enumerate(manifest.specs)
        for name in (spec.name, *spec.aliases)
        if name in own
    }
    states, first = [], 0
    for optimizer in optimizers:
        states.append(_optimizer_state(reader, optimizer, groups, first, places, left))
        first += len(optimizer.param_groups)
    return states


def _optimizer_state(
    reader: Reader,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    first: int,
    places: Mapping[int, int],
    left: Set[int],
) -> dict[str, Any]:
    """The `state_dict` of an optimizer. Raises ModelMismatch.

    Args:
        groups: the hyperparameters of all parameter groups. Those of this optimizer begin at `first`.
        places: indexes of the model's tensors in the checkpoint, by their ids.
        left: the ids of the tensors that no checkpoint has.
    """
    state = optimizer.state_dict()
    for number, group in enumerate(optimizer.param_groups, first):
        packed, saved = state["param_groups"][number - first], groups[number]
        packed.update({key: _like(packed[key], value) for key, value in saved.items() if key in packed})
        for position, parameter in zip(packed["params"], group["params"], strict=True):
            if id(parameter) in left:
                continue
            index = places.get(id(parameter))
            spec = None if index is None else reader.manifest.specs[index]
            if spec is not None and spec.rule is not Rule.GRADIENT and not parameter.requires_grad:
                continue  # the optimizer has it, and never steps it, so there is no state
            if index is None or spec is None or (spec.rule, spec.group) != (Rule.GRADIENT, number):
                name = "a parameter" if spec is None else spec.name
                raise ModelMismatch(f"{name} is in parameter group {number}, but not in the checkpoint's")
            if entries := reader.state(index, 0, spec.elements):
                kept = {key: value for key, value in entries.items() if key not in (MASTER, PULLED)}
                state["state"][position] = restored(type(optimizer), saved, spec.shape, kept)
    return state


def _like(present: object, saved: Any) -> Any:
    """A hyperparameter with tuples restored, which JSON does not have."""
    return tuple(saved) if isinstance(present, tuple) else saved
