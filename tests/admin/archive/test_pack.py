"""Archives of prompts, without an engine: what is in one, who signed it, whom it is for, and how it gets into
a store."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.admin.archive.asked import plan_pack
from kvstore.admin.archive.export import export
from kvstore.admin.archive.manifest import Prompts, check_signed, document_of
from kvstore.admin.archive.place import writable
from kvstore.admin.archive.reports import ExportReport
from kvstore.admin.archive.wanted import Wanted, check_fits
from kvstore.admin.backends import Cache, Refused
from kvstore.build import load_settings, open_store
from kvstore.cli.exits import ExitCode, of_report
from kvstore.format.keyring import Keyring
from kvstore.keys import NamespaceId, canonical_json, digest, namespace_id, new_segment_id
from schemas.archive import Manifest
from schemas.namespace import Namespace
from schemas.pack import Pack, PackedPrompt
from tests.admin.conftest import Admin, Filled, ec_space, fill, kv_slots, kv_space
from tests.format import second
from tests.servers.s3.servers import S3Bucket

BLOCKS = 12
KEY = "31" * 32


def packed(name: str, blocks: int, tokens: int | None = None) -> PackedPrompt:
    """A prompt that begins like the chain of a filled cache."""
    digits = b"".join(slot.key[:16] for slot in kv_slots(blocks)).hex()
    return PackedPrompt(name=name, tokens=tokens or blocks * 16 + 3, blocks=digits)


PACK = Pack(engine="0.32.0", prompts=(packed("agent", 4), packed("agent/tools", BLOCKS)))


class Packed:
    """A store whose chain is a pack, and an empty one beside it."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.source = fill(root / "source")
        self.settings = self.source.settings | settings
        self.pack = root / "base.tar"
        self.file = root / "target.yaml"
        self.target = root / "target"

    def exported(self, pack: Pack = PACK) -> ExportReport:
        with Cache(load_settings(self.settings, {})) as cache:
            name = NamespaceId(self.source.kv_id)
            return export(cache, plan_pack(cache, name, pack), self.pack, pack=pack)

    def made(self) -> Path:
        assert self.exported().ended == "complete"
        return self.pack

    def options(self, **settings: Any) -> list[str]:
        """How verbs are told of the empty store, with other settings besides."""
        self.file.write_text(yaml.safe_dump({"payloads": f"file://{self.target}"} | settings))
        return ["--settings", str(self.file)]

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
        "prompts": [one.model_dump() for one in PACK.prompts],
        "key": "",
        "mac": "",
    }
    # Encoder items and other prompts of the store are not in it.
    assert (manifest["segments"], len(payloads)) == (3, 3)
    assert list(manifest["namespaces"]) == [of.source.kv_id]
    shown = admin("import", str(pack), "--dry-run", "--json").json["pack"]
    assert (shown["model"], shown["weights"]) == (of.source.kv.model, of.source.kv.weights)
    assert (shown["engine"], shown["key"], shown["namespace"]) == ("0.32.0", "", of.source.kv_id)
    assert [(one["name"], one["tokens"], one["blocks"], one["loadable"]) for one in shown["prompts"]] == [
        ("agent", 67, 4, 64), ("agent/tools", 195, 12, 192),
    ]  # fmt: skip
    text = admin("import", str(pack), "--dry-run").out
    assert of.source.kv.weights in text and "agent/tools" in text and "nothing: a dry run" in text


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


def test_imported_twice_it_is_there_once(either: Filled, of: Packed, admin: Admin) -> None:
    of.made()
    where = either.options
    admin("drop", either.kv_id, "--now", "--apply", *where)
    first = admin("import", str(of.pack), "--json", *where).json
    assert first["imported"] == first["verified"]
    assert [one["loadable"] for one in first["pack"]["prompts"]] == [64, 192]
    before = either.payload_files()
    again = admin("import", str(of.pack), "--json", *where)
    assert again.code == 0
    assert again.json["present"] == first["imported"]
    assert again.json["imported"]["segments"] == 0
    assert [one["loadable"] for one in again.json["pack"]["prompts"]] == [64, 192]
    assert either.payload_files() == before
    assert "3 segments" in admin("import", str(of.pack), *where).out


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
    ours = of.source.kv.weights
    refused = admin("import", str(of.pack), "--new-namespaces", *where)
    assert refused.code == 1 and f"say so: --weights {ours}" in refused.err
    assert admin("operations", "--json", *where).json["operations"] == []
    assert admin("namespaces", "--json", *where).json["namespaces"][0]["usage"]["segments"] == 1
    # Said, or known beside them, they are right.
    assert admin("import", str(of.pack), "--weights", ours[:6], *where).code == 0
    assert admin("import", str(of.pack), *where).code == 0


