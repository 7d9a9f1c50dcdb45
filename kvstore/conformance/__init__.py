"""The ports' contracts as test suites: product code, for every implementation, ours or yours.

Take the suites from kvstore.testing. They need pytest, which kvstore itself does not.
"""

import pytest

# Before the modules are imported, or their plain asserts would say nothing when they fail.
pytest.register_assert_rewrite(
    *(
        f"kvstore.conformance.{name}"
        for name in (
            "admission",
            "catalogue",
            "chains",
            "commits",
            "culling",
            "index",
            "invalidation",
            "journal",
            "maintained",
            "payloads",
            "upkeep",
        )
    )
)
