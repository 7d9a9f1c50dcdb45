"""The payload port's contract as a test suite. It is product code, for every implementation, ours or yours.

Import the suite from kvstore.testing. It needs pytest, which kvstore itself does not.
"""

import pytest

# This comes before the module is imported; otherwise its plain asserts would say nothing when they fail.
pytest.register_assert_rewrite("kvstore.conformance.payloads")
