"""Names of blocks: golden values, taken from vLLM 0.32's own functions, and what is refused."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.rules.hashing import ALGORITHMS, DEFAULT_SEED, block_hashes, root_digest, seed_for
from tests.store.world import namespace

PROMPT = [1, 15043, 3186, 29892, 920, 526, 366, 29973]
WIDE = [0, 255, 65536, 2**31]

#: Of PROMPT in blocks of four with vLLM's default seed; and of WIDE with PYTHONHASHSEED=0 and a salt.
GOLDEN = {
    "sha256": (
        [
            "3682d7a1b36bba5e2942efaa094cf9f3146d2c97f5881204ed25c3c88e72b1e8",
            "c52a72a1275d24c651f7747d6080ced4ce25f40f60e1de4e051183051e3de7ee",
        ],
        "9c79ab5743fb91281c1e7fd70859018ad89d5eef64d461135faeccbb91d01a08",
    ),
    "sha256_cbor": (
        [
            "041960bd490febb72350e61e99ce2fb83fdfbaf30cdf80d03d29e09705e3c94d",
            "b54e45906910d49ea7e234c6d69bfe540afb7c4c10873f718e1aaad323ce7955",
        ],
        "8994c22c3911c4951071eb7b9f04f5721dcb95612bc37f5dc64df598b6c51c1b",
    ),
    "xxhash": (
        ["38263ffece31ea637dfbf5aa7828fc79", "4a2b36b17bb8302ea481b6467bfd1c1e"],
        "93bcfe66073bfe1884da52526e9fe0fd",
    ),
    "xxhash_cbor": (
        ["2b39a54de3e8c3532a47d638c0027e68", "7f21f79f6ab39223e69b8b844da61127"],
        "09bc30111552b383ff4a1be8b1eb4085",
    ),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_names_are_vllms(algorithm: str) -> None:
    chain, salted = GOLDEN[algorithm]
    made = block_hashes(PROMPT, algorithm=algorithm, block_tokens=4)
    assert [one.hex() for one in made] == chain
    [one] = block_hashes(WIDE, algorithm=algorithm, block_tokens=4, seed="0", salt="tenant-7")
    assert one.hex() == salted


def test_only_full_blocks_have_names() -> None:
    named = [len(block_hashes(PROMPT[:n], algorithm="sha256", block_tokens=4)) for n in range(9)]
    assert named == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_a_seed_that_is_not_the_namespaces_is_refused_and_the_way_out_named() -> None:
    plain = namespace(hash_root=root_digest(DEFAULT_SEED))
    seeded = namespace(hash_root=root_digest("42"))
    assert seed_for(plain, None) == DEFAULT_SEED
    assert seed_for(seeded, "42") == "42"
    with pytest.raises(ConfigError, match="give it with --seed"):
        seed_for(seeded, None)
    with pytest.raises(ConfigError, match="is not '43'"):
        seed_for(seeded, "43")
    with pytest.raises(ConfigError, match="leave out --seed"):
        seed_for(plain, "42")
    with pytest.raises(ConfigError, match=r"kvstore-v0-sha256.*--request or --digest"):
        seed_for(namespace(hash_algo="kvstore-v0-sha256"), None)
