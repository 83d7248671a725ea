"""Measures the speed of importing a parquet file into an experience pool, and of seeding it from another pool.

    python benchmarks/transfer.py [--rows 5000] [--tokens 1000] [--folder .]

It needs `pip install 'gleanrl[parquet]'`. A pool of ``--rows`` trajectories with ``--tokens`` tokens each (as in
`benchmarks/pool.py`) is exported to parquet. The file is imported into a second pool, and a third pool is seeded from
the first. "rows/s" is in wall-clock time, which depends on the disk, because each transaction waits until it is
written. "cpu us" is microseconds of CPU time per row.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gleanrl.experience.pool.pool import ExperiencePool
from gleanrl.experience.pool.transfer import Moved, export_parquet, import_parquet, seed_from_pool
from pool import VOCABULARY, Episodes, fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the files may lie meanwhile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="transfer-benchmark-", dir=args.folder) as name:
        folder = Path(name)
        with ExperiencePool(folder / "source.sqlite", tokenizer="one", vocabulary=VOCABULARY) as source:
            fill(source, 0, args.rows, Episodes(args.tokens, np.random.default_rng(0)))
        export_parquet(folder / "source.sqlite", folder / "source.parquet")
        print(f"{f'{args.rows:,} rows x {args.tokens:,} tokens':28}{'rows/s':>10}{'CPU us/row':>12}")
        report(folder, "import", args.rows, lambda pool: import_parquet(pool, folder / "source.parquet"))
        report(folder, "seed", args.rows, lambda pool: seed_from_pool(pool, folder / "source.sqlite"))


def report(folder: Path, name: str, rows: int, bring: Callable[[ExperiencePool], Moved]) -> None:
    with ExperiencePool(folder / f"{name}.sqlite", tokenizer="one", vocabulary=VOCABULARY) as pool:
        wall, cpu = time.perf_counter(), time.process_time()
        moved = bring(pool)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        faults = pool.verify()
        if moved.stored != rows or faults:
            raise SystemExit(f"{name}: {moved}, {faults}")
    print(f"{name:28}{rows / wall:10.0f}{1e6 * cpu / rows:12.0f}", flush=True)


if __name__ == "__main__":
    main()
