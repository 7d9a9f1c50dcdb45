"""What can't work is refused before anything is installed, with a sentence that says what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.helm.chart import CHART, fails, render
from tests.helm.test_core import CLAIM, FOLDER, ONE_NODE, given

KEYS = {"bucket": "my-bucket", "existingSecret": "keys"}
IRSA = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/kv"}
ROLE = {"roleArn": "arn:aws:iam::1:role/kv"}


def folder(**more: Any) -> dict[str, Any]:
    host_path = {"path": "/mnt/nfs/kv", "sameOnAllNodes": True, **more}
    return {"payloads": {"type": "hostPath", "hostPath": host_path}}


def claim(**more: Any) -> dict[str, Any]:
    return {"payloads": {"type": "pvc", "pvc": more}}


def cache(**more: Any) -> dict[str, Any]:
    return given(payloads__nodeCache={"enabled": True, **more})


#: Values, and what the sentence begins with.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (given(enabled=False), "enabled is false, which says something only to a larger chart"),
    (given(fullnameOverride="1234"), "fullnameOverride is called 1234, and Services with it"),
    # Who may ask the janitors.
    (
        given(janitor__tls__clientCASecret="clients"),
        "janitor.tls.clientCASecret is set, and janitor.tls.existingSecret is not",
    ),
    (
        given(
            janitor__tls={"existingSecret": "own", "clientCASecret": "clients"},
            monitoring__podMonitor__enabled=True,
        ),
        "monitoring.podMonitor is enabled, janitor.tls.clientCASecret is set, and there is no",
    ),
    (
        given(monitoring__serviceMonitor__tlsConfig={"insecureSkipVerify": True}),
        "monitoring.serviceMonitor.tlsConfig is set, and janitor.tls.existingSecret is not",
    ),
    # Keys.
    (given(signing={"existingSecret": "keys"}), "signing.existingSecret (a Secret of keys) and signing.key"),
    (given(signing={"key": "a"}), "signing.existingSecret (a Secret of keys) and signing.key"),
    (given(signing={"encrypt": True}), "signing.encrypt needs keys"),
    (given(settings={"signing": {"key": "a"}}), "settings.signing is set by values of its own: use signing"),
    # The bucket.
    ({}, "payloads.s3.bucket is empty: name the bucket"),
    (
        {"payloads": {"type": "pvc", "s3": {"bucket": "b12"}}},
        "payloads.s3.bucket is b12, and payloads.type is pvc",
    ),
    (given(payloads__s3__bucket="s3://b/c"), "payloads.s3.bucket is s3://b/c: it is the bucket's name alone"),
    (given(payloads__s3__prefix="a b"), "payloads.s3.prefix is a b: it is made of letters"),
    (given(payloads__s3__prefix="a//b"), "payloads.s3.prefix is a//b"),
    (given(payloads__s3__prefix="../b"), "payloads.s3.prefix is ../b"),
    (given(payloads__s3__endpoint="rgw:9000"), "payloads.s3.endpoint has to be http://HOST:PORT"),
    (given(payloads__s3__endpoint="https://u:p@rgw"), "payloads.s3.endpoint has to be http://HOST:PORT"),
    (given(payloads__s3__endpoint="https://rgw/bucket"), "payloads.s3.endpoint has to be http://HOST:PORT"),
    (
        given(payloads__s3__webIdentity={**ROLE, "stsEndpoint": "sts"}),
        "payloads.s3.webIdentity.stsEndpoint has to be",
    ),
    (
        given(payloads__s3__webIdentity__stsEndpoint="https://s"),
        "payloads.s3.webIdentity.stsEndpoint is set without",
    ),
    (
        given(payloads__s3__ca={"secret": "a", "configMap": "b"}),
        "payloads.s3.ca.secret and payloads.s3.ca.configMap",
    ),
    (
        given(payloads__s3={"bucket": "my-bucket", "endpoint": "http://rgw", "ca": {"secret": "a"}}),
        "payloads.s3.ca names certificates to trust, and payloads.s3.endpoint is http://",
    ),
    # Credentials.
    (
        given(payloads__s3__accessKeyId="a"),
        "payloads.s3.accessKeyId and payloads.s3.secretAccessKey go together",
    ),
    (
        given(payloads__s3={**KEYS, "accessKeyId": "a", "secretAccessKey": "b"}),
        "payloads.s3.existingSecret and payloads.s3.accessKeyId are both set",
    ),
    (given(payloads__s3__sessionTokenKey="t"), "payloads.s3.sessionTokenKey names a key of"),
    (
        given(payloads__s3={**KEYS, "webIdentity": ROLE}),
        "payloads.s3.webIdentity.roleArn and an access key are both",
    ),
    (
        given(payloads__s3=KEYS, serviceAccount__annotations=IRSA),
        "serviceAccount.annotations has eks.amazonaws.com/role-arn, and payloads.s3 an access key",
    ),
    (
        given(payloads__s3__webIdentity=ROLE, serviceAccount__annotations=IRSA),
        "serviceAccount.annotations has eks.amazonaws.com/role-arn, and payloads.s3.webIdentity.roleArn is",
    ),
    (
        given(serviceAccount__annotations={"azure.workload.identity/client-id": "x"}),
        "serviceAccount.annotations has azure.workload.identity/client-id, which does nothing",
    ),
    (
        given(serviceAccount={"create": False, "annotations": {"a": "b"}}),
        "serviceAccount.annotations are set, and serviceAccount.create is false",
    ),
    # The claim.
    (given(capacity="much"), "capacity is much: it is a size of at least 1 MiB"),
    (given(capacity=100), "capacity is 100: it is a size of at least 1 MiB"),
    (given(payloads__pvc__existingClaim="c"), "payloads.pvc.existingClaim is c, and payloads.type is s3"),
    (
        claim(existingClaim="c", storageClass="d"),
        "payloads.pvc.storageClass is for a claim that the chart makes",
    ),
    (claim(size="100GiB"), "payloads.pvc.size is 100GiB: it is a quantity"),
    (claim(size="90Gi"), "capacity (100GiB) is larger than payloads.pvc.size (90Gi)"),
    # A folder of the nodes'.
    (given(payloads__hostPath__path="/mnt/kv"), "payloads.hostPath.path is /mnt/kv, and payloads.type is s3"),
    (folder(path=""), "payloads.hostPath.path is empty: name the folder"),
    (
        folder(path="/var/lib/kubelet/kv"),
        "payloads.hostPath.path is /var/lib/kubelet/kv, which is the node's own",
    ),
    (folder(path="/mnt/../etc"), "payloads.hostPath.path is /mnt/../etc, which is the node's own"),
    (folder(sameOnAllNodes=False), "payloads.type is hostPath: if the folder is one storage on every node"),
    # The nodes' cache.
    (cache(capacity="fast"), "payloads.nodeCache.capacity is fast: it is a size"),
    (cache(capacity="16MiB"), "payloads.nodeCache.capacity (16MiB) is smaller than one segment"),
    (
        {**cache(capacity="100MiB"), "settings": {"segment": {"target_bytes": "128MiB"}}},
        "payloads.nodeCache.capacity (100MiB) is smaller than one segment",
    ),
    (
        {**cache(), "settings": {"transfers": {"errand_bytes": "16MiB"}}},
        "settings.transfers.errand_bytes (16777216) is smaller than one segment",
    ),
    (cache(path="/var"), "payloads.nodeCache.path is /var, which is the node's own"),
    (
        {"payloads": folder()["payloads"] | {"nodeCache": {"enabled": True, "path": "/mnt/nfs/kv/fast"}}},
        "payloads.nodeCache.path (/mnt/nfs/kv/fast) and payloads.hostPath.path (/mnt/nfs/kv) are the same",
    ),
    # The settings.
    *(
        (given(settings={key: 1}), f"settings.{key} is set by values of its own")
        for key in ("payloads", "index", "capacity_bytes")
    ),
    *(
        (given(settings={group: {key: "x"}}), f"settings.{group}.{key} would stand in a ConfigMap")
        for group, key in [
            ("redis", "username"),
            ("redis", "password"),
            ("redis", "sentinel_username"),
            ("redis", "sentinel_password"),
            ("s3", "access_key_id"),
            ("s3", "secret_access_key"),
            ("s3", "session_token"),
        ]
    ),
    *(
        (
            given(settings={group: {key: "/x"}}),
            f"settings.{group}.{key} names a file that has to be in the pods",
        )
        for group, key in [("redis", "tls_ca"), ("redis", "tls_cert"), ("redis", "tls_key"), ("s3", "tls_ca")]
    ),
    (
        given(settings={"grace_s": 39}),
        "settings.kv.match_ttl_s (10) and settings.kv.load_deadline_s (30) add up",
    ),
    (given(settings={"breaker": {"backoff_s": 11}}), "settings.breaker.backoff_s (11) is larger than"),
    # The janitors.
    (
        given(janitor__replicas=0, monitoring__prometheusRule={"enabled": True, "serverMatcher": 'job="x"'}),
        "monitoring.prometheusRule.enabled is true, and janitor.replicas is 0",
    ),
    *(
        (
            given(**{f"{name}__resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}}),
            f"{name}.resources.requests.memory (2Gi) is more than its limit (1Gi)",
        )
        for name in ("janitor", "fsck", "gc")
    ),
    # Their pods.
    (
        given(podLabels={"app.kubernetes.io/name": "x"}),
        "podLabels has app.kubernetes.io/name, which the chart sets",
    ),
    (given(commonLabels={"kvstore/client": "x"}), "commonLabels has kvstore/client, which the chart sets"),
    (
        given(commonAnnotations={"helm.sh/hook": "x"}),
        "commonAnnotations has helm.sh/hook: everything would be a hook",
    ),
    (given(podSecurityContext__runAsUser=0), "podSecurityContext.runAsUser is 0, and runAsNonRoot is true"),
    (given(extraEnv=[{"name": "KVSTORE_INDEX", "value": "x"}]), "extraEnv has KVSTORE_INDEX, which outranks"),
    (
        given(extraEnv=[{"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}]),
        "extraEnv has AWS_SECRET_ACCESS_KEY with its",
    ),
    (
        given(extraVolumes=[{"name": "tmp", "emptyDir": {}}]),
        "extraVolumes has tmp, which the chart has as well",
    ),
    (
        given(extraVolumeMounts=[{"name": "a", "mountPath": "/a"}]),
        "extraVolumeMounts names the volume a, which is",
    ),
    (
        given(
            extraVolumes=[{"name": "a", "emptyDir": {}}],
            extraVolumeMounts=[{"name": "a", "mountPath": "/tmp/"}],
        ),
        "extraVolumeMounts mounts a at /tmp/, which the chart needs itself",
    ),
    # The cron jobs.
    *(
        (given(**{verb: {"schedule": "soon"}}), f"{verb}.schedule is soon: it has five fields")
        for verb in ("fsck", "gc")
    ),
    (given(gc__schedule="TZ=Europe/Berlin 1 2 * * *"), "gc.schedule is TZ=Europe/Berlin"),
    (given(gc__schedule="CRON_TZ=UTC @daily 1 2 *"), "gc.schedule names a time zone: that is gc.timeZone"),
    (given(fsck={"quick": True, "readDataPercent": 5}), "fsck.quick is true, and fsck.readDataPercent is 5"),
    (
        given(fsck={"repair": True, "schedule": "1 2 * * *"}, gc__schedule="1 2 * * *"),
        "fsck.repair and gc.delete run at the same time (1 2 * * *)",
    ),
    (given(gc__olderThan="a day"), "gc.olderThan is a day: it is an age"),
    (given(gc__olderThan="9m"), "gc.olderThan is 9m: what is younger than 10 minutes"),
]


def sentences(text: str) -> list[str]:
    """The lines of helm's message that are ours."""
    return [line.removeprefix("  - ") for line in text.splitlines() if line.startswith("  - ")]


