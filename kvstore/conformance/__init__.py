"""The ports' contracts as test suites. They are product code, for every implementation, ours or yours.

Import the suites from kvstore.testing. They need pytest, which kvstore itself does not.
"""

import pytest

# This comes before the modules are imported; otherwise their plain asserts would say nothing when they fail.
pytest.register_assert_rewrite(
    "kvstore.conformance.payloads",
    *(
        f"kvstore.conformance.index.{name}"
        for name in (
            "abilities",
            "admission",
            "catalogue",
            "chains",
            "commits",
            "culling",
            "index",
            "invalidation",
            "journal",
            "maintained",
            "repair",
            "whole",
        )
    ),
)
