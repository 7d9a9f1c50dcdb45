-- application_id 0x6b767369, user_version 11, journal_mode wal
CREATE TABLE chunks (
    key INTEGER NOT NULL, number INTEGER NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (key, number)) WITHOUT ROWID;
CREATE TABLE entries (
    key INTEGER NOT NULL, ms INTEGER NOT NULL, number INTEGER NOT NULL, fields BLOB NOT NULL,
    PRIMARY KEY (key, ms, number)) WITHOUT ROWID;
CREATE TABLE fields (
    key INTEGER NOT NULL, field BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (key, field)) WITHOUT ROWID;
CREATE TABLE keys (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL, kind BLOB NOT NULL, expires_ms INTEGER,
    length INTEGER NOT NULL DEFAULT 0, last_ms INTEGER NOT NULL DEFAULT 0,
    last_number INTEGER NOT NULL DEFAULT 0);
CREATE INDEX keys_by_expiry ON keys (expires_ms) WHERE expires_ms IS NOT NULL;
CREATE INDEX keys_by_name ON keys (name, kind, expires_ms);
CREATE TABLE members (
    key INTEGER NOT NULL, member BLOB NOT NULL, score REAL NOT NULL, PRIMARY KEY (key, member)) WITHOUT ROWID;
CREATE INDEX members_by_score ON members (key, score, member);
