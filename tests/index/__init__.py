import pytest

# This comes before the contract is imported; otherwise its plain asserts would say nothing when they fail.
pytest.register_assert_rewrite("tests.index.contract")
