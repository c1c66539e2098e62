"""The op in emulated machines with real NUMA nodes: placement page by page, and the bits.

``pytest -m numa_lab``. Each test boots a guest, which takes minutes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from guest import missing, run_in_guest

_reason = missing()
pytestmark = [
    pytest.mark.numa_lab,
    pytest.mark.skipif(_reason is not None, reason=f"no guests: {_reason}"),
]


@pytest.mark.parametrize(("topology", "nodes"), [("two", 2), ("four", 4)])
def test_every_slice_is_on_its_node_and_bits_are_those_of_one_slice(topology: str, nodes: int) -> None:
    done = run_in_guest(topology, [sys.executable, str(Path(__file__).with_name("guest_op.py"))])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["slices"] == nodes
    assert found["local_shares"] == {str(node): 1.0 for node in range(nodes)}
    assert found["same_bits"]