@pytest.mark.parametrize("words", [["--weights", "1234"], ["--tenant", "other"], ["ffff"]])
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_was_not_named_is_refused(of: Packed, admin: Admin, words: list[str], dry_run: bool) -> None:
    words = [*words, "--dry-run"] if dry_run else words
    refused = admin("import", str(of.made()), *words, *of.options())
    assert refused.code == 1
    assert f"namespace {of.source.kv_id}, model tiny-random of tenant default" in refused.err
    assert "of weights 0011223344556677" in refused.err
    assert not of.target.exists()


OURS = namespace_id(kv_space(page_format="vllm0.32.0/cuda/FLASH_ATTN"))
OTHER_WEIGHTS = "with weights ffff, and the pack is of weights 0011223344556677"
OTHER_OWNER = f"they would load nothing of it. If others will, name its namespace: {OURS}"
FP8 = {"kv_dtype": "fp8", "page_format": "vllm0.31.0/cpu/CPU_ATTN/amx"}
FP8_ID = namespace_id(kv_space(**FP8))


@pytest.mark.parametrize(
    ("known", "wanted", "found"),
    [
        ({"weights": "ffff"}, Wanted(), OTHER_WEIGHTS),
        ({"weights": "ffff"}, Wanted(new=True, tenants={"default"}), OTHER_WEIGHTS),
        ({"weights": "ffff"}, Wanted(weights="0011"), ["weights"]),
        # Other models and tenants have weights of their own. They load nothing of it, which is said.
        ({"weights": "ffff", "model": "other"}, Wanted(), ["model", "weights"]),
        ({"weights": "ffff", "tenant": "other"}, Wanted(), ["tenant", "weights"]),
        ({"model": "other"}, Wanted(), OTHER_OWNER),
        ({"tenant": "other"}, Wanted(weights="0011", new=True), OTHER_OWNER),
        ({"model": "other"}, Wanted((OURS[:5],)), ["model"]),
        ({"tenant": "other"}, Wanted((OURS,)), ["tenant"]),
        # What an upgrade changes is not named.
        ({}, Wanted(), []),
        ({"page_format": "vllm0.31.0/cuda/FLASH_ATTN"}, Wanted(), []),
        ({"page_format": "vllm0.32.0/cuda/FLASHINFER"}, Wanted(), ["page_format"]),
        ({"page_format": "rocm/ROCM_AITER_FA/16HN"}, Wanted(), ["page_format"]),
        (FP8, Wanted(), ["kv_dtype", "page_format"]),
        (FP8, Wanted((FP8_ID,)), "kv_dtype is auto, not fp8; page_format is vllm0.32.0/cuda/FLASH_ATTN, not"),
    ],
)
def test_whom_a_pack_is_for(known: dict[str, str], wanted: Wanted, found: str | list[str]) -> None:
    ours = {"page_format": "vllm0.32.0/cuda/FLASH_ATTN"}
    manifest = Manifest(
        version="0.1.0", created_s=0, namespaces={OURS: canonical_json(kv_space(**ours))}, segments=0,
        payloads=0, payload_bytes=0, pack=PACK,
    )  # fmt: skip
    prompts, other = Prompts.of(manifest), kv_space(**ours | known)
    assert prompts is not None
    texts = {namespace_id(other): canonical_json(other)}
    if isinstance(found, str):
        with pytest.raises(Refused, match=re.escape(found)):
            check_fits(prompts, wanted, texts)
    else:
        assert [one.path for one in check_fits(prompts, wanted, texts)] == found


