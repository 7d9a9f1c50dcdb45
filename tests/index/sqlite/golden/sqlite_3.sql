-- An index of schema 3 as the release that knew no newer one wrote it: two commits, and an eviction by an
-- administrator, of whom nothing is known.
BEGIN TRANSACTION;
CREATE TABLE blocks (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment BLOB NOT NULL, slot INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
INSERT INTO "blocks" VALUES(1,X'512C5BF28EC55A0BAE6BB34681CBF559',X'0101010101010101',1);
INSERT INTO "blocks" VALUES(1,X'BED5100BD4C26EEC0E2489BAA2DCCC9E',X'0202020202020202',1);
INSERT INTO "blocks" VALUES(1,X'D69499D1041548C02202BA3E693FDF56',X'0202020202020202',0);
INSERT INTO "blocks" VALUES(1,X'D7E98967056F4828CB388A7930D88594',X'0101010101010101',0);
CREATE TABLE claims (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment BLOB NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE TABLE credits (
    namespace INTEGER NOT NULL, step INTEGER NOT NULL, blocks INTEGER NOT NULL,
    PRIMARY KEY (namespace, step)) WITHOUT ROWID;
CREATE TABLE events (
    namespace INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, op TEXT NOT NULL, segment BLOB,
    first BLOB, last BLOB, depth INTEGER NOT NULL, slots INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    rule TEXT, PRIMARY KEY (namespace, number)) WITHOUT ROWID;
INSERT INTO "events" VALUES(1,1700000040000,1700000040.0,'commit',X'0101010101010101',X'D7E98967056F4828CB388A7930D88594',X'512C5BF28EC55A0BAE6BB34681CBF559',0,2,5120,NULL);
INSERT INTO "events" VALUES(1,1700000040001,1700000040.0,'commit',X'0202020202020202',X'D69499D1041548C02202BA3E693FDF56',X'BED5100BD4C26EEC0E2489BAA2DCCC9E',0,2,5120,NULL);
INSERT INTO "events" VALUES(1,1700000040002,1700000040.0,'evict',X'0202020202020202',X'D69499D1041548C02202BA3E693FDF56',NULL,0,2,5120,'admin');
CREATE TABLE generations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL,
    segments INTEGER NOT NULL DEFAULT 0);
INSERT INTO "generations" VALUES(1,1,0);
CREATE TABLE ghosts (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, stamp INTEGER NOT NULL, slots INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE TABLE hot (segment INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, minutes REAL NOT NULL);
CREATE TABLE leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE namespaces (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, json TEXT NOT NULL, nbytes INTEGER NOT NULL DEFAULT 0,
    segments INTEGER NOT NULL DEFAULT 0, blocks INTEGER NOT NULL DEFAULT 0, swept BLOB NOT NULL DEFAULT x'', generation INTEGER NOT NULL DEFAULT 0, kind TEXT NOT NULL DEFAULT '', tenant TEXT NOT NULL DEFAULT '', seen REAL NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0, cost INTEGER NOT NULL DEFAULT 0, evicted INTEGER NOT NULL DEFAULT 0);
INSERT INTO "namespaces" VALUES(1,'73ddcfe9e0407ad6','{"block_tokens":16,"codec":"none","config":"","dtype":"bfloat16","epoch":0,"format":1,"groups":[{"block_tokens":16,"dtype":"BF16","kind":"full","layers":"","shape":[2,2,16,8],"shards":1,"window":null}],"hash_algo":"sha256","hash_root":"","kind":"kv","kv_dtype":"","model":"model","page_format":"","page_order":"","parallel":{"dcp":1,"pp":1,"tp":1},"quantization":"","revision":"","tenant":"default","weights":"w"}',5120,1,2,X'',1,'kv','default',1700000040.0,0,0,0);
CREATE TABLE outcomes (
    namespace INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, request BLOB NOT NULL,
    op TEXT NOT NULL, asked INTEGER NOT NULL, served INTEGER NOT NULL, reason TEXT NOT NULL,
    position INTEGER NOT NULL, missing BLOB NOT NULL, PRIMARY KEY (namespace, number)) WITHOUT ROWID;
CREATE TABLE parts (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, rank INTEGER NOT NULL, agreement BLOB NOT NULL,
    part BLOB NOT NULL, nbytes INTEGER NOT NULL, ranks INTEGER NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, id, rank)) WITHOUT ROWID;
CREATE TABLE quotas (scope TEXT PRIMARY KEY, nbytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (
    key INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL, id BLOB NOT NULL,
    checksum BLOB NOT NULL, record BLOB NOT NULL, nbytes INTEGER NOT NULL, slots INTEGER NOT NULL,
    ranks INTEGER NOT NULL, used INTEGER NOT NULL, depth INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0, cost INTEGER NOT NULL DEFAULT 0, worth INTEGER NOT NULL DEFAULT 0, keep INTEGER NOT NULL DEFAULT 0, first BLOB NOT NULL DEFAULT x'', UNIQUE (namespace, id));
INSERT INTO "segments" VALUES(1,1,X'0101010101010101',X'0E13E293E0033343',X'010102000100000028F153650000000000040000000000000010000000020000',5120,2,1,28333334,0,0,0,0,28333334,X'D7E98967056F4828CB388A7930D88594');
CREATE TABLE totals (
    namespace INTEGER NOT NULL, name TEXT NOT NULL, amount INTEGER NOT NULL,
    PRIMARY KEY (namespace, name)) WITHOUT ROWID;
CREATE TABLE trash (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, ranks INTEGER NOT NULL, due INTEGER NOT NULL,
    PRIMARY KEY (namespace, id)) WITHOUT ROWID;
INSERT INTO "trash" VALUES(1,X'0202020202020202',1,1700000100);
CREATE TABLE uses (
    namespace INTEGER NOT NULL, parity INTEGER NOT NULL, line INTEGER NOT NULL, sketch TEXT NOT NULL,
    bits BLOB NOT NULL, PRIMARY KEY (namespace, parity, line)) WITHOUT ROWID;
CREATE INDEX trash_by_time ON trash (namespace, due);
CREATE INDEX parts_by_time ON parts (expires);
CREATE INDEX claims_by_time ON claims (expires);
CREATE INDEX generations_of ON generations (namespace);
CREATE INDEX segments_by_keep ON segments (namespace, keep, min(depth, 4194303) DESC, used, id)
    WHERE pinned = 0;
CREATE INDEX hot_by_use ON hot (namespace, minutes);
CREATE INDEX ghosts_by_age ON ghosts (namespace, stamp);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('generations',1);
INSERT INTO "sqlite_sequence" VALUES('segments',2);
COMMIT;
