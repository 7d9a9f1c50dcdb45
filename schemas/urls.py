"""The URLs of the settings tree: what each may say, checked in words.

    payloads   file:///DIR, s3://BUCKET/PREFIX?endpoint=URL&region=NAME, memory://NAME (tests)
    index      redis://[user:password@]HOST:PORT/DB, rediss:// (TLS), redis://HOST,HOST,HOST (seeds of a
               Cluster), redis+sentinel://[user:password@]HOST:PORT,HOST:PORT/MASTER/DB, rediss+sentinel://,
               unix://[user:password@]PATH?db=DB, sqlite:///PATH, memory://NAME

The checks raise ValueError and never quote what they were given: it may hold a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
#: Characters of a prefix: those that are safe in S3, so that no client quotes them in its own way.
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/-]*")
_S3_KEYS = ("endpoint", "region")
#: Names that Sentinel allows for a master.
_MASTER = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z]+\]")
REDIS_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")
REDIS_PORT = 6379
SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class S3Location:
    """A parsed s3:// URL, which holds no secret and may be logged."""

    bucket: str
    #: Prefix of the keys, without slashes at its ends; may be empty.
    prefix: str
    #: Address of the server; None: AWS.
    endpoint: str | None
    #: Region; None: the one that boto3 finds in the environment, or else us-east-1.
    region: str | None

    @property
    def root(self) -> str:
        """The beginning of every key, before the payload's name."""
        return f"{self.prefix}/" if self.prefix else ""


def split(value: str) -> SplitResult:
    """Returns what `urlsplit` does, but insists on scheme://."""
    try:
        url = urlsplit(value)
    except ValueError:
        # Its message may quote the user information.
        raise ValueError("not a valid URL") from None
    if not url.scheme or "://" not in value:
        raise ValueError("not a URL (scheme://...)")
    if url.scheme in ("file", "sqlite") and (url.query or url.fragment):
        raise ValueError(f"a {url.scheme} URL takes no '?' or '#'; use a path without them")
    return url


def check_folder(value: str) -> str:
    """Returns `value`, which must be a file:// URL with a folder."""
    url = split(value)
    if url.scheme != "file":
        raise ValueError("not a folder; write file:///var/lib/kvstore")
    if url.netloc not in ("", "localhost"):
        raise ValueError("file URLs have three slashes: file:///var/lib/kvstore")
    if url.path in ("", "/"):
        raise ValueError("file URL without a folder; write file:///var/lib/kvstore")
    return value


def check_payloads(value: str) -> str:
    """Returns `value`, which must be the URL of one payload store."""
    scheme = split(value).scheme
    if scheme == "file":
        return check_folder(value)
    if scheme == "s3":
        s3_location(value)
        return value
    if scheme != "memory":
        raise ValueError("unsupported URL; allowed: file:///DIR, s3://BUCKET/PREFIX, memory://NAME")
    return value


def s3_location(value: str) -> S3Location:
    """Returns the parts of an s3:// URL."""
    url = split(value)
    if "@" in url.netloc:
        raise ValueError(
            "an s3 URL takes no credentials; they come from boto3's chain (AWS_ACCESS_KEY_ID, profile, role) "
            "or from s3.access_key_id and s3.secret_access_key"
        )
    if not _BUCKET.fullmatch(url.netloc):
        raise ValueError("s3 URL without a valid bucket; write s3://BUCKET/PREFIX")
    if url.fragment or not _PREFIX.fullmatch(url.path) or "//" in url.path or "/." in url.path:
        raise ValueError(
            "the prefix of an s3 URL is letters, digits and - _ . / only, as in s3://BUCKET/cache"
        )
    pairs = parse_qsl(url.query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) != len(pairs) or set(options) - set(_S3_KEYS):
        raise ValueError(
            "after '?' an s3 URL takes endpoint= and region=, each once; all else is a setting under s3"
        )
    endpoint = options.get("endpoint")
    if endpoint is not None:
        _check_endpoint(endpoint)
    region = options.get("region")
    if region is not None and not re.fullmatch(r"[A-Za-z0-9-]{1,64}", region):
        raise ValueError("region of an s3 URL is a name such as us-east-1")
    return S3Location(url.netloc, url.path.strip("/"), endpoint, region)


def _check_endpoint(value: str) -> None:
    advice = "endpoint of an s3 URL is http://HOST:PORT or https://HOST:PORT, without path or credentials"
    try:
        url = urlsplit(value)
        port = url.port
    except ValueError:
        raise ValueError(advice) from None
    extra = url.path not in ("", "/") or url.query or url.fragment or "@" in url.netloc
    if url.scheme not in ("http", "https") or not url.hostname or extra or port == 0:
        raise ValueError(advice)


