"""Checks of the certificates of several processes before one of them starts: a failed handshake later would look like a hang."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from quartet.config.deployment import SecurityConfig
from quartet.errors import ConfigError
from quartet.rpc.security.credentials import DOMAIN, Credentials
from quartet.system.secret_files import AUTHORITY, CERTIFICATE


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
