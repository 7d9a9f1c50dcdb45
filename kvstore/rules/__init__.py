"""Rules that engines and `cache-admin` must agree on: pure functions, each written once."""
