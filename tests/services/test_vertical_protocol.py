"""The Open Inference Protocol as a client meets it: a real server on loopback, a scorer that is a formula."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kserve.protocol.grpc import grpc_predict_v2_pb2 as oip
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from kserve.utils.numpy_codec import from_np_dtype, to_np_dtype
from prometheus_client import CollectorRegistry

from feature_store.batch import FIELDS, Array, FeatureBatch
from feature_store.errors import CorruptArtefact
from services.runtime.limits import Limits
from services.runtime.metrics import CallMetrics
from services.vertical.contract import Contract
from services.vertical.grpc_server import GrpcSettings
from services.vertical.predictor import Scorer, ScoringMetrics, Vertical, Workplace
from services.vertical.scoring import Scores, finite
from services.vertical.server import VerticalServer, VerticalServerSettings

pytestmark = pytest.mark.filterwarnings(
    "ignore:ORJSONResponse is deprecated"  # kserve's choice of response class
)

WIDTHS = {
    "user_ids": 2, "user_dense": 3, "event_ids": 2, "event_dense": 1, "ad_ids": 3, "ad_dense": 2,
    "memory_q": 4, "pair_q": 8, "pair_meta": 3,
}  # fmt: skip
RANGES = {
    "surface": (0, 1), "event_source": (0, 2), "event_surface": (-1, 1),
    "memory_surface": (-1, 1), "pair_level": (0, 4),
}  # fmt: skip


@dataclass
class Formula:
    """Scores an ad by its first dense feature; an ad whose second is infinite has no finite score."""

    version: str = "7"
    unread: frozenset[str] = frozenset()
    gate: threading.Event = field(default_factory=threading.Event)

    @property
    def contract(self) -> Contract:
        return Contract(
            widths=WIDTHS, ranges=RANGES, unread=self.unread,
            objectives=("click", "buy"), max_candidates=1_000,
            stamps={"spec_hash": "aa", "solaris_space_id": "5c"},
        )  # fmt: skip

    def score(self, batch: FeatureBatch) -> Scores:
        logits = batch.ad_dense[:, :1] + np.array([[0.0, 1.0]], dtype=np.float32)
        sane = np.isfinite(batch.ad_dense[:, 1:])
        probabilities = np.where(sane, 1 / (1 + np.exp(-logits)), np.nan)
        return finite(("click", "buy"), probabilities, np.array([0.5, 0.25], dtype=np.float32))


@contextmanager
def serving(models: dict[str, Callable[[], Scorer]], **settings: Any) -> Iterator[VerticalServer]:
    registry = CollectorRegistry()
    pool = ThreadPoolExecutor(2)
    place = Workplace(pool=pool, metrics=ScoringMetrics(registry), max_in_flight=4)
    server = VerticalServer(
        VerticalServerSettings(
            grpc=GrpcSettings(listen="127.0.0.1:0", limits=Limits(max_message_bytes=4 << 20)),
            call_metrics=CallMetrics(registry),
            drain_seconds=0.0,
            **settings,
        )
    )
    verticals = [Vertical(name, load, place) for name, load in models.items()]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(verticals)))
    thread.start()
    try:
        assert server.wait_listening(10), "the server did not come up"
        yield server
    finally:
        server.stop()
        thread.join(10)
        pool.shutdown()


class Unfinished(Formula):
    def score(self, batch: FeatureBatch) -> Scores:
        raise NotImplementedError("no kernel for this host")


class Buggy(Formula):
    def score(self, batch: FeatureBatch) -> Scores:
        raise KeyError("secret")


@pytest.fixture(scope="module")
def slow_gate() -> threading.Event:
    return threading.Event()


def http_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def corrupt() -> Scorer:
    raise CorruptArtefact("weights.safetensors has another digest than its manifest says")


@pytest.fixture(scope="module")
def server(slow_gate: threading.Event) -> Iterator[tuple[str, str]]:
    """One process with a ready model, one still loading, and one that was refused."""

    def slow() -> Scorer:
        slow_gate.wait(20)
        return Formula()

    port = http_port()
    models: dict[str, Callable[[], Scorer]] = {
        "feed": Formula,
        "lean": lambda: Formula(unread=frozenset(n for n in FIELDS if n.startswith(("pair_", "memory_")))),
        "slow": slow,
        "broken": corrupt,
        "unfinished": Unfinished,
        "buggy": Buggy,
    }  # fmt: skip
    with serving(models, http_listen=f"127.0.0.1:{port}") as live:
        address = f"127.0.0.1:{live.port}"
        for name in ("feed", "lean", "unfinished", "buggy"):
            _wait_until_loaded(address, name)
        yield address, f"http://127.0.0.1:{port}"
        slow_gate.set()


def _wait_until_loaded(address: str, name: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for _ in range(500):
            if stub.ModelReady(oip.ModelReadyRequest(name=name), timeout=5).ready:
                return
            threading.Event().wait(0.01)
    raise AssertionError(f"{name} was never ready")


@pytest.fixture(scope="module")
def stub(server: tuple[str, str]) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server[0]) as channel:
        yield GRPCInferenceServiceStub(channel)


def tensors(n: int = 3, events: int = 2, memory: int = 1) -> dict[str, Array]:
    sizes = {"request": 1, "candidate": n, "event": events, "memory": memory}
    values: dict[str, Array] = {
        name: np.zeros((sizes[f.axis],) + ((WIDTHS[name],) if f.ndim == 2 else ()), dtype=f.dtype)
        for name, f in FIELDS.items()
    }
    values["ad_dense"][:, 0] = np.linspace(-2, 2, n)
    return values


def message(values: dict[str, Array], model: str = "feed", **fields: Any) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name=model, id="r1", **fields)
    for name, array in values.items():
        request.inputs.add(name=name, datatype=from_np_dtype(array.dtype), shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def outputs(response: oip.ModelInferResponse) -> dict[str, Array]:
    return {
        output.name: np.frombuffer(raw, dtype=to_np_dtype(output.datatype)).reshape(output.shape)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def refusal(call: Callable[[], object]) -> tuple[str, str, str]:
    """Code, message and reason of a call that must fail."""
    with pytest.raises(grpc.RpcError) as failed:
        call()
    status = rpc_status.from_call(failed.value)
    assert status is not None, failed.value
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "gem"
    return failed.value.code().name, status.message, info.reason


@pytest.mark.parametrize("n", [0, 1, 3, 1_000])
def test_n_candidates_get_n_probabilities(stub: GRPCInferenceServiceStub, n: int) -> None:
    response = stub.ModelInfer(message(tensors(n)), timeout=10)
    got = outputs(response)
    assert (response.model_name, response.model_version, response.id) == ("feed", "7", "r1")
    assert sorted(got) == ["fallback", "p_buy", "p_click"]
    assert [(a.dtype.name, a.shape) for a in (got["p_click"], got["fallback"])] == [
        ("float32", (n,)), ("bool", (n,)),
    ]  # fmt: skip
    expected = 1 / (1 + np.exp(-np.linspace(-2, 2, n, dtype=np.float32)))
    np.testing.assert_allclose(got["p_click"], expected, rtol=1e-6)
    assert not got["fallback"].any()


def test_a_score_that_is_not_finite_becomes_the_base_rate_and_says_so(
    stub: GRPCInferenceServiceStub,
) -> None:
    values = tensors(3)
    values["ad_dense"][1, 1] = np.inf
    got = outputs(stub.ModelInfer(message(values), timeout=10))
    assert got["fallback"].tolist() == [False, True, False]
    assert (got["p_click"][1], got["p_buy"][1]) == (0.5, 0.25)
    assert np.isfinite(got["p_click"]).all()


def test_typed_contents_are_answered_in_kind(stub: GRPCInferenceServiceStub) -> None:
    kinds = {"FP32": "fp32_contents", "INT64": "int64_contents", "UINT8": "uint_contents"}
    request = oip.ModelInferRequest(model_name="feed")
    for name, array in tensors(2).items():
        kind = from_np_dtype(array.dtype)
        contents = {kinds.get(kind, "int_contents"): array.ravel().tolist()}
        request.inputs.add(name=name, datatype=kind, shape=array.shape, contents=contents)
    response = stub.ModelInfer(request, timeout=10)
    assert not response.raw_output_contents
    clicks = next(o for o in response.outputs if o.name == "p_click")
    assert len(clicks.contents.fp32_contents) == 2


def test_only_the_outputs_asked_for_come_back(stub: GRPCInferenceServiceStub) -> None:
    request = message(tensors(2))
    request.outputs.add(name="p_buy")
    assert list(outputs(stub.ModelInfer(request, timeout=10))) == ["p_buy"]
    request.outputs.add(name="p_sell")
    code, text, _ = refusal(lambda: stub.ModelInfer(request, timeout=10))
    assert code == "INVALID_ARGUMENT"
    assert "p_sell" in text
    assert "p_buy" in text


def without(name: str) -> dict[str, Array]:
    return {key: value for key, value in tensors().items() if key != name}


def with_(name: str, array: Array) -> dict[str, Array]:
    return {**tensors(), name: array}


BROKEN = {
    "a missing tensor": (without("ad_ids"), "'ad_ids'"),
    "an unknown tensor": (with_("horoscope", np.zeros(1, np.float32)), "'horoscope'"),
    "another data type": (with_("ad_ids", np.zeros((3, 3), np.int32)), "INT64"),
    "a lost axis": (with_("ad_ids", np.zeros(3, np.int64)), "2 axes"),
    "another width": (with_("ad_ids", np.zeros((3, 5), np.int64)), "must be 3"),
    "leading dimensions that disagree": (with_("ad_ids", np.zeros((4, 3), np.int64)), "'ad_dense'"),
    "two users": (with_("user_key", np.zeros(2, np.int64)), "request tensors"),
    "a level beyond the last": (with_("pair_level", np.full(3, 5, np.int32)), "0..4"),
    "a surface out of range": (with_("surface", np.full(1, 9, np.int32)), "'surface'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tensor_is_refused_by_name_and_rule(
    stub: GRPCInferenceServiceStub, case: str
) -> None:
    values, expected = BROKEN[case]
    code, text, reason = refusal(lambda: stub.ModelInfer(message(values), timeout=10))
    assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_INPUT")
    assert expected in text


@pytest.mark.parametrize(
    ("shape", "data"), [([2, 2], 12), ([-1, 3], 72), ([3, 3], 71), ([2**40, 3], 72), ([3, 3], 0)]
)
def test_a_shape_that_does_not_fit_its_bytes_is_refused(
    stub: GRPCInferenceServiceStub, shape: list[int], data: int
) -> None:
    request = message(tensors())
    position = next(i for i, t in enumerate(request.inputs) if t.name == "ad_ids")
    request.inputs[position].ClearField("shape")
    request.inputs[position].shape.extend(shape)
    request.raw_input_contents[position] = bytes(data)
    code, text, _ = refusal(lambda: stub.ModelInfer(request, timeout=10))
    assert code == "INVALID_ARGUMENT"
    assert "'ad_ids'" in text


def test_a_tensor_sent_twice_is_refused(stub: GRPCInferenceServiceStub) -> None:
    request = message(tensors())
    request.inputs.add(name="ad_ids", datatype="INT64", shape=[3, 3])
    request.raw_input_contents.append(bytes(72))
    assert "twice" in refusal(lambda: stub.ModelInfer(request, timeout=10))[1]


def test_raw_contents_that_do_not_match_the_inputs_are_refused(
    stub: GRPCInferenceServiceStub,
) -> None:
    request = message(tensors())
    del request.raw_input_contents[-1]
    assert refusal(lambda: stub.ModelInfer(request, timeout=10))[0] == "INVALID_ARGUMENT"


def test_too_many_candidates_are_refused_with_both_numbers(stub: GRPCInferenceServiceStub) -> None:
    code, text, _ = refusal(lambda: stub.ModelInfer(message(tensors(1_001)), timeout=10))
    assert code == "RESOURCE_EXHAUSTED"
    assert "1001" in text
    assert "1000" in text


def test_a_message_over_the_limit_is_refused_with_its_size(stub: GRPCInferenceServiceStub) -> None:
    values = with_("event_ids", np.zeros((300_000, 2), np.int64))
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(message(values), timeout=10)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_model_that_is_still_loading_is_unavailable_and_says_so(
    stub: GRPCInferenceServiceStub,
) -> None:
    """KServe's own interceptor fails on this error and the client sees UNKNOWN."""
    code, text, reason = refusal(lambda: stub.ModelInfer(message(tensors(), "slow"), timeout=10))
    assert (code, reason) == ("UNAVAILABLE", "NOT_READY")
    assert "loading" in text
    assert not stub.ModelReady(oip.ModelReadyRequest(name="slow"), timeout=10).ready


