"""What a client may send to a vertical model and what it gets, tensor by tensor.

Knows names, data types, shapes and ranges on the Open Inference Protocol. Does not know models or transports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kserve import InferInput
from kserve.utils.numpy_codec import from_np_dtype

from feature_store.batch import DEFAULT_LEVEL, FIELDS, Array, FeatureBatch, Field, from_tensors
from feature_store.errors import FailedPrecondition, InvalidInput, ResourceExhausted

PROBABILITY_PREFIX = "p_"
FALLBACK = "fallback"
SPEC_HASH, LOOPFM_SPACE, SOLARIS_SPACE = "spec_hash", "loopfm_space_id", "solaris_space_id"
"""Names of the stamps among a request's parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """Shapes and ranges of one model's tensors."""

    widths: Mapping[str, int]
    """Second axis of every tensor that has one."""
    ranges: Mapping[str, tuple[int, int]]
    """Smallest and largest value of tensors that index something."""
    unread: frozenset[str]
    """Tensors of channels that the model does not have: they may be left out."""
    objectives: tuple[str, ...]
    """In the order of the model's outputs."""
    max_candidates: int
    """Ads of one request."""
    stamps: Mapping[str, str]
    """What a request may state of the tensors it carries, in hex: hash of the spec, coordinate systems."""

    def check_stamps(self, stated: Mapping[str, str]) -> None:
        """Refuse tensors that were made for another spec or in another coordinate system.

        Raises:
            FailedPrecondition: a stamp is stated and differs.
        """
        for name, value in self.stamps.items():
            if name in stated and stated[name] != value:
                raise FailedPrecondition(
                    f"the request states {name} {stated[name]!r}, the model was built for {value!r}; "
                    "reload the route table"
                )

    def decode(self, inputs: Sequence[InferInput]) -> FeatureBatch:
        """The batch of one request from the tensors of a message.

        Raises:
            InvalidInput: naming the tensor, the rule it breaks and the way out.
            ResourceExhausted: more candidates than the limit.
        """
        tensors: dict[str, Array] = {}
        for tensor in inputs:
            field = FIELDS.get(tensor.name)
            if field is None:
                raise InvalidInput(f"tensor {tensor.name!r} is not known; send {sorted(FIELDS)}")
            if tensor.name in tensors:
                raise InvalidInput(f"tensor {tensor.name!r} is there twice; send it once")
            tensors[tensor.name] = self._array(tensor, field)
        self._fill(tensors)
        batch = from_tensors(tensors)
        self._check_values(batch)
        return batch

    def outputs(self) -> dict[str, str]:
        """Output name → data type."""
        probabilities = {f"{PROBABILITY_PREFIX}{name}": "FP32" for name in self.objectives}
        return {**probabilities, FALLBACK: "BOOL"}

    def input_metadata(self) -> list[dict[str, object]]:
        """Inputs as the protocol's model metadata lists them."""
        return [
            {"name": name, "datatype": datatype(field), "shape": self._shape(name)}
            for name, field in FIELDS.items()
        ]

    def output_metadata(self) -> list[dict[str, object]]:
        """Outputs as the protocol's model metadata lists them."""
        return [
            {"name": name, "datatype": kind, "shape": [-1]} for name, kind in self.outputs().items()
        ]

    def _shape(self, name: str) -> list[int]:
        """Shape of an input; -1 where any length goes."""
        field = FIELDS[name]
        leading = 1 if field.axis == "request" else -1
        return [leading] if field.ndim == 1 else [leading, self.widths.get(name, -1)]

    def _array(self, tensor: InferInput, field: Field) -> Array:
        _check_head(tensor, field)
        array = _values(tensor, field)
        width = self.widths.get(tensor.name)
        if width is not None and tensor.name not in self.unread and array.shape[1] != width:
            raise InvalidInput(
                f"tensor {tensor.name!r} has shape {list(array.shape)}; its last axis must be {width}: "
                "it was packed for another dataset spec or model"
            )
        if field.axis == "candidate" and len(array) > self.max_candidates:
            raise ResourceExhausted(
                f"{len(array)} candidates exceed the limit of {self.max_candidates}; send several requests"
            )
        return array

    def _fill(self, tensors: dict[str, Array]) -> None:
        """Puts neutral tensors in the place of those the model does not read."""
        leading = {"candidate": len(tensors.get("ad_ids", ())), "memory": 0}
        for name in self.unread:
            field = FIELDS[name]
            shape = (leading[field.axis], *(self.widths.get(name, 0),) * (field.ndim - 1))
            neutral = DEFAULT_LEVEL if name == "pair_level" else 0
            tensors[name] = np.full(shape, neutral, dtype=field.dtype)

    def _check_values(self, batch: FeatureBatch) -> None:
        for name, (low, high) in self.ranges.items():
            values: npt.NDArray[np.int32] = getattr(batch, name)
            if values.size and (values.min() < low or values.max() > high):
                wrong = values[(values < low) | (values > high)][0]
                raise InvalidInput(f"tensor {name!r} holds {wrong}; it must be in {low}..{high}")


def datatype(field: Field) -> str:
    """Data type of a field as the protocol spells it."""
    return str(from_np_dtype(np.dtype(field.dtype)))


def _check_head(tensor: InferInput, field: Field) -> None:
    if tensor.datatype != datatype(field):
        raise InvalidInput(
            f"tensor {tensor.name!r} is {tensor.datatype}; it must be {datatype(field)}"
        )
    shape = list(tensor.shape)
    if len(shape) != field.ndim or min(shape, default=0) < 0:
        raise InvalidInput(
            f"tensor {tensor.name!r} has shape {shape}; it must have {field.ndim} axes, none negative"
        )


def _values(tensor: InferInput, field: Field) -> Array:
    """Elements of a tensor whose head was checked; numbers in JSON must be of the declared kind."""
    data = tensor.data
    try:
        if isinstance(data, list) and data and np.issubdtype(field.dtype, np.integer):
            _refuse_fractions(tensor.name, data)
        array: Array = tensor.as_numpy()
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(
            f"tensor {tensor.name!r} does not hold {int(np.prod(tensor.shape))} elements of {tensor.datatype} "
            f"as its shape {list(tensor.shape)} says ({error}); send exactly that many"
        ) from error
    return array


def _refuse_fractions(name: str, data: list[object]) -> None:
    """NumPy would cut 1.5 down to 1 without a word."""
    kind = np.array(data).dtype.kind
    if kind not in "iu":
        raise InvalidInput(
            f"tensor {name!r} holds values that are not whole numbers; send integers"
        )
