"""Checks the arguments of the buffer's public methods against the types in their signatures.

The types of numbers, such as `Positive`, are those of the settings. As in the settings, a value of another type that
means the same is converted: ``2.0`` and ``np.int64(2)`` are the integer 2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Annotated, Any, TypeVar, cast

import numpy as np
import torch
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    ValidationError,
    validate_call,
)
from torch import Tensor

from gleanrl.utils.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])
LONGEST_VALUE = 60  # characters of a value in an error message; a longer value is shown by its type

Exponent = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, BeforeValidator(lambda value: bool(value) if isinstance(value, np.bool_) else value)]
FieldNames = Annotated[Collection[str], GetPydanticSchema(lambda _, handler: handler(tuple[str, ...]))]
"""Names of fields. A single text is refused, because it is a collection of letters too."""


def _check_indices(indices: Tensor) -> Tensor:
    if indices.dtype != torch.int64 or indices.dim() != 1:
        raise ValueError(f"a tensor int64 [n] is needed, this one is {indices.dtype} {list(indices.shape)}")
    return indices


Indices = Annotated[Tensor, AfterValidator(_check_indices)]


def checked(function: F) -> F:
    """Return ``function`` with a check that raises `UserError` if an argument has another type than its annotation.

    Arguments that are missing or unknown raise `TypeError`, as in any call.
    """
    signature = inspect.signature(function)

    @wraps(function)  # also gives it the signature and the annotations that are checked
    def arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    convert = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(arguments)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = convert(*args, **kwargs)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        else:
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments  # raises `TypeError` if one is missing or unknown
        name = first["loc"][0]  # of a positional argument it is the position
        name = list(given)[name] if isinstance(name, int) else name
        value = repr(given[name])
        if len(value) > LONGEST_VALUE or "\n" in value:
            value = type(given[name]).__name__
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{name} = {value}: {message[0].lower()}{message[1:]}")

    return cast(F, call)
