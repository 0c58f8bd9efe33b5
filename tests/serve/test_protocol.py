"""The Open Inference Protocol: with NVIDIA's client, unchanged, against the real command; and its messages alone."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.serve.services import MODEL, SIZE, Process, make_network, pixels, process, serving
from trust_tta.live.guard import Guard
from trust_tta.live.stream import Stream
from trust_tta.models.typed import create_model
from trust_tta.serve.protocol import read_request
from trust_tta.serve.settings import RequestError, Settings

INFER = f"/v2/models/{MODEL}/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with process(tmp_path_factory.mktemp("protocol")) as running:
        yield running


def triton() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the client's own imports
        import tritonclient.http as client
    return client


@pytest.mark.skipif(os.name != "posix", reason="the client is for Linux")
def test_triton_client_works_unchanged(server: Process) -> None:
    http = triton()
    client = http.InferenceServerClient(server.address.removeprefix("http://"))
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
        assert client.is_model_ready(MODEL, "1")
        assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
        metadata = client.get_model_metadata(MODEL)
        assert metadata["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 3, SIZE, SIZE]}]

        images = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).numpy()
        results = {}
        for binary in (True, False):
            tensor = http.InferInput("images", list(images.shape), "FP32")
            tensor.set_data_from_numpy(images, binary_data=binary)
            wanted = [http.InferRequestedOutput(name, binary_data=binary) for name in ("logits", "probabilities")]
            parameters = {"stream": "unadapted", "adapt": False}
            results[binary] = client.infer(MODEL, [tensor], outputs=wanted, request_id="7", parameters=parameters)
        answer = results[True].get_response()
        assert answer["id"] == "7"
        assert answer["parameters"]["stream"] == "unadapted"
        assert answer["parameters"]["adapted"] is False
        logits = results[True].as_numpy("logits")
        np.testing.assert_allclose(logits, results[False].as_numpy("logits"), rtol=1e-6)
        expected = torch.from_numpy(logits.copy()).softmax(1).numpy()
        np.testing.assert_allclose(results[True].as_numpy("probabilities"), expected, rtol=1e-5)

        default = http.InferInput("images", list(images.shape), "FP32")
        default.set_data_from_numpy(images)
        adapted = client.infer(MODEL, [default], headers={"X-Stream": "adapted"})
        assert adapted.get_response()["parameters"] | {"prediction": ""} == {
            "stream": "adapted", "adapted": True, "prediction": "",
        }  # fmt: skip
        assert adapted.as_numpy("logits").shape == (4, 4)
    finally:
        client.close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("within")) as (client, _):
        yield client


def tensor(values: Any, kind: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"name": "images", "datatype": kind, "shape": shape, "data": values, **more}


def test_logits_are_those_of_the_guarded_stream(client: httpx.Client, tmp_path: Path) -> None:
    images = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    asked = {"inputs": [tensor(images.flatten().tolist(), "FP32", list(images.shape))]}
    answer = client.post(f"{INFER}?stream=one", json=asked).json()
    logits = torch.tensor(answer["outputs"][0]["data"]).view(answer["outputs"][0]["shape"])
    expected = Stream(make_network(tmp_path).method, guard=Guard())(images).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_raw_pixels_go_through_the_preprocessing(client: httpx.Client, tmp_path: Path) -> None:
    raw = pixels(2, size=SIZE)
    network = make_network(tmp_path)
    floats = network.preprocessing(raw)
    answers = []
    for asked in (
        tensor(raw.tolist(), "UINT8", list(raw.shape)),
        tensor(floats.tolist(), "FP32", list(floats.shape)),
    ):
        parameters = {"adapt": False, "stream": "pixels"}
        answers.append(client.post(INFER, json={"inputs": [asked], "parameters": parameters}).json()["outputs"])
    np.testing.assert_allclose(answers[0][0]["data"], answers[1][0]["data"], rtol=1e-5)


def test_health_routes(client: httpx.Client) -> None:
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get(f"/v2/models/{MODEL}/ready").json() == {"name": MODEL, "ready": True}
    assert client.get("/v2").json()["name"] == "trust-tta"
    assert client.get("/v2/models/other").status_code == 404
    assert client.get(f"/v2/models/{MODEL}/versions/2").status_code == 404


def test_binary_and_json_tensors_are_equal() -> None:
    raw = pixels(2)
    by_json = json.dumps({"inputs": [tensor(raw.ravel().tolist(), "UINT8", list(raw.shape))]}).encode()
    described = tensor(None, "UINT8", list(raw.shape), parameters={"binary_data_size": raw.nbytes})
    del described["data"]
    header = json.dumps({"inputs": [described]}).encode()
    one = read_request(by_json, None, size=SIZE, settings=Settings())
    two = read_request(header + raw.tobytes(), str(len(header)), size=SIZE, settings=Settings())
    assert np.array_equal(one.images, two.images)
    assert np.array_equal(one.images, raw)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"name": "pictures"}, 400, "inputs.0.name is 'pictures': Input should be 'images'"),
        ({"datatype": "INT64"}, 400, "should be 'FP32' or 'UINT8'"),
        ({"shape": [1, 3, SIZE, SIZE + 1]}, 400, f"give [n, 3, {SIZE}, {SIZE}]"),
        ({"shape": [0, 3, SIZE, SIZE]}, 400, "shape"),
        ({"shape": [10**6, 3, SIZE, SIZE]}, 413, "at most 256"),
        ({"data": ["1"] * 768}, 400, "768 numbers"),
        ({"data": [[1, 2], [3]]}, 400, "768 numbers"),
        ({"data": [1.0] * 767}, 400, "768 numbers"),
        ({"parameters": {"binary_data_size": 8}}, 400, "one of them"),
    ],
)
def test_invalid_tensor_is_explained(change: dict[str, Any], status: int, words: str) -> None:
    content = {"inputs": [{**tensor([0.0] * 768, "FP32", [1, 3, SIZE, SIZE]), **change}]}
    with pytest.raises(RequestError) as refused:
        read_request(json.dumps(content).encode(), None, size=SIZE, settings=Settings())
    assert refused.value.status == status
    assert words in str(refused.value)


def test_non_finite_image_is_refused(client: httpx.Client) -> None:
    values = np.zeros((1, 3, SIZE, SIZE), np.float32)
    values[0, 0, 0, 0] = np.nan
    described = tensor(None, "FP32", list(values.shape), parameters={"binary_data_size": values.nbytes})
    del described["data"]
    header = json.dumps({"inputs": [described]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    response = client.post(INFER, content=header + values.tobytes(), headers=headers)
    assert response.status_code == 400
    assert "not finite" in response.json()["error"]


def test_adapted_checkpoint_predicts_as_the_adapted_method(server: Process, tmp_path: Path) -> None:
    """The downloaded checkpoint has the weights and statistics of the method after the same images."""
    file = tmp_path / "adapted.safetensors"
    images = torch.randn(8, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    asked = {"inputs": [tensor(images.tolist(), "FP32", list(images.shape))], "parameters": {"stream": "given"}}
    with httpx.Client(base_url=server.address, timeout=60) as http:
        assert http.post(INFER, json=asked).json()["parameters"]["adapted"]
        assert http.get("/streams/given/checkpoint").status_code == 401
        file.write_bytes(http.get("/streams/given/checkpoint", headers={"Authorization": "Bearer a-token"}).content)
    method = make_network(tmp_path).method
    method(images)
    model = create_model("vmamba_nano", checkpoint=file)
    with torch.no_grad():  # tide sees the mirror image, too
        views = [model(images).softmax(1), model(images.flip(-1)).softmax(1)]
    expected = method.evaluate(images).softmax(1)
    torch.testing.assert_close((views[0] + views[1]) / 2, expected, rtol=1e-4, atol=1e-5)
