"""Settings: what is refused and in which words, sizes, and that no secret is ever shown."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from schemas.base import explain, redact
from schemas.settings import Settings, parse_bytes
from schemas.urls import S3Location, local_path, redis_location, s3_location

SECRET = "hunter2"


def problems(**given: Any) -> list[str]:
    """What explain() says of settings that must not pass; every rendering of the error is safe."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"payloads": "file:///x"} | given)
    lines = explain(caught.value, Settings)
    for text in (*lines, str(caught.value), repr(caught.value)):
        assert SECRET not in text
    return lines


def test_a_folder_is_enough() -> None:
    settings = Settings(payloads="file:///var/lib/kvstore")
    assert local_path(settings.origin) == "/var/lib/kvstore"
    assert settings.index_url == "sqlite:///var/lib/kvstore/index.sqlite"


@pytest.mark.parametrize("section", ["kv", "ec"])
def test_one_that_only_observes_needs_no_store_but_a_folder(section: str) -> None:
    for yes in (True, "true", "1"):
        made = Settings.model_validate({section: {"observe": yes}, "trace": {"folder": "/traces"}})
        assert made.nowhere
    # An index alone is no store; both are one, which may stay in the settings meanwhile.
    assert Settings.model_validate(
        {"index": "redis://redis", "kv": {"observe": True}, "trace": {"folder": "/traces"}}
    ).nowhere
    given = {"payloads": "file:///cache", "kv": {"observe": True}, "trace": {"folder": "/traces"}}
    assert Settings.model_validate(given).origin == "file:///cache"
    with pytest.raises(ValidationError, match=r"trace\.folder"):
        Settings.model_validate({section: {"observe": True}})
    for no in (False, "false", 0):
        with pytest.raises(ValidationError, match="payloads"):
            Settings.model_validate({section: {"observe": no}, "trace": {"folder": "/traces"}})


def test_settings_are_frozen_and_comparable() -> None:
    settings = Settings(payloads="file:///x")
    with pytest.raises(ValidationError, match="frozen"):
        settings.payloads = "file:///y"  # type: ignore[misc]
    assert settings == Settings(payloads="file:///x")
    assert hash(settings) == hash(Settings(payloads="file:///x"))
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_every_default_is_valid_alone() -> None:
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if name != "payloads" and default is not None:
            Settings.model_validate({"payloads": "file:///x", name: default})


# Unknown keys


@pytest.mark.parametrize("given", [{"high": 0.95}, {"low": 0.9}, {"high": 0.95, "low": 0.9, "fresh_s": 5}])
def test_the_watermarks_were_shares_once(given: dict[str, float]) -> None:
    (line,) = problems(eviction=given)
    assert line.startswith("eviction: high" if "high" in given else "eviction: low")
    assert "no settings any more" in line
    assert "at most 1 GiB" in line


def test_the_client_of_a_bucket_was_a_choice_once() -> None:
    given = {"payloads": "s3://bucket", "index": "redis://h"}
    assert Settings.model_validate(given | {"s3": {"client": "obstore"}}) == Settings.model_validate(given)
    (line,) = problems(s3={"client": "boto3"})
    assert line == "s3: client is no setting any more, obstore moves the bytes: leave it out"


def test_an_unknown_key_is_named_with_what_is_allowed() -> None:
    (line,) = problems(capacity="50GiB")
    assert line.startswith("unknown key 'capacity'; allowed here: admission, breaker, capacity_bytes, ")


def test_an_unknown_key_of_a_section() -> None:
    assert problems(redis={"pasword": SECRET}) == [
        "unknown key 'redis.pasword'; allowed here: connect_timeout_s, max_connections, password, "
        "sentinel_password, sentinel_username, shards, timeout_s, tls_ca, tls_cert, tls_key, tls_verify, "
        "username"
    ]


def test_every_problem_is_told_at_once() -> None:
    lines = problems(local={"fsync": "always"}, grace=1, segment={"max_blocks": 0})
    assert len(lines) == 3


