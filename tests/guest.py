"""Runs a command in an emulated machine with NUMA nodes of one's choice.

    python tests/guest.py --topology two -- COMMAND [ARGUMENT...]

virtme-ng boots a kernel of this machine in QEMU, with this machine's files as its root: what is installed or
built here runs there as it is, the repository, its virtual environment and the extension included. Writes
go to memory and are gone afterwards (below /tmp, /var and /home they succeed, elsewhere they fail). Nodes,
affinity, mbind and page faults are the kernel's own; the CPU is emulated, so times mean nothing.

Needs virtme-ng (pip), and of the distribution QEMU for x86, a kernel image, busybox and kmod. On Debian and
Ubuntu:

    apt install qemu-system-x86 linux-image-amd64 busybox-static kmod    # Ubuntu: linux-image-generic
    pip install virtme-ng
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

TIMEOUT = 900
"""Seconds until a guest is stopped: booting takes some 20, importing torch there as many again."""

DISK_BYTES = 1 << 30
"""Size of the guest's empty disk, /dev/vda: for files that have a page cache."""

_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class GuestTopology:
    """What the guest is made of; its CPUs are numbered 0 to 3.

    Attributes:
        about: in words.
        nodes: per node its memory in MiB (0: none) and its CPUs (None: none).
        cpus: sockets, cores per socket and threads per core.
        distance: between any two nodes; None for the default of QEMU.
    """

    about: str
    nodes: tuple[tuple[int, str | None], ...]
    cpus: tuple[int, int, int] = (1, 4, 1)
    distance: int | None = None

    @property
    def memory(self) -> int:
        """Of all nodes, in MiB."""
        return sum(memory for memory, _ in self.nodes)


TOPOLOGIES = {
    "one": GuestTopology("1 node, 4 CPUs", ((4096, "0-3"),)),
    "two": GuestTopology("2 nodes, 2 CPUs each", ((2048, "0-1"), (2048, "2-3")), (2, 2, 1), distance=21),
    "four": GuestTopology("4 nodes, 1 CPU each", tuple((1024, str(cpu)) for cpu in range(4)), (4, 1, 1)),
    "memless": GuestTopology("node 1 has CPUs, but no memory", ((4096, "0-1"), (0, "2-3")), (2, 2, 1)),
    "cpuless": GuestTopology("node 1 has memory, but no CPUs", ((2048, "0-3"), (2048, None))),
    "lopsided": GuestTopology("node 0 has 3 CPUs, node 1 has one", ((2048, "0-2"), (2048, "3"))),
    "tight": GuestTopology("node 1 has little memory", ((3072, "0-1"), (640, "2-3")), (2, 2, 1)),
    "smt": GuestTopology("2 nodes, 1 core of 2 threads each", ((2048, "0-1"), (2048, "2-3")), (2, 1, 2)),
}


def missing() -> str | None:
    """Why no guest can be run on this machine, or None."""
    if platform.machine() != "x86_64":
        return f"the emulated machines are x86_64, this one is {platform.machine()}"
    lacking = [program for program in ("qemu-system-x86_64", "busybox", "modprobe") if _find(program) is None]
    if _find("vng") is None:
        lacking.append("vng (pip install virtme-ng)")
    if _kernel() is None:
        lacking.append("a kernel image that can be read (/boot/vmlinuz-*)")
    return f"no {', no '.join(lacking)}" if lacking else None


def _find(program: str) -> str | None:
    # vng may be installed beside this Python; system programs may be outside an ordinary user's path.
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]
    return shutil.which(program, path=os.pathsep.join(places))


def _kernel() -> Path | None:
    images = [path for path in Path("/boot").glob("vmlinuz-*") if os.access(path, os.R_OK)]
    with_modules = [
        path for path in images if Path("/lib/modules", path.name.removeprefix("vmlinuz-")).is_dir()
    ]
    return max(with_modules, key=lambda path: path.stat().st_mtime, default=None)


