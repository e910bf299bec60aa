"""Where every byte of an arena file lies, who writes it, and in which order.

One file per engine, incarnation and tensor-parallel rank. One writer: the engine's worker process.
Readers: any process of the same user. No locks.

    offset                      size                            what
    0                           4 KiB                           file header
    slots_offset                slot_count * slot_bytes         stream slots
    page_headers_offset         page_count * page_header_bytes  page headers
    pages_offset                page_count * page_stride        pages, 4-KiB aligned

    file header   0 magic 8s | 8 version u32 | 12 ready u32 | 16 generation u64 | 24 fingerprint 32s
                  | 56 page_bytes u64 | 64 file_bytes u64 | 72 page_count u32 | 76 slot_count u32
                  | 80 pages_per_stream_max u32 | 84 block_tokens u32
                  | 88 checksum 16s (blake2b-128 over bytes 0-11 and 16-87)
    slot          0 generation u64 (odd: being rewritten) | 8 key 16s | 24 epoch u32 | 28 flags u32
                  | 32 page_count u32 | 36 - | 40 watermark u64 | 48 updated_ns u64
                  | 56 bytes_written u64 | 64 page_index u32[max] | page_generation u32[max]
    page header   0 generation u32 (0: being rewritten) | 4 filled u32 | 8 block_hash 32s
                  | 40 token_ids u32[block_tokens]
    page          one KV block over all layers, [layers, block] in the engine's raw layout

All integers are in the byte order of the machine (a file never leaves its host) and aligned to
their size, so that a store of one is seen whole.

Who writes: everything by the worker, the file header once at creation with `ready` last. The
ledger in the scheduler process decides, and never maps the file. The serving process unlinks it.

Store order (`>>` is a full fence; see `mover`), and why a reader never takes a wrong token:

    fresh page    generation = 0 >> page bytes, token_ids, filled, block_hash >> generation = g
    rows added    page bytes of the new rows, their token_ids, filled (and block_hash when full)
    slot, new     generation odd >> key, epoch, page_count = 0, watermark = 0 >> generation even
    commit        all pages of the plan as above, page list tail, page_count, counters >> watermark
    close, drop   flags

  - A page is rewritten only under a new generation, and reads 0 meanwhile. A slot's list names the
    generation that it means. A reader compares the two before and after it copies: equal on both
    sides means that the bytes in between belong to this stream.
  - Rows are only ever added past the watermark, so what lies below it does not change; a torn row
    of a writer that died lies above it and is not read.
  - A slot's list only grows while its generation stands, so a reader that took the watermark first
    finds at least that many tokens in the list.
  - A slot is rewritten for another stream under an odd generation; a reader retries, then finds
    nothing.

The engine's pages, not the file, decide what is correct: a reader also compares token ids page by
page.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from zerolayer.core.errors import ConfigError

MAGIC: Final = b"ZLARENA\x00"
VERSION: Final = 1
MEMORY_PAGE_BYTES: Final = 4096
CACHE_LINE_BYTES: Final = 64
HEADER_BYTES: Final = 4096
KEY_BYTES: Final = 16
HASH_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 32

HEADER_READY: Final = 12
HEADER_GENERATION: Final = 16

SLOT_GENERATION: Final = 0
SLOT_KEY: Final = 8
SLOT_EPOCH: Final = 24
SLOT_FLAGS: Final = 28
SLOT_PAGE_COUNT: Final = 32
SLOT_WATERMARK: Final = 40
SLOT_UPDATED_NS: Final = 48
SLOT_BYTES_WRITTEN: Final = 56
SLOT_LISTS: Final = 64

PAGE_GENERATION: Final = 0
PAGE_FILLED: Final = 4
PAGE_HASH: Final = 8
PAGE_TOKENS: Final = 40

FLAG_LIVE: Final = 1
FLAG_FINISHED: Final = 2
FLAG_DROPPED: Final = 3

# Bounds of what a header may claim; past them a file is damaged, whatever its checksum says.
PAGE_COUNT_MAX: Final = 1 << 26
SLOT_COUNT_MAX: Final = 1 << 16
PAGES_PER_STREAM_MAX: Final = 1 << 20
BLOCK_TOKENS_MAX: Final = 1 << 12
PAGE_BYTES_MAX: Final = 1 << 34

_FRONT = struct.Struct("=8sI")  # magic, version; then `ready`, which the checksum leaves out
_REST = struct.Struct("=Q32sQQIIII")
_CHECKSUM_OFFSET: Final = 88
_CHECKSUM_BYTES: Final = 16


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """Sizes of one arena file; every offset follows from these five numbers."""

    page_bytes: int
    """Bytes of one KV block over all layers of one rank."""
    page_count: int
    """Pages in the file."""
    slot_count: int
    """Streams that can have a snapshot at the same time, finished ones included."""
    pages_per_stream_max: int
    """Longest page list: ceil(longest context in tokens / block_tokens)."""
    block_tokens: int
    """Tokens in one KV block."""

    def __post_init__(self) -> None:
        _check("page_bytes", self.page_bytes, PAGE_BYTES_MAX)
        _check("page_count", self.page_count, PAGE_COUNT_MAX)
        _check("slot_count", self.slot_count, SLOT_COUNT_MAX)
        _check("pages_per_stream_max", self.pages_per_stream_max, PAGES_PER_STREAM_MAX)
        _check("block_tokens", self.block_tokens, BLOCK_TOKENS_MAX)

    @classmethod
    def for_budget(
        cls,
        budget_bytes: int,
        page_bytes: int,
        *,
        slot_count: int,
        pages_per_stream_max: int,
        block_tokens: int,
    ) -> "ArenaGeometry":
        """The largest geometry whose file has at most `budget_bytes`.

        Raises `ConfigError` when not even one page fits.
        """
        one = cls(page_bytes, 1, slot_count, pages_per_stream_max, block_tokens)
        # Page headers end before a 4-KiB boundary, so up to that much is padding.
        room = budget_bytes - one.page_headers_offset - MEMORY_PAGE_BYTES
        page_count = min(room // (one.page_stride + one.page_header_bytes), PAGE_COUNT_MAX)
        if page_count < 1:
            raise ConfigError(
                "snapshot budget",
                budget_bytes,
                f"give at least {one.file_bytes + MEMORY_PAGE_BYTES} bytes",
            )
        return cls(page_bytes, page_count, slot_count, pages_per_stream_max, block_tokens)

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next; whole cache lines."""
        return _align(SLOT_LISTS + 8 * self.pages_per_stream_max, CACHE_LINE_BYTES)

    @property
    def slots_offset(self) -> int:
        """Where the first slot begins."""
        return HEADER_BYTES

    @property
    def page_header_bytes(self) -> int:
        """Bytes from one page header to the next; whole cache lines."""
        return _align(PAGE_TOKENS + 4 * self.block_tokens, CACHE_LINE_BYTES)

    @property
    def page_headers_offset(self) -> int:
        """Where the first page header begins."""
        return self.slots_offset + self.slot_count * self.slot_bytes

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next; whole 4-KiB memory pages."""
        return _align(self.page_bytes, MEMORY_PAGE_BYTES)

    @property
    def pages_offset(self) -> int:
        """Where the first page begins; 4-KiB aligned."""
        end = self.page_headers_offset + self.page_count * self.page_header_bytes
        return _align(end, MEMORY_PAGE_BYTES)

    @property
    def file_bytes(self) -> int:
        """Exact size of the file."""
        return self.pages_offset + self.page_count * self.page_stride

    def slot_offset(self, slot: int) -> int:
        """Where slot `slot` begins."""
        return self.slots_offset + slot * self.slot_bytes

    def page_header_offset(self, page: int) -> int:
        """Where the header of page `page` begins."""
        return self.page_headers_offset + page * self.page_header_bytes

    def page_offset(self, page: int) -> int:
        """Where the bytes of page `page` begin."""
        return self.pages_offset + page * self.page_stride


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """What a file header says, once it was checked."""

    geometry: ArenaGeometry
    generation: int
    """Random, so that two files under one name are told apart."""
    fingerprint: bytes
    """32 bytes: model, dtype, block size, rank and attention backend; equal means loadable."""


def stream_key(stream_id: str) -> bytes:
    """The 16 bytes under which a stream is found: blake2b-128 of its id."""
    return hashlib.blake2b(stream_id.encode(), digest_size=KEY_BYTES).digest()


def encode_header(header: ArenaHeader) -> bytes:
    """The first bytes of a file, with `ready` still 0."""
    assert len(header.fingerprint) == FINGERPRINT_BYTES
    g = header.geometry
    front = _FRONT.pack(MAGIC, VERSION)
    rest = _REST.pack(
        header.generation, header.fingerprint, g.page_bytes, g.file_bytes,
        g.page_count, g.slot_count, g.pages_per_stream_max, g.block_tokens,
    )  # fmt: skip
    return front + b"\0" * 4 + rest + _checksum(front, rest)


def decode_header(raw: bytes, file_bytes: int) -> ArenaHeader | str:
    """Checks a header against the size of its file; a sentence says what is wrong with it."""
    if len(raw) < HEADER_BYTES:
        return "shorter than a header"
    front, rest = raw[: _FRONT.size], raw[HEADER_GENERATION:_CHECKSUM_OFFSET]
    magic, version = _FRONT.unpack(front)
    if magic != MAGIC:
        return "not an arena file"
    if version != VERSION:
        return f"format version {version}, this program reads {VERSION}"
    if raw[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + _CHECKSUM_BYTES] != _checksum(front, rest):
        return "header checksum does not match"
    if struct.unpack_from("=I", raw, HEADER_READY)[0] != 1:
        return "not ready yet"
    generation, fingerprint, page_bytes, claimed_bytes, *counts = _REST.unpack(rest)
    try:
        geometry = ArenaGeometry(page_bytes, *counts)
    except ConfigError as wrong:
        return f"impossible geometry: {wrong}"
    if geometry.file_bytes != claimed_bytes or claimed_bytes != file_bytes:
        return f"has {file_bytes} bytes and its header says {claimed_bytes}"
    return ArenaHeader(geometry, generation, fingerprint)


def _checksum(front: bytes, rest: bytes) -> bytes:
    return hashlib.blake2b(front + rest, digest_size=_CHECKSUM_BYTES).digest()


def _check(field: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(field, value, f"must lie between 1 and {most}")
