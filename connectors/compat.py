"""Which vLLM the connectors are in, and what they say of it.

A connector is written against one scheduler, whose contract changes with every release, mostly by hooks that
are added and sometimes by names that move. So there are three answers, not two:

    older than OLDEST     refused: what is missing is known (docs/vllm-versions.md), and it would fail anyway,
                          later and less clearly
    OLDEST to NEWEST      what the engine tests have been run with
    newer, or unknown     a warning. It may well work, and whoever upgrades vLLM is not to be stopped by this
                          package's calendar. What is wrong for sure is found at the start: a name that is
                          gone fails the import; pages that are laid out otherwise fail the comparison with
                          the configuration, or the canary. tests/connectors/test_vllm_contract.py, run with
                          the new version, says the rest in words
"""

from __future__ import annotations

import logging
import re

from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

#: The first and the last minor release of vLLM that the engine tests were run with.
OLDEST = (0, 31)
NEWEST = (0, 32)


def check_vllm_version(version: str | None = None) -> None:
    """Raise ConfigError for a vLLM that is too old, warn of one that nobody has tried.

    `version` is the running vLLM's own, unless given. Releases of one minor version count as one.
    """
    if version is None:
        import vllm

        version = str(vllm.__version__)
    release = _release(version)
    if release is None:
        log.warning(
            "kvstore: can't tell which vLLM %r is; tried with %s. To find out what differs, run "
            "tests/connectors/test_vllm_contract.py with it",
            version,
            tried(),
        )
    elif release < OLDEST:
        raise ConfigError(
            f"kvstore: vLLM {version} is too old for the connectors; they have been tried with {tried()}. "
            "docs/vllm-versions.md says what older ones lack"
        )
    elif release > NEWEST:
        log.warning(
            "kvstore: vLLM %s is newer than what the connectors have been tried with (%s). To find out what "
            "differs, run tests/connectors/test_vllm_contract.py with it",
            version,
            tried(),
        )


def vllm_release() -> str:
    """What the running vLLM is called by those that must agree on it: `0.32`, or all of an odd version."""
    import vllm

    version = str(vllm.__version__)
    release = _release(version)
    return version if release is None else ".".join(map(str, release))


def tried() -> str:
    """The range in words: `0.31 to 0.32`."""
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
    return oldest if oldest == newest else f"{oldest} to {newest}"


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor; None for a build that doesn't know (vLLM then says `dev`, or 0.1.devN)."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return None
    release = int(match[1]), int(match[2])
    return None if release <= (0, 1) else release
