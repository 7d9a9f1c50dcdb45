"""Turns what an S3 server or client says into one of the store's errors.

    NoSuchKey                                      None, or nothing to delete: the caller decides
    SlowDown, Throttling..., 429                   Throttled
    5xx, no connection, broken off, NoSuchBucket   TransientError
    time ran out                                   DeadlineExceeded
    AccessDenied, bad keys, other 4xx,
    a certificate that isn't trusted               PermissionDenied: an operator must act
    QuotaExceeded, EntityTooLarge, 507             CapacityExceeded
    301, 302, 307, 308, another region             Redirected, a PermissionDenied: it is not followed

A missing bucket is not a missing payload: the index must not be emptied for it, and the bucket may come
back, so the error is transient. A 404 without S3's own code comes from something that isn't S3.

Messages contain the server's code and its first sentence, without what may be a key or a token. They contain
no more of its body: AWS quotes there what it was asked, the access key among it. A client's error is never
the cause of one of these, since it holds the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    SSLError,
)

from kvstore.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    Throttled,
    TransientError,
)
from kvstore.rules.text import readable


class Redirected(PermissionDenied):
    """The server sends the client elsewhere, which it does not follow: a bucket's requests go to its server.

    The honest case is a bucket in another region.
    """

    reason = "other_region"


#: Code for an object that is not there, in a bucket that is.
MISSING = "NoSuchKey"
#: Code for a range that starts behind the end of the object.
BEYOND = "InvalidRange"

_THROTTLED = re.compile(r"SlowDown|Throttl|TooManyRequests|RequestLimitExceeded|BandwidthLimitExceeded")
_FULL = frozenset({"QuotaExceeded", "EntityTooLarge", "InsufficientStorage"})
#: Codes of 4xx answers that another attempt may not get again.
_PASSING = frozenset({"NoSuchBucket", "NoSuchUpload", "RequestTimeout", "OperationAborted", "BadDigest"})

#: What asks whether a bucket keeps former versions, in errors. It needs a right that no other call does.
ASK_VERSIONING = "ask for versioning"

#: Address that obstore is told to reach any host through but the endpoint's: nobody can be there.
NOWHERE = "127.0.0.1:0"

_ELSEWHERE = "the bucket is in another region: name it with ?region="
_PERHAPS = "if the bucket is in another region, name it with ?region="
_ADVICE = {
    "NoSuchBucket": "create the bucket, or correct its name or the endpoint",
    "InvalidAccessKeyId": "the server doesn't know this access key",
    "SignatureDoesNotMatch": "the secret access key is wrong, or a proxy changes requests",
    "ExpiredToken": "the session token has expired",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "AccessDenied": "grant s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket",
    "PermanentRedirect": _ELSEWHERE,
    "AuthorizationHeaderMalformed": _ELSEWHERE,
    "IllegalLocationConstraintException": _ELSEWHERE,
}

_UNTRUSTED = "the server's certificate is not trusted; name its authority's in s3.tls_ca"

#: Most characters of a server's sentence that are repeated.
_SENTENCE_CHARS = 200
#: Where a sentence ends, and the words in one that may be an access key's id, a token or a signature.
_END = re.compile(r"(?<=[.!?])\s|[\r\n]")
_SECRET = re.compile(r"\b[A-Z0-9]{16,}\b|[A-Za-z0-9+]{32,}={0,2}")
_HOST = re.compile(r"https?://(?:[^/@]*@)?([A-Za-z0-9.:\[\]-]{1,100})(?:[/?#]|$)")
_REGION = re.compile(r"[a-z0-9-]{1,40}")

#: What obstore says of a redirect: one without a place to go, a circle, or to another host (NOWHERE).
_REDIRECT = re.compile(
    rf"Received redirect without LOCATION|error following redirect|{re.escape(NOWHERE)},\s"
)
_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_SENTENCE = re.compile(rf"<Message>([^<>]{{1,{10 * _SENTENCE_CHARS}}})")


def classify(
    what: str, status: int, code: str, sentence: str = "", headers: Mapping[str, str] | None = None
) -> KVStoreError:
    """Returns the error for an HTTP status and an S3 error code; `what` names the bucket and the call."""
    sentence = readable(_first(sentence), _SENTENCE_CHARS)
    said = f"{status} {readable(code)}".strip() + (f" ({sentence})" if sentence else "")
    advice = _ADVICE.get(code)
    if code == "AccessDenied" and what.endswith(ASK_VERSIONING):
        advice = "grant s3:GetBucketVersioning"
    if 300 <= status < 400:
        return Redirected(f"{what}: {said}{_elsewhere(headers or {})}")
    text = f"{what}: {said}" + (f"; {advice}" if advice else "")
    if status == 429 or _THROTTLED.search(code):
        return Throttled(text)
    if code in _FULL or status == 507:
        return CapacityExceeded(text)
    if code in _PASSING or status >= 500 or status in (404, 408, 416):
        return TransientError(text)
    return Redirected(text) if advice == _ELSEWHERE else PermissionDenied(text)


def _first(text: str) -> str:
    """Returns the first sentence of what a server says, with "..." for what may be a key or a token."""
    sentence = _END.split(text.strip(), maxsplit=1)[0]
    return _SECRET.sub("...", sentence)


def nonsense(what: str, kind: str) -> KVStoreError:
    """Returns the error for an answer that is not S3's. `kind` says in which way, in words of our own."""
    return TransientError(f"{what}: the answer is not what S3 sends ({kind})")


