"""The URLs of the settings tree: what each may say, checked in words.

    payloads   file:///DIR, s3://BUCKET/PREFIX?endpoint=URL&region=NAME, memory://NAME (tests)
    index      redis://[user:password@]HOST:PORT/DB, rediss://, unix://PATH, sqlite:///PATH, memory://NAME

The checks raise ValueError and never quote what they were given: it may hold a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, urlsplit

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
#: What a prefix may be made of: S3's safe characters, so that no client quotes it in its own way.
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/-]*")
_S3_KEYS = ("endpoint", "region")


@dataclass(frozen=True, slots=True)
class S3Location:
    """A parsed s3:// URL. Not quoted anywhere, so it may be logged."""

    bucket: str
    #: Without slashes at its ends; may be empty.
    prefix: str
    #: None: AWS.
    endpoint: str | None
    #: None: what boto3 finds in the environment, or else us-east-1.
    region: str | None

    @property
    def root(self) -> str:
        """What stands before a payload's name in its key."""
        return f"{self.prefix}/" if self.prefix else ""


def split(value: str) -> SplitResult:
    """`urlsplit` that insists on scheme://."""
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
    """A file:// URL with a folder."""
    url = split(value)
    if url.scheme != "file":
        raise ValueError("not a folder; write file:///var/lib/kvstore")
    if url.netloc not in ("", "localhost"):
        raise ValueError("file URLs have three slashes: file:///var/lib/kvstore")
    if url.path in ("", "/"):
        raise ValueError("file URL without a folder; write file:///var/lib/kvstore")
    return value


def check_payloads(value: str) -> str:
    """The URL of one payload store."""
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
    """The parts of an s3:// URL."""
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
    """The URL of an index."""
    url = split(value)
    if url.scheme in ("redis", "rediss"):
        if not url.hostname:
            raise ValueError("redis URL without a host; write redis://HOST:6379/0")
        _check_port(url)
        if url.path not in ("", "/") and not url.path[1:].isdigit():
            raise ValueError("the path of a redis URL is a database number, as in redis://HOST:6379/0")
    elif url.scheme == "sqlite":
        if url.netloc or url.path in ("", "/"):
            raise ValueError("sqlite URLs have three slashes and a file: sqlite:///var/lib/kvstore/index.db")
    elif url.scheme == "unix":
        if url.path in ("", "/"):
            raise ValueError("unix URL without a socket; write unix:///run/redis.sock")
    elif url.scheme != "memory":
        raise ValueError(
            "unsupported URL; allowed: redis://HOST:PORT/DB, rediss://, unix://PATH, sqlite:///PATH, memory://NAME"
        )
    return value


def _check_port(url: SplitResult) -> None:
    try:
        number = url.port
    except ValueError:
        number = 0
    if number == 0:
        raise ValueError(
            "the port of a redis URL is a number up to 65535, as in redis://HOST:6379/0; special characters "
            "of a password must be percent-encoded"
        )


def local_path(value: str) -> str:
    """Folder behind a file:// URL, name behind a memory:// one."""
    url = split(value)
    return url.path if url.scheme == "file" else url.netloc + url.path
