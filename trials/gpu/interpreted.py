"""The kernel beside torch by Triton's interpreter: TRITON_INTERPRET=1 python3 -m trials.gpu.interpreted"""

from __future__ import annotations

from collections import Counter

from tests.connectors.engine.paging.kernel_cases import compared
from tests.connectors.engine.paging.pools import odd


def main() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        compared(odd(seed, separate=seed % 3 > 0), seed, seen)
    print(f"{seen['cases']} pools")


if __name__ == "__main__":
    main()
