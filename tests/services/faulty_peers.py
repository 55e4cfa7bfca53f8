"""Peers of the router that answer by rule and fail on demand: fault injectors, one gRPC server for all three.

Knows the peers' protocols. Real peers are started by the integration tests; these can hang, lie and disappear at will.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from gem.common.v1.tensor_pb2 import Tensor
from gem.sequence.v1 import sequence_service_pb2 as sequence
from gem.sequence.v1 import sequence_service_pb2_grpc
from gem.solaris.v1 import solaris_service_pb2 as solaris
from gem.solaris.v1 import solaris_service_pb2_grpc

from feature_store.ids import key_of
from feature_store.layout import Layout
from feature_store.spec import Spec, load_spec
from feature_store.wire import pack_tensor
from services.router import inference, policy
from services.router.absent import Absent
from services.router.asked import Asked
from services.router.inference import MODEL_INFER

SPEC = """
name: tiny
surfaces: [{name: feed}, {name: reels}]
objectives:
  - {name: click, attribution_window_seconds: 3600}
  - {name: buy, attribution_window_seconds: 86400, parent: click}
entities: {user: {id_type: string}, ad: {id_type: int64}, ad_group: {id_type: int64}}
features:
  - {name: user, owner: user, id: {rows: 100}}
  - {name: country, owner: request, id: {rows: 10}}
  - {name: ad, owner: ad, id: {rows: 100}}
  - {name: ad_group, owner: ad, id: {rows: 100}}
  - {name: text, owner: ad, embedding: {dim: 4}}
event_sources:
  - {name: impression, features: [ad, ad_group], max_length: 50}
aggregates:
  - {name: user_clicks, by: [user], objective: click, statistic: count}
  - {name: ad_rate, by: [ad], objective: click, statistic: rate, prior_strength: 10}
"""
SPACE = "00000000000000a1"
DIM, LOOPFM_DIM = 8, 32
HANG_SECONDS = 20.0
ROUTES = f"""
version: {{version}}
surfaces:
  feed:
    salt: feed
    value_weights: {{{{click: 1.0, buy: 10.0}}}}
    speculation_top: {{top}}
    arms:
      - {{{{name: A0, model: plain, weight: 5000}}}}
      - name: A3
        model: full
        weight: 5000
        loopfm: true
        loopfm_space_id: "{SPACE}"
        loopfm_dim: {LOOPFM_DIM}
        solaris: true
        solaris_space_id: "{SPACE}"
        solaris_dim: {DIM}
      - {{{{name: next, model: next, shadow: true}}}}
