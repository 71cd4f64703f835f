"""The dashboard's files, and the one script that is not its own: plotly's, out of the installed wheel."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from quartet.gateway.http_errors import NotFound
from quartet.gateway.runs.catalog import Signature, signature

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "static"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
"""Files of other kinds are not served."""
COMPRESSED = (".css", ".html", ".js", ".json", ".svg", ".txt")
PLOTLY = "plotly.min.js"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    compressed: bytes | None
    media_type: str
    etag: str


class StaticFiles:
    """Files that were asked for, read and compressed once, and again when they change."""

    def __init__(self, folder: Path, elsewhere: dict[str, Callable[[], Path]]) -> None:
        self._folder, self._elsewhere = folder, elsewhere
        self._kept: dict[str, tuple[Signature, _File]] = {}
        self._lock = threading.Lock()

    def find(self, name: str) -> _File:
        """A file by its path below the folder. Raises NotFound."""
        path = self._path(name)
        try:
            # One at a time: compressing the same megabytes twice helps nobody.
            with self._lock:
                seen = signature(path)
                known = self._kept.get(name)
                if known is not None and known[0] == seen:
                    return known[1]
                content = path.read_bytes()
                found = _File(
                    content,
                    gzip.compress(content, 6, mtime=0) if path.suffix in COMPRESSED else None,
                    TYPES[path.suffix],
                    f'"{hashlib.sha256(content).hexdigest()[:32]}"',
                )
                self._kept[name] = (seen, found)
                return found
        except OSError:
            raise _missing(name) from None

    def _path(self, name: str) -> Path:
        if name in self._elsewhere:
            return self._elsewhere[name]()
        parts = name.split("/")
        if any(part in ("", ".", "..") or part.startswith(".") or "\0" in part or "\\" in part for part in parts):
            raise _missing(name)
        path = self._folder.joinpath(*parts)
        if path.suffix not in TYPES or self._folder.resolve() not in path.resolve().parents:
            raise _missing(name)
        return path


def plotly_script() -> Path:
    """Where plotly's script lies, found without importing plotly, which takes its time."""
    package = importlib.util.find_spec("plotly")
    if package is None or package.origin is None:
        raise NotFound("plotly is not installed here; charts need it: pip install plotly")
    return Path(package.origin).parent / "package_data" / PLOTLY


FILES = StaticFiles(FOLDER, {PLOTLY: plotly_script})


@router.api_route("/", methods=["GET", "HEAD"])
def get_dashboard(request: Request) -> Response:
    """The dashboard's page."""
    return _answer(FILES.find("index.html"), request)


@router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
def get_static(name: str, request: Request) -> Response:
    """A file of the dashboard's."""
    return _answer(FILES.find(name), request)


def _answer(file: _File, request: Request) -> Response:
    compress = file.compressed is not None and "gzip" in request.headers.get("accept-encoding", "")
    # Compressed it is another representation, so it has another tag.
    etag = file.etag[:-1] + '-gzip"' if compress else file.etag
    headers = {
        # Kept, and asked about each time: a new version of Quartet is seen at once.
        "Cache-Control": "no-cache",
        "ETag": etag,
        "Vary": "Accept-Encoding",
        "Content-Type": file.media_type,
    }
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if compress and file.compressed is not None:
        return Response(file.compressed, headers={**headers, "Content-Encoding": "gzip"})
    return Response(file.content, headers=headers)


def _missing(name: str) -> NotFound:
    return NotFound(f"/static/{name[:100]}: there is no such file")