# Values


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"local": {"fsync": "always"}}, ["local.fsync = 'always'", "'none', 'data' or 'full'"]),
        ({"segment": {"max_blocks": 0}}, ["segment.max_blocks = 0", "greater than or equal to 1"]),
        ({"segment": {"target_bytes": "1KiB"}}, ["segment.target_bytes = 1024", "4096"]),
        ({"segment": {"codec": "zstd"}}, ["segment.codec = 'zstd'", "'none', 'lz4' or 'planes-lz4'"]),
        ({"grace_s": "soon"}, ["grace_s = 'soon'", "valid number"]),
        ({"claim_ttl_s": 0}, ["claim_ttl_s = 0", "greater than 0"]),
        ({"claim_ttl_s": float("inf")}, ["claim_ttl_s = inf", "finite"]),
        ({"claim_ttl_s": float("nan")}, ["claim_ttl_s = nan", "finite"]),
        ({"capacity_bytes": "50 parsecs"}, ["capacity_bytes = '50 parsecs'", "512MiB"]),
        ({"capacity_bytes": -1}, ["capacity_bytes = -1"]),
        ({"identity": {"tenant": ""}}, ["identity.tenant = ''", "at least 1 character"]),
        ({"kv": "yes"}, ["kv = 'yes'", "dictionary"]),
        ({"kv": None}, ["kv", "dictionary"]),
        ({"index": 5}, ["index = 5", "string"]),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(given: dict[str, Any], words: list[str]) -> None:
    (line,) = problems(**given)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/var/lib/kvstore", "not a URL"),
        ("", "not a URL"),
        ("file:/var/lib", "not a URL"),
        ("file://var/lib", "file URLs have three slashes: file:///var/lib/kvstore"),
        ("file://", "without a folder; write file:///var/lib/kvstore"),
        ("file:///", "without a folder"),
        ("file:///x?y", "no '?' or '#'"),
        ("file:///x#y", "no '?' or '#'"),
        ("s4://bucket", "unsupported URL; allowed: file:///DIR"),
        ("redis://host", "unsupported URL; allowed: file:///DIR"),
    ],
)
def test_bad_payload_urls(url: str, words: str) -> None:
    (line,) = problems(payloads=url)
    assert line.startswith(f"payloads = {redact(url)!r}: ")
    assert words in line


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:6379", "not a URL"),
        ("redis:localhost", "not a URL"),
        ("redis://", "without a host; write redis://HOST:6379/0"),
        ("redis://:6379", "without a host"),
        ("redis://host/db", "database number"),
        ("redis://host/0/1", "database number"),
        ("redis://host:port", "port of a redis URL"),
        ("redis://host:0", "port of a redis URL"),
        ("redis://host:65536", "port of a redis URL"),
        ("redis://[::1", "not a valid URL"),
        ("redis://ho st", "not a valid URL"),
        ("redis://host/0?protocol=2", "a redis URL takes no options"),
        ("rediss://host/0?ssl_cert_reqs=none", "such as redis.password, redis.tls_ca"),
        ("redis://host#0", "a redis URL takes no options"),
        ("redis://a,b:6379,/0", "without a host"),
        ("redis://a,a:6379/0", "stands twice"),
        ("redis://a,b/1", "no database but 0"),
        ("redis+sentinel://a,b", "names the master as in `sentinel monitor NAME ...`"),
        ("redis+sentinel://a,b/", "redis+sentinel://HOST:26379,HOST:26379,HOST:26379/mymaster/0"),
        ("redis+sentinel://a,b/0", "names the master"),
        ("rediss+sentinel://a,b/my%20master/0", "letters, digits and . - _ only"),
        ("redis+sentinel://a,b/mymaster/x", "comes a database number"),
        ("redis+sentinel://a,b/mymaster/0/1", "comes a database number"),
        ("redis+sentinel:///mymaster/0", "without a host"),
        ("redis+sentinel://a:x/mymaster", "port of a redis URL"),
        ("redis+sentinel://a/mymaster?db=1", "takes no options"),
        ("unix:///run/redis.sock?password=x", "takes db=NUMBER"),
        ("unix://run/redis.sock", "write unix:///run/redis.sock"),
        ("sqlite://index.db", "three slashes"),
        ("sqlite:///", "three slashes"),
        ("sqlite:///x?mode=ro", "no '?' or '#'"),
        ("unix://", "write unix:///run/redis.sock"),
        ("http://host", "allowed: redis://HOST:PORT/DB, rediss://, unix://PATH, sqlite:///PATH"),
        ("redis+cluster://host", "memory://NAME, redis+sentinel://HOST:PORT/MASTER/DB"),
    ],
)
def test_bad_index_urls(url: str, words: str) -> None:
    (line,) = problems(index=url)
    assert line.startswith("index = ")
    assert words in line


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://host:6379",
        "redis://host:6379/0",
        "redis://[::1]:6379/15",
        f"rediss://user:{SECRET}@host:6379/0",
        f"redis://:{SECRET}@host",
        "redis://a,b:7000,[::1]:7001/0",
        "redis+sentinel://a/mymaster",
        f"rediss+sentinel://user:{SECRET}@a:26380,b,[::1]:26379/my-master.1/3",
        "unix:///run/redis.sock",
        f"unix://user:{SECRET}@/run/redis.sock?db=1",
        "sqlite:///var/lib/index.db",
    ],
)
def test_good_index_urls(url: str) -> None:
    assert Settings(payloads="file:///x", index=url).index_url == url


