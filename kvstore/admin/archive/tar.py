"""Plain tar files, as archives are: regular files one after the other, and nothing else.

The standard library's `tarfile` keeps every member in memory and, when it reads, follows any extension header
that a stranger's archive has. So only its codec for one 512-byte header is used.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from kvstore.errors import KVStoreError

_BLOCK = 512
#: tar pads an archive to a multiple of this, and tape drives need it.
_RECORD = 20 * _BLOCK
_CHUNK = 1 << 20
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.DIRTYPE: "a folder",
    tarfile.FIFOTYPE: "a FIFO",
}


class BadArchive(KVStoreError):
    """The archive is truncated, or not one that an export wrote; nothing after this point can be read."""

    reason = "archive"


class TarWriter:
    """Writes members to a stream, and keeps none of them in memory."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        #: Bytes written so far.
        self.nbytes = 0

    def add(self, name: str, buffers: Sequence[memoryview], mtime_s: int) -> None:
        """Writes one regular file of these bytes. Raises OSError."""
        info = tarfile.TarInfo(name)
        info.size = sum(buffer.nbytes for buffer in buffers)
        info.mtime = mtime_s
        # GNU's format adds the one thing that ustar lacks: files of 8 GiB and more.
        self._write(info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict"))
        for buffer in buffers:
            self._write(buffer)
        self._write(bytes(-info.size % _BLOCK))

    def end(self) -> None:
        """Writes the end mark, without which an archive counts as truncated."""
        self._write(bytes(2 * _BLOCK))
        self._write(bytes(-self.nbytes % _RECORD))
        self._out.flush()

    def go_back(self, nbytes: int) -> bool:
        """Truncates the archive to `nbytes`; returns False if the stream can't be truncated."""
        try:
            if not self._out.seekable():
                return False
            self._out.seek(nbytes - self.nbytes, io.SEEK_CUR)
            self._out.truncate()
        except OSError:
            return False
        self.nbytes = nbytes
        return True

    def _write(self, data: bytes | memoryview) -> None:
        self._out.write(data)
        self.nbytes += len(data)


@dataclass(slots=True)
class Member:
    """One file of an archive, to be read before the next one is asked for."""

    name: str
    size: int
    _source: _Source
    _left: int

    def read_into(self, view: memoryview) -> None:
        """Fills `view` with the next bytes. Raises BadArchive if there are fewer."""
        if view.nbytes > self._left:
            raise BadArchive(f"member {self.name!r} is shorter than its content says")
        self._source.read_into(view)
        self._left -= view.nbytes

    def skip(self) -> None:
        """Skips to the end of the member."""
        self._source.skip(self._left + -self.size % _BLOCK)
        self._left = 0


def read_members(stream: BinaryIO) -> Iterator[Member]:
    """Yields the members of a tar, up to its end mark.

    Raises BadArchive for a damaged header, for anything but a regular file, and if the stream ends too soon;
    OSError if the stream does.
    """
    source = _Source(stream)
    while True:
        header = memoryview(bytearray(_BLOCK))
        source.read_into(header)
        if not any(header):
            source.end()
            return
        member = _member(bytes(header), source)
        yield member
        member.skip()


def _member(header: bytes, source: _Source) -> Member:
    where = f"at byte {source.position - _BLOCK}"
    try:
        # Bytes that aren't UTF-8 stay visible in the name; no payload has such a name.
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as exc:
        raise BadArchive(f"no tar header {where}: the archive is damaged, or no tar") from exc
    if info.type not in _REGULAR:
        kind = _KINDS.get(info.type, "an extension")
        raise BadArchive(f"member {info.name!r} {where} is {kind}; an export holds plain files only")
    if info.size < 0:
        raise BadArchive(f"member {info.name!r} {where} has an impossible size")
    return Member(info.name, info.size, source, info.size)


class _Source:
    """A stream that counts its position and raises BadArchive at the end of file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._seekable = stream.seekable()
        self.position = 0

    def read_into(self, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            data = self._stream.read(min(_CHUNK, view.nbytes - done))
            if not data:
                raise BadArchive(f"the archive is truncated: it ends at byte {self.position}")
            view[done : done + len(data)] = data
            done += len(data)
            self.position += len(data)

    def skip(self, nbytes: int) -> None:
        if self._seekable:
            # A seek past the end of a truncated file does not fail; reading the next header does.
            self._stream.seek(nbytes, io.SEEK_CUR)
            self.position += nbytes
            return
        scratch = memoryview(bytearray(min(_CHUNK, nbytes)))
        while nbytes:
            self.read_into(scratch[: min(_CHUNK, nbytes)])
            nbytes -= min(_CHUNK, nbytes)

    def end(self) -> None:
        """Reads the second block of the end mark, and the padding up to the end of the stream.

        A header that was overwritten with zeros looks like the mark, but something follows it. And a process
        that writes into our pipe should not fail because we stop reading.
        """
        block = memoryview(bytearray(_BLOCK))
        self.read_into(block)
        rest: bytes | memoryview = block
        while rest:
            if any(rest):
                raise BadArchive(
                    f"the archive is damaged: its end mark at byte {self.position} is not its end"
                )
            rest = self._stream.read(_CHUNK)
