"""Speaks KServe's Open Inference Protocol over gRPC, with raw tensors.

Knows the protocol's messages. Does not know what tensors mean, nor which model is asked.

KServe's package imports FastAPI, pandas and a Kubernetes client when any part of it is imported (measured: 1.5 s and
141 MiB); the one generated module that holds the messages needs protobuf alone (19 ms, 2 MiB). It is loaded by its file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
from gem.common.v1.tensor_pb2 import DataType, Tensor

from feature_store.errors import FailedPrecondition
from services.runtime.client import Method

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
PROBABILITY, FALLBACK = "p_", "fallback"

DATATYPES: Mapping[int, str] = {
    DataType.DATA_TYPE_FLOAT32: "FP32",
    DataType.DATA_TYPE_INT64: "INT64",
    DataType.DATA_TYPE_INT32: "INT32",
    DataType.DATA_TYPE_INT8: "INT8",
    DataType.DATA_TYPE_UINT8: "UINT8",
}


class Answer(NamedTuple):
    """What a vertical model says of N candidates."""

    probabilities: Mapping[str, npt.NDArray[np.float32]]
    """Objective → [N]; a post-click objective's is conditional on its parent."""
    fallback: npt.NDArray[np.bool_]
    """[N] the model replaced a score that was not finite."""
    model_version: str
    """Model and version."""


def _messages() -> ModuleType:
    package = importlib.util.find_spec("kserve")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("kserve is not installed; install the `router` extra")
    path = Path(package.submodule_search_locations[0]) / "protocol/grpc/grpc_predict_v2_pb2.py"
    spec = importlib.util.spec_from_file_location("grpc_predict_v2_pb2", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{path} is not there; install the kserve that the lock names")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_oip = _messages()


def model_infer(channel: grpc.Channel) -> Method[Any, Any]:
    """The protocol's one method that we call."""
    return channel.unary_unary(
        MODEL_INFER,
        request_serializer=_oip.ModelInferRequest.SerializeToString,
        response_deserializer=_oip.ModelInferResponse.FromString,
    )


def infer_request(model: str, *, request_id: str, tensors: Mapping[str, Tensor]) -> Any:
    """A ModelInferRequest that carries the tensors' bytes as they are."""
    request = _oip.ModelInferRequest(model_name=model, id=request_id)
    for name, tensor in tensors.items():
        request.inputs.add(name=name, datatype=DATATYPES[tensor.dtype], shape=tensor.shape)
        request.raw_input_contents.append(tensor.data)
    return request


def answer(response: Any, *, num_candidates: int) -> Answer:
    """What a ModelInferResponse says.

    Raises:
        FailedPrecondition: an output has another type or length than N candidates need.
    """
    probabilities: dict[str, npt.NDArray[np.float32]] = {}
    fallback = np.zeros(num_candidates, dtype=np.bool_)
    for index, output in enumerate(response.outputs):
        raw = response.raw_output_contents[index] if response.raw_output_contents else None
        if output.name.startswith(PROBABILITY):
            values = _values(output, raw, "FP32", np.float32, num_candidates)
            probabilities[output.name.removeprefix(PROBABILITY)] = values
        elif output.name == FALLBACK:
            fallback = _values(output, raw, "BOOL", np.bool_, num_candidates)
    version = f"{response.model_name}/{response.model_version}".rstrip("/")
    return Answer(probabilities, fallback, version)


def _values(
    output: Any, raw: bytes | None, datatype: str, dtype: type[np.generic], count: int
) -> npt.NDArray[Any]:
    right_type = output.datatype == datatype
    if right_type and raw is None:
        typed = {"FP32": output.contents.fp32_contents, "BOOL": output.contents.bool_contents}
        if len(typed[datatype]) == count:
            return np.array(typed[datatype], dtype=dtype)
    elif right_type and raw is not None and len(raw) == count * np.dtype(dtype).itemsize:
        return np.frombuffer(raw, dtype=dtype)
    raise FailedPrecondition(
        f"output {output.name!r} is {output.datatype}{list(output.shape)}; it must be {datatype}[{count}]"
    )
