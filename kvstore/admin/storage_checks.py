"""The doctor's checks of where payloads are: a folder or a bucket, and a fast tier in front of it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.admin.cache import Cache, exists
from kvstore.admin.machine import check_file_clock, nearest_folder, size
from kvstore.errors import (
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    Throttled,
    TransientError,
)
from schemas.base import redact
from schemas.reports import Check
from schemas.urls import S3Location, s3_location

_FOLDER_ADVICE: dict[type[KVStoreError], str] = {
    PermissionDenied: "give the engines' user the right to write there, or run as that user",
    CapacityExceeded: "the disk is full: make room, or lower capacity_bytes",
    TransientError: "check the disk and its mount",
}
_KEYS = (
    "KVSTORE_S3__ACCESS_KEY_ID and KVSTORE_S3__SECRET_ACCESS_KEY (or AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY)"
)
#: What a bucket's error says -> what to do about it; the first that is found counts, and after them the
#: kind of the error.
_BUCKET_ADVICE = (
    (r"no credentials found", "set {keys}, or s3.profile, or give the pod's service account a role"),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken",
        "correct {keys}; do they belong to {endpoint}?",
    ),
    (r"RequestTimeTooSkewed", "set this machine's clock (NTP): requests are signed with the time"),
    (r"NoSuchBucket", "create bucket {bucket} at {endpoint}, or correct payloads"),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation",
        "add ?region=NAME to payloads, with the region that bucket {bucket} is in",
    ),
    (
        r"certificate|SSL|TLS",
        "name the PEM file of the authority that signed the certificate of {endpoint} in s3.tls_ca; is the "
        "host name right?",
    ),
    (r": put ", "allow s3:PutObject on {objects}"),
    (r": read ", "allow s3:GetObject on {objects}"),
    (r": delete ", "allow s3:DeleteObject on {objects}: without it the bucket grows without bound"),
    (r": list ", "allow s3:ListBucket on {arn}: without it a missing object looks like a forbidden one"),
)
_BY_KIND: dict[type[KVStoreError], str] = {
    ConfigError: "correct the settings under s3",
    PermissionDenied: "correct {keys}, or what they may do",
    CapacityExceeded: "the bucket's quota is used up: raise it, or lower capacity_bytes",
    Throttled: "the server asks for fewer requests: lower s3.concurrency and transfers.read_threads",
    DeadlineExceeded: "{endpoint} does not answer in time: check network policies and proxies, or raise "
    "s3.connect_timeout_s and s3.read_timeout_s",
    TransientError: "check that {endpoint} is right and can be reached from here (host, port, DNS, network "
    "policies), and whether it speaks http or https",
}


def check_payloads(cache: Cache, clock: Callable[[], float]) -> Iterator[Check]:
    """Whether payloads can be written and read, by a probe that is deleted again."""
    folder = cache.folder
    if folder is not None and not exists(folder):
        yield to_be_made("payloads", folder, "the payload folder")
        return
    if folder is not None and (owner := owner_if_root(folder)):
        yield Check(
            name="payloads",
            state="warning",
            found=f"not probed: this is root, and {folder} belongs to user {owner}",
            advice="run cache-admin as the user that the engines run as",
        )
        return
    began = time.perf_counter()
    try:
        cache.payloads.ping()
    except KVStoreError as exc:
        yield Check(name="payloads", state="problem", found=str(exc), advice=_advice(cache, exc))
        return
    took = time.perf_counter() - began
    what = "written, read and deleted" if folder is not None else "written, read, deleted and listed"
    yield Check(name="payloads", state="ok", found=f"a probe was {what} in {took * 1e3:.2f} ms")
    try:
        yield from check_file_clock(cache, clock)
    except OSError as exc:
        yield Check(name="file clock", state="warning", found=f"can't look at {folder}: {exc.strerror}")


def check_fast_tier(cache: Cache) -> Iterator[Check]:
    """Whether the fast tier can be written, how full it is, and whether the disk holds its capacity."""
    tiers, folder = cache.settings.tiers, cache.fast_folder
    if tiers is None or folder is None:
        return
    if not exists(folder):
        yield to_be_made("fast tier", folder, "its folder")
    elif owner := owner_if_root(folder):
        yield Check(
            name="fast tier",
            state="warning",
            found=f"not looked into: this is root, and {folder} belongs to user {owner}",
            advice="run cache-admin as the user that the engines run as",
        )
    elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield Check(
            name="fast tier",
            state="problem",
            found=f"user {os.geteuid()} can't write to {folder}; every read then goes to the shared store",
            advice="give the engines' user the right to write there, or run as that user",
        )
    else:
        yield from _usage(cache, folder)
    used = state.used_bytes if (state := cache.fast_state()) and state.used_bytes else 0
    room = shutil.disk_usage(nearest_folder(folder)).free + used
    lacks = room < tiers.fast_capacity
    yield Check(
        name="fast tier's disk",
        state="warning" if lacks else "ok",
        found=f"room for {size(room)} of payloads, and payloads.fast_capacity is {size(tiers.fast_capacity)}",
        advice="the disk fills up before the tier does, and then nothing more is kept in it: lower "
        "payloads.fast_capacity, or add space"
        if lacks
        else "",
    )


def _usage(cache: Cache, folder: Path) -> Iterator[Check]:
    state = cache.fast_state()
    assert state is not None, "there is a tier"
    if state.problem:
        yield Check(
            name="fast tier",
            state="problem",
            found=state.problem,
            advice=f"engines go on with the shared store; if it stays so, delete {folder}/.tier while no "
            "engine runs: it is rebuilt from the files",
        )
        return
    waiting = f", {size(state.dirty_bytes)} wait for their upload" if state.dirty_bytes else ""
    yield Check(
        name="fast tier",
        state="ok",
        found=f"holds {size(state.used_bytes or 0)} of {size(state.capacity_bytes)}{waiting}",
    )


def owner_if_root(folder: Path) -> int:
    """The user that a folder belongs to if this is root and another user: 0 if not.

    Root may write anywhere, which proves nothing, and what it makes engines could not write.
    """
    return folder.stat().st_uid if os.geteuid() == 0 else 0


def to_be_made(name: str, path: Path, what: str) -> Check:
    """A folder or file that isn't there is fine if it can be made."""
    existing = nearest_folder(path)
    able = os.access(existing, os.W_OK | os.X_OK)
    return Check(
        name=name,
        state="ok" if able else "problem",
        found=f"{what} is not there yet; the first save makes it in {path}",
        advice=""
        if able
        else f"user {os.geteuid()} can't write to {existing}: make the folder, or run as the engines' user",
    )


def _advice(cache: Cache, exc: KVStoreError) -> str:
    url = cache.settings.origin
    if not url.startswith("s3://"):
        return next((text for kind, text in _FOLDER_ADVICE.items() if isinstance(exc, kind)), "")
    location = s3_location(url)
    by_words = (text for words, text in _BUCKET_ADVICE if re.search(words, str(exc)))
    by_kind = (text for kind, text in _BY_KIND.items() if isinstance(exc, kind))
    # Which call failed says what is not allowed, and nothing about a server that can't be reached.
    denied = isinstance(exc, PermissionDenied)
    texts = [*(by_words if denied or "NoSuchBucket" in str(exc) else ()), *by_kind]
    return _filled(texts[0], location) if texts else ""


def _filled(text: str, location: S3Location) -> str:
    arn = f"arn:aws:s3:::{location.bucket}"
    return text.format(
        keys=_KEYS,
        bucket=location.bucket,
        endpoint=redact(location.endpoint) if location.endpoint else "AWS",
        arn=arn,
        objects=f"{arn}/{location.root}*",
    )
