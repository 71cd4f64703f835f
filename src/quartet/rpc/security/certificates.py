"""Certificates of processes: an authority that issues them, and checks before a start. A failed handshake looks like a hang."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quartet.config.deployment import SecurityConfig
from quartet.errors import ConfigError
from quartet.rpc.security.credentials import DOMAIN, Credentials
from quartet.system.secret_files import AUTHORITY, CERTIFICATE, KEY


def check_certificates(certificates: Path, processes: Iterable[str]) -> None:
    """Check the certificates of ``processes``. ``certificates`` has one folder per process.

    Raises ConfigError unless each certificate is usable and names its process, and all of them have the same authority.
    """
    first: Path | None = None
    for process in processes:
        Credentials(process, SecurityConfig(certificates=certificates))
        folder = certificates / process
        first = first or folder
        if (folder / AUTHORITY).read_bytes() != (first / AUTHORITY).read_bytes():
            raise ConfigError(
                f"security.certificates: {folder} has another authority than {first}; "
                "quartet certificates creates all of them again"
            )
        _check_issuer(folder)
        _check_name(folder, f"{process}.{DOMAIN}")


def _check_issuer(folder: Path) -> None:
    certificate, *intermediates = x509.load_pem_x509_certificates((folder / CERTIFICATE).read_bytes())
    authorities = x509.load_pem_x509_certificates((folder / AUTHORITY).read_bytes())
    # The issuer is one of the authorities, or an intermediate certificate in the same file, each signed by the next.
    for issuer in [*intermediates, None]:
        if any(_issued(certificate, authority) for authority in authorities):
            return
        if issuer is None or not _issued(certificate, issuer):
            break
        certificate = issuer
    raise ConfigError(
        f"security.certificates: {folder / CERTIFICATE} was not signed by the authority in {AUTHORITY} beside it; "
        "quartet certificates creates all of them again"
    )


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_name(folder: Path, expected: str) -> None:
    certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns_names = names.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, ValueError):
        dns_names = []
    if expected not in dns_names:
        raise ConfigError(
            f"security.certificates: {folder / CERTIFICATE} names {', '.join(dns_names) or 'no process'}; expected {expected}, "
            "the name of this process; quartet certificates creates a new folder"
        )


SLACK = timedelta(minutes=5)
"""Tolerance for clocks that differ."""


class Authority:
    """Certificate authority with a private key that exists in memory only."""

    def __init__(self, lifetime: timedelta) -> None:
        """``lifetime`` of the authority's certificate, and the default for issued ones."""
        self._key, self._lifetime = ec.generate_private_key(ec.SECP256R1()), lifetime
        subject = _named("Quartet")
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        public = self._key.public_key()
        self.certificate = (
            _builder(subject, subject, public, lifetime)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, folder: Path, names: Sequence[str], lifetime: timedelta | None = None) -> None:
        """Write ``tls.crt``, ``tls.key`` and ``ca.crt``, named as in a Kubernetes TLS secret, into a new folder.

        ``names``: DNS names and IP addresses of the certificate. Raises OSError.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_named(folder.name), self.certificate.subject, key.public_key(), lifetime or self._lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        folder.mkdir(parents=True, mode=0o700)
        _write(folder / KEY, private)
        _write(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))
        _write(folder / AUTHORITY, self.certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + lifetime) - SLACK)
        .not_valid_after(now + lifetime)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, content: bytes) -> None:
    # Created with its final mode, so that the file is never readable by others.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