def test_a_damaged_pack_is_not_whole(of: Packed, admin: Admin) -> None:
    pack = of.made()
    assert admin("import", str(pack), "--dry-run", "--json").json["pack"]["whole"] is True
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    ran = admin("import", str(pack), "--dry-run", "--json")
    assert (ran.code, ran.json["pack"]["whole"], ran.json["left_out"]) == (3, False, 1)
    done = admin("import", str(pack), "--json", *of.options())
    # Another time it is no better.
    assert (done.code, done.json["imported"]["segments"]) == (3, 2)
    assert done.json["pack"]["whole"] is False
    of.pack.write_bytes(data[:700])
    for words in ["--dry-run"], of.options():
        assert admin("import", str(pack), *words).code == 3


@pytest.mark.parametrize("said", [3, 2])
def test_segments_that_are_missing_are_missed(of: Packed, admin: Admin, said: int) -> None:
    of.made()
    manifest, payloads = second.read_archive(of.pack.read_bytes())
    payloads.popitem()
    # A manifest that counts what there is may still name blocks that there aren't.
    manifest |= {"segments": said, "payloads": said, "payload_bytes": sum(map(len, payloads.values()))}
    of.pack.write_bytes(second.write_archive(manifest["namespaces"], payloads, 0, manifest))
    for words in ["--dry-run"], of.options():
        ran = admin("import", str(of.pack), "--json", *words)
        assert (ran.code, ran.json["pack"]["whole"], ran.json["verified"]["segments"]) == (3, False, 2)
        assert [one["loadable"] for one in ran.json["pack"]["prompts"]] == [64, 128]
    assert "not all of it is here" in admin("import", str(of.pack), *of.options()).out


def test_segments_of_another_namespace_are_none_of_the_pack(of: Packed, admin: Admin) -> None:
    of.made()
    archive = of.root / "export.tar"
    assert admin("export", "--to", str(archive), *of.source.options).code == 0
    manifest, _ = second.read_archive(of.pack.read_bytes())
    _, payloads = second.read_archive(archive.read_bytes())
    of.pack.write_bytes(second.write_archive(manifest["namespaces"], payloads, 0, manifest))
    for words in ["--dry-run"], of.options(), ["--new-namespaces", *of.options()]:
        ran = admin("import", str(of.pack), "--json", *words)
        assert (ran.code, ran.json["pack"]["whole"], ran.json["unwanted"]) == (3, False, 2)


def test_of_a_pack_that_is_not_let_in_at_all_the_report_says_why(of: Packed, admin: Admin) -> None:
    of.made()
    ran = admin("import", str(of.pack), "--json", *of.options(capacity_bytes="4KiB"))
    assert (ran.code, ran.json["pack"]["whole"], ran.json["left_out"]) == (3, False, 3)
    assert "no room" in ran.json["left"][0]["reason"]
    assert [one["loadable"] for one in ran.json["pack"]["prompts"]] == [0, 0]


def test_a_pack_of_encoder_items_is_none(of: Packed, admin: Admin) -> None:
    of.made()
    other = ec_space()
    of.change(lambda one: one.update(namespaces={namespace_id(other): canonical_json(other)}))
    ran = admin("import", str(of.pack), *of.options())
    assert ran.code == 3 and "encoder items, not prompts" in ran.err


def test_what_is_being_saved_just_now_is_brought_by_another_try(of: Packed, admin: Admin) -> None:
    of.made()
    where = of.options()
    claimed = with_other(of)
    with closing(open_store({"payloads": f"file://{of.target}"})) as store:
        space = store.open(claimed, block_bytes=4096)
        digests = b"".join(digest(slot.key) for slot in kv_slots(4))
        assert store.index.claim(space.id, digests, new_segment_id(), 60.0).granted
    ran = admin("import", str(of.pack), "--json", *where)
    assert (ran.code, ran.json["later"], ran.json["pack"]["whole"]) == (4, 1, False)


