"""What happens on every kind of NUMA machine, under every setting, with and without a mask that hides nodes.

    python tests/numa_table.py                       # all topologies of tests/guest.py: a quarter of an hour
    python tests/numa_table.py --topologies two,four

Boots an emulated machine per topology and prints a table in Markdown: the plan, the lines that were logged,
the share of each slice's pages on its node, and whether the op's bits are those of a single slice. Left out
is the line that a node lacks room: nodes as small as these always do.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from guest import TOPOLOGIES, missing, run_in_guest

_CASES = Path(__file__).with_name("guest_cases.py")


def run_cases(topology: str, *cases: str) -> list[dict[str, Any]]:
    """What the processes of some cases of guest_cases.py found in a guest.

    Raises:
        RuntimeError: if the guest failed, with what it wrote.
    """
    done = run_in_guest(topology, [sys.executable, str(_CASES), *cases])
    if done.returncode != 0:
        raise RuntimeError(f"{topology}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def markdown(topology: str, rows: list[dict[str, Any]]) -> list[str]:
    """The rows of a topology."""
    bits = rows[0].get("bits")
    lines = []
    for row in rows:
        plan = " + ".join(
            f"{'any' if node is None else f'node {node}'}: CPUs {','.join(map(str, cpus)) or '-'}"
            for node, cpus in row["groups"]
        )
        lines_logged = [
            f"{logging.getLevelName(level)} {line}"
            for level, line in row["log"]
            if not line.startswith("placement at risk: NUMA node ")
        ]
        logged = "<br>".join(lines_logged) or "-"
        placed = ", ".join(
            f"node {node}: {'unknown' if share is None else f'{share:.0%}'}"
            for node, share in row["placement"]
            if node is not None
        )
        same = "same" if row["bits"] == bits else "DIFFERENT"
        cells = (topology, row["mask"], row["setting"], plan, logged, placed or "-", same)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES), help="default: %(default)s")
    topologies = parser.parse_args().topologies.split(",")
    unknown = [name for name in topologies if name not in TOPOLOGIES]
    if unknown:
        parser.error(f"no topology {', '.join(unknown)}; there are {', '.join(TOPOLOGIES)}")
    reason = missing()
    if reason is not None:
        parser.error(f"{reason}; see python tests/guest.py --help")
    print("| machine | mask | NUMA_MOE_SPLIT | groups of workers | logged | pages on their node | bits |")
    print("|---|---|---|---|---|---|---|")
    for topology in topologies:
        print("\n".join(markdown(topology, run_cases(topology, "table"))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