def test_a_refused_artefact_says_why_and_leaves_the_others_serving(
    stub: GRPCInferenceServiceStub,
) -> None:
    code, text, _ = refusal(lambda: stub.ModelInfer(message(tensors(), "broken"), timeout=10))
    assert code == "UNAVAILABLE"
    assert "loading" in text or "digest" in text
    assert len(outputs(stub.ModelInfer(message(tensors()), timeout=10))["p_click"]) == 3


def test_what_is_not_implemented_says_so_and_a_bug_says_nothing(
    stub: GRPCInferenceServiceStub,
) -> None:
    """KServe's own interceptor fails on the first, too."""
    code, text, reason = refusal(
        lambda: stub.ModelInfer(message(tensors(), "unfinished"), timeout=10)
    )
    assert (code, reason, text) == ("UNIMPLEMENTED", "UNIMPLEMENTED", "no kernel for this host")
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(message(tensors(), "buggy"), timeout=10)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in failed.value.details()


def test_tensors_of_another_spec_or_space_are_refused(stub: GRPCInferenceServiceStub) -> None:
    request = message(tensors())
    request.parameters["spec_hash"].string_param = "aa"
    stub.ModelInfer(request, timeout=10)
    request.parameters["solaris_space_id"].string_param = "00"
    code, text, _ = refusal(lambda: stub.ModelInfer(request, timeout=10))
    assert code == "FAILED_PRECONDITION"
    assert "solaris_space_id '00'" in text


