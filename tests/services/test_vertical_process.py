"""`python -m services.vertical` as a process: two arms, one trace, a clean end."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as oip
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from kserve.utils.numpy_codec import from_np_dtype

from feature_store.batch import FeatureBatch, to_tensors
from feature_store.spec import Spec
from services.vertical.loading import Pins, load_scorer
from tests.integration.processes import Process, free_port, processes
from tests.services.small_models import SPEC_PATH, requests, vertical, world_spec


class Running(NamedTuple):
    process: Process
    spec: Spec
    models: Path
    http: str
    traces: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("vertical")
    spec, traces, port = world_spec(), folder / "traces.jsonl", free_port()
    folders = {name: vertical(folder / "models", spec, name) for name in ("A0", "A3")}
    env = {
        "GEM_SPEC": str(SPEC_PATH),
        "GEM_MODELS": ",".join(f"feed-{name.lower()}={at}" for name, at in folders.items()),
        "GEM_HTTP_LISTEN": f"127.0.0.1:{port}",
        "GEM_TRACE_FILE": str(traces),
        "GEM_DRAIN_SECONDS": "0",
    }
    with processes(folder) as group:
        process = group.start("services.vertical", env, name="vertical")
        process.wait_ready()
        yield Running(process, spec, folder / "models", f"http://127.0.0.1:{port}", traces)


def infer_request(batch: FeatureBatch, model: str) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name=model)
    for name, array in to_tensors(batch).items():
        request.inputs.add(name=name, datatype=from_np_dtype(array.dtype), shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def test_each_arm_serves_what_its_artefact_says(running: Running) -> None:
    batch = requests(running.spec, [5], seed=3)
    with grpc.insecure_channel(running.process.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for name in ("A0", "A3"):
            response = stub.ModelInfer(infer_request(batch, f"feed-{name.lower()}"), timeout=10)
            scorer = load_scorer(
                running.models / f"feed-{name.lower()}", running.spec, Pins(), max_candidates=10
            )
            expected = scorer.score(batch).probabilities_NK
            served = np.stack(
                [np.frombuffer(raw, np.float32) for raw in response.raw_output_contents[:3]], axis=1
            )
            np.testing.assert_allclose(served, expected, rtol=1e-6)
            assert response.model_version == "1"


def test_ten_thousand_candidates_pass_in_one_message(running: Running) -> None:
    options = [("grpc.max_receive_message_length", 64 << 20)]
    with grpc.insecure_channel(running.process.address, options=options) as channel:
        stub = GRPCInferenceServiceStub(channel)
        request = infer_request(requests(running.spec, [10_000]), "feed-a3")
        response = stub.ModelInfer(request, timeout=30)
        assert list(response.outputs[0].shape) == [10_000]
        request = infer_request(requests(running.spec, [10_001]), "feed-a3")
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request, timeout=30)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "10001" in refused.value.details()


def test_rest_and_metrics_answer_on_their_port(running: Running) -> None:
    with urllib.request.urlopen(f"{running.http}/v2/health/ready", timeout=5) as response:
        assert json.load(response)["ready"] is True
    with urllib.request.urlopen(f"{running.http}/metrics", timeout=5) as response:
        shown = response.read().decode()
    assert 'gem_vertical_candidates_total{model="feed-a3"}' in shown
    assert 'gem_request_seconds_count{code="OK",method="ModelInfer"}' in shown


def test_a_score_is_part_of_the_callers_trace_and_a_stop_is_clean(running: Running) -> None:
    """Runs last: it ends the process."""
    trace, parent = "ab" * 16, "cd" * 8
    with grpc.insecure_channel(running.process.address) as channel:
        GRPCInferenceServiceStub(channel).ModelInfer(
            infer_request(requests(running.spec, [2]), "feed-a3"),
            timeout=10,
            metadata=[("traceparent", f"00-{trace}-{parent}-01")],
        )
    rest_trace = "ef" * 16
    rest(running, requests(running.spec, [2]), {"traceparent": f"00-{rest_trace}-{parent}-01"})
    assert running.process.terminate() == 0
    over_rest = {s["name"]: s for s in spans_of(running.traces) if s["traceId"] == rest_trace}
    assert over_rest["POST /v2/models/{model_name}/infer"]["parentSpanId"] == parent
    assert "vertical.score" in over_rest
    spans = {s["name"]: s for s in spans_of(running.traces) if s["traceId"] == trace}
    assert set(spans) == {"/inference.GRPCInferenceService/ModelInfer", "vertical.score"}
    server = spans["/inference.GRPCInferenceService/ModelInfer"]
    assert server["parentSpanId"] == parent
    assert spans["vertical.score"]["parentSpanId"] == server["spanId"]
    named = {a["key"]: a["value"] for a in server["attributes"]}
    assert named["gem.model"] == {"stringValue": "feed-a3"}
    assert named["gem.candidates"] == {"intValue": "2"}


def rest(running: Running, batch: FeatureBatch, headers: dict[str, str]) -> None:
    inputs = [
        {
            "name": n,
            "datatype": from_np_dtype(a.dtype),
            "shape": a.shape,
            "data": a.ravel().tolist(),
        }
        for n, a in to_tensors(batch).items()
    ]
    url = f"{running.http}/v2/models/feed-a3/infer"
    data = json.dumps({"inputs": inputs}).encode()
    sent = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(sent, timeout=10) as response:
        assert json.load(response)["model_version"] == "1"


def spans_of(path: Path) -> list[dict[str, Any]]:
    return [
        span
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def test_a_process_without_settings_ends_at_once_and_names_each_of_them(tmp_path: Path) -> None:
    with processes(tmp_path) as group:
        process = group.start("services.vertical", {})
        assert process.popen.wait(30) == 1
        said = process.log.read_text()
    assert "GEM_SPEC is missing" in said
    assert "GEM_MODELS is missing" in said
