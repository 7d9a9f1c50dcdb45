"""Packs without an engine: what is in one, who signed it, whom it is for, and how it gets into a store."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.admin.archive.manifest import check_signed, document_of
from kvstore.admin.backends import Cache, Refused
from kvstore.admin.pack.build import write
from kvstore.admin.pack.engine import Computed
from kvstore.admin.pack.pack import Intended, check_fits
from kvstore.admin.progress import Silent
from kvstore.build import load_settings, open_store
from kvstore.cli.exits import ExitCode, of_report
from kvstore.format.keyring import Keyring
from kvstore.keys import canonical_json, digest, namespace_id, new_segment_id
from schemas.archive import Manifest
from schemas.namespace import Namespace
from schemas.pack import PackedPrompt
from tests.admin.conftest import Admin, Filled, ec_space, fill, kv_slots, kv_space
from tests.format import second
from tests.servers.s3.servers import S3Bucket

BLOCKS = 12
KEY = "31" * 32


def packed(name: str, blocks: int, tokens: int | None = None) -> PackedPrompt:
    """A prompt that begins like the chain of a filled cache."""
    digits = b"".join(slot.key[:16] for slot in kv_slots(blocks)).hex()
    return PackedPrompt(name=name, tokens=tokens or blocks * 16 + 3, blocks=digits)


COMPUTED = Computed("0.32.0", (packed("agent", 4), packed("agent/tools", BLOCKS)))


class Packed:
    """A store whose chain is a pack, and an empty one beside it."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.source = fill(root / "source")
        self.settings = self.source.settings | settings
        self.pack = root / "base.tar"
        self.file = root / "target.yaml"
        self.target = root / "target"

    def made(self, computed: Computed = COMPUTED, **more: Any) -> Path:
        with Cache(load_settings(self.settings, {})) as cache:
            write(cache, computed, self.pack, progress=Silent(), **more)
        return self.pack

    def options(self, **settings: Any) -> list[str]:
        """How verbs are told of the empty store, with other settings besides."""
        self.file.write_text(yaml.safe_dump({"payloads": f"file://{self.target}"} | settings))
        return ["--settings", str(self.file)]

    def manifest(self) -> dict[str, Any]:
        with tarfile.open(self.pack) as tar:
            return json.load(tar.extractfile(tar.getmembers()[0]))  # type: ignore[arg-type]

    def change(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Writes the pack again, with another manifest."""
        manifest, payloads = second.read_archive(self.pack.read_bytes())
        change(manifest)
        self.pack.write_bytes(second.write_archive(manifest["namespaces"], payloads, 0, manifest))


@pytest.fixture
def of(tmp_path: Path) -> Packed:
    return Packed(tmp_path)


def signing(root: Path, **more: Any) -> dict[str, Any]:
    (keys := root / "keys").mkdir(exist_ok=True)
    for name, text in {"ours": KEY, "theirs": "42" * 32}.items():
        (keys / name).write_text(text)
        (keys / name).chmod(0o600)
    return {"signing": {"keys": str(keys), "key": "ours"} | more}


def test_a_pack_is_an_archive_with_its_prompts_in_the_manifest(of: Packed, admin: Admin) -> None:
    pack = of.made()
    manifest, payloads = second.read_archive(pack.read_bytes())
    assert manifest["pack"] == {
        "format": 1,
        "engine": "0.32.0",
        "prompts": [one.model_dump() for one in COMPUTED.prompts],
        "key": "",
        "mac": "",
    }
    # Encoder items and other prompts of the store are not in it.
    assert (manifest["segments"], len(payloads)) == (3, 3)
    assert list(manifest["namespaces"]) == [of.source.kv_id]
    shown = admin("pack", "inspect", str(pack), "--json").json
    assert (shown["model"], shown["weights"]) == (of.source.kv.model, of.source.kv.weights)
    assert (shown["engine"], shown["key"], shown["namespace"]) == ("0.32.0", "", of.source.kv_id)
    assert [(one["name"], one["tokens"], one["blocks"]) for one in shown["prompts"]] == [
        ("agent", 67, 4), ("agent/tools", 195, 12),
    ]  # fmt: skip
    text = admin("pack", "inspect", str(pack)).out
    assert of.source.kv.weights in text and "agent/tools" in text


def test_an_export_is_as_it_was(of: Packed, admin: Admin) -> None:
    export = of.root / "export.tar"
    assert admin("export", "--to", str(export), *of.source.options).code == 0
    manifest, _ = second.read_archive(export.read_bytes())
    assert set(manifest) == {
        "format", "version", "created_s", "namespaces", "segments", "payloads", "payload_bytes",
    }  # fmt: skip
    for verb in ("inspect", "verify"):
        ran = admin("pack", verb, str(export))
        assert ran.code == 3 and "this is an export, not a pack" in ran.err


def test_golden_manifest() -> None:
    text = (Path(__file__).parent / "manifest.json").read_text(encoding="utf-8")
    manifest = Manifest.model_validate_json(text)
    assert manifest.pack is not None and manifest.pack.prompts[0].hashes == [bytes(range(16)), bytes(16)]
    assert document_of(manifest) == text.encode().rstrip()
    check_signed(manifest, Keyring({"golden": bytes(range(32))}))
    for other in (
        text.replace('"format": 1,\n  "engine"', '"format": 2,\n  "engine"'),
        text.replace("00", "0g"),
    ):
        assert other != text
        with pytest.raises(ValueError):
            Manifest.model_validate_json(other)


def test_applied_twice_it_is_there_once(either: Filled, of: Packed, admin: Admin) -> None:
    of.made()
    where = either.options
    admin("drop", either.kv_id, "--now", "--apply", *where)
    first = admin("pack", "apply", str(of.pack), "--json", *where).json
    assert first["archive"]["imported"] == first["archive"]["verified"]
    assert [one["loadable"] for one in first["pack"]["prompts"]] == [64, 192]
    before = either.payload_files()
    again = admin("pack", "apply", str(of.pack), "--json", *where)
    assert again.code == 0
    assert again.json["archive"]["present"] == first["archive"]["imported"]
    assert again.json["archive"]["imported"]["segments"] == 0
    assert [one["loadable"] for one in again.json["pack"]["prompts"]] == [64, 192]
    assert either.payload_files() == before
    assert "3 segments" in admin("pack", "apply", str(of.pack), *where).out


def test_import_takes_a_pack(of: Packed, admin: Admin) -> None:
    done = admin("import", str(of.made()), "--new-namespaces", "--json", *of.options()).json
    assert (done["ended"], done["imported"]["segments"]) == ("complete", 3)


def test_what_was_evicted_meanwhile_comes_back(of: Packed, admin: Admin) -> None:
    of.made()
    where = of.options(grace_s=42.0)
    assert admin("pack", "apply", str(of.pack), *where).code == 0
    assert admin("drop", of.source.kv_id, "--now", "--apply", *where).code == 0
    assert admin("pack", "apply", str(of.pack), *where).code == 0


def with_other(of: Packed, **changes: Any) -> Namespace:
    """Registers a namespace with the empty store, as an engine does that saves."""
    other = kv_space(**changes)
    settings = {"payloads": f"file://{of.target}"}
    Filled(of.target, [], settings, kv=other).save(other, kv_slots(1, seed=9))
    return other


def test_other_weights_are_refused(of: Packed, admin: Admin) -> None:
    of.made()
    with_other(of, weights="ffff")
    where = of.options()
    refused = admin("pack", "apply", str(of.pack), *where)
    assert refused.code == 1
    ours = of.source.kv.weights
    assert "engines here have model tiny-random with weights ffff" in refused.err
    assert f"the pack is of weights {ours}" in refused.err and f"--weights {ours}" in refused.err
    assert admin("operations", "--json", *where).json["operations"] == []
    assert admin("namespaces", "--json", *where).json["namespaces"][0]["usage"]["segments"] == 1
    # Said, or known beside them, they are right.
    assert admin("pack", "apply", str(of.pack), "--weights", ours[:6], *where).code == 0
    assert admin("pack", "apply", str(of.pack), *where).code == 0


@pytest.mark.parametrize("changes", [{"model": "other"}, {"tenant": "other"}])
def test_other_models_and_tenants_have_weights_of_their_own(
    of: Packed, admin: Admin, changes: dict[str, str]
) -> None:
    of.made()
    with_other(of, weights="ffff", **changes)
    done = admin("pack", "apply", str(of.pack), "--json", *of.options())
    # They load nothing of it, which is said.
    assert done.code == 0
    assert [one["path"] for one in done.json["differences"]] == [*changes, "weights"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "other"}, ["--model", "tiny-random"]),
        ({"model": "other"}, ["--namespace"]),
        ({"tenant": "other"}, ["--namespace"]),
    ],
)
def test_weights_of_another_model_or_tenant_are_refused(
    of: Packed, admin: Admin, changes: dict[str, str], words: list[str]
) -> None:
    of.made()
    with_other(of, **changes)
    ours = of.source.kv_id
    for more in [], ["--weights", of.source.kv.weights], ["--model", "tiny-random"] * ("tenant" in changes):
        ran = admin("pack", "apply", str(of.pack), *more, *of.options())
        assert ran.code == 1 and "they would load nothing of it" in ran.err
        assert "other" in ran.err and f"--namespace {ours}" in ran.err
    words = [*words, ours] if words == ["--namespace"] else words
    done = admin("pack", "apply", str(of.pack), *words, "--json", *of.options())
    assert done.code == 0 and [one["path"] for one in done.json["differences"]] == list(changes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--weights", "1234"],
            "of weights 0011223344556677, not 1234: engines with those would load nothing",
        ),
        (["--model", "llama"], "the pack is of model tiny-random, not llama"),
        (["--namespace", "ffff"], "not ffff"),
    ],
)
def test_what_is_not_expected_is_refused(of: Packed, admin: Admin, words: list[str], said: str) -> None:
    refused = admin("pack", "apply", str(of.made()), *words, *of.options())
    assert refused.code == 1 and said in refused.err
    assert not of.target.exists()


def test_a_namespace_that_is_known_says_what_differs(of: Packed, admin: Admin) -> None:
    of.made()
    other = with_other(of, page_format="vllm0.31.0/cpu/CPU_ATTN/amx", kv_dtype="fp8")
    refused = admin("pack", "apply", str(of.pack), "--namespace", namespace_id(other), *of.options())
    assert refused.code == 1 and f"namespace {of.source.kv_id}, not {namespace_id(other)}" in refused.err
    assert "kv_dtype is auto, not fp8" in refused.err and "page_format is" in refused.err
    done = admin("pack", "apply", str(of.pack), "--json", *of.options())
    assert done.code == 0
    assert [one["path"] for one in done.json["differences"]] == ["kv_dtype", "page_format"]
    mine = ["--namespace", of.source.kv_id[:5].upper(), "--model", "tiny-random"]
    assert admin("pack", "apply", str(of.pack), *mine, *of.options()).code == 0


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ("vllm0.31.0/cuda/FLASH_ATTN", "vllm0.32.0/cuda/FLASH_ATTN", []),
        ("vllm0.31.0/cpu/CPU_ATTN/amx", "vllm0.32.0/cpu/CPU_ATTN/vec", ["page_format"]),
        ("vllm0.31.0/cuda/FLASH_ATTN", "vllm0.31.0/cuda/FLASHINFER", ["page_format"]),
        ("cuda/FLASH_ATTN", "rocm/ROCM_AITER_FA/16HN", ["page_format"]),
    ],
)
def test_what_an_upgrade_changes_is_not_named(theirs: str, ours: str, said: list[str]) -> None:
    pack, known = kv_space(page_format=ours), kv_space(page_format=theirs)
    texts = {namespace_id(known): known.model_dump_json()}
    found = check_fits(namespace_id(pack), pack.model_dump(mode="json"), texts, Intended())
    assert [one.path for one in found] == said


def test_a_damaged_pack_is_not_whole(of: Packed, admin: Admin) -> None:
    pack = of.made()
    assert admin("pack", "verify", str(pack), "--json").json["good"] is True
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    ran = admin("pack", "verify", str(pack), "--json")
    assert (ran.code, ran.json["good"], ran.json["archive"]["left_out"]) == (3, False, 1)
    applied = admin("pack", "apply", str(pack), "--json", *of.options())
    # Another time it is no better.
    assert (applied.code, applied.json["archive"]["imported"]["segments"]) == (3, 2)
    assert applied.json["whole"] is False
    of.pack.write_bytes(data[:700])
    for words in (["verify", str(pack)], ["inspect", str(pack)], ["apply", str(pack), *of.options()]):
        assert admin("pack", *words).code == 3


@pytest.mark.parametrize("said", [3, 2])
def test_segments_that_are_missing_are_missed(of: Packed, admin: Admin, said: int) -> None:
    of.made()
    manifest, payloads = second.read_archive(of.pack.read_bytes())
    payloads.popitem()
    # A manifest that counts what there is may still name blocks that there aren't.
    manifest |= {"segments": said, "payloads": said, "payload_bytes": sum(map(len, payloads.values()))}
    of.pack.write_bytes(second.write_archive(manifest["namespaces"], payloads, 0, manifest))
    ran = admin("pack", "verify", str(of.pack), "--json")
    assert (ran.code, ran.json["good"]) == (3, False)
    assert ran.json["archive"]["verified"]["segments"] == 2
    ran = admin("pack", "apply", str(of.pack), "--json", *of.options())
    assert (ran.code, ran.json["whole"]) == (3, False)
    assert [one["loadable"] for one in ran.json["pack"]["prompts"]] == [64, 128]
    assert "not all of it is here" in admin("pack", "apply", str(of.pack), *of.options()).out


def test_segments_of_another_namespace_are_none_of_the_pack(of: Packed, admin: Admin) -> None:
    of.made()
    export = of.root / "export.tar"
    assert admin("export", "--to", str(export), *of.source.options).code == 0
    manifest, payloads = second.read_archive(of.pack.read_bytes())
    _, others = second.read_archive(export.read_bytes())
    of.pack.write_bytes(second.write_archive(manifest["namespaces"], others | payloads, 0, manifest))
    ran = admin("pack", "verify", str(of.pack), "--json")
    assert (ran.code, ran.json["good"], ran.json["archive"]["unwanted"]) == (3, False, 2)
    ran = admin("pack", "apply", str(of.pack), "--json", *of.options())
    assert (ran.code, ran.json["whole"], ran.json["archive"]["unwanted"]) == (3, False, 2)


def test_of_a_pack_that_is_not_let_in_at_all_the_report_says_why(of: Packed, admin: Admin) -> None:
    of.made()
    ran = admin("pack", "apply", str(of.pack), "--json", *of.options(capacity_bytes="4KiB"))
    assert (ran.code, ran.json["whole"], ran.json["archive"]["left_out"]) == (3, False, 3)
    assert "no room" in ran.json["archive"]["left"][0]["reason"]
    assert [one["loadable"] for one in ran.json["pack"]["prompts"]] == [0, 0]


def test_a_pack_of_encoder_items_is_none(of: Packed, admin: Admin) -> None:
    of.made()
    other = ec_space()
    of.change(lambda one: one.update(namespaces={namespace_id(other): canonical_json(other)}))
    ran = admin("pack", "apply", str(of.pack), *of.options())
    assert ran.code == 3 and "encoder items, not prompts" in ran.err


def test_what_is_being_saved_just_now_is_brought_by_another_try(of: Packed, admin: Admin) -> None:
    of.made()
    where = of.options()
    claimed = with_other(of)
    with closing(open_store({"payloads": f"file://{of.target}"})) as store:
        space = store.open(claimed, block_bytes=4096)
        digests = b"".join(digest(slot.key) for slot in kv_slots(4))
        assert store.index.claim(space.id, digests, new_segment_id(), 60.0).granted
    ran = admin("pack", "apply", str(of.pack), "--json", *where)
    assert (ran.code, ran.json["archive"]["later"], ran.json["whole"]) == (4, 1, False)


def test_a_signed_pack_is_believed_by_whom_has_the_key(tmp_path: Path, admin: Admin) -> None:
    keys = signing(tmp_path)
    of = Packed(tmp_path / "of", **keys)
    # What the store held before is not signed, and signed again by none.
    of.settings["signing"] = keys["signing"] | {"unsigned": "accept"}
    of.made()
    manifest = of.manifest()
    assert manifest["pack"]["key"] == "ours"
    assert manifest["pack"]["mac"] == second.manifest_mac(manifest, bytes.fromhex(KEY))
    accepts = of.options(signing=of.settings["signing"])
    assert admin("pack", "verify", str(of.pack), *accepts).code == 0
    assert admin("pack", "apply", str(of.pack), *accepts).code == 0
    # Whoever has no keys takes it for what its checksums are.
    assert admin("pack", "verify", str(of.pack), "--json").json["pack"]["key"] == "ours"

    of.change(lambda one: one["pack"]["prompts"][0].update(name="another"))
    for words in (["verify", str(of.pack)], ["apply", str(of.pack)]):
        ran = admin("pack", *words, *accepts)
        assert ran.code == 3 and "the pack's signature is not one of key ours" in ran.err
    of.change(lambda one: one["pack"].update(key="nobodys"))
    ran = admin("pack", "verify", str(of.pack), *accepts)
    assert ran.code == 1 and "key nobodys" in ran.err


def test_a_pack_without_a_signature_is_refused_where_that_is_asked_for(of: Packed, admin: Admin) -> None:
    of.made()
    for verb in ("verify", "apply"):
        ran = admin("pack", verb, str(of.pack), *of.options(**signing(of.root)))
        assert ran.code == 3 and "the pack is not signed, and signing.unsigned is refuse" in ran.err
    assert not of.target.exists()


def test_what_is_not_stored_is_not_packed(of: Packed) -> None:
    lost = PackedPrompt(name="lost", tokens=16, blocks="ab" * 16)
    with pytest.raises(Refused, match="nothing of prompt 'lost' is stored"):
        of.made(Computed("0.32.0", (lost,)))
    long = PackedPrompt(name="long", tokens=16, blocks="ab" * 16 * 120_000)
    with pytest.raises(Refused, match="prompts of 120000 blocks; a pack has at most 98304: make several"):
        of.made(Computed("0.32.0", (long,)))
    assert not of.pack.exists()


def test_a_pack_with_a_hole_is_not_written(of: Packed) -> None:
    next(path for path in of.source.payload_files() if of.source.kv_id in path.parts).unlink()
    with Cache(load_settings(of.settings, {})) as cache:
        report = write(cache, COMPUTED, of.pack, progress=Silent())
    assert (report.pack, report.export.left_out, of_report(report)) == (None, 1, ExitCode.PROBLEMS)
    assert not of.pack.exists()


def test_a_pack_in_a_bucket(of: Packed, admin: Admin, moto_bucket: S3Bucket) -> None:
    from kvstore.admin.pack.place import check_free, upload

    # An archive may be padded: this one goes in parts, and is read in several steps.
    of.pack.write_bytes(of.made().read_bytes() + bytes(11 << 20))
    url = moto_bucket.url.replace("?", "/packs/base.tar?", 1)
    credentials = {
        "KVSTORE_S3__ACCESS_KEY_ID": moto_bucket.credentials.access_key,
        "KVSTORE_S3__SECRET_ACCESS_KEY": moto_bucket.credentials.secret_key,
    }
    settings = load_settings(
        {"payloads": "memory://pack", "index": "memory://pack"},
        credentials | {"KVSTORE_S3__MULTIPART_BYTES": "5MiB", "KVSTORE_S3__PART_BYTES": "5MiB"},
    )
    ran = admin("pack", "inspect", url, env=credentials)
    assert ran.code == 1 and "there is no s3://" in ran.err
    check_free(url, settings, overwrite=False)
    upload(of.pack, url, settings)
    with pytest.raises(Refused, match="exists; --force overwrites it"):
        check_free(url, settings, overwrite=False)
    check_free(url, settings, overwrite=True)
    for words in (["verify", url], ["inspect", url], ["apply", url, *of.options()]):
        ran = admin("pack", *words, "--json", env=credentials)
        assert ran.code == 0, ran.err
    assert ran.json["archive"]["imported"]["segments"] == 3


@pytest.mark.parametrize(
    "where", ["http://host/base.tar", "s3://bucket", "file://host/base.tar", "s3://u:p@b/x"]
)
def test_a_place_that_is_none_is_refused(of: Packed, admin: Admin, where: str) -> None:
    ran = admin("pack", "inspect", where)
    assert ran.code == 2 and "u:p" not in ran.err
