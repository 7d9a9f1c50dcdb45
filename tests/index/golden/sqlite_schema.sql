-- application_id 0x6b767369, user_version 2, journal_mode wal
CREATE TABLE claims (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment BLOB NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE INDEX claims_by_time ON claims (expires);
CREATE TABLE entries (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment INTEGER NOT NULL, slot INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE TABLE namespaces (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, json TEXT NOT NULL, nbytes INTEGER NOT NULL DEFAULT 0,
    segments INTEGER NOT NULL DEFAULT 0, blocks INTEGER NOT NULL DEFAULT 0, swept BLOB NOT NULL DEFAULT x'');
CREATE TABLE parts (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, rank INTEGER NOT NULL, agreement BLOB NOT NULL,
    part BLOB NOT NULL, nbytes INTEGER NOT NULL, ranks INTEGER NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, id, rank)) WITHOUT ROWID;
CREATE INDEX parts_by_time ON parts (expires);
CREATE TABLE segments (
    key INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL, id BLOB NOT NULL,
    checksum BLOB NOT NULL, record BLOB NOT NULL, nbytes INTEGER NOT NULL, slots INTEGER NOT NULL,
    ranks INTEGER NOT NULL, used INTEGER NOT NULL, depth INTEGER NOT NULL, UNIQUE (namespace, id));
CREATE INDEX segments_by_use ON segments (namespace, used, depth DESC, id);
CREATE TABLE sqlite_sequence(name,seq);
CREATE TABLE trash (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, ranks INTEGER NOT NULL, due INTEGER NOT NULL,
    PRIMARY KEY (namespace, id)) WITHOUT ROWID;
CREATE INDEX trash_by_time ON trash (namespace, due);
CREATE TABLE uses (
    namespace INTEGER NOT NULL, parity INTEGER NOT NULL, line INTEGER NOT NULL, sketch TEXT NOT NULL,
    bits BLOB NOT NULL, PRIMARY KEY (namespace, parity, line)) WITHOUT ROWID;
