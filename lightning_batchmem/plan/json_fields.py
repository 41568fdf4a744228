"""Data classes as JSON: the one writer, and the one reader."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_batchmem.plan.printable import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def to_json(value: DataclassInstance) -> str:
    """Return a data class as JSON, of which :func:`from_json` makes an equal one.

    Its texts are printable then.
    """
    return json.dumps(asdict(value), indent=2)


def from_json(kind: type[T], text: str, convert: Callable[[Any], Any] | None = None) -> T:
    """Return the data class that JSON describes.

    Keys that are no fields are ignored, because another version may have written them. Texts may
    reach a terminal, so they become printable.

    Args:
        kind: the data class.
        text: the JSON.
        convert: makes the JSON of this version from that of any version.

    Raises:
        ValueError: if ``text`` is not the JSON of this data class.
    """
    try:
        data = json.loads(text)
        value: T = _value(kind, data if convert is None else convert(data))
    except (TypeError, RecursionError) as error:
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
    # The only unions are those of a type and None.
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
        raise TypeError(f"{data!r} is no {types[0].__name__}")
    # Bytes and sizes are smaller. Python cannot compute with larger integers and floats together.
    if isinstance(data, int) and abs(data) >= 2**63:
        raise TypeError(f"{data} is too large")
