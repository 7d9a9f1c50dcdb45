"""The tables of the index in SQLite, and how a file of an older release becomes one of this release.

    namespaces   one row each: identity; usage (nbytes to cost: sums over the visible segments, exact);
                 `generation`: which segments are visible; `evicted`: bytes that quotas have evicted;
                 `swept`: the digest where the sweep goes on; `seen`: unix s of the last registration
    generations  segments and parts name one of these numbers as their `namespace`. A new one makes everything
                 invisible at once; the old one stays until its segments are in the trash
    segments     `used`: minute of the last use, down to the quarter; `keep`: that plus what its cost is worth
                 (kvstore.index.eviction); `first`: its first block's digest, empty if a migration could not
                 tell; `salt`: id of the salt that it was saved under, empty without one
    blocks       a block's entry: where the index says that it is
    trash        payloads to be deleted
    parts        incomplete commits
    claims       which segment may write a block
    uses         the sketch of uses
    sessions     clients' sessions (kvstore.index.sessions): `seen`: unix s of the last call; `used`: minute
                 of the last use; `until`: unix s until which it retains, or 0; `priority`: 0 to 2. Which
                 segments are whose own says `owner` of segments
    retained     segments that count as used at `until`; `used`: minute of the true last use
    hot          segments that began loads lately
    forbidden    what was computed until then, under a salt or (x'') in all of a namespace, isn't committed
    quotas                      belong to the whole store
    events, outcomes, ghosts    rings, bounded; `number` rises by one per row, and begins with a time
    fates        of some events, by their number: see Event
    operations   ring of what operators did in the whole store
    totals, credits             counters of outcomes; blocks by ghost step
    writers      verdicts about writers (kvstore.index.verdicts); `state`: 0 proven, 1 disputed, 2 failed

In every table but segments, parts, forbidden and writers `namespace` is namespaces.key.
"""

from __future__ import annotations

import sqlite3

from kvstore.errors import ConfigError
from kvstore.sqlite import begun, stamps

#: "kvsi": tells an index from any other SQLite file, also to the command `file`.
APPLICATION_ID = 0x6B767369

_SCHEMA_1 = """
CREATE TABLE namespaces (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, json TEXT NOT NULL, nbytes INTEGER NOT NULL DEFAULT 0,
    segments INTEGER NOT NULL DEFAULT 0, blocks INTEGER NOT NULL DEFAULT 0, swept BLOB NOT NULL DEFAULT x'');
CREATE TABLE segments (
    key INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL, id BLOB NOT NULL,
    checksum BLOB NOT NULL, record BLOB NOT NULL, nbytes INTEGER NOT NULL, slots INTEGER NOT NULL,
    ranks INTEGER NOT NULL, used INTEGER NOT NULL, depth INTEGER NOT NULL, UNIQUE (namespace, id));
CREATE INDEX segments_by_use ON segments (namespace, used, depth DESC, id);
CREATE TABLE entries (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment INTEGER NOT NULL, slot INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE TABLE trash (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, ranks INTEGER NOT NULL, due INTEGER NOT NULL,
    PRIMARY KEY (namespace, id)) WITHOUT ROWID;
CREATE INDEX trash_by_time ON trash (namespace, due);
CREATE TABLE parts (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, rank INTEGER NOT NULL, agreement BLOB NOT NULL,
    part BLOB NOT NULL, nbytes INTEGER NOT NULL, ranks INTEGER NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, id, rank)) WITHOUT ROWID;
CREATE INDEX parts_by_time ON parts (expires);
CREATE TABLE claims (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment BLOB NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE INDEX claims_by_time ON claims (expires);
"""

# The sketch of uses (kvstore.index.sketch), one row per line that has bits. Windows take turns in the rows of
# two parities: a line whose `sketch` is not the one asked for counts as empty, and is overwritten.
_SCHEMA_2 = """
CREATE TABLE uses (
    namespace INTEGER NOT NULL, parity INTEGER NOT NULL, line INTEGER NOT NULL, sketch TEXT NOT NULL,
    bits BLOB NOT NULL, PRIMARY KEY (namespace, parity, line)) WITHOUT ROWID;
"""