def test_an_unknown_model_or_version_is_not_found(stub: GRPCInferenceServiceStub) -> None:
    code, text, _ = refusal(lambda: stub.ModelInfer(message(tensors(), "xyz"), timeout=10))
    assert code == "NOT_FOUND"
    assert "feed" in text
    old = message(tensors(), model_version="6")
    assert refusal(lambda: stub.ModelInfer(old, timeout=10))[0] == "NOT_FOUND"
    assert (
        refusal(lambda: stub.ModelReady(oip.ModelReadyRequest(name="xyz"), timeout=10))[0]
        == "NOT_FOUND"
    )


def test_clients_cannot_unload_a_model(stub: GRPCInferenceServiceStub) -> None:
    request = oip.RepositoryModelUnloadRequest(model_name="feed")
    assert (
        refusal(lambda: stub.RepositoryModelUnload(request, timeout=10))[0] == "FAILED_PRECONDITION"
    )
    assert stub.ModelReady(oip.ModelReadyRequest(name="feed"), timeout=10).ready


def test_the_server_is_alive_and_not_ready_while_a_model_is_not(
    server: tuple[str, str], stub: GRPCInferenceServiceStub
) -> None:
    assert stub.ServerLive(oip.ServerLiveRequest(), timeout=10).live
    assert not stub.ServerReady(oip.ServerReadyRequest(), timeout=10).ready
    with grpc.insecure_channel(server[0]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        checks = [
            health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status
            for name in ("liveness", "readiness", "")
        ]
    assert checks == [1, 2, 2]


def test_metadata_lists_every_tensor(stub: GRPCInferenceServiceStub) -> None:
    metadata = stub.ModelMetadata(oip.ModelMetadataRequest(name="feed"), timeout=10)
    shapes = {t.name: (t.datatype, list(t.shape)) for t in metadata.inputs}
    assert shapes["ad_ids"] == ("INT64", [-1, 3])
    assert shapes["user_key"] == ("INT64", [1])
    assert set(shapes) == set(FIELDS)
    assert {t.name for t in metadata.outputs} == {"p_click", "p_buy", "fallback"}


def test_channels_a_model_does_not_read_may_be_left_out(stub: GRPCInferenceServiceStub) -> None:
    values = {k: v for k, v in tensors().items() if not k.startswith(("pair_", "memory_"))}
    assert len(outputs(stub.ModelInfer(message(values, "lean"), timeout=10))["p_click"]) == 3
    wide = with_("pair_q", np.zeros((3, 99), np.int8))
    assert len(outputs(stub.ModelInfer(message(wide, "lean"), timeout=10))["p_click"]) == 3


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(FIELDS)),
    shape=st.lists(st.integers(-3, 5), max_size=3),
    datatype=st.sampled_from(["FP32", "INT64", "INT8", "BYTES", "FP16", "NONSENSE", ""]),
    data=st.binary(max_size=64),
)
def test_any_tensor_at_all_is_answered_or_refused_and_the_server_lives(
    stub: GRPCInferenceServiceStub, name: str, shape: list[int], datatype: str, data: bytes
) -> None:
    request = message(without(name))
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(data)
    answer = stub.ModelInfer.future(request, timeout=10)
    answer.exception()
    assert answer.code().name in ("OK", "INVALID_ARGUMENT"), answer.details()
    assert stub.ServerLive(oip.ServerLiveRequest(), timeout=10).live