def _elsewhere(headers: Mapping[str, str]) -> str:
    """Returns what an answer says about where the bucket is, in words that name no more than a host."""
    host = _HOST.match(headers.get("location", ""))
    to = f" to {host[1]}" if host else ""
    region = headers.get("x-amz-bucket-region", "")
    if not _REGION.fullmatch(region):
        return f", a redirect{to}, which is not followed; {_PERHAPS}"
    where = f"the bucket is in region {region}: name it with ?region={region}"
    return f", a redirect{to}, which is not followed; {where}"


def code_of(error: BaseException) -> str:
    """Returns the S3 error code in an error of boto3 or obstore; "" if there is none."""
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))[:64]
        # A HEAD has no body to put a code into.
        return "" if code.isdigit() else code
    found = _CODE.search(str(error))
    return found[1] if found else ""


def of_boto(what: str, error: Exception) -> KVStoreError:
    """Returns the error for one that boto3 raised."""
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        sentence = str(error.response.get("Error", {}).get("Message", ""))[: 10 * _SENTENCE_CHARS]
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return classify(what, status, code_of(error), sentence, headers)
    if isinstance(error, (ConnectTimeoutError, ReadTimeoutError)):
        return DeadlineExceeded(f"{what}: the server did not answer in time")
    if isinstance(error, SSLError):
        return PermissionDenied(f"{what}: {_UNTRUSTED}")
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return PermissionDenied(f"{what}: {no_credentials()}")
    kind = type(error).__name__
    return TransientError(f"{what}: no connection, or it broke ({kind})")


def of_obstore(what: str, error: Exception) -> KVStoreError:
    """Returns the error for one that obstore raised."""
    text = str(error)
    status = _STATUS.search(text)
    if status is not None:
        sentence = _SENTENCE.search(text)
        return classify(what, int(status[1]), code_of(error), sentence[1] if sentence else "")
    if _REDIRECT.search(text):
        return Redirected(f"{what}: the server redirects elsewhere, which is not followed; {_PERHAPS}")
    if "Received non-partial response" in text:
        return TransientError(
            f"{what}: the server, or a proxy before it, ignores ranges and sends all there is"
        )
    if re.search(r"timed out|TimedOut", text):
        return DeadlineExceeded(f"{what}: the server did not answer in time")
    if "InvalidCertificate" in text:
        return PermissionDenied(f"{what}: {_UNTRUSTED}")
    # The first line names the URL and the kind of failure; the others repeat the request.
    return TransientError(f"{what}: no connection, or it broke ({readable(_first(text), _SENTENCE_CHARS)})")


def no_credentials() -> str:
    """Returns a sentence that says that there are no credentials, and what to do."""
    return (
        "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the role "
        "of the pod"
    )