# Entries name segments by their ids, so that a repair can say what a dangling one means; hence `blocks` and
# not `entries`. A process of an older release that still has the file open then fails (and its engine goes on
# without a cache until it is restarted) instead of writing rows that this release would misread.
# `segments_by_keep` is the order of eviction: pinned segments are not in it, and depths from 2**22 - 1 on are
# alike.
_SCHEMA_3 = """
CREATE TABLE generations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL,
    segments INTEGER NOT NULL DEFAULT 0);
CREATE INDEX generations_of ON generations (namespace);
INSERT INTO generations (number, namespace) SELECT key, key FROM namespaces;
ALTER TABLE namespaces ADD COLUMN generation INTEGER NOT NULL DEFAULT 0;
ALTER TABLE namespaces ADD COLUMN kind TEXT NOT NULL DEFAULT '';
ALTER TABLE namespaces ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
ALTER TABLE namespaces ADD COLUMN seen REAL NOT NULL DEFAULT 0;
ALTER TABLE namespaces ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE namespaces ADD COLUMN cost INTEGER NOT NULL DEFAULT 0;
ALTER TABLE namespaces ADD COLUMN evicted INTEGER NOT NULL DEFAULT 0;
UPDATE namespaces SET generation = key, seen = CAST(strftime('%s', 'now') AS REAL),
    kind = CASE json_valid(json) WHEN 1 THEN coalesce(json_extract(json, '$.kind'), '') ELSE '' END,
    tenant = CASE json_valid(json) WHEN 1 THEN coalesce(json_extract(json, '$.tenant'), '') ELSE '' END;
ALTER TABLE segments ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE segments ADD COLUMN cost INTEGER NOT NULL DEFAULT 0;
ALTER TABLE segments ADD COLUMN worth INTEGER NOT NULL DEFAULT 0;
ALTER TABLE segments ADD COLUMN keep INTEGER NOT NULL DEFAULT 0;
ALTER TABLE segments ADD COLUMN first BLOB NOT NULL DEFAULT x'';
DROP INDEX segments_by_use;
UPDATE segments SET keep = used;
UPDATE segments SET first = e.digest FROM entries AS e WHERE e.segment = segments.key AND e.slot = 0;
CREATE INDEX segments_by_keep ON segments (namespace, keep, min(depth, 4194303) DESC, used, id)
    WHERE pinned = 0;
CREATE TABLE blocks (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment BLOB NOT NULL, slot INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
INSERT INTO blocks SELECT e.namespace, e.digest, s.id, e.slot FROM entries AS e
    CROSS JOIN segments AS s ON s.key = e.segment;
DROP TABLE entries;
CREATE TABLE hot (segment INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, minutes REAL NOT NULL);
CREATE INDEX hot_by_use ON hot (namespace, minutes);
CREATE TABLE quotas (scope TEXT PRIMARY KEY, nbytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    namespace INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, op TEXT NOT NULL, segment BLOB,
    first BLOB, last BLOB, depth INTEGER NOT NULL, slots INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    rule TEXT, PRIMARY KEY (namespace, number)) WITHOUT ROWID;
CREATE TABLE outcomes (
    namespace INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, request BLOB NOT NULL,
    op TEXT NOT NULL, asked INTEGER NOT NULL, served INTEGER NOT NULL, reason TEXT NOT NULL,
    position INTEGER NOT NULL, missing BLOB NOT NULL, PRIMARY KEY (namespace, number)) WITHOUT ROWID;
CREATE TABLE totals (
    namespace INTEGER NOT NULL, name TEXT NOT NULL, amount INTEGER NOT NULL,
    PRIMARY KEY (namespace, name)) WITHOUT ROWID;
CREATE TABLE ghosts (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, stamp INTEGER NOT NULL, slots INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE INDEX ghosts_by_age ON ghosts (namespace, stamp);
CREATE TABLE credits (
    namespace INTEGER NOT NULL, step INTEGER NOT NULL, blocks INTEGER NOT NULL,
    PRIMARY KEY (namespace, step)) WITHOUT ROWID;
"""

_SCHEMA_4 = """
ALTER TABLE events ADD COLUMN by TEXT NOT NULL DEFAULT '';
CREATE TABLE operations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, by TEXT NOT NULL, verb TEXT NOT NULL,
    what TEXT NOT NULL);
"""

# `forbidden` outlives its namespace, so it names it by its id.
_SCHEMA_5 = """
ALTER TABLE segments ADD COLUMN salt BLOB NOT NULL DEFAULT x'';
CREATE INDEX segments_by_salt ON segments (namespace, salt, nbytes) WHERE salt <> x'';
CREATE TABLE forbidden (
    namespace TEXT NOT NULL, salt BLOB NOT NULL, until INTEGER NOT NULL,
    PRIMARY KEY (namespace, salt)) WITHOUT ROWID;
"""