def rest(url: str, body: object | None = None) -> tuple[int, dict[str, Any]]:
    """Status and body of a REST call; a body that is not strict JSON fails."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, strict(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, strict(error.read())


def strict(data: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    parsed: dict[str, Any] = json.loads(data, parse_constant=refuse)
    return parsed


def body(values: dict[str, Array]) -> dict[str, Any]:
    return {
        "id": "r1",
        "inputs": [
            {"name": n, "datatype": from_np_dtype(a.dtype), "shape": a.shape, "data": a.ravel().tolist()}
            for n, a in values.items()
        ],
    }  # fmt: skip


def test_rest_gives_the_scores_that_grpc_gives(
    server: tuple[str, str], stub: GRPCInferenceServiceStub
) -> None:
    status, answer = rest(f"{server[1]}/v2/models/feed/infer", body(tensors(3)))
    assert status == 200
    by_name = {o["name"]: o for o in answer["outputs"]}
    over_grpc = outputs(stub.ModelInfer(message(tensors(3)), timeout=10))
    assert by_name["p_click"]["data"] == over_grpc["p_click"].tolist()
    assert by_name["fallback"]["data"] == [False] * 3
    assert answer["model_version"] == "7"


def test_rest_reads_null_as_absent_and_stays_strict_when_a_score_breaks(
    server: tuple[str, str],
) -> None:
    sent = body(tensors(2))
    dense = next(t for t in sent["inputs"] if t["name"] == "ad_dense")
    dense["data"][1] = None
    status, answer = rest(f"{server[1]}/v2/models/feed/infer", sent)
    assert status == 200
    by_name = {o["name"]: o["data"] for o in answer["outputs"]}
    assert by_name["fallback"] == [True, False]
    assert by_name["p_click"][0] == 0.5


@pytest.mark.parametrize(
    ("name", "index", "value"), [("ad_ids", 0, 1.5), ("pair_q", 0, 300), ("surface", 0, None), ("ad_ids", 0, "x")]
)  # fmt: skip
def test_rest_refuses_values_that_are_not_of_the_declared_kind(
    server: tuple[str, str], name: str, index: int, value: object
) -> None:
    sent = body(tensors(2))
    next(t for t in sent["inputs"] if t["name"] == name)["data"][index] = value
    status, answer = rest(f"{server[1]}/v2/models/feed/infer", sent)
    assert status == 400, answer
    assert name in answer["error"]


def test_rest_has_the_same_refusals(server: tuple[str, str]) -> None:
    url = server[1]
    assert rest(f"{url}/v2/models/feed/infer", body(without("ad_ids")))[0] == 400
    assert rest(f"{url}/v2/models/xyz/infer", body(tensors()))[0] == 404
    assert rest(f"{url}/v2/models/slow/infer", body(tensors()))[0] == 503
    assert rest(f"{url}/v2/models/feed/infer", body(tensors(1_001)))[0] == 429
    assert rest(f"{url}/v2/repository/models/feed/unload", {})[0] == 412
    assert rest(f"{url}/v1/models/feed:predict", {"instances": [1]})[0] == 400
    assert rest(f"{url}/v2/health/live")[0] == 200
    assert rest(f"{url}/v2/health/ready")[0] == 503
    assert rest(f"{url}/v2/models/feed/ready")[0] == 200


@dataclass
class Held(Formula):
    """Scores when it is let go."""

    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def score(self, batch: FeatureBatch) -> Scores:
        self.entered.release()
        assert self.gate.wait(20)
        return super().score(batch)


def test_requests_beyond_the_limit_are_shed_at_once_and_the_others_answered() -> None:
    held = Held()
    with serving({"feed": lambda: held}) as live:
        address = f"127.0.0.1:{live.port}"
        _wait_until_loaded(address, "feed")
        with grpc.insecure_channel(address) as channel:
            stub = GRPCInferenceServiceStub(channel)
            taken = [stub.ModelInfer.future(message(tensors()), timeout=20) for _ in range(4)]
            for _ in range(2):
                held.entered.acquire()
            code, text, _ = _until_refused(stub)
            held.gate.set()
            assert (code, "4 requests in flight" in text) == ("RESOURCE_EXHAUSTED", True)
            assert all(len(outputs(call.result())["p_click"]) == 3 for call in taken)


def _until_refused(stub: GRPCInferenceServiceStub) -> tuple[str, str, str]:
    """The four may still be on their way in; a call that is taken as well is given up."""
    for _ in range(50):
        try:
            stub.ModelInfer(message(tensors()), timeout=0.05)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                return refusal(lambda: stub.ModelInfer(message(tensors()), timeout=5))
    raise AssertionError("nothing was ever shed")


def test_a_stop_answers_what_was_taken_and_says_not_serving_first() -> None:
    held = Held()
    with serving({"feed": lambda: held}) as live:
        address = f"127.0.0.1:{live.port}"
        _wait_until_loaded(address, "feed")
        with grpc.insecure_channel(address) as channel:
            watched = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service="readiness"), timeout=20
            )
            assert _next_status(watched, until=1) == 1
            taken = GRPCInferenceServiceStub(channel).ModelInfer.future(
                message(tensors()), timeout=20
            )
            held.entered.acquire()
            live.stop()
            assert _next_status(watched, until=2) == 2
            held.gate.set()
            assert len(outputs(taken.result())["p_click"]) == 3


def _next_status(watched: Any, *, until: int) -> int:
    for update in watched:
        if update.status == until:
            return until
    raise AssertionError(f"the watch ended before {until}")


def test_a_server_none_of_whose_models_loads_ends_with_the_reason() -> None:
    registry = CollectorRegistry()
    server = VerticalServer(
        VerticalServerSettings(
            grpc=GrpcSettings(listen="127.0.0.1:0"), call_metrics=CallMetrics(registry)
        )
    )
    with ThreadPoolExecutor(1) as pool:
        place = Workplace(pool=pool, metrics=ScoringMetrics(registry))
        broken = Vertical("broken", corrupt, place)
        with pytest.raises(CorruptArtefact, match="digest"):
            asyncio.run(server.serve([broken]))
