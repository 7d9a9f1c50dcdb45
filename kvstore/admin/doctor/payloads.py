"""The doctor's checks of the payload store: a folder or a bucket, and a fast tier in front of it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.admin.backends import Cache, exists
from kvstore.admin.doctor.machine import check_file_clock, nearest_folder
from kvstore.admin.doctor.reports import Check
from kvstore.build import ask_encryption, may_list_as_of, open_probe
from kvstore.errors import (
    CapacityExceeded,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    Throttled,
    TransientError,
)
from kvstore.files import access_of, too_open
from kvstore.rules.units import size
from schemas.base import redact
from schemas.settings import Settings
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
#: Pairs of a pattern in a bucket's error and advice; the first that is found counts, and if there is none the
#: kind of the error (_BY_KIND).
_BUCKET_ADVICE = (
    (
        r"credentials can't be had",
        "check the role of the pod or machine, its trust policy and its region, and whether what gives out "
        "its credentials can be reached from here: STS, the agent of EKS, or the instance's metadata",
    ),
    (r"no credentials found", "set {keys}, or s3.profile, or give the pod's service account a role"),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken",
        "correct {keys}; do they belong to {endpoint}?",
    ),
    (r"RequestTimeTooSkewed", "set this machine's clock (NTP): requests are signed with the time"),
    (r"NoSuchBucket", "create bucket {bucket} at {endpoint}, or correct payloads"),
    (
        r"the bucket is in region (?P<region>[a-z0-9-]+)",
        "add ?region={region} to payloads: bucket {bucket} is there",
    ),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation|in another region",
        "add ?region=NAME to payloads, with the region that bucket {bucket} is in",
    ),
    (
        r"certificate|SSL|TLS",
        "name the PEM file of the authority that signed the certificate of {endpoint} in s3.tls_ca; is the "
        "host name right?",
    ),
    (
        r"kms:|KMS",
        "allow kms:GenerateDataKey and kms:Decrypt on the key s3.sse_kms_key_id, or correct its name; it has "
        "to be enabled, and in the bucket's region",
    ),
    (r": put ", "allow s3:PutObject on {objects}"),
    (r": read ", "allow s3:GetObject on {objects}"),
    (r": delete ", "allow s3:DeleteObject on {objects}: without it the bucket grows without bound"),
    (r": list ", "allow s3:ListBucket on {arn}: without it a missing object looks like a forbidden one"),
)
#: An account number that nobody has.
_NO_ACCOUNT = "000000000000"
_BY_KIND: dict[type[KVStoreError], str] = {
    ConfigError: "correct the settings under s3",
    PermissionDenied: "correct {keys}, or what they may do",
    CapacityExceeded: "the bucket's quota is used up: raise it, or lower capacity_bytes",
    Throttled: "the server asks for fewer requests: engines slow down by themselves; if it lasts, put a "
    "folder on each node in front of it",
    DeadlineExceeded: "{endpoint} does not answer in time: check network policies and proxies, or raise "
    "s3.connect_timeout_s and s3.read_timeout_s",
    TransientError: "check that {endpoint} is right and can be reached from here (host, port, DNS, network "
    "policies), and whether it speaks http or https",
}


def check_payloads(cache: Cache, clock: Callable[[], float]) -> Iterator[Check]:
    """Checks whether payloads can be written and read, with a probe that is deleted again."""
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
        with open_probe(cache.settings) as probe:
            probe.ping()
    except KVStoreError as exc:
        yield Check(name="payloads", state="problem", found=str(exc), advice=advice_on(cache.settings, exc))
        return
    took = time.perf_counter() - began
    what = "written, read and deleted" if folder is not None else "written, read, deleted and listed"
    yield Check(name="payloads", state="ok", found=f"a probe was {what} in {took * 1e3:.2f} ms")
    try:
        yield from check_file_clock(cache, clock)
    except OSError as exc:
        yield Check(name="file clock", state="warning", found=f"can't look at {folder}: {exc.strerror}")


def check_bucket(cache: Cache) -> Iterator[Check]:
    """Checks whether the bucket does what `s3.sse_kms_key_id` and `s3.expected_bucket_owner` ask of it."""
    settings = cache.settings
    if not settings.origin.startswith("s3://"):
        return
    owner, key = settings.s3.expected_bucket_owner, settings.s3.sse_kms_key_id
    if owner is not None:
        # It answers to the right account; a server that looks at the header doesn't to a wrong one.
        counts = not may_list_as_of(settings, _NO_ACCOUNT)
        yield Check(
            name="bucket owner",
            state="ok" if counts else "warning",
            found=f"it is account {owner}'s"
            if counts
            else "the server takes no notice of who is said to own it",
            advice=""
            if counts
            else "s3.expected_bucket_owner protects at AWS; leave it out for a server that doesn't know it",
        )
    if key is not None:
        how, used = ask_encryption(settings)
        # An alias stands for a key whose id it doesn't tell.
        same = "alias/" in key or used.rpartition("/")[2] == key.rpartition("/")[2]
        good = how == "aws:kms" and bool(used) and same
        said = f"with {how}" + (f", key {used}" if used else "") if how else "by no word of the server"
        yield Check(
            name="bucket encryption",
            state="ok" if good else "problem",
            found=f"a probe was encrypted {said}",
            advice="" if good else "the server doesn't use the key s3.sse_kms_key_id: does it have SSE-KMS?",
        )


def check_access(cache: Cache) -> Iterator[Check]:
    """Checks whether others can read the files that payloads and index are in."""
    share = cache.settings.local.share
    access = access_of(share)
    takes = "go-rwx" if share == "owner" else "o-rwx"
    index = cache.index_file
    for folder in (cache.folder, cache.fast_folder, index):
        if folder is None or not exists(folder):
            continue
        # An index beside the payloads is looked at with them; elsewhere its folder may be anybody's.
        inside = too_open(folder if folder != index else folder.parent, access)
        open_ones = [each for each in inside if folder != index or each == index]
        yield Check(
            name="access",
            state="warning" if open_ones else "ok",
            found=f"others can read {open_ones[0]}, one of {len(open_ones)} that they can in {folder}"
            if open_ones
            else f"{folder} is for its {share} alone",
            advice=f"`chmod -R {takes} {folder}`: payloads tell what prompts say"
            + ("; if several users share it, set local.share: group" if share == "owner" else "")
            if open_ones
            else "",
        )


def check_fast_tier(cache: Cache) -> Iterator[Check]:
    """Checks whether the fast tier can be written, how full it is, and whether its disk has room."""
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
    """Returns the folder's owner if this process is root and the owner is not, else 0.

    Root may write anywhere, so its probe proves nothing, and engines could not write to what it creates.
    """
    return folder.stat().st_uid if os.geteuid() == 0 else 0


def to_be_made(name: str, path: Path, what: str) -> Check:
    """Checks whether a folder or file that isn't there can be created."""
    existing = nearest_folder(path)
    below = next(part for part in (path, *path.parents) if part.parent == existing or part == existing)
    if below != existing and os.path.lexists(below):
        return Check(
            name=name,
            state="problem",
            found=f"{what} can't be made in {path}: {below} is no folder",
            advice="name a folder, or one that can be made, in the settings",
        )
    able = os.access(existing, os.W_OK | os.X_OK)
    return Check(
        name=name,
        state="ok" if able else "problem",
        found=f"{what} is not there yet; the first save makes it in {path}",
        advice=""
        if able
        else f"user {os.geteuid()} can't write to {existing}: make the folder, or run as the engines' user",
    )


