"""The state of a loop as JSON and back, exactly: numbers, strings, lists, tuples, dicts, small tensors, frozen dataclasses.

A dataclass is written with its class name and rebuilt only from a class that is already imported, so reading a checkpoint
never runs code it brings along (unlike pickle). Floats survive bit for bit: JSON keeps the shortest repr that reads back equal.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rewarden.errors import ResumeError, RewardenError


def encode(value: Any, where: str = "state") -> Any:
    """`value` as something `json.dumps` takes. RewardenError names the field that cannot be written."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
        return {"__class__": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().flatten().tolist()
        return {"__tensor__": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "values": flat}
    if type(value) is tuple:
        return {"__tuple__": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        bad = [key for key in value if not isinstance(key, str) or key.startswith("__")]
        if bad:
            raise RewardenError(f"{where} has the key {bad[0]!r}; keys of a saved dict are strings that do not start with '__'")
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    raise RewardenError(
        f"{where} is {value!r} ({type(value).__name__}); a checkpoint state holds numbers, strings, None, lists, tuples, "
        "dicts, tensors and dataclasses. Convert it, for example with float() or .tolist()"
    )


def decode(raw: Any) -> Any:
    """What `encode` was given; ResumeError when a dataclass is unknown or its fields have changed."""
    if isinstance(raw, list):
        return [decode(item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    if "__tuple__" in raw:
        return tuple(decode(item) for item in raw["__tuple__"])
    if "__tensor__" in raw:
        return torch.tensor(raw["values"], dtype=getattr(torch, raw["__tensor__"])).reshape(raw["shape"])
    if "__class__" in raw:
        return _rebuild(raw["__class__"], {key: decode(item) for key, item in raw["fields"].items()})
    return {key: decode(item) for key, item in raw.items()}


def _rebuild(name: str, fields: dict[str, Any]) -> Any:
    module, qualname = name.split(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ResumeError(
            f"the checkpoint holds a {name}, which this program does not know; resume with the code that wrote it"
        )
    try:
        return found(**fields)
    except TypeError as error:
        raise ResumeError(
            f"the checkpoint holds a {name} with other fields: {error}; resume with the code that wrote it"
        ) from error