# Retained segments of generations that are gone have no rows in `segments`: keys are never used again.
_SCHEMA_6 = """
ALTER TABLE segments ADD COLUMN owner BLOB NOT NULL DEFAULT x'';
CREATE INDEX segments_by_owner ON segments (namespace, owner, nbytes) WHERE owner <> x'';
ALTER TABLE namespaces ADD COLUMN sessions INTEGER NOT NULL DEFAULT 0;
CREATE TABLE sessions (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, seen INTEGER NOT NULL, used INTEGER NOT NULL,
    until INTEGER NOT NULL, priority INTEGER NOT NULL, ended INTEGER NOT NULL,
    PRIMARY KEY (namespace, id)) WITHOUT ROWID;
CREATE INDEX sessions_by_use ON sessions (namespace, seen);
CREATE TABLE retained (
    segment INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, until INTEGER NOT NULL, used INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, salt BLOB NOT NULL);
CREATE INDEX retained_by_end ON retained (namespace, until);
CREATE INDEX retained_by_salt ON retained (namespace, salt, nbytes);
"""

# Not columns of `events`: a release before it that has the file open writes rows of as many as it knows.
_SCHEMA_7 = """
CREATE TABLE fates (
    namespace INTEGER NOT NULL, number INTEGER NOT NULL, fate TEXT NOT NULL, session BLOB NOT NULL,
    PRIMARY KEY (namespace, number)) WITHOUT ROWID;
"""

# Gone with _SCHEMA_10.
_SCHEMA_8 = """
CREATE TABLE asked (
    namespace INTEGER NOT NULL, length INTEGER NOT NULL, bucket INTEGER NOT NULL, asked INTEGER NOT NULL,
    served INTEGER NOT NULL, registers BLOB NOT NULL, PRIMARY KEY (namespace, length, bucket)) WITHOUT ROWID;
"""

# Verdicts name the namespace by its id: that of one in shards is no row of `namespaces`. Records have the id
# of their writer from here on; of those before nobody knows it.
_SCHEMA_9 = """
CREATE TABLE writers (
    namespace TEXT NOT NULL, id BLOB NOT NULL, state INTEGER NOT NULL, at REAL NOT NULL, by BLOB NOT NULL,
    name TEXT NOT NULL, PRIMARY KEY (namespace, id)) WITHOUT ROWID;
CREATE INDEX writers_by_age ON writers (at);
UPDATE segments SET record = CAST(x'02' || substr(record, 2, 23) || zeroblob(8) || substr(record, 25) AS BLOB)
    WHERE substr(record, 1, 1) = x'01';
UPDATE parts SET agreement = CAST(substr(agreement, 1, 8) || x'02' || substr(agreement, 10, 23) || zeroblob(8)
    || substr(agreement, 33) AS BLOB) WHERE substr(agreement, 9, 1) = x'01';
"""

_SCHEMA_10 = """
DROP TABLE asked;
DROP TABLE leases;
"""

#: What each version changed in the one before. The first process of this release that opens an older file
#: brings it up to date; releases older than a file refuse it.
SCHEMAS = (
    *(_SCHEMA_1, _SCHEMA_2, _SCHEMA_3, _SCHEMA_4, _SCHEMA_5, _SCHEMA_6, _SCHEMA_7, _SCHEMA_8),
    *(_SCHEMA_9, _SCHEMA_10),
)
#: Raised with every change of the schema (golden test: tests/index/sqlite/test_index.py).
SCHEMA_VERSION = len(SCHEMAS)


def make_schema(connection: sqlite3.Connection, where: str) -> None:
    """Brings an empty database, or one of an older release, up to date in one transaction."""
    with begun(connection, "BEGIN IMMEDIATE"):
        # None are missing if another process was faster.
        for schema in SCHEMAS[version_of(connection, where) :]:
            for statement in schema.strip().split(";\n"):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def version_of(connection: sqlite3.Connection, where: str) -> int:
    """Returns the schema's version, 0 for an empty database. Raises ConfigError for a foreign or newer
    one."""
    owner, version, new = stamps(connection)
    if owner != APPLICATION_ID and not new:
        raise ConfigError(f"sqlite {where}: this is another program's database; name another file")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"sqlite {where}: made by a newer kvstore (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade this one, or delete the file: the cache refills"
        )
    return version
