"""``--ray``: a bench's devices as actors of Ray, which finds them on this machine or on several.

An actor is one process with one device: a GPU, or a share of a machine's cores. Only words go there and only plain
lines come back: each actor reads weights and data itself, and takes part if all that a resumed bench must agree in
(settings, weights, hashes of inputs, versions, device, threads, kernels) is the same there.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foldspec.bench.crew import Gone, Hand, Reply, admitted
from foldspec.bench.protocol import Place
from foldspec.bench.session import Session
from foldspec.errors import FoldspecError, ResourceError, UsageError

__all__ = ["LOCAL", "Cluster", "cores_each"]

LOCAL, AUTO = "local", "auto"
OBJECTS = 80_000_000  # bytes of memory for what actors send, near the least that Ray takes: lines are small
PATIENCE = 5.0  # seconds for an address to answer; Ray itself goes on trying for minutes


def cores_each(cpus: Sequence[int], actors: int) -> int:
    """The most cores that each of so many actors can have on machines of so many; 0 where they do not fit."""
    fits = (each for each in range(max(cpus, default=0), 0, -1) if sum(n // each for n in cpus) >= actors)
    return next(fits, 0)


class Cluster:
    """A :class:`~foldspec.bench.crew.Crew` in a cluster. ``count``: its actors; ``threads``: of each, and of
    whoever is compared with them."""

    def __init__(self, address: str = LOCAL, count: int | None = None, *, cuda: bool = False) -> None:
        """Join a cluster, or make one of this machine (``local``). Starts no actor yet. By default there is one a GPU,
        or without ``cuda`` one a machine. Raises :class:`UsageError` where Ray is missing, :class:`ResourceError` for a
        cluster that cannot be reached or is too small."""
        try:
            import ray
        except ImportError:
            raise UsageError("Ray is not installed", where="--ray", do="pip install 'foldspec[ray]'") from None
        self._ray: Any = ray
        self._cuda, self._where = cuda, f"--ray {address}"
        self._folder: str | None = None
        self._actors: list[Any] = []
        self._running: dict[Any, int] = {}
        self.devices: list[dict[str, Any]] = []
        try:
            self._join(address)
            self.count, self._cores = self._size(count)
            self.threads = self._cores or torch.get_num_threads()
        except BaseException:
            self.close()
            raise

    def _join(self, address: str) -> None:
        how: dict[str, Any] = {}
        if address == LOCAL:
            # short, for the sockets in it, and gone afterwards; nor does another's `auto` find this cluster then
            self._folder = tempfile.mkdtemp(prefix="foldspec-", dir="/tmp")
            how = {"object_store_memory": OBJECTS, "_temp_dir": self._folder, "include_dashboard": False}
        elif address != AUTO:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if not host or not port.isdigit():
                raise UsageError(f"must be {LOCAL}, {AUTO} or HOST:PORT, not {address!r:.60}", where="--ray")
            try:
                socket.create_connection((host, int(port)), PATIENCE).close()
            except (OSError, OverflowError) as error:
                raise ResourceError(f"no Ray cluster answers there ({error})", where=self._where) from None
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **how)
        except Exception as error:  # of many kinds
            if address == AUTO and isinstance(error, ConnectionError):
                do = f"`ray start --head` begins one; --ray {LOCAL} needs none"
                raise ResourceError("no Ray cluster runs here", where=self._where, do=do) from None
            do = "" if address == LOCAL else "if the cluster asks for a token: set RAY_AUTH_MODE=token"
            raise ResourceError(f"Ray could not begin ({_line(error)})", where=self._where, do=do) from None

    def _size(self, count: int | None) -> tuple[int, int]:
        """How many actors, and the cores of each (0 on a GPU: Ray need not count them)."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if self._cuda:
            gpus = sum(int(node.get("GPU", 0)) for node in nodes)
            if gpus < (count or 1):
                what = f"{count or 1} actors of one GPU each were asked for, the cluster has {gpus} GPUs"
                raise ResourceError(what, where=self._where, do="lower --ray-actors" if gpus else "")
            return count or gpus, 0
        cpus = [int(node.get("CPU", 0)) for node in nodes]
        count = count or sum(n > 0 for n in cpus) or 1
        cores = cores_each(cpus, count)
        if not cores:
            what = f"{count} actors of a core or more were asked for, the cluster has {sum(cpus)} cores"
            raise ResourceError(what, where=self._where, do="lower --ray-actors")
        return count, cores

    def begin(
        self,
        build: Callable[..., Session],
        words: Mapping[str, Any],
        plan: Mapping[str, Any],
        ready: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Start the actors, each of which makes its session by ``build(**words)``: a function of a module, and plain
        data. Returns when all are ready. Raises what one of them raised of foldspec's own, :class:`UsageError` for one
        whose plan is another than ``plan``, :class:`ResourceError` for one that died."""
        how = {"num_gpus": 1, "num_cpus": 0} if self._cuda else {"num_gpus": 0, "num_cpus": self._cores}
        kind = self._ray.remote(Hand).options(**how, max_restarts=0, scheduling_strategy="SPREAD")
        self._actors = [kind.remote(build, words) for _ in range(self.count)]
        for i, actor in enumerate(self._actors):
            self._running[actor.begin.remote()] = i
        found: dict[int, Mapping[str, Any]] = {}
        while self._running:
            i, told = self._next()
            if isinstance(told, Gone):
                raise ResourceError(f"did not start ({told.why})", where=f"--ray, device {i}")
            found[i] = admitted(told, plan, f"--ray, device {i}")
            ready(len(found), self.count)
        machines = list(dict.fromkeys(found[i]["machine"] for i in range(self.count)))
        self.devices = [
            {
                "name": found[i]["device"],
                "cores": found[i]["cores"],
                "machine": machines.index(found[i]["machine"]),
                "requests": 0,
                "peak_mem_bytes": 0,
            }
            for i in range(self.count)
        ]

    def hand(self, device: int, place: Place) -> None:
        self._running[self._actors[device].measure.remote(place)] = device

    def wait(self) -> tuple[int, Reply | FoldspecError | Gone]:
        return self._next()

    def _next(self) -> tuple[int, Any]:
        (ref, *_), _ = self._ray.wait(list(self._running))
        device = self._running.pop(ref)
        try:
            return device, self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(self._actors[device])
            return device, Gone(_line(getattr(error, "cause", None) or error))

    def close(self) -> None:
        """End the actors, and the cluster if it was made here."""
        with contextlib.suppress(Exception):  # they may be gone
            for actor in self._actors:
                self._ray.kill(actor)
        self._actors, self._running = [], {}
        self._ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(error: BaseException) -> str:
    """What an error says first, with its kind if that says more."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}"[:200].rstrip(": .")