"""


def user_of_arm(name: str) -> str:
    """A user whom the table puts into an arm."""
    for number in range(100):
        bucket = policy.bucket_of(key_of(f"user-{number}", 2), salt="feed")
        if (bucket < 5000) == (name == "A0"):
            return f"user-{number}"
    raise AssertionError(name)


USER = {name: user_of_arm(name) for name in ("A0", "A3")}


def write_spec(folder: Path) -> Spec:
    """The spec of the tests, on disk as `spec.yaml`."""
    path = folder / "spec.yaml"
    path.write_text(SPEC)
    return load_spec(path)


class FaultyPeers:
    """Sequence, solaris and every vertical model behind one port; `faults` holds what is wrong right now.

    Faults: `sequence`, `solaris`, or a model's name → hang | unavailable | bug; `sequence` → other_spec | no_memory;
    a model → nan | short | no_buy.
    """

    def __init__(self, spec: Spec, *, port: int = 0) -> None:
        self.spec = spec
        self.faults: dict[str, str] = {}
        self.infer_requests: list[Any] = []
        self.state_requests: list[sequence.GetUserStateRequest] = []
        self.headers: list[dict[str, str]] = []
        self._release = threading.Event()
        self._absent = Absent(Layout(spec), spec.surfaces)
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(self._pool, options=[("grpc.max_receive_message_length", -1)])
        sequence_service_pb2_grpc.add_SequenceServiceServicer_to_server(
            _Sequence(self), self._server
        )
        solaris_service_pb2_grpc.add_SolarisServiceServicer_to_server(_Solaris(self), self._server)
        self._server.add_generic_rpc_handlers((_Oip(self),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    @property
    def address(self) -> str:
        """host:port of all three."""
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Disappear at once."""
        self._release.set()
        self._server.stop(0).wait()
        self._pool.shutdown()

    def fail(self, name: str, context: grpc.ServicerContext) -> str:
        """Do what the fault of `name` says; returns it if it is a lie rather than a failure."""
        self.headers.append({key: str(value) for key, value in context.invocation_metadata()})
        fault = self.faults.get(name, "")
        if fault == "hang":
            self._release.wait(HANG_SECONDS)
        if fault == "unavailable":
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if fault == "bug":
            context.abort(grpc.StatusCode.INTERNAL, "internal error")
        return fault

    def state(self, request: sequence.GetUserStateRequest) -> dict[str, Tensor]:
        """User and ad tensors of a user without a history but with three LoopFM entries."""
        ad_keys = tuple(int(ad) for ad in request.ad_ids)
        asked = Asked(
            request_id="",
            surface=request.surface,
            user_id=request.user_id,
            user_key=key_of(request.user_id, self.spec.id_type("user")),
            request_ms=request.as_of_ms,
            ad_ids=tuple(request.ad_ids),
            ad_keys=ad_keys,
            bids=np.ones(len(ad_keys)),
            context={},
            top_count=0,
        )
        tensors = dict(self._absent.state(asked, memory_bytes=LOOPFM_DIM // 2))
        if request.loopfm_space_id:
            rows = {"memory_ms": np.arange(3), "memory_surface": np.zeros(3, np.int32)}
            rows |= {
                "memory_labels": np.zeros(3, np.int32),
                "memory_q": np.full((3, 16), 7, np.uint8),
            }
            tensors |= {name: pack_tensor(rows[name]) for name in rows}
        return tensors


class _Sequence(sequence_service_pb2_grpc.SequenceServiceServicer):
    def __init__(self, peers: FaultyPeers) -> None:
        self._peers = peers

    def GetUserState(
        self, request: sequence.GetUserStateRequest, context: grpc.ServicerContext
    ) -> sequence.GetUserStateResponse:
        self._peers.state_requests.append(request)
        fault = self._peers.fail("sequence", context)
        return sequence.GetUserStateResponse(
            tensors=self._peers.state(request),
            as_of_ms=request.as_of_ms,
            spec_hash=b"x" * 16 if fault == "other_spec" else self._peers.spec.hash,
            missing=["loopfm"] if fault == "no_memory" else [],
        )


class _Solaris(solaris_service_pb2_grpc.SolarisServiceServicer):
    def __init__(self, peers: FaultyPeers) -> None:
        self._peers = peers

    def ReadPairs(
        self, request: solaris.ReadPairsRequest, context: grpc.ServicerContext
    ) -> solaris.ReadPairsResponse:
        self._peers.fail("solaris", context)
        count = len(request.ad_ids)
        arrays = {
            "pair_q": np.ones((count, request.dim), np.int8),
            "pair_scale": np.ones(count, np.float32),
            "pair_level": (np.arange(count) % 5).astype(np.int32),
            "pair_meta": np.zeros((count, 3), np.float32),
        }
        return solaris.ReadPairsResponse(tensors={k: pack_tensor(v) for k, v in arrays.items()})


class _Oip(grpc.GenericRpcHandler):
    """ModelInfer: P(click) is the ad id in per mille, P(buy | click) one half."""

    def __init__(self, peers: FaultyPeers) -> None:
        self._peers = peers
        self._messages = inference._oip

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method != MODEL_INFER:
            return None
        return grpc.unary_unary_rpc_method_handler(
            self._infer,
            request_deserializer=self._messages.ModelInferRequest.FromString,
            response_serializer=self._messages.ModelInferResponse.SerializeToString,
        )

    def _infer(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._peers.infer_requests.append(request)
        fault = self._peers.fail(request.model_name, context)
        tensors = {
            i.name: raw for i, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        shapes = {each.name: list(each.shape) for each in request.inputs}
        keys = np.frombuffer(tensors["ad_ids"], np.int64).reshape(shapes["ad_ids"])[:, 0]
        click = (keys / 1000).astype(np.float32)
        if fault == "nan":
            click[keys == 3] = np.nan
        if fault == "short":
            click = click[1:]
        outputs = {"p_click": click, "p_buy": np.full(len(keys), 0.5, np.float32)}
        if fault == "no_buy":
            del outputs["p_buy"]
        response = self._messages.ModelInferResponse(
            model_name=request.model_name, model_version="v1", id=request.id
        )
        for name, values in outputs.items():
            response.outputs.add(name=name, datatype="FP32", shape=[len(values)])
            response.raw_output_contents.append(values.tobytes())
        return response


def shapes_sent(request: Any) -> dict[str, list[int]]:
    """Shape of each tensor of a ModelInferRequest."""
    return {each.name: list(each.shape) for each in request.inputs}


def tensor_sent(request: Any, name: str, dtype: type[np.generic]) -> np.ndarray:
    """One tensor of a ModelInferRequest."""
    index = [each.name for each in request.inputs].index(name)
    values = np.frombuffer(request.raw_input_contents[index], dtype)
    return values.reshape(list(request.inputs[index].shape))


def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Wait for something that another thread does."""
    waiting = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError(f"it did not come true within {seconds} s")
