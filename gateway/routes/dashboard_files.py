"""The dashboard's files, and the plotly script from the installed plotly package."""

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

from quartet.gateway.http.http_errors import NotFound
from quartet.gateway.readers.file_cache import FileCache

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "static"
MEDIA_TYPES = {
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
"""Files with other suffixes are not served."""
COMPRESSED = (".css", ".html", ".js", ".json", ".svg", ".txt")
PLOTLY = "plotly.min.js"
MAX_CACHED_FILES = 256


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    compressed: bytes | None
    media_type: str
    etag: str


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(
        content,
        gzip.compress(content, 6, mtime=0) if path.suffix in COMPRESSED else None,
        MEDIA_TYPES[path.suffix],
        f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    )


class StaticFiles:
    """Static files. Each is read and compressed at the first request, and again after it changes. Thread-safe."""

    def __init__(self, folder: Path, external: dict[str, Callable[[], Path]]) -> None:
        """``external`` maps names to functions that locate files outside the folder."""
        self._folder, self._external = folder, external
        self._files = FileCache(_read, MAX_CACHED_FILES)
        self._lock = threading.Lock()

    def find(self, name: str) -> _File:
        """Return a file by its path below the folder. Raises NotFound."""
        path = self._path(name)
        try:
            # One request at a time, so that a large file is not compressed twice.
            with self._lock:
                return self._files.of(path)
        except OSError:
            raise _missing(name) from None

    def _path(self, name: str) -> Path:
        if name in self._external:
            return self._external[name]()
        parts = name.split("/")
        if any(part in ("", ".", "..") or part.startswith(".") or "\0" in part or "\\" in part for part in parts):
            raise _missing(name)
        path = self._folder.joinpath(*parts)
        if path.suffix not in MEDIA_TYPES or self._folder.resolve() not in path.resolve().parents:
            raise _missing(name)
        return path


def plotly_script() -> Path:
    """Return the path of the plotly script. The package is located but not imported, because its import is slow."""
    package = importlib.util.find_spec("plotly")
    if package is None or package.origin is None:
        raise NotFound("plotly is not installed; charts need it: pip install plotly")
    return Path(package.origin).parent / "package_data" / PLOTLY


FILES = StaticFiles(FOLDER, {PLOTLY: plotly_script})


@router.api_route("/", methods=["GET", "HEAD"])
def get_dashboard(request: Request) -> Response:
    """Return the dashboard's page."""
    return _response(FILES.find("index.html"), request)


@router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
def get_static(name: str, request: Request) -> Response:
    """Return a file of the dashboard."""
    return _response(FILES.find(name), request)


def _response(file: _File, request: Request) -> Response:
    compress = file.compressed is not None and "gzip" in request.headers.get("accept-encoding", "")
    # The compressed content is another representation and needs another tag.
    etag = file.etag[:-1] + '-gzip"' if compress else file.etag
    headers = {
        # Browsers revalidate cached files each time, so a new version of Quartet shows at once.
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
    return NotFound(f"/static/{name[:100]}: this file does not exist")
