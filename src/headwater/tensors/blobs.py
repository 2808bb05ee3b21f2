"""The blob store: immutable files of tensors under one fsspec root (a local or shared folder, or s3://).

A blob becomes visible whole: it is written under a temporary name and renamed. Each tensor in it starts at a multiple
of 64 bytes and has its own checksum, so a reader can take one tensor and still know that it is what was written.
"""

import os
import re
import time
import uuid
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import fsspec
import xxhash

from headwater.common.v1.tensor_pb2 import BlobRef
from headwater.errors import DataLoss, HeadwaterError, InvalidArgument, NotFound, Unavailable
from headwater.tensors.codec import MAX_TENSOR_BYTES, Buffer

ALIGNMENT_BYTES = 64
MAX_URI_CHARS = 512
_CHECKSUM_PREFIX = "xxh3_128:"
_SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")  # no empty, hidden, "." or ".." segment
_TEMPORARY = ".tmp-"


def checksum(data: Buffer) -> str:
    """ "xxh3_128:" and 32 hex digits."""
    return _CHECKSUM_PREFIX + xxhash.xxh3_128_hexdigest(data)


def check_uri(uri: str, *, field: str = "blob.uri") -> str:
    """Return `uri` when it is relative, plain and stays below the root; raise `InvalidArgument` otherwise."""
    if len(uri) > MAX_URI_CHARS or not all(_SEGMENT.fullmatch(part) for part in uri.split("/")):
        raise InvalidArgument(
            f"{field} is {uri[:MAX_URI_CHARS]!r}; it must be a relative path of letters, digits and ._=- without '..', "
            f"at most {MAX_URI_CHARS} characters",
            field=field,
            reason="BLOB_URI",
        )
    return uri


class BlobStore:
    """Blobs under one root. All methods block; call them from a thread in asyncio code. Safe to share by threads."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._fs, path = fsspec.core.url_to_fs(root)
        self._local = "file" in ((self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol)
        self._path = os.path.realpath(path) if self._local else path.rstrip("/")

    def put(self, uri: str, buffers: Sequence[Buffer]) -> list[BlobRef]:
        """Write one blob that holds `buffers`; returns a reference to each, in order. An existing blob is replaced.

        Raises `InvalidArgument` for a bad uri, `Unavailable` when the store cannot be written.
        """
        path = self._resolve(uri)
        refs, offset = [], 0
        for data in buffers:
            refs.append(BlobRef(uri=uri, offset_bytes=offset, byte_size=len(data), checksum=checksum(data)))
            offset += _aligned(len(data))
        try:
            self._write(path, buffers)
        except OSError as error:
            raise Unavailable(
                f"cannot write blob {uri!r} under {self.root}: {error}; check space and permissions of the blob root",
                reason="BLOB_STORE",
            ) from error
        return refs

    def get(self, ref: BlobRef) -> bytearray:
        """The bytes of a reference, verified.

        Raises `InvalidArgument` for a bad uri or size, `NotFound` for a missing blob, `DataLoss` when the blob is
        shorter than the reference says or the checksum differs.
        """
        path = self._resolve(ref.uri)
        if ref.byte_size > MAX_TENSOR_BYTES:
            raise InvalidArgument(f"blob {ref.uri!r}: {ref.byte_size} bytes; at most {MAX_TENSOR_BYTES} are read")
        try:
            total = int(self._fs.size(path))
            if ref.offset_bytes + ref.byte_size > total:
                raise _lost(ref, f"it ends at byte {total}, the reference at {ref.offset_bytes + ref.byte_size}")
            data = self._read(path, ref.offset_bytes, ref.byte_size)
        except FileNotFoundError as error:
            raise NotFound(
                f"no blob {ref.uri!r} under {self.root}: it was deleted, or the writer uses another --blob-root",
                reason="BLOB_MISSING",
            ) from error
        except OSError as error:
            raise Unavailable(
                f"cannot read blob {ref.uri!r} under {self.root}: {error}", reason="BLOB_STORE"
            ) from error
        if checksum(data) != ref.checksum:
            raise _lost(ref, f"its checksum is {checksum(data)}, the reference says {ref.checksum!r}")
        return data

    def delete(self, uri: str) -> bool:
        """Delete a blob; whether it existed."""
        try:
            self._fs.rm_file(self._resolve(uri))
        except FileNotFoundError:
            return False
        return True

    def sweep(self, older_than_s: float, keep: Collection[str] = (), *, below: str = "") -> list[str]:
        """Delete blobs, and unfinished ones, older than `older_than_s` that are not in `keep`; returns their uris.

        `below` limits the sweep to one folder, e.g. a run.
        """
        start = self._resolve(below) if below else self._path
        cutoff, kept, removed = time.time() - older_than_s, set(keep), []
        for path, info in self._fs.find(start, detail=True).items():
            uri = path.removeprefix(self._path).lstrip("/")
            if uri not in kept and _modified_at(info) < cutoff:
                self._fs.rm_file(path)
                removed.append(uri)
        return removed

    def _resolve(self, uri: str) -> str:
        path = f"{self._path}/{check_uri(uri)}"
        if self._local and os.path.realpath(path) != path:  # a symbolic link inside the root that leads elsewhere
            raise InvalidArgument(f"blob.uri {uri!r} leaves the blob root {self.root}", field="blob.uri")
        return path

    def _write(self, path: str, buffers: Sequence[Buffer]) -> None:
        folder, _, name = path.rpartition("/")
        target = path
        if self._local:  # object stores show an object only when it is complete
            self._fs.makedirs(folder, exist_ok=True)
            target = f"{folder}/{_TEMPORARY}{uuid.uuid4().hex}-{name[-64:]}"
        try:
            with self._fs.open(target, "wb") as file:
                for data in buffers:
                    file.write(data)
                    file.write(bytes(_aligned(len(data)) - len(data)))
            if self._local:
                os.replace(target, path)
        except BaseException:
            if self._local and os.path.exists(target):
                os.unlink(target)
            raise

    def _read(self, path: str, offset: int, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        with self._fs.open(path, "rb") as file:
            file.seek(offset)
            while done < size:
                count = file.readinto(view[done:])
                if not count:
                    break
                done += count
        return data


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _lost(ref: BlobRef, why: str) -> HeadwaterError:
    return DataLoss(f"blob {ref.uri!r} is damaged: {why}", field="blob", reason="BLOB_DAMAGED")


def _modified_at(info: dict[str, Any]) -> float:
    value = info.get("mtime", info.get("LastModified", 0.0))
    return value.timestamp() if isinstance(value, datetime) else float(value)
