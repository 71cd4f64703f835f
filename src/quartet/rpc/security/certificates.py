"""What is wrong with the certificates of several processes, said before one of them starts: later it would look like a stall."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from quartet.config import SecurityConfig
from quartet.errors import ConfigError
from quartet.rpc.security.credentials import DOMAIN, Credentials
from quartet.secret_files import AUTHORITY, CERTIFICATE


def check_certificates(certificates: Path, processes: Iterable[str]) -> None:
    """Raises ConfigError unless each of the ``processes`` can use its certificate, is named by it, and all are of one authority.

    ``certificates``: the folder that has a folder for each.
    """
    first: Path | None = None
    for process in processes:
        Credentials(process, SecurityConfig(certificates=certificates))
        folder = certificates / process
        first = first or folder
        if (folder / AUTHORITY).read_bytes() != (first / AUTHORITY).read_bytes():
            raise ConfigError(
                f"security.certificates: {folder} is of another authority than {first}; "
                "quartet certificates makes all of them anew"
            )
        _check_issuer(folder)
        _check_name(folder, f"{process}.{DOMAIN}")


def _check_issuer(folder: Path) -> None:
    certificate, *between = x509.load_pem_x509_certificates((folder / CERTIFICATE).read_bytes())
    authorities = x509.load_pem_x509_certificates((folder / AUTHORITY).read_bytes())
    # By one of the authorities itself, or by way of the others in the same file, each signed by the next.
    for issuer in [*between, None]:
        if any(_issued(certificate, authority) for authority in authorities):
            return
        if issuer is None or not _issued(certificate, issuer):
            break
        certificate = issuer
    raise ConfigError(
        f"security.certificates: {folder / CERTIFICATE} was not signed by the authority in {AUTHORITY} beside it; "
        "quartet certificates makes all of them anew"
    )


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_name(folder: Path, wanted: str) -> None:
    certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = names.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, ValueError):
        found = []
    if wanted not in found:
        raise ConfigError(
            f"security.certificates: {folder / CERTIFICATE} is for {', '.join(found) or 'no name'}; expected {wanted}, by which "
            "others know this process; quartet certificates makes a folder anew"
        )
