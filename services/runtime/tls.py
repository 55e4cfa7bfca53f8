"""Makes the credentials of servers and channels from mounted certificate files.

Knows files. Does not know who issued them. Without files the platform speaks plain text: the loopback default.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsSettings:
    """Certificate files in PEM; all three together make TLS mutual."""

    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_authority: Path | None = None
    """Certificates that sign the other side's."""

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together; set both or neither")

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of a server, which asks clients for a certificate if it has an authority; None for plain text."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return grpc.ssl_server_credentials(
            [(self.tls_key.read_bytes(), self.tls_certificate.read_bytes())],
            root_certificates=_read(self.tls_authority),
            require_client_auth=self.tls_authority is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a client; None for plain text."""
        if self.tls_authority is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.tls_authority),
            private_key=_read(self.tls_key),
            certificate_chain=_read(self.tls_certificate),
        )


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
