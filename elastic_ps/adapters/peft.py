"""Adapters in the format of Hugging Face's PEFT, for `PeftModel.from_pretrained`.

A checkpoint of a job with `base="external"` has the configurations of its adapters as one entry of the
model's description, so that all workers have the same ones. PEFT itself is not needed here.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from elastic_ps.core.partition import DESCRIPTIONS, Rule, TensorSpec, uncompiled
from elastic_ps.errors import UserError

CONFIGURATION = "peft_config"
"""The name of the entry. Its dtype is `json`."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def described(model: torch.nn.Module) -> list[TensorSpec]:
    """The entry with the configurations of the model's adapters; none if it has none."""
    for prefix, module in model.named_modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, Mapping) and all(hasattr(each, "to_dict") for each in configs.values()):
            said = {name: _plain(module, config) for name, config in configs.items()}
            path = f"{uncompiled(prefix)}." if uncompiled(prefix).strip(".") else ""
            text = json.dumps({"prefix": path, "adapters": said}, sort_keys=True, default=_listed)
            return [TensorSpec(CONFIGURATION, (), "json", Rule.EXTERNAL, content=text)]
    return []


def configuration(base: Iterable[TensorSpec]) -> dict[str, Any] | None:
    """The configuration that `described` gave; None if the model has no adapters of PEFT."""
    found = [spec.content for spec in base if (spec.name, spec.dtype) == (CONFIGURATION, "json")]
    return json.loads(found[0]) if found else None


def tensors(base: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The base without descriptions."""
    return [spec for spec in base if spec.dtype not in DESCRIPTIONS]


def adapters(
    said: Mapping[str, Any], values: Mapping[str, torch.Tensor]
) -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    """The tensors and the config of each trained adapter, by the folder that PEFT gives it.

    Args:
        said: see `configuration`.
        values: the checkpoint's tensors.

    Raises:
        UserError: adapters of this kind have names that are not known here.
    """
    found, names = {}, [*said["adapters"]]
    for name, config in said["adapters"].items():
        others = [f".{other}." for other in names if other != name]
        own = {
            key: value
            for key, value in values.items()
            if key.startswith(said["prefix"]) and not any(other in f"{key}." for other in others)
        }
        if not any(f".{name}." in f"{key}." for key in own):
            continue  # it is frozen
        if config.get("peft_type") not in _WHOLE:
            raise UserError(
                f"the adapter {name!r} is of the type {config.get('peft_type')}, and only PEFT can "
                "write its file, which holds other tensors or names than those trained. Load the checkpoint "
                "with elastic_ps.load_checkpoint, and call model.save_pretrained(OUT)"
            )
        renamed = {_renamed(key.removeprefix(said["prefix"]), name): value for key, value in own.items()}
        found["" if name == "default" else name] = (renamed, json.dumps(config, indent=2, sort_keys=True))
    return found


def write(out: Path, found: Mapping[str, tuple[dict[str, torch.Tensor], str]]) -> None:
    """Write what `adapters` has found to a directory. Raises OSError, SafetensorError."""
    import safetensors.torch

    for folder, (values, config) in found.items():
        (out / folder).mkdir(parents=True, exist_ok=True)
        apart = {name: value.clone() for name, value in values.items()}  # no two may share their memory
        mine = uuid.uuid4().hex  # another process may export to the same place
        partials = [out / folder / f".{name}.{mine}.partial" for name in (WEIGHTS, CONFIG)]
        try:
            safetensors.torch.save_file(apart, partials[0], metadata={"format": "pt"})
            partials[1].write_text(config, encoding="utf-8")
            for partial in partials:
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
            partials[0].replace(out / folder / WEIGHTS)
            partials[1].replace(out / folder / CONFIG)
        finally:
            for partial in partials:
                partial.unlink(missing_ok=True)


# fmt: off
_WHOLE = frozenset({
    "ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LILY",
    "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "POLY", "PSOFT", "ROAD",
    "TRAINABLE_TOKENS", "WAVEFT",
})
# fmt: on
"""The types whose file has the trained tensors and no others. PEFT may bring more types, of any form."""


def _renamed(key: str, adapter: str) -> str:
    """A tensor's name in PEFT's file: without the adapter's, which whoever loads it gives anew."""
    key = f"{key}.".replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".")[:-1]
    if key.endswith(".lora_magnitude_vector.weight"):
        key = key.removesuffix(".weight")
    return key if key.startswith("base_model.") else f"base_model.model.{key}"


def _plain(module: torch.nn.Module, config: Any) -> dict[str, Any]:
    """The configuration as PEFT saves it."""
    said = {**config.to_dict(), "inference_mode": True}
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    place = said.get("base_model_name_or_path") or getattr(inner, "name_or_path", None)
    if place and Path(place).is_dir():
        place = Path(place).name  # workers may have it at different places
    said["base_model_name_or_path"] = place or None
    if said.get("task_type") is None:
        kind = type(inner)
        said["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return said


def _listed(value: object) -> Any:
    """The form of types that JSON lacks: sets in a fixed order, and enumerations."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(getattr(value, "value", value))
