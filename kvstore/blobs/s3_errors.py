"""What an S3 server or client says, as one of the store's errors.

    NoSuchKey                                      None, or nothing to delete: the caller decides
    SlowDown, Throttling..., 429                   Throttled
    5xx, no connection, broken off, NoSuchBucket   TransientError
    time ran out                                   DeadlineExceeded
    AccessDenied, bad keys, bad region, other 4xx,
    a certificate that isn't trusted               PermissionDenied: an operator must act
    QuotaExceeded, EntityTooLarge, 507             CapacityExceeded

A bucket that isn't there is not a payload that isn't there: the index must not be emptied for it, and
it may come back, so it is transient. A 404 without S3's own code comes from something that isn't S3.

Messages take the server's code and sentence, never its body, which may quote the request.
"""

from __future__ import annotations

import re

from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.exceptions import ReadTimeoutError as BodyTimeout

from kvstore.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    Throttled,
    TransientError,
)

#: The object is not there, and the bucket is.
MISSING = "NoSuchKey"
#: The range starts behind the end of the object.
BEYOND = "InvalidRange"

_THROTTLED = re.compile(r"SlowDown|Throttl|TooManyRequests|RequestLimitExceeded|BandwidthLimitExceeded")
_FULL = frozenset({"QuotaExceeded", "EntityTooLarge", "InsufficientStorage"})
#: 4xx that another attempt may not see again.
_PASSING = frozenset({"NoSuchBucket", "NoSuchUpload", "RequestTimeout", "OperationAborted", "BadDigest"})

_ADVICE = {
    "NoSuchBucket": "create the bucket, or correct its name or the endpoint",
    "InvalidAccessKeyId": "the server doesn't know this access key",
    "SignatureDoesNotMatch": "the secret access key is wrong, or a proxy changes requests",
    "ExpiredToken": "the session token has expired",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "AccessDenied": "grant s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket",
    "PermanentRedirect": "the bucket is in another region: name it with ?region=",
    "AuthorizationHeaderMalformed": "the bucket is in another region: name it with ?region=",
    "IllegalLocationConstraintException": "the bucket is in another region: name it with ?region=",
}

_UNTRUSTED = "the server's certificate is not trusted; name its authority's in s3.tls_ca"

_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_SENTENCE = re.compile(r"<Message>([^<>]{1,200})")


def classify(what: str, status: int, code: str, sentence: str = "") -> KVStoreError:
    """The error for an answer with this HTTP status and S3 error code; `what` says where and what for."""
    said = f"{status} {code}".strip() + (f" ({sentence.strip()})" if sentence.strip() else "")
    advice = _ADVICE.get(code)
    text = f"{what}: {said}" + (f"; {advice}" if advice else "")
    if status == 429 or _THROTTLED.search(code):
        return Throttled(text)
    if code in _FULL or status == 507:
        return CapacityExceeded(text)
    if code in _PASSING or status >= 500 or status in (404, 408, 416):
        return TransientError(text)
    return PermissionDenied(text)


def code_of(error: BaseException) -> str:
    """The S3 error code in an error of boto3 or obstore; empty if there is none."""
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        # A HEAD has no body to put a code into.
        return "" if code.isdigit() else code
    found = _CODE.search(str(error))
    return found[1] if found else ""


def of_boto(what: str, error: Exception) -> KVStoreError:
    """The error for what boto3 raised."""
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        sentence = str(error.response.get("Error", {}).get("Message", ""))[:200]
        return classify(what, status, code_of(error), sentence)
    if isinstance(error, (ConnectTimeoutError, ReadTimeoutError, BodyTimeout)):
        return DeadlineExceeded(f"{what}: the server did not answer in time")
    if isinstance(error, SSLError):
        return PermissionDenied(f"{what}: {_UNTRUSTED}")
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return PermissionDenied(f"{what}: {no_credentials()}")
    kind = type(error).__name__
    return TransientError(f"{what}: no connection, or it broke ({kind})")


def of_obstore(what: str, error: Exception) -> KVStoreError:
    """The error for what obstore raised."""
    text = str(error)
    status = _STATUS.search(text)
    if status is not None:
        sentence = _SENTENCE.search(text)
        return classify(what, int(status[1]), code_of(error), sentence[1] if sentence else "")
    if re.search(r"timed out|TimedOut", text):
        return DeadlineExceeded(f"{what}: the server did not answer in time")
    if "InvalidCertificate" in text:
        return PermissionDenied(f"{what}: {_UNTRUSTED}")
    # The first line quotes the URL and the kind of failure; what follows repeats the request.
    return TransientError(f"{what}: no connection, or it broke ({text.splitlines()[0][:200]})")


def no_credentials() -> str:
    """What to do about them."""
    return (
        "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the role "
        "of the pod"
    )