def test_what_a_redis_url_says() -> None:
    sentinel = redis_location(f"rediss+sentinel://us%40er:{SECRET}%2F@a:1,b,[::1]:3/main/4")
    assert sentinel.hosts == (("a", 1), ("b", 26379), ("::1", 3))
    assert (sentinel.master, sentinel.db, sentinel.tls) == ("main", 4, True)
    assert (sentinel.username, sentinel.password) == ("us@er", f"{SECRET}/")
    assert sentinel.where == "a:1,b:26379,[::1]:3/main/4"
    assert SECRET not in repr(sentinel)
    seeds = redis_location("redis://a,b:7000")
    assert (seeds.hosts, seeds.db, seeds.tls) == ((("a", 6379), ("b", 7000)), 0, False)
    assert (seeds.master, seeds.username, seeds.password) == (None, None, None)
    socket = redis_location(f"unix://:{SECRET}@/run/redis.sock?db=2")
    assert (socket.path, socket.db, socket.password, socket.hosts) == ("/run/redis.sock", 2, SECRET, ())


# Combinations


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"payloads": "memory://x"}, ["index may only be left out with file:// payloads"]),
        ({"payloads": "memory://x", "index": "redis://h"}, ["memory://", "both index and payloads"]),
        ({"index": "memory://x"}, ["memory://", "both index and payloads"]),
        ({"redis": {"tls_key": "k"}}, ["redis: tls_cert and tls_key are given both or neither"]),
        ({"redis": {"sentinel_username": "u"}}, ["sentinel_username is given without sentinel_password"]),
        (
            {"index": "redis://h", "redis": {"tls_cert": "c", "tls_key": "k"}},
            ["redis.tls_cert is for an index over TLS"],
        ),
        (
            {"index": "rediss://h", "redis": {"sentinel_password": "p"}},
            ["redis.sentinel_password is for an index that is found by Sentinels"],
        ),
        (
            {"breaker": {"backoff_s": 20, "max_backoff_s": 5}},
            ["breaker.backoff_s = 20", "breaker.max_backoff_s = 5"],
        ),
        ({"grace_s": 10}, ["grace_s = 10", "kv.load_deadline_s = 30", "kv.match_ttl_s = 10"]),
        (
            {"grace_s": 35},
            ["grace_s = 35", "kv.load_deadline_s = 30", "kv.match_ttl_s = 10", "must not add up to more"],
        ),
    ],
)
def test_impossible_combinations(given: dict[str, Any], words: list[str]) -> None:
    (line,) = problems(**given)
    for word in words:
        assert word in line
    assert not line.startswith(":")


