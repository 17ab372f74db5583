"""ByteReader: the bytes of an archive, from a file, a part of a file, or a decompressor, in chunks."""

from __future__ import annotations

import bz2
import hashlib
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import BinaryIO, Protocol

from agentfly.core.threads.run import CancelToken

CHUNK_SIZE = 2**20
"""The most bytes that are read at a time."""
_COMPRESSED_PIECE = 2**16
_DECOMPRESSED_PIECE = 2**18
_XZ_MEMORY = 256 * 2**20  # what "xz -9" needs is 65 MiB
_ZSTD = b"\x28\xb5\x2f\xfd"


class ArchiveError(Exception):
    """An archive cannot be unpacked because of its content."""


class MalformedArchive(ArchiveError):
    """The data is not an archive, is truncated or damaged, or was made to break a reader."""


class ByteReader(Protocol):
    """Bytes that can be read from any offset on."""

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `CHUNK_SIZE`. Empty bytes mean the end."""
        ...

    def seek(self, position: int) -> None:
        """Continue at an offset from the start."""
        ...


class FileSlice:
    """Reads a part of an open file, from any offset on."""

    def __init__(self, file: ByteReader | BinaryIO, token: CancelToken, start: int = 0, size: int | None = None):
        """Begin at the start of the part.

        Args:
            file: the file.
            token: checked at each chunk; it may cancel the work.
            start: offset of the part.
            size: length of the part; None for the rest of the file.
        """
        self._file = file
        self._token = token
        self._start = start
        self._size = size
        self._position = 0
        self.seek(0)

    def read(self, size: int) -> bytes:
        """See `ByteReader.read`."""
        self._token.check()
        if self._size is not None:
            size = min(size, self._size - self._position)
        piece = self._file.read(min(size, CHUNK_SIZE)) if size > 0 else b""
        self._position += len(piece)
        return piece

    def seek(self, position: int) -> None:
        """See `ByteReader.seek`."""
        self._position = position
        self._file.seek(self._start + position)


class _SequentialReader(ABC):
    """Bytes that can only be read in order. Seeking forward reads the bytes in between; seeking back begins again."""

    _position: int

    @abstractmethod
    def read(self, size: int) -> bytes:
        """See `ByteReader.read`."""

    def seek(self, position: int) -> None:
        """See `ByteReader.seek`."""
        if position < self._position:
            self._rewind()
        while self._position < position and self.read(position - self._position):
            pass

    @abstractmethod
    def _rewind(self) -> None:
        """Begin again at the start."""


class HashingReader(_SequentialReader):
    """Computes the digest of bytes while they are read."""

    def __init__(self, content: ByteReader, algorithm: str) -> None:
        """Begin at the start."""
        self._content = content
        self._algorithm = algorithm
        self._rewind()

    def read(self, size: int) -> bytes:
        """See `ByteReader.read`."""
        piece = self._content.read(size)
        self._digest.update(piece)
        self._position += len(piece)
        return piece

    def digest(self) -> str:
        """The digest of all bytes, in hexadecimal digits."""
        while self.read(CHUNK_SIZE):
            pass
        return self._digest.hexdigest()

    def _rewind(self) -> None:
        self._content.seek(0)
        self._digest = hashlib.new(self._algorithm)
        self._position = 0


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class DecompressingReader(_SequentialReader):
    """Decompresses bytes in chunks of bounded size, in bounded memory."""

    def __init__(self, compressed: ByteReader, decoder: Callable[[], _Decoder], token: CancelToken) -> None:
        """Begin at the start.

        Args:
            compressed: the compressed bytes: any number of streams, one after the other.
            decoder: creates a decoder for one stream.
            token: checked at each chunk; it may cancel the work.
        """
        self._compressed = compressed
        self._make = decoder
        self._token = token
        self._decoder = decoder()
        self._ahead = self._buffer = b""
        self._position = self._served = 0
        self._ended = False
        compressed.seek(0)

    def read(self, size: int) -> bytes:
        """See `ByteReader.read`.

        Raises:
            MalformedArchive: it is malformed or truncated.
        """
        if self._served == len(self._buffer):
            self._buffer, self._served = self._next_piece(), 0
        piece = self._buffer[self._served : self._served + size]
        self._served += len(piece)
        self._position += len(piece)
        return piece

    def _next_piece(self) -> bytes:
        while not self._ended:
            self._token.check()
            if self._decoder.eof:
                self._begin_next()
                continue
            try:
                piece = self._decoder.decompress(self._ahead, _DECOMPRESSED_PIECE)
            except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
                raise MalformedArchive(f"what is compressed in it cannot be read: {error}") from error
            self._ahead = getattr(self._decoder, "unconsumed_tail", b"")
            if piece:
                return piece
            if not self._ahead and not self._decoder.eof:
                self._ahead = self._compressed.read(_COMPRESSED_PIECE)
                if not self._ahead:
                    raise MalformedArchive("what is compressed in it is broken off")
        return b""

    def _rewind(self) -> None:
        self._compressed.seek(0)
        self._decoder = self._make()
        self._ahead = self._buffer = b""
        self._position = self._served = 0
        self._ended = False

    def _begin_next(self) -> None:
        """Begin the next stream, after zeros that may fill a block. Without one, mark the end."""
        rest = self._decoder.unused_data.lstrip(b"\0")
        while not rest:
            piece = self._compressed.read(_COMPRESSED_PIECE)
            if not piece:
                self._ended = True
                return
            rest = piece.lstrip(b"\0")
        self._decoder, self._ahead = self._make(), rest


def open_decompressed(content: ByteReader, token: CancelToken) -> ByteReader:
    """Return a reader of the decompressed bytes. Bytes without the mark of a compression are read unchanged.

    Raises:
        MalformedArchive: the compression is not supported.
    """
    start = content.read(10)
    content.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return DecompressingReader(content, lambda: zlib.decompressobj(wbits=31), token)
    if start.startswith(b"BZh") and start[4:10] == b"1AY&SY":
        return DecompressingReader(content, bz2.BZ2Decompressor, token)
    if start.startswith((b"\xfd7zXZ", b"\x5d\x00\x00\x80")):
        return DecompressingReader(content, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY), token)
    if start.startswith(_ZSTD):
        raise MalformedArchive("it is compressed by zstd, which is not read here: decompress it by 'zstd -d' first")
    return content