def advice_on(settings: Settings, exc: KVStoreError) -> str:
    """Returns advice for an error of a ping, "" if there is none.

    S3 denies in the same words what is not allowed, and what is not the account's that it is said to be.
    """
    owner = settings.s3.expected_bucket_owner
    if owner is not None and isinstance(exc, PermissionDenied) and settings.origin.startswith("s3://"):
        try:
            if may_list_as_of(settings, None) and not may_list_as_of(settings, owner):
                return f"the bucket is not account {owner}'s: correct s3.expected_bucket_owner, or payloads"
        except KVStoreError:
            pass
    return _advice(settings.origin, exc)


def _advice(url: str, exc: KVStoreError) -> str:
    if not url.startswith("s3://"):
        return next((text for kind, text in _FOLDER_ADVICE.items() if isinstance(exc, kind)), "")
    location = s3_location(url)
    # The call that failed shows what is not allowed, and nothing about a server that can't be reached.
    told = "NoSuchBucket" in str(exc) or "credentials can't be had" in str(exc)
    if isinstance(exc, PermissionDenied) or told:
        for words, text in _BUCKET_ADVICE:
            if found := re.search(words, str(exc)):
                return _filled(text, location, **found.groupdict())
    return next((_filled(text, location) for kind, text in _BY_KIND.items() if isinstance(exc, kind)), "")


def _filled(text: str, location: S3Location, **found: str) -> str:
    arn = f"arn:aws:s3:::{location.bucket}"
    return text.format(
        keys=_KEYS,
        bucket=location.bucket,
        endpoint=redact(location.endpoint) if location.endpoint else "AWS",
        arn=arn,
        objects=f"{arn}/{location.root}*",
        **found,
    )
