"""kvstore beside vLLM's own tiers, LMCache and Mooncake: the same prompts, in turns, on real engines.

    make bench-peers [ARGS="--rounds 3 --prompts 3 --json FILE --svg FILE --variants NAME ..."]

By hand: `.venv/bin/python -m trials.benchmarks.peers.install`, which makes `.cache/peers/venv`, then
`.cache/peers/venv/bin/python -m trials.benchmarks.peers`. It isn't part of `make bench`, nor of the tests.
"""
