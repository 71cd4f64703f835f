"""What was made of files: made again only after they change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Content = TypeVar("Content")
Signature = tuple[int, int, int]
"""Inode, modification time in nanoseconds, size in bytes."""


def signature(path: Path) -> Signature:
    """Return a value that changes when the file does. Raises OSError."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


class FileCache(Generic[Content]):
    """Content of the most recently used files. Thread-safe."""

    def __init__(self, parse: Callable[[Path], Content], max_files: int) -> None:
        """``parse`` reads one file. At most ``max_files`` results are kept."""
        self._parse, self._max_files = parse, max_files
        self._contents: OrderedDict[Path, tuple[Signature, Content]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> Content:
        """Return the content of a file as it is now. Raises OSError if there is no file, and what ``parse`` raises."""
        current = signature(path)
        with self._lock:
            cached = self._contents.get(path)
            if cached is not None and cached[0] == current:
                self._contents.move_to_end(path)
                return cached[1]
        content = self._parse(path)
        with self._lock:
            self._contents[path] = (current, content)
            self._contents.move_to_end(path)
            if len(self._contents) > self._max_files:
                self._contents.popitem(last=False)
        return content


class RecentFiles(Generic[Content]):
    """Objects that follow growing files: those of the most recently used files. Thread-safe."""

    def __init__(
        self, follow: Callable[[Path], Content], limit: int, size: Callable[[Content], int] = lambda _: 1
    ) -> None:
        """``follow`` starts to follow a file. The sizes of the objects are at most ``limit`` together, but the newest is kept."""
        self._follow, self._limit, self._size = follow, limit, size
        self._objects: OrderedDict[Path, Content] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> Content:
        """Return the object that follows a file."""
        with self._lock:
            if path not in self._objects:
                self._objects[path] = self._follow(path)
            self._objects.move_to_end(path)
            while len(self._objects) > 1 and sum(map(self._size, self._objects.values())) > self._limit:
                self._objects.popitem(last=False)
            return self._objects[path]
