from __future__ import annotations

import numpy as np
import pytest
from gem.common.v1.tensor_pb2 import Tensor
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from feature_store.errors import InvalidInput
from feature_store.wire import pack_tensor, unpack_tensor

DTYPES = st.sampled_from(["<f4", ">f4", "<i8", ">i8", "<i4", "i1", "u1"])


@given(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
def test_an_array_survives_the_wire_to_the_bit(array: np.ndarray) -> None:
    there = unpack_tensor(Tensor.FromString(pack_tensor(array).SerializeToString()))
    assert there.shape == array.shape
    assert there.dtype == array.dtype.newbyteorder("<")
    assert there.tobytes() == array.astype(there.dtype).tobytes()


def test_a_transposed_array_travels_row_by_row() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3).T
    assert (unpack_tensor(pack_tensor(array)) == array).all()


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(InvalidInput, match="float64 does not travel"):
        pack_tensor(np.zeros(1))
    with pytest.raises(InvalidInput, match="dtype 0 is not known"):
        unpack_tensor(Tensor(shape=[0]))


@pytest.mark.parametrize(
    ("shape", "data"),
    [([2, 2], b"\0" * 12), ([-1], b""), ([-1, -4], b"\0" * 16), ([], b""), ([1], b"")],
)
def test_bytes_that_do_not_fill_the_shape_are_refused(shape: list[int], data: bytes) -> None:
    with pytest.raises(InvalidInput, match="carries"):
        unpack_tensor(Tensor(dtype=1, shape=shape, data=data))
