"""Files and data classes as JSON, which others may have written: one writer and one reader."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_batchmem.plan.printing import printable

# A plan with a thousand trials is smaller.
_MOST_MIB = 16


def read_small(path: Path) -> str:
    """The text of a regular file of at most 16 MiB.

    Raises:
        OSError: if there is no such file, or it cannot be read.
        ValueError: if it is another kind of file, larger, or not UTF-8.
    """
    check_regular(path)
    most_bytes = _MOST_MIB * 2**20
    with open(path, "rb") as file:
        # The size that a file system tells may be 0, as in /proc.
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {_MOST_MIB} MiB")
    return content.decode("utf-8")


def check_regular(path: Path) -> None:
    """Raise a ValueError unless it is a regular file.

    To open a pipe could take forever, and a device may have no end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def to_json(value: DataclassInstance) -> str:
    """Return a data class as JSON; :func:`from_json` makes an equal one from it.

    Its texts are printable then.
    """
    return json.dumps(asdict(value), indent=2)


def from_json(kind: type[T], text: str) -> T:
    """Return the data class that JSON describes.

    Keys that are not fields are ignored, because another version may have written them. Texts may
    reach a terminal, so they become printable.

    Args:
        kind: the data class.
        text: the JSON.

    Raises:
        ValueError: if ``text`` is not the JSON of this data class.
    """
    try:
        value: T = _value(kind, json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"text must be the JSON of a {kind.__name__}, got {text[:80]!r}"
        ) from error
    return value


def _value(annotation: Any, data: Any) -> Any:
    """Return a value of this type from what JSON has in its place.

    Raises:
        TypeError: if JSON has another type there.
    """
    if is_dataclass(annotation):
        _check_type(data, dict)
        annotations = get_type_hints(annotation)
        known = {
            field.name: _value(annotations[field.name], data[field.name])
            for field in fields(annotation)
            if field.name in data
        }
        # After is_dataclass, mypy takes the class for one of its instances, which has no call.
        return annotation(**known)  # type: ignore[operator]
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    # Each union is of a type and None.
    if origin is UnionType:
        return None if data is None else _value(arguments[0], data)
    if origin is tuple:
        _check_type(data, list)
        return tuple(_value(arguments[0], part) for part in data)
    if origin in (dict, Mapping):
        _check_type(data, dict)
        return {printable(key): _value(arguments[1], part) for key, part in data.items()}
    if origin is Literal or annotation is str:
        # Other versions have other values of the same type.
        _check_type(data, str)
        return printable(data)
    if annotation is float:
        _check_type(data, float, int)
        if isinstance(data, float) and not math.isfinite(data):
            raise TypeError(f"{data!r} is not finite")
    else:
        _check_type(data, annotation)
    return data


def _check_type(data: Any, *types: type) -> None:
    # A Boolean is an integer to Python, but not in JSON.
    if not isinstance(data, types) or (isinstance(data, bool) and bool not in types):
        raise TypeError(f"{data!r} is not a {types[0].__name__}")
    # Bytes and sizes are smaller. Python cannot compute with larger integers and floats together.
    if isinstance(data, int) and abs(data) >= 2**63:
        raise TypeError(f"{data} is too large")