def guest_command(topology: str, script: Path, disk: Path) -> list[str]:
    """The command that boots the guest and runs an executable file in it; disk is its /dev/vda."""
    machine = TOPOLOGIES[topology]
    sockets, cores, threads = machine.cpus
    num_cpus = sockets * cores * threads
    # As an AMD model, which "max" is here, the emulated CPU doesn't tell of threads.
    model = "max,vendor=GenuineIntel" if threads > 1 else "max"
    processors = f"{num_cpus},sockets={sockets},cores={cores},threads={threads}"
    qemu = f"-accel tcg,thread=multi -cpu {model} -smp {processors}"
    qemu += f" -drive file={disk},if=virtio,format=raw,cache=unsafe"
    # virtme-ng's own --numa leaves the numbering of nodes without memory to QEMU: say it all.
    for node, (memory, cpus) in enumerate(machine.nodes):
        described = f"node,nodeid={node}"
        if memory:
            qemu += f" -object memory-backend-ram,id=node{node},size={memory}M"
            described += f",memdev=node{node}"
        if cpus is not None:
            described += f",cpus={cpus}"
        qemu += f" -numa {described}"
    if machine.distance is not None:
        for source in range(len(machine.nodes)):
            for target in range(source + 1, len(machine.nodes)):
                qemu += f" -numa dist,src={source},dst={target},val={machine.distance}"
    return [
        *(_find("vng") or "vng", "--run", str(_kernel()), "--disable-kvm", "--force-9p"),
        *("--cpus", str(num_cpus), "--memory", f"{machine.memory}M"),
        *(f"--qemu-opts={qemu}", "--exec", str(script)),
    ]


def run_in_guest(
    topology: str,
    command: list[str],
    *,
    directory: Path = REPOSITORY,
    environment: dict[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> subprocess.CompletedProcess[str]:
    """Boots a guest, runs a command in it as the same user and waits for it.

    Args:
        topology: a name of :data:`TOPOLOGIES`.
        command: program and arguments.
        directory: where it runs.
        environment: variables besides PATH, HOME and ``NUMA_MOE_GUEST``, which holds the topology's name.
        timeout: in seconds.

    Returns:
        Exit status, output and errors of the command; 137 when the time was over.
    """
    variables = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(Path.home()),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMA_MOE_GUEST": topology,
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory(prefix="numa-moe-guest-") as folder:
        # In a file, so that no quoting on the way can change it.
        script = Path(folder) / "run"
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        script.write_text(
            f"#!/bin/sh\ncd {shlex.quote(str(directory))} || exit 125\n{exports}exec {shlex.join(command)}\n"
        )
        script.chmod(0o755)
        disk = Path(folder) / "disk"
        with disk.open("wb") as file:
            file.truncate(DISK_BYTES)  # takes no room until it is written
        search_path = os.pathsep.join(
            [str(Path(sys.executable).parent), variables["PATH"], "/usr/sbin", "/sbin"]
        )
        # Pipes, since QEMU opens its outputs anew and would empty a file; a session of its own, since it and
        # virtme-ng are several processes to stop.
        process = subprocess.Popen(
            guest_command(topology, script, disk),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PATH": search_path},
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return subprocess.CompletedProcess(
                command, _KILLED, output, f"{errors}\nstopped after {timeout} s\n"
            )
    # About features of the emulated CPU that QEMU lacks.
    kept = [
        line
        for line in errors.splitlines(keepends=True)
        if not line.startswith("qemu-system-x86_64: warning")
    ]
    return subprocess.CompletedProcess(command, process.returncode, output, "".join(kept))


def main() -> int:
    """The command line; returns the exit status of the command."""
    described = "\n".join(f"  {name:9} {topology.about}" for name, topology in TOPOLOGIES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"topologies:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--topology", choices=TOPOLOGIES, default="two")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds (default: %(default)s)")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        sys.exit(f"{parser.prog}: {reason}; see --help")
    done = run_in_guest(
        arguments.topology, arguments.command, directory=Path.cwd(), timeout=arguments.timeout
    )
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
