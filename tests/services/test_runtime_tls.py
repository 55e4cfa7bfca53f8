from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from gem.router.v1 import router_service_pb2 as wire
from gem.router.v1 import router_service_pb2_grpc
from prometheus_client import CollectorRegistry

from feature_store.errors import GemError
from services.runtime import client
from services.runtime.limits import Limits
from services.runtime.metrics import CallMetrics
from services.runtime.server import ServerSettings, running
from services.runtime.tls import TlsSettings
from tests.services.ranking_by_rule import ranking


def write_certificates(folder: Path) -> TlsSettings:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gem")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    folder.mkdir()
    (folder / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    certificate_path = folder / "tls.crt"
    return TlsSettings(
        tls_certificate=certificate_path, tls_key=folder / "tls.key", tls_authority=certificate_path
    )


@pytest.fixture
def mutual(tmp_path: Path) -> Iterator[tuple[str, TlsSettings]]:
    tls = write_certificates(tmp_path / "ours")
    settings = ServerSettings(listen="127.0.0.1:0", drain_seconds=0.0, tls=tls)
    with running([ranking()], settings, call_metrics=CallMetrics(CollectorRegistry())) as server:
        server.health.ready()
        yield f"127.0.0.1:{server.port}", tls


def ask(address: str, tls: TlsSettings | None) -> int:
    with client.connect(address, limits=Limits(), tls=tls) as channel:
        stub = router_service_pb2_grpc.RankingServiceStub(channel)
        return client.call(stub.Explain, wire.ExplainRequest(surface="answer"), timeout=1.0).bucket


def test_a_client_with_a_certificate_is_answered(mutual: tuple[str, TlsSettings]) -> None:
    address, tls = mutual
    assert ask(address, tls) == 7


def test_plain_text_and_strangers_are_not_answered(
    mutual: tuple[str, TlsSettings], tmp_path: Path
) -> None:
    address, tls = mutual
    stranger = write_certificates(tmp_path / "theirs")
    no_certificate = TlsSettings(tls_authority=tls.tls_authority)
    for credentials in (None, stranger, no_certificate):
        with pytest.raises(GemError):
            ask(address, credentials)


def test_half_a_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="go together"):
        TlsSettings(tls_key=Path("k"))


# Tokens


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "tokens").write_text("old-token\nnew-token\n")
    settings = ServerSettings(
        listen="127.0.0.1:0", drain_seconds=0.0, token_file=tmp_path / "tokens"
    )
    with running([ranking()], settings, call_metrics=CallMetrics(CollectorRegistry())) as server:
        server.health.ready()
        yield f"127.0.0.1:{server.port}"


def test_a_caller_with_any_of_the_tokens_is_answered_and_another_is_not(guarded: str) -> None:
    for token in ("old-token", "new-token"):
        with client.connect(guarded, limits=Limits(), token=token) as channel:
            stub = router_service_pb2_grpc.RankingServiceStub(channel)
            request = wire.ExplainRequest(surface="answer")
            assert client.call(stub.Explain, request, timeout=5.0).bucket == 7
    for token in ("", "old", "old-token-and-more"):
        with client.connect(guarded, limits=Limits(), token=token) as channel:
            stub = router_service_pb2_grpc.RankingServiceStub(channel)
            with pytest.raises(GemError) as caught:
                client.call(stub.Explain, wire.ExplainRequest(surface="answer"), timeout=5.0)
            assert caught.value.code == "UNAUTHENTICATED"


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("\n")
    settings = ServerSettings(listen="127.0.0.1:0", token_file=tmp_path / "tokens")
    context = running([ranking()], settings, call_metrics=CallMetrics(CollectorRegistry()))
    with pytest.raises(ValueError, match="holds no token"):
        context.__enter__()
