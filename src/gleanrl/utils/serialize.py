"""Turns dataclasses into bytes or JSON and back: the only serialiser of the package, built on msgspec.

Rollout files, the experience pool, checkpoints and the environment service use this serialiser, so a new field of a
dataclass is stored everywhere without further work. A new dataclass needs no code here either, because the serialiser
reads the type annotations of its fields.

    data = encode(trajectory)                       # MessagePack, the compact form
    assert decode(data, Trajectory).score == trajectory.score
    line = to_json(trajectory)                      # JSON, for files and HTTP bodies that people read
    trajectory = from_json(line, Trajectory)

A decoded value is equal to the value that was encoded:

* int32 and float32 arrays keep every bit, also the payload bits of a NaN. They are stored as little-endian bytes, and
  in JSON these bytes are written as base64 text.
* NaN and infinities in float fields are kept. JSON has no numbers for them, so they are written as the texts "NaN",
  "Infinity" and "-Infinity".
* Integers of any size are kept, and so are texts with lone surrogates, which UTF-8 cannot encode.

Values whose type is not annotated more closely than ``Any``, such as those of ``Trajectory.info``, are decoded to the
types of JSON: tuples, sets and arrays become lists, and numpy scalars become Python numbers. If the format is JSON, a
NaN among such values becomes the text "NaN", and the keys of a mapping among them become texts.

When a dataclass is decoded, keys that name none of its fields are ignored. The messages of a conversation
(`gleanrl.types.Message`) are dicts and keep all their keys.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

_EXACT: dict[np.dtype[Any], int] = {np.dtype("<i4"): 1, np.dtype("<f4"): 2}
"""Dtype of an array -> MessagePack extension code, for the dtypes whose arrays are stored as raw bytes."""
_DTYPES = {code: dtype for dtype, code in _EXACT.items()}


class DecodeError(ValueError):
    """The data do not describe an object of the requested type. If a field is wrong, the message names it."""


def encode(value: Any) -> bytes:
    """Serialise a dataclass, or a list, tuple or mapping of dataclasses, as MessagePack.

    A value that MessagePack cannot represent is serialised as JSON, which `decode` also reads.

    Raises:
        TypeError: a value has a type that cannot be serialised. The message names the type.
    """
    try:
        return _ENCODER.encode(value)
    except (UnicodeEncodeError, OverflowError):
        # JSON can represent lone surrogates and integers above 64 bits, and MessagePack cannot.
        return json.dumps(to_builtins(value)).encode("ascii")
    except RecursionError:
        raise TypeError("the value contains itself or is nested too deeply") from None


def decode(data: bytes, kind: type[T]) -> T:
    """Return the object of type ``kind`` that `encode` serialised as ``data``.

    Raises:
        DecodeError: the data are cut off, damaged, or of another type.
    """
    try:
        # These data are JSON, to which `encode` falls back. They cannot be MessagePack, in which each of these three
        # bytes is a complete integer, so that no further bytes would follow.
        if data[:1] in (b"{", b"[", b'"') and len(data) > 1:
            return msgspec.convert(json.loads(data), kind, str_keys=True, dec_hook=_array)
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(str(error)) from None


def encode_with_arrays(value: Any) -> tuple[bytes, list[npt.NDArray[Any]]]:
    """Serialise ``value`` without its int32 and float32 arrays. Return the bytes, and the arrays in order.

    For a caller that stores arrays in its own format, such as the experience pool. If MessagePack cannot represent the
    value, the bytes are those of `encode`, which include the arrays, and the list is empty. Raises the errors of
    `encode`.
    """
    arrays: list[npt.NDArray[Any]] = []

    def take(value: Any) -> Any:
        if isinstance(value, np.ndarray) and (code := _exact(value)):
            arrays.append(value)
            return msgspec.msgpack.Ext(code, value.size.to_bytes(4, "little"))
        return _to_plain(value)

    try:
        return msgspec.msgpack.encode(value, enc_hook=take), arrays
    except (UnicodeEncodeError, OverflowError, RecursionError):
        return encode(value), []


def decode_with_arrays(data: bytes, kind: type[T], int32: IntArray, float32: FloatArray) -> T:
    """Return the object of type ``kind`` that `encode_with_arrays` serialised.

    ``int32`` is the concatenation of all int32 arrays that `encode_with_arrays` returned, in the same order.
    ``float32`` is the concatenation of all float32 arrays.

    Raises:
        DecodeError: the data are cut off, damaged or of another type, or the arrays are longer or shorter than the
            object needs.
    """
    given, used = {1: int32, 2: float32}, {1: 0, 2: 0}

    def put(code: int, data: memoryview) -> npt.NDArray[Any]:
        if code not in given:
            raise ValueError(f"unknown extension {code}")
        start = used[code]
        used[code] = end = start + int.from_bytes(data, "little")
        if end > given[code].size:
            raise ValueError("the arrays are cut off")
        return given[code][start:end]

    if data[:1] == b"{" and len(data) > 1:
        value = decode(data, kind)
    else:
        try:
            value = msgspec.msgpack.decode(data, type=kind, dec_hook=_array, ext_hook=put)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DecodeError(str(error)) from None
    if used != {1: int32.size, 2: float32.size}:
        raise DecodeError("its arrays are longer than its data say")
    return value


def to_builtins(value: Any) -> Any:
    """Return ``value`` as dicts, lists, texts and numbers, in the structure that `to_json` writes.

    NaN and infinities remain floats, although `to_json` writes them as texts.

    Raises:
        TypeError: for the same values as `encode`.
    """
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_to_json_value)
    except RecursionError:
        raise TypeError("the value contains itself or is nested too deeply") from None


def from_builtins(value: Any, kind: type[T]) -> T:
    """Return the object of type ``kind`` that ``value``, which is parsed JSON, describes.

    Numbers may be given as texts, because `to_json` writes NaN and infinities as texts.

    Raises:
        DecodeError: ``value`` does not describe an object of this type.
    """
    try:
        return msgspec.convert(value, kind, strict=False, dec_hook=_array)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(str(error)) from None


def to_json(value: Any) -> bytes:
    """Serialise a dataclass, or a list, tuple or mapping of dataclasses, as one line of standard JSON in UTF-8.

    Raises:
        TypeError: for the same values as `encode`.
    """
    plain = to_builtins(value)
    try:
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # raised for a number that is not finite, and for a lone surrogate
        return json.dumps(_finite(plain), separators=(",", ":")).encode("ascii")


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Return the object of type ``kind`` that ``data`` describes.

    Raises:
        DecodeError: ``data`` are not JSON, or do not describe an object of this type.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not JSON: {error}") from None
    return from_builtins(value, kind)


def _to_msgpack_value(value: Any) -> Any:
    if isinstance(value, np.ndarray) and (code := _exact(value)):
        return msgspec.msgpack.Ext(code, value.tobytes())
    return _to_plain(value)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, np.ndarray) and _exact(value):
        return base64.b64encode(value.tobytes()).decode("ascii")
    return _to_plain(value)


def _exact(array: npt.NDArray[Any]) -> int | None:
    """Return the MessagePack extension code of an array that is stored as bytes; None if it is stored as a list.

    Only read-only, one-dimensional int32 and float32 arrays are stored as bytes, because the dataclasses of the package
    hold such arrays.
    """
    return None if array.flags.writeable or array.ndim != 1 else _EXACT.get(array.dtype)


def _to_plain(value: Any) -> Any:
    """Convert a value whose type msgspec does not support to a type that it supports.

    Raises:
        TypeError: there is no conversion for this type.
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    for base in (str, int, float):
        if isinstance(value, base):  # an instance of a subclass, which msgspec does not support
            return base(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be serialised")


def _finite(value: Any) -> Any:
    """Return a copy of ``value`` with texts in place of NaN and infinities."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _array(annotation: Any, value: Any) -> npt.NDArray[Any]:
    """Return the array of a field annotated as ``NDArray[dtype]``, from its value in MessagePack or JSON."""
    dtype = _field_dtype(annotation)
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), dtype)
    if isinstance(value, np.ndarray):
        if value.dtype != dtype:
            raise ValueError(f"found an array of {value.dtype}, expected {dtype}")
        return value
    try:
        array = np.asarray(value, dtype)
    except OverflowError as error:
        raise ValueError(str(error)) from None
    if dtype.kind == "i" and not np.array_equal(array, value):
        raise ValueError(f"expected an array of {dtype}, found other numbers")
    return array


@cache
def _field_dtype(annotation: Any) -> np.dtype[Any]:
    try:
        return np.dtype(get_args(get_args(annotation)[1])[0]).newbyteorder("<")
    except (IndexError, TypeError):
        raise NotImplementedError(f"cannot decode a field of type {annotation}") from None


def _extension(code: int, data: memoryview) -> npt.NDArray[Any]:
    if code not in _DTYPES:
        raise ValueError(f"unknown extension {code}")
    return np.frombuffer(data, _DTYPES[code])


@cache
def _decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_array, ext_hook=_extension)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_msgpack_value)