def test_the_limits_of_combinations_are_allowed() -> None:
    Settings(payloads="memory://x", index="memory://x")
    Settings.model_validate({"payloads": "file:///x", "grace_s": 40})
    Settings.model_validate({"payloads": "file:///x", "breaker": {"backoff_s": 5, "max_backoff_s": 5}})


# Sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        (" 50GiB ", 50 << 30),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("10KB", 10_000),
        ("1MB", 10**6),
        ("1gb", 10**9),
        ("7B", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    if expected:
        assert Settings.model_validate({"payloads": "file:///x", "capacity_bytes": text}).capacity_bytes == (
            expected
        )


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1 2", "1e9", "5 PiB", "0x10", "1,5GiB", "inf", "nan"])
def test_what_is_no_size(text: str) -> None:
    (line,) = problems(capacity_bytes=text)
    assert line.startswith(f"capacity_bytes = {text!r}: not a size; ")


@given(st.integers(0, 1 << 50), st.sampled_from(["", "B", "KiB", "MiB", "GiB"]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert parse_bytes(f"{number}{unit}") == number * factor


# Secrets

LEAKY_URLS = [
    f"redis://user:{SECRET}@host:6379/0",
    f"redis://:{SECRET}@host",
    f"rediss://{SECRET}@host",
    f"redis://user:a@{SECRET}@host/0",
    f"redis://user:{SECRET}%40x@host/0",
    f"redis://host/0?password={SECRET}",
    f"redis://host/0?password=x@{SECRET}",
    f"redis://host/0#{SECRET}",
    f"redis://host/0#x@{SECRET}",
    f"redis://user:{SECRET}/x@host/0",
    f"redis://user:x/{SECRET}@host/0",
    f"redis://user:{SECRET}?x@host/0",
    f"redis://user:x?{SECRET}@host/0",
    f"redis://user:{SECRET}#x@host/0",
    f"redis://user:x#{SECRET}@host/0",
    f"redis://user:{SECRET}\u2100@host/0",  # urlsplit refuses it, and quotes it
    f"redis://user:{SECRET}@[host/0",
    f"redis://user:{SECRET}@host:port/0",
    f"redis://user:{SECRET}@host/db",
    f"redis://user:{SECRET}",  # the @ and the host forgotten: it looks like a port
    f"redis+sentinel://user:{SECRET}@a:1,b:2/m/0",
    f"rediss+sentinel://:{SECRET}@a,b/m/0",
    f"redis+sentinel://a,user:{SECRET}@b/m/0",
    f"redis+sentinel://user:{SECRET},a:1,b",
    f"redis://user:12,{SECRET}",  # a comma in a password, the host forgotten
    f"redis://user:x,{SECRET}:y",
    f"redis:user:{SECRET}@host/0",
    f"redis:/user:{SECRET}@host/0",
    f"user:{SECRET}@host:6379",
    f"{SECRET}@host",
    f"file://user:{SECRET}@host/x",
    f"http://user:{SECRET}@host/",
    f"http://host/?token={SECRET}",
    f"sqlite:///x?key={SECRET}",
    f"sqlite://user:{SECRET}@host/x",
    f"unix://user:{SECRET}@/run/redis.sock",
    f"unix:///run/redis.sock?password={SECRET}",
    f"memory://user:{SECRET}@x",
]


def rendered(settings: Settings) -> list[str]:
    return [
        repr(settings),
        str(settings),
        f"{settings}",
        f"{settings!r:>10}",
        "%s" % settings,  # noqa: UP031
        settings.model_dump_json(),
        json.dumps(settings.model_dump(mode="json")),
        yaml.safe_dump(settings.model_dump(mode="json")),
        repr([settings]),
        repr({"settings": settings}),
    ]


@pytest.mark.parametrize("key", ["index", "payloads"])
@pytest.mark.parametrize("url", LEAKY_URLS)
def test_no_url_shows_a_password(url: str, key: str) -> None:
    assert SECRET not in redact(url)
    try:
        settings = Settings.model_validate({"payloads": "file:///x"} | {key: url})
    except ValidationError as exc:
        for text in (*explain(exc, Settings), str(exc), repr(exc)):
            assert SECRET not in text
    else:
        for text in rendered(settings):
            assert SECRET not in text
        # Those that use it get all of it.
        assert SECRET in getattr(settings, key)
        assert SECRET in settings.model_dump()[key]


@pytest.mark.parametrize(
    ("section", "key"), [("redis", "timeout_s"), ("segment", "codec"), ("kv", "save_decode")]
)
@pytest.mark.parametrize("url", LEAKY_URLS)
def test_no_url_in_the_wrong_place_shows_a_password(url: str, section: str, key: str) -> None:
    problems(**{section: {key: url}})
    problems(**{section: url})
    problems(capacity_bytes=url)


@pytest.mark.parametrize("value", [SECRET, SecretStr(SECRET)])
def test_the_password_field_is_never_shown(value: Any) -> None:
    settings = Settings.model_validate({"payloads": "file:///x", "redis": {"password": value}})
    for text in (*rendered(settings), repr(settings.redis), str(settings.redis)):
        assert SECRET not in text
    assert settings.redis.password is not None
    assert settings.redis.password.get_secret_value() == SECRET


@pytest.mark.parametrize("value", [[SECRET], {"value": SECRET}, SECRET.encode(), 222222])
def test_a_password_of_the_wrong_type_is_not_shown(value: Any) -> None:
    try:
        settings = Settings.model_validate({"payloads": "file:///x", "redis": {"password": value}})
    except ValidationError as exc:
        for text in (*explain(exc, Settings), str(exc), repr(exc)):
            assert SECRET not in text
            assert "222222" not in text
    else:
        assert SECRET not in repr(settings)


def test_a_password_beside_another_problem_is_not_shown() -> None:
    problems(redis={"password": SECRET, "timeout_s": -1, "tls": True})
    problems(redis={"password": SECRET}, index=f"redis://user:{SECRET}@host/0", grace_s=1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("redis://user:secret@host:6379/0", "redis://***@host:6379/0"),
        ("redis://host:6379/0?password=secret", "redis://host:6379/0?***"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://[::1]/0", "redis://[::1]/0"),
        ("redis://user:secret@[fe80::1]:6379", "redis://***@[fe80::1]:6379"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?***"),
        ("file:///var/lib/kvstore", "file:///var/lib/kvstore"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("https://key:secret@s3.local:9000/bucket", "https://***@s3.local:9000/bucket"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("50GiB", "50GiB"),
        ("", ""),
        (5, 5),
        (None, None),
        (True, True),
    ],
)
def test_redact_keeps_what_helps(value: Any, shown: Any) -> None:
    assert redact(value) == shown


unescaped = st.text(st.characters(codec="utf-8"), max_size=8)


@pytest.mark.slow
@given(unescaped, unescaped, unescaped, st.sampled_from(["redis", "rediss", "unix", "http", "file"]))
def test_redact_hides_whatever_stands_before_the_host(
    before: str, after: str, user: str, scheme: str
) -> None:
    assert SECRET not in redact(f"{scheme}://{user}:{before}{SECRET}{after}@host:6379/0")


@given(unescaped, unescaped)
def test_redact_hides_whatever_stands_in_a_query(before: str, after: str) -> None:
    assert SECRET not in redact(f"redis://host:6379/0?{before}{SECRET}{after}")


# S3 and tiers


def test_an_s3_url_says_where() -> None:
    url = "s3://bucket/some/prefix/?endpoint=http://127.0.0.1:9000&region=eu-west-1"
    location = s3_location(url)
    assert location == S3Location("bucket", "some/prefix", "http://127.0.0.1:9000", "eu-west-1")
    assert location.root == "some/prefix/"
    assert s3_location("s3://bucket") == S3Location("bucket", "", None, None)
    assert s3_location("s3://bucket/").root == ""
    # Nothing in it is secret, and whoever reads a log wants to know which server it was.
    assert redact(url) == url
    assert redact("s3://bucket/x?endpoint=http://h&token=abc") == "s3://bucket/x?***"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "without a valid bucket"),
        ("s3://b", "without a valid bucket"),
        (f"s3://key:{SECRET}@bucket/x", "takes no credentials"),
        ("s3://bucket/a//b", "prefix of an s3 URL"),
        ("s3://bucket/../b", "prefix of an s3 URL"),
        ("s3://bucket/a b", "prefix of an s3 URL"),
        ("s3://bucket/a#b", "prefix of an s3 URL"),
        (f"s3://bucket/a?secret={SECRET}", "takes endpoint= and region="),
        ("s3://bucket/a?region=a&region=b", "each once"),
        ("s3://bucket/a?region=", "region of an s3 URL"),
        ("s3://bucket/a?endpoint=host:9000", "endpoint of an s3 URL"),
        ("s3://bucket/a?endpoint=http://", "endpoint of an s3 URL"),
        ("s3://bucket/a?endpoint=http://h/path", "endpoint of an s3 URL"),
        (f"s3://bucket/a?endpoint=http://u:{SECRET}@h", "endpoint of an s3 URL"),
        ("s3://bucket/a?endpoint=http://h:99999", "endpoint of an s3 URL"),
    ],
)
def test_bad_s3_urls(url: str, words: str) -> None:
    (line,) = problems(payloads=url, index="redis://h")
    assert line.startswith("payloads = ")
    assert words in line


def test_two_tiers() -> None:
    given = {"fast": "file:///cache", "slow": "s3://bucket/x", "fast_capacity": "50GiB"}
    settings = Settings.model_validate({"payloads": given, "index": "redis://h"})
    assert settings.tiers is not None
    assert settings.origin == "s3://bucket/x"
    assert (settings.tiers.fast_capacity, settings.tiers.write) == (50 << 30, "through")
    assert Settings.model_validate(settings.model_dump()) == settings
    assert json.loads(settings.model_dump_json())["payloads"]["slow"] == "s3://bucket/x"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"slow": "s3://bucket"}, "payloads.fast: Field required"),
        ({"fast": "file:///x"}, "payloads.slow: Field required"),
        ({"fast": "s3://bucket", "slow": "s3://bucket"}, "payloads.fast = 's3://bucket': not a folder"),
        ({"fast": "file:///x", "slow": "file:///x/"}, "same folder"),
        ({"fast": "file:///x", "slow": "ftp://x"}, "payloads.slow = 'ftp://x': unsupported URL"),
        (
            {"fast": "file:///x", "slow": "s3://bucket", "capacity": 1},
            "unknown key 'payloads.capacity'; allowed here: fast, fast_capacity, prefetch_bytes, slow, write",
        ),
        ({"fast": "file:///x", "slow": "s3://bucket", "fast_capacity": "2MiB"}, "smaller than one segment"),
        ({"fast": "file:///x", "slow": "s3://bucket", "write": "around"}, "payloads.write = 'around'"),
    ],
)
def test_bad_tiers(given: dict[str, Any], words: str) -> None:
    (line,) = problems(payloads=given, index="redis://h")
    assert words in line


def test_a_tier_that_could_never_be_filled() -> None:
    tiers = {"fast": "file:///x", "slow": "s3://bucket"}
    (line,) = problems(payloads=tiers, index="redis://h", transfers={"errand_bytes": "1MiB"})
    assert "transfers.errand_bytes = 1048576 is smaller than one segment" in line


def test_tiers_need_an_index_of_their_own() -> None:
    (line,) = problems(payloads={"fast": "file:///x", "slow": "file:///nfs"})
    assert "index may only be left out with file:// payloads" in line


def test_s3_keys_come_in_pairs_and_stay_secret() -> None:
    (line,) = problems(payloads="s3://bucket", index="redis://h", s3={"access_key_id": SECRET})
    assert "both or neither" in line
    keys = {"access_key_id": SECRET, "secret_access_key": SECRET, "session_token": SECRET}
    settings = Settings.model_validate({"payloads": "s3://bucket", "index": "redis://h", "s3": keys})
    for text in (repr(settings), str(settings), settings.model_dump_json()):
        assert SECRET not in text
