"""Turns arrays into tensor messages and back, bytes untouched.

Knows dtypes, shapes and byte order. Does not know what a tensor means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from gem.common.v1.tensor_pb2 import DataType, Tensor

from feature_store.batch import Array
from feature_store.errors import InvalidInput

_NUMPY: Mapping[DataType, np.dtype[np.generic]] = {
    DataType.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    DataType.DATA_TYPE_INT64: np.dtype("<i8"),
    DataType.DATA_TYPE_INT32: np.dtype("<i4"),
    DataType.DATA_TYPE_INT8: np.dtype("i1"),
    DataType.DATA_TYPE_UINT8: np.dtype("u1"),
}
_WIRE = {dtype: wire for wire, dtype in _NUMPY.items()}


def pack_tensor(array: npt.NDArray[np.generic]) -> Tensor:
    """The message of an array.

    Raises:
        InvalidInput: its dtype does not travel.
    """
    little = array.dtype.newbyteorder("<")
    if little not in _WIRE:
        raise InvalidInput(f"dtype {array.dtype} does not travel; use one of {_names()}")
    return Tensor(
        dtype=_WIRE[little],
        shape=array.shape,
        data=array.astype(little, copy=False).tobytes(),
    )


def unpack_tensor(tensor: Tensor) -> Array:
    """The array of a message; read-only, its memory is the message's.

    Raises:
        InvalidInput: the dtype is not known, a size is negative, or the bytes do not fill the shape.
    """
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise InvalidInput(f"tensor dtype {tensor.dtype} is not known; use one of {_names()}")
    shape = tuple(tensor.shape)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(tensor.data):
        raise InvalidInput(
            f"tensor of {dtype.name}{list(shape)} carries {len(tensor.data)} bytes; "
            "send exactly one element for each place of the shape"
        )
    return np.frombuffer(tensor.data, dtype=dtype).reshape(shape)


def _names() -> list[str]:
    return sorted(dtype.name for dtype in _WIRE)