def check_index(value: str) -> str:
    """Returns `value`, which must be the URL of an index."""
    if value.partition("://")[0] in REDIS_SCHEMES:
        redis_location(value)
        return value
    url = split(value)
    if url.scheme == "sqlite":
        if url.netloc or url.path in ("", "/"):
            raise ValueError("sqlite URLs have three slashes and a file: sqlite:///var/lib/kvstore/index.db")
    elif url.scheme != "memory":
        raise ValueError(
            "unsupported URL; allowed: redis://HOST:PORT/DB, rediss://, unix://PATH, sqlite:///PATH, "
            "memory://NAME, redis+sentinel://HOST:PORT/MASTER/DB, rediss+sentinel://"
        )
    return value


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """A parsed URL of a Redis: one server, seeds of a Cluster, Sentinels that know a master, or a socket."""

    #: (host without brackets, port). Several are seeds of a Cluster, or Sentinels; none: a socket.
    hosts: tuple[tuple[str, int], ...] = ()
    #: Path of a socket.
    path: str | None = None
    db: int = 0
    tls: bool = False
    #: The master's name; if there is one, `hosts` are its Sentinels.
    master: str | None = None
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """The place in messages: everything but the credentials."""
        if self.path is not None:
            return f"{self.path}/{self.db}"
        hosts = ",".join(place(host, port) for host, port in self.hosts)
        return f"{hosts}/{self.master}/{self.db}" if self.master else f"{hosts}/{self.db}"


def place(host: str, port: int) -> str:
    """Returns `host:port`, with brackets where the host needs them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def redis_location(value: str) -> RedisLocation:
    """Returns the parts of the URL of a Redis index."""
    scheme, _, rest = value.partition("://")
    if scheme not in REDIS_SCHEMES:
        raise ValueError("not the URL of a Redis; write redis://HOST:6379/0")
    head, mark, query = _cut(rest)
    user, there = _user(head)
    name, colon, password = user.partition(":")
    known = RedisLocation(
        username=unquote(name) if name else None, password=unquote(password) if colon else None
    )
    if scheme == "unix":
        if not there.startswith("/") or there == "/":
            raise ValueError("unix URL without a socket; write unix:///run/redis.sock")
        return replace(known, path=unquote(there), db=_socket_db(mark + query))
    if mark:
        raise ValueError(
            f"a {scheme} URL takes no options ('?' or '#'): its settings are under redis, such as "
            "redis.password, redis.tls_ca, redis.timeout_s; special characters of a password must be "
            "percent-encoded"
        )
    listed, _, path = there.partition("/")
    if scheme.endswith("+sentinel"):
        return _sentinels(replace(known, tls=scheme.startswith("rediss")), listed, path, scheme)
    hosts = _hosts(listed, REDIS_PORT, f"{scheme}://HOST:6379/0")
    if path and not path.isdecimal():
        raise ValueError(f"the path of a redis URL is a database number, as in {scheme}://HOST:6379/0")
    if len(hosts) > 1 and int(path or 0):
        raise ValueError("several hosts are seeds of a Cluster, which has no database but 0")
    return replace(known, hosts=hosts, db=int(path or 0), tls=scheme == "rediss")


def _sentinels(known: RedisLocation, listed: str, path: str, scheme: str) -> RedisLocation:
    example = f"{scheme}://HOST:26379,HOST:26379,HOST:26379/mymaster/0"
    hosts = _hosts(listed, SENTINEL_PORT, example)
    master, slash, db = path.partition("/")
    if not master or (master.isdecimal() and not slash):
        raise ValueError(
            f"a {scheme} URL names the master as in `sentinel monitor NAME ...` of its Sentinels: {example}"
        )
    if not _MASTER.fullmatch(master):
        raise ValueError(f"the master's name is letters, digits and . - _ only, as in {example}")
    if slash and db and not db.isdecimal():
        raise ValueError(f"after the master's name comes a database number, as in {example}")
    return replace(known, hosts=hosts, master=master, db=int(db or 0))


def _cut(rest: str) -> tuple[str, str, str]:
    """Returns the text before the first '?' or '#', that character, and the text after it."""
    found = re.search(r"[?#]", rest)
    return (rest, "", "") if found is None else (rest[: found.start()], found[0], rest[found.end() :])


def _user(head: str) -> tuple[str, str]:
    """Returns the user information and the rest. An '@' after the first slash separates nothing."""
    authority, slash, path = head.partition("/")
    user, _, listed = authority.rpartition("@")
    return user, f"{listed}{slash}{path}"


def _hosts(listed: str, port: int, example: str) -> tuple[tuple[str, int], ...]:
    found = []
    for part in listed.split(","):
        bracket = part.rfind("]")
        host, colon, number = part, "", ""
        if part.find(":", bracket + 1) >= 0:
            host, colon, number = part.rpartition(":")
        if not host:
            raise ValueError(f"redis URL without a host; write {example}")
        if not _HOST.fullmatch(host):
            raise ValueError(
                f"not a valid URL: a host is a name or an address (IPv6 in brackets), as in {example}; "
                "special characters of a password must be percent-encoded"
            )
        if colon and not (number.isdecimal() and 0 < int(number) <= 65535):
            raise ValueError(
                f"the port of a redis URL is a number up to 65535, as in {example}; special characters "
                "of a password must be percent-encoded"
            )
        found.append((host.strip("[]"), int(number) if colon else port))
    if len(set(found)) != len(found):
        raise ValueError(f"a host stands twice in the list; write {example}")
    return tuple(found)


def _socket_db(query: str) -> int:
    if query and not re.fullmatch(r"\?db=\d{1,9}", query):
        raise ValueError(
            "after '?' a unix URL takes db=NUMBER, as in unix:///run/redis.sock?db=1; all else is a setting "
            "under redis"
        )
    return int(query[4:] or 0)


def local_path(value: str) -> str:
    """Returns the folder of a file:// URL, or the name of a memory:// URL."""
    url = split(value)
    return url.path if url.scheme == "file" else url.netloc + url.path