@pytest.mark.parametrize(("values", "begins"), REFUSED, ids=[begins.split(":")[0] for _, begins in REFUSED])
def test_refused(values: dict[str, Any], begins: str) -> None:
    found = sentences(fails(values))
    # One mistake, one sentence.
    assert len(found) == 1 and found[0].startswith(begins), found
    assert re.search(r"[:;,] .+[.)]$", found[0]), "what to do"


def test_every_sentence_has_a_case() -> None:
    seen = [sentence for values, _ in REFUSED for sentence in sentences(fails(values))]
    lines = [
        line
        for name in ("_validate_core.tpl", "_validate_pods.tpl")
        for line in (CHART / "templates" / name).read_text().splitlines()
        if line.endswith(".")
    ]
    assert len(lines) > 50
    for line in lines:
        # What is computed stands for anything.
        pattern = ".*".join(re.escape(part) for part in re.split(r"\{\{.*?\}\}", line))
        assert any(re.fullmatch(pattern, sentence) for sentence in seen), line


def test_all_mistakes_are_named_at_once() -> None:
    values = given(capacity="x", gc__olderThan="x", settings={"index": "x"})
    assert len(sentences(fails(values))) == 3


@pytest.mark.parametrize(
    "values",
    [
        given(payloads__s3__prefix=""),
        given(payloads__s3={"bucket": "my-bucket", "endpoint": "http://[::1]:9000"}),
        given(payloads__s3={"bucket": "my-bucket", "endpoint": "https://rgw", "ca": {"configMap": "a"}}),
        given(fsck__repair=True, fsck__schedule="1 2 * * *", gc={"schedule": "1 2 * * *", "delete": False}),
        given(settings={"grace_s": 40}),
        given(gc__olderThan="10m", gc__schedule="@weekly"),
        given(gc__olderThan="1w"),
        given(extraEnv=[{"name": "A_TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]),
        given(extraEnv=[{"name": "KVSTORE_JANITOR__SCRUB_PERCENT", "value": "5"}]),
        given(podSecurityContext={"runAsNonRoot": False, "runAsUser": 0}),
        claim(existingClaim="c", accessModes=["ReadWriteMany", "ReadWriteOnce"]),
        CLAIM,
        FOLDER,
        ONE_NODE,
    ],
    ids=range(14),
)
def test_not_refused(values: dict[str, Any]) -> None:
    assert render(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"paylods": {}}, "Additional property paylods is not allowed"),
        ({"janitor": {"replica": 1}}, "janitor: Additional property replica is not allowed"),
        (given(settings={"kv": {"save": True}}), "settings.kv: Additional property save is not allowed"),
        (
            given(settings={"eviction": {"high": 0.95}}),
            "settings.eviction: Additional property high is not allowed",
        ),
        (given(settings={"grace_s": "soon"}), "settings.grace_s: Invalid type"),
        (given(janitor__replicas="two"), "janitor.replicas: Invalid type. Expected: integer"),
        (given(janitor__replicas=2), "janitor.replicas: Must be less than or equal to 1"),
        (given(payloads__type="nfs"), "payloads.type: payloads.type must be one of"),
        (given(image__digest="md5:1"), "image.digest: Does not match pattern"),
        (given(janitor=None), "janitor is required"),
        (given(extraEnv=[{"name": "N", "value": 1}]), "extraEnv.0.value: Invalid type. Expected: string"),
    ],
)
def test_refused_by_the_schema(values: dict[str, Any], words: str) -> None:
    assert words in fails(values)
