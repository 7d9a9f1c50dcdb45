"""Checks the version of vLLM in which the connectors run.

A connector is written against one scheduler, whose contract changes with every release, mostly by hooks that
are added and sometimes by names that move. So there are three answers, not two:

    older than OLDEST     refused: what is missing is known (docs/vllm-versions.md), and it would fail anyway,
                          later and less clearly
    OLDEST to NEWEST      accepted: the engine tests have been run with these, or, where no CPU build of vLLM
                          is published, the tests of the contract on its Python files
    newer, or unknown     a warning. It may well work, and an upgrade of vLLM should not have to wait for a
                          release of this package. Certain faults show at the start: a name that is gone fails
                          the import; pages that are laid out otherwise fail the comparison with the
                          configuration, or the canary. tests/connectors/test_vllm_contract.py, run with the
                          new version, describes the rest
"""

from __future__ import annotations

import logging
import re

from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

#: The first and the last minor release of vLLM that was tried. docs/vllm-versions.md says how.
OLDEST = (0, 32)
NEWEST = (0, 33)


def check_vllm_version(version: str | None = None) -> None:
    """Raise ConfigError for a vLLM that is too old, and log a warning for an untried one.

    `version` defaults to the running vLLM's. Releases of one minor version count as one.
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
    """Returns the running vLLM's release as namespaces name it: `0.32`, or the whole version if it is odd."""
    import vllm

    version = str(vllm.__version__)
    release = _release(version)
    return version if release is None else ".".join(map(str, release))


def tried() -> str:
    """Returns the range of versions that were tried, in words: `0.32 to 0.33`."""
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
    return oldest if oldest == newest else f"{oldest} to {newest}"


def _release(version: str) -> tuple[int, int] | None:
    """Returns (major, minor), or None for a build without a version (vLLM then says `dev`, or 0.1.devN)."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return None
    release = int(match[1]), int(match[2])
    return None if release <= (0, 1) else release
