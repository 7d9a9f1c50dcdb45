"""A second implementation of the format, made from docs/format.md alone.

Reads and writes segments, names, records and archives; reads an index in Redis or SQLite, commits into it.
It knows nothing of kvstore's code: what it needs and the document does not say is a fault of the document.
"""

from tests.format.second.archives import manifest_mac, read_archive, write_archive
from tests.format.second.basics import CODECS, WIDTHS, Miss
from tests.format.second.names import (
    block_key,
    bound_name,
    canonical,
    chain,
    digest,
    hash_root,
    item_key,
    namespace_id,
    payload_name,
    salt_id,
    session_id,
    weights_digest,
)
from tests.format.second.planes import unplanes
from tests.format.second.records import (
    Record,
    agreement,
    load,
    pack_head,
    pack_parts,
    record_of,
    retention,
    saved_minute,
    score,
    session_record,
    unpack_record,
    unscore,
    worth,
)
from tests.format.second.redis_index import SCRIPTS, RedisStore, bucket_bits, split_value, window_name
from tests.format.second.segments import (
    Header,
    Tensor,
    decode,
    put,
    read_header,
    slot_checksum,
    write_segment,
)
from tests.format.second.signatures import Foreign
from tests.format.second.sqlite_index import SqliteStore

__all__ = [
    "CODECS",
    "Foreign",
    "Header",
    "Miss",
    "Record",
    "RedisStore",
    "SCRIPTS",
    "SqliteStore",
    "Tensor",
    "WIDTHS",
    "agreement",
    "block_key",
    "bucket_bits",
    "canonical",
    "chain",
    "decode",
    "digest",
    "hash_root",
    "bound_name",
    "item_key",
    "load",
    "namespace_id",
    "pack_head",
    "pack_parts",
    "payload_name",
    "put",
    "manifest_mac",
    "read_archive",
    "read_header",
    "record_of",
    "salt_id",
    "session_id",
    "session_record",
    "retention",
    "saved_minute",
    "score",
    "slot_checksum",
    "split_value",
    "unpack_record",
    "unplanes",
    "unscore",
    "weights_digest",
    "window_name",
    "worth",
    "write_archive",
    "write_segment",
]
