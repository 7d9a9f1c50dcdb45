"""Decides who may ask `cache-admin serve`, and by what name: TLS, certificates, a password, Host headers.

Its files are read again when they change, as those of a mounted Secret do. While they can't be read, or a
certificate and its key don't belong together, what they said before holds.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar
from urllib.parse import urlsplit

from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

_T = TypeVar("_T")
#: Fewer characters can be guessed, at what the listener allows of wrong ones.
_LEAST_PASSWORD = 12
_MOST_PASSWORD = 1024
#: Files of a Secret of type kubernetes.io/tls, as cert-manager writes them.
_CERTIFICATE, _KEY = "tls.crt", "tls.key"

#: Why somebody was turned away: the name that was asked for; neither certificate nor password; a wrong
#: password; a connection that made room for a newer one.
Refusal = Literal["host", "anonymous", "password", "crowded"]
REFUSALS: tuple[Refusal, ...] = ("host", "anonymous", "password", "crowded")


@dataclass(frozen=True, slots=True)
class Guests:
    """What an operator says of who may ask. Without certificates and password everybody may."""

    #: Names that requests may ask for besides addresses and localhost.
    hosts: tuple[str, ...] = ()
    #: Folder with tls.crt and tls.key, in PEM.
    tls: Path | None = None
    #: The authorities whose clients may ask, in PEM.
    client_ca: Path | None = None
    #: File that holds the password.
    password: Path | None = None


class Door:
    """Decides about each request. For the listener's thread, but for `refused`."""

    def __init__(self, access: Guests) -> None:
        """Reads the files. Raises ConfigError."""
        if access.client_ca is not None and access.tls is None:
            raise ConfigError("--client-ca needs --tls: only TLS asks clients for certificates")
        self._hosts = frozenset(name.lower().rstrip(".") for name in access.hosts)
        self._tls = _tls(access.tls, access.client_ca) if access.tls is not None else None
        self._password = _password(access.password) if access.password is not None else None
        self._certificates = access.client_ca is not None
        self._refused: Counter[Refusal] = Counter()

    @property
    def open(self) -> bool:
        """Whether everybody may ask."""
        return self._password is None and not self._certificates

    @property
    def challenge(self) -> str | None:
        """The WWW-Authenticate header; None if there is no password."""
        return None if self._password is None else 'Basic realm="kvstore", charset="UTF-8"'

    @property
    def encrypts(self) -> bool:
        """Whether the listener speaks TLS."""
        return self._tls is not None

    def tls(self) -> ssl.SSLContext | None:
        """Returns the context for a new connection; None: no TLS."""
        return None if self._tls is None else self._tls.now()

    def knows(self, host: str) -> bool:
        """Returns whether a Host header is an address, this machine, or a name that was given.

        A web site whose name leads here for a moment (DNS rebinding) asks for its own name, by which a
        browser would let it read the answer. Raises ValueError for what is no host.
        """
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".") if host else ""
        if name in ("", "localhost") or name.endswith(".localhost") or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def turns_away(self, authorization: str, *, certificate: bool) -> Refusal | None:
        """Returns why a request is not answered; None: it is. A verified certificate or the password do.

        `authorization` is the header: Basic with any user, or Bearer.
        """
        if self.open or (certificate and self._certificates):
            return None
        if self._password is None or not authorization:
            return "anonymous"
        return (
            None if hmac.compare_digest(_digest(_given(authorization)), self._password.now()) else "password"
        )

    def note(self, refusal: Refusal) -> None:
        """Counts somebody who was turned away."""
        self._refused[refusal] += 1

    def refused(self) -> dict[Refusal, int]:
        """Returns how many were turned away, by reason. Any thread may ask."""
        return {reason: self._refused[reason] for reason in REFUSALS}


class _FromFiles(Generic[_T]):
    """What files say: read when it begins, and again when one of them has changed."""

    def __init__(self, files: Sequence[Path], load: Callable[[], _T]) -> None:
        """`load` raises OSError or ValueError for what can't be used: now, ConfigError."""
        self._files, self._load = files, load
        self._seen = self._stamps()
        try:
            self._now = load()
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{self._names()}: {_why(exc)}") from None

    def now(self) -> _T:
        """Returns what they say. Does a few calls of stat."""
        if (stamps := self._stamps()) != self._seen:
            self._seen = stamps
            try:
                self._now = self._load()
            except (OSError, ValueError) as exc:
                log.warning("%s changed: %s; what was there before holds", self._names(), _why(exc))
        return self._now

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, self._files))

    def _names(self) -> str:
        return " and ".join(map(str, self._files))


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _why(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError):
        return f"not a certificate and its key, or not certificates, in PEM ({exc.reason or exc})"
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


def _tls(folder: Path, client_ca: Path | None) -> _FromFiles[ssl.SSLContext]:
    certificate, key = folder / _CERTIFICATE, folder / _KEY

    def load() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # A password would be asked for at the terminal.
        context.load_cert_chain(certificate, key, password=_no_password)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            # Optional, since probes have none.
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    return _FromFiles([certificate, key, *([client_ca] if client_ca else [])], load)


def _no_password() -> str:
    raise ValueError("the key is encrypted: give one that is not, in a file that only this user may read")


def _password(file: Path) -> _FromFiles[bytes]:
    def load() -> bytes:
        with file.open("rb") as opened:
            text = opened.read(_MOST_PASSWORD + 1).strip()
        if not _LEAST_PASSWORD <= len(text) <= _MOST_PASSWORD:
            raise ValueError(f"a password has from {_LEAST_PASSWORD} to {_MOST_PASSWORD} bytes, on one line")
        if any(byte < 32 for byte in text):
            raise ValueError("a password is one line, without control characters")
        return _digest(text)

    return _FromFiles([file], load)


def _given(authorization: str) -> bytes:
    """Returns the password that a header gives; what can't be read is a wrong one."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip().encode("latin-1", "replace")
    try:
        return (
            base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
            if scheme.lower() == "basic"
            else b""
        )
    except (binascii.Error, ValueError):
        return b""


def _digest(password: bytes) -> bytes:
    """Returns a password's digest, by which comparing takes as long for any two."""
    return hashlib.sha256(password).digest()
