"""Benchmarks, the fault matrix, a fake accelerator, fuzzing, and a real GPU: each has a target of its own.

Only tests/trials imports this. Nothing of it is shipped.
"""