def test_a_signed_pack_is_believed_by_whom_has_the_key(tmp_path: Path, admin: Admin) -> None:
    keys = signing(tmp_path)
    of = Packed(tmp_path / "of", **keys)
    # What the store held before is not signed, and signed again by none.
    of.settings["signing"] = keys["signing"] | {"unsigned": "accept"}
    of.made()
    manifest, _ = second.read_archive(of.pack.read_bytes())
    assert manifest["pack"]["key"] == "ours"
    assert manifest["pack"]["mac"] == second.manifest_mac(manifest, bytes.fromhex(KEY))
    accepts = of.options(signing=of.settings["signing"])
    for words in ["--dry-run"], []:
        assert admin("import", str(of.pack), *words, *accepts).code == 0
    # Whoever has no keys takes it for what its checksums are.
    assert admin("import", str(of.pack), "--dry-run", "--json").json["pack"]["key"] == "ours"

    of.change(lambda one: one["pack"]["prompts"][0].update(name="another"))
    for words in ["--dry-run"], []:
        ran = admin("import", str(of.pack), *words, *accepts)
        assert ran.code == 3 and "the pack's signature is not one of key ours" in ran.err
    of.change(lambda one: one["pack"].update(key="nobodys"))
    ran = admin("import", str(of.pack), "--dry-run", *accepts)
    assert ran.code == 1 and "key nobodys" in ran.err


def test_a_pack_without_a_signature_is_refused_where_that_is_asked_for(of: Packed, admin: Admin) -> None:
    of.made()
    for words in ["--dry-run"], []:
        ran = admin("import", str(of.pack), *words, *of.options(**signing(of.root)))
        assert ran.code == 3 and "the pack is not signed, and signing.unsigned is refuse" in ran.err
    assert not of.target.exists()


def test_what_is_not_stored_is_not_packed(of: Packed) -> None:
    lost = PackedPrompt(name="lost", tokens=16, blocks="ab" * 16)
    with pytest.raises(Refused, match="nothing of prompt 'lost' is stored"):
        of.exported(Pack(engine="0.32.0", prompts=(lost,)))
    long = PackedPrompt(name="long", tokens=16, blocks="ab" * 16 * 120_000)
    with pytest.raises(Refused, match="prompts of 120000 blocks; an archive has at most 98304: make several"):
        of.exported(Pack(engine="0.32.0", prompts=(long,)))
    assert not of.pack.exists()


def test_a_pack_with_a_hole_is_not_written(of: Packed) -> None:
    next(path for path in of.source.payload_files() if of.source.kv_id in path.parts).unlink()
    report = of.exported()
    assert (report.pack, report.left_out, of_report(report)) == (None, 1, ExitCode.PROBLEMS)
    assert "not all that the prompts need" in report.problem
    assert not of.pack.exists()


def test_an_archive_in_a_bucket(of: Packed, admin: Admin, moto_bucket: S3Bucket) -> None:
    url = moto_bucket.url.replace("?", "/packs/base.tar?", 1)
    credentials = {
        "KVSTORE_S3__ACCESS_KEY_ID": moto_bucket.credentials.access_key,
        "KVSTORE_S3__SECRET_ACCESS_KEY": moto_bucket.credentials.secret_key,
    }
    export_to = ["export", of.source.kv_id, "--to", url, *of.source.options]
    settings = load_settings(
        {"payloads": "memory://pack", "index": "memory://pack"},
        credentials | {"KVSTORE_S3__MULTIPART_BYTES": "5MiB", "KVSTORE_S3__PART_BYTES": "5MiB"},
    )
    with writable(url, settings, overwrite=False):
        pass
    ran = admin("import", url, "--dry-run", env=credentials)
    assert ran.code == 1 and "there is no s3://" in ran.err, "an export that failed leaves nothing"
    with writable(url, settings, overwrite=False) as path:
        # An archive may be padded: this one goes in parts, and is read in several steps.
        path.write_bytes(of.made().read_bytes() + bytes(11 << 20))
    assert admin("import", url, "--dry-run", "--json", env=credentials).json["pack"]["whole"]
    refused = admin(*export_to, env=credentials)
    assert refused.code == 1 and "exists; --force overwrites it" in refused.err
    assert admin(*export_to, "--force", env=credentials).code == 0
    done = admin("import", url, "--new-namespaces", "--json", *of.options(), env=credentials)
    assert (done.code, done.json["imported"]["segments"], done.json["pack"]) == (0, 3, None)


@pytest.mark.parametrize(
    "where", ["http://host/base.tar", "s3://bucket", "file://host/base.tar", "s3://u:p@b/x"]
)
@pytest.mark.parametrize("verb", [["import"], ["export", "--to"]])
def test_a_place_that_is_none_is_refused(of: Packed, admin: Admin, verb: list[str], where: str) -> None:
    ran = admin(*verb, where, *of.options())
    assert ran.code == 2 and "u:p" not in ran.err
