"""Keys that sign and encrypt payloads: their names and their place, never a key itself."""

from __future__ import annotations

import re
from datetime import date
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from schemas.base import StrictModel

#: 32 bytes in hex, in base64 or in base64 for URLs. No absolute path is any of them, unless it ends with "=".
_A_KEY = re.compile(r"[0-9A-Fa-f]{64}|[A-Za-z0-9+/]{43}=|[A-Za-z0-9_-]{43}=?")


def _no_key(value: Any) -> Any:
    if isinstance(value, date) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)  # YAML takes an id such as 2026-11-22 for something else
    # A key in place of its name would be in every log of the settings.
    if isinstance(value, str) and _A_KEY.fullmatch(value.strip()):
        raise ValueError("this is a key itself; keys stand in files of the folder signing.keys alone")
    return value


class SigningSettings(StrictModel):
    """Payloads that prove who wrote them, so that no other writer to the bucket, the folder or an archive can
    plant any; and payloads that can't be read without a key.

    Every engine, janitor and tool of a store needs the same folder of keys.
    """

    #: Folder of keys, such as a mounted Kubernetes Secret: one file per key, whose name is the key's id (1 to
    #: 32 letters, digits, `.`, `_`, `-`) and whose content is 32 random bytes in hex or base64. A payload
    #: that any of these keys has signed is believed. Read once, when a process starts. Left out: nothing is
    #: signed, and signatures are not looked at.
    keys: Annotated[str | None, BeforeValidator(_no_key)] = None
    #: Id of the key that signs what this process writes.
    key: Annotated[str | None, BeforeValidator(_no_key)] = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$"
    )
    #: `refuse`: payloads without a signature are misses, and are evicted. `accept`: they are believed, as
    #: without keys; for the time in which a store that was not signed becomes one that is.
    unsigned: Literal["refuse", "accept"] = "refuse"
    #: Encrypt payloads that this process writes, with AES-256-GCM. Reads decrypt in any case.
    encrypt: bool = False

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.keys is None) != (self.key is None):
            raise ValueError(
                "signing.keys (a folder) and signing.key (an id in it) are given both or neither"
            )
        if self.keys is not None and not PurePosixPath(self.keys).is_absolute():
            raise ValueError("signing.keys is not an absolute path of a folder")
        if self.encrypt and self.keys is None:
            raise ValueError("signing.encrypt needs signing.keys and signing.key")
        return self
