-- application_id 0x6b767369, user_version 10, journal_mode wal
CREATE TABLE blocks (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment BLOB NOT NULL, slot INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE TABLE claims (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment BLOB NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE INDEX claims_by_time ON claims (expires);
CREATE TABLE credits (
    namespace INTEGER NOT NULL, step INTEGER NOT NULL, blocks INTEGER NOT NULL,
    PRIMARY KEY (namespace, step)) WITHOUT ROWID;
CREATE TABLE events (
    namespace INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, op TEXT NOT NULL, segment BLOB,
    first BLOB, last BLOB, depth INTEGER NOT NULL, slots INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    rule TEXT, by TEXT NOT NULL DEFAULT '', PRIMARY KEY (namespace, number)) WITHOUT ROWID;
CREATE TABLE fates (
    namespace INTEGER NOT NULL, number INTEGER NOT NULL, fate TEXT NOT NULL, session BLOB NOT NULL,
    PRIMARY KEY (namespace, number)) WITHOUT ROWID;
CREATE TABLE forbidden (
    namespace TEXT NOT NULL, salt BLOB NOT NULL, until INTEGER NOT NULL,
    PRIMARY KEY (namespace, salt)) WITHOUT ROWID;
CREATE TABLE generations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL,
    segments INTEGER NOT NULL DEFAULT 0);
CREATE INDEX generations_of ON generations (namespace);
CREATE TABLE ghosts (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, stamp INTEGER NOT NULL, slots INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE INDEX ghosts_by_age ON ghosts (namespace, stamp);
CREATE TABLE hot (segment INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, minutes REAL NOT NULL);
CREATE INDEX hot_by_use ON hot (namespace, minutes);
CREATE TABLE namespaces (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, json TEXT NOT NULL, nbytes INTEGER NOT NULL DEFAULT 0,
    segments INTEGER NOT NULL DEFAULT 0, blocks INTEGER NOT NULL DEFAULT 0, swept BLOB NOT NULL DEFAULT x'', generation INTEGER NOT NULL DEFAULT 0, kind TEXT NOT NULL DEFAULT '', tenant TEXT NOT NULL DEFAULT '', seen REAL NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0, cost INTEGER NOT NULL DEFAULT 0, evicted INTEGER NOT NULL DEFAULT 0, sessions INTEGER NOT NULL DEFAULT 0);
CREATE TABLE operations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, by TEXT NOT NULL, verb TEXT NOT NULL,
    what TEXT NOT NULL);
CREATE TABLE outcomes (
    namespace INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, request BLOB NOT NULL,
    op TEXT NOT NULL, asked INTEGER NOT NULL, served INTEGER NOT NULL, reason TEXT NOT NULL,
    position INTEGER NOT NULL, missing BLOB NOT NULL, PRIMARY KEY (namespace, number)) WITHOUT ROWID;
CREATE TABLE parts (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, rank INTEGER NOT NULL, agreement BLOB NOT NULL,
    part BLOB NOT NULL, nbytes INTEGER NOT NULL, ranks INTEGER NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, id, rank)) WITHOUT ROWID;
CREATE INDEX parts_by_time ON parts (expires);
CREATE TABLE quotas (scope TEXT PRIMARY KEY, nbytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE retained (
    segment INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, until INTEGER NOT NULL, used INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, salt BLOB NOT NULL);
CREATE INDEX retained_by_end ON retained (namespace, until);
CREATE INDEX retained_by_salt ON retained (namespace, salt, nbytes);
CREATE TABLE segments (
    key INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL, id BLOB NOT NULL,
    checksum BLOB NOT NULL, record BLOB NOT NULL, nbytes INTEGER NOT NULL, slots INTEGER NOT NULL,
    ranks INTEGER NOT NULL, used INTEGER NOT NULL, depth INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0, cost INTEGER NOT NULL DEFAULT 0, worth INTEGER NOT NULL DEFAULT 0, keep INTEGER NOT NULL DEFAULT 0, first BLOB NOT NULL DEFAULT x'', salt BLOB NOT NULL DEFAULT x'', owner BLOB NOT NULL DEFAULT x'', UNIQUE (namespace, id));
CREATE INDEX segments_by_keep ON segments (namespace, keep, min(depth, 4194303) DESC, used, id)
    WHERE pinned = 0;
CREATE INDEX segments_by_owner ON segments (namespace, owner, nbytes) WHERE owner <> x'';
CREATE INDEX segments_by_salt ON segments (namespace, salt, nbytes) WHERE salt <> x'';
CREATE TABLE sessions (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, seen INTEGER NOT NULL, used INTEGER NOT NULL,
    until INTEGER NOT NULL, priority INTEGER NOT NULL, ended INTEGER NOT NULL,
    PRIMARY KEY (namespace, id)) WITHOUT ROWID;
CREATE INDEX sessions_by_use ON sessions (namespace, seen);
CREATE TABLE sqlite_sequence(name,seq);
CREATE TABLE totals (
    namespace INTEGER NOT NULL, name TEXT NOT NULL, amount INTEGER NOT NULL,
    PRIMARY KEY (namespace, name)) WITHOUT ROWID;
CREATE TABLE trash (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, ranks INTEGER NOT NULL, due INTEGER NOT NULL,
    PRIMARY KEY (namespace, id)) WITHOUT ROWID;
CREATE INDEX trash_by_time ON trash (namespace, due);
CREATE TABLE uses (
    namespace INTEGER NOT NULL, parity INTEGER NOT NULL, line INTEGER NOT NULL, sketch TEXT NOT NULL,
    bits BLOB NOT NULL, PRIMARY KEY (namespace, parity, line)) WITHOUT ROWID;
CREATE TABLE writers (
    namespace TEXT NOT NULL, id BLOB NOT NULL, state INTEGER NOT NULL, at REAL NOT NULL, by BLOB NOT NULL,
    name TEXT NOT NULL, PRIMARY KEY (namespace, id)) WITHOUT ROWID;
CREATE INDEX writers_by_age ON writers (at);
