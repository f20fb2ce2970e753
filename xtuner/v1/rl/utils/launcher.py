"""Where workers live: in this process, or as Ray actors. The only file that imports Ray."""

import asyncio
import atexit
import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import torch

from xtuner.v1.utils import get_logger

from .courier import Courier
from .handles import Handle, LocalHandle, WorkerLostError
from .host import Host, register, unregister
from .outcome import Outcome
from .resources import AcceleratorResourcesConfig, CPUResourcesConfig

Resources = AcceleratorResourcesConfig | CPUResourcesConfig
LauncherKind = Literal["auto", "local", "ray"]

CONFIG_MARK = "__xtuner_config__"
"""Attribute of the module that a config file was loaded as."""
_START_S = 600.0
"""Longest wait for processes and constructors: torch imported by many processes at once takes minutes."""
_MAX_CALLS = 1_000_000
"""Calls in flight a host; the rollout controller bounds them by itself."""
_NO_RAY = "launcher 'ray' needs Ray: pip install \"xtuner[ray]\". One worker runs without it (--num-workers 1)."


class Launcher(Protocol):
    """Turns classes into workers. `spawn_*` return once constructors have run, or raise their exception."""

    kind: Literal["local", "ray"]
    world_size: int

    def spawn_on(self, rank: int, name: str, cls: type, /, *args: Any, **kwargs: Any) -> Handle:
        """`cls(*args, **kwargs)` in the process of accelerator bundle `rank`, beside all others there."""

    def spawn_cpu(
        self, name: str, cls: type, /, *args: Any, resources: CPUResourcesConfig, **kwargs: Any
    ) -> list[Handle]:
        """`resources.num_workers` workers without an accelerator, each in a process of its own under Ray."""

    def rendezvous(self) -> tuple[str, int]:
        """An address at which all ranks reach the machine of rank 0, and a port that is free there now."""

    def shutdown(self) -> None:
        """End what this launcher started, and nothing else. May be called twice."""


def build_launcher(kind: LauncherKind, resources: AcceleratorResourcesConfig) -> Launcher:
    """`auto` is `local` for one worker and `ray` for more. Refuses at once what the machine cannot do."""
    return LocalLauncher(resources) if _resolved(kind, resources) == "local" else RayLauncher(resources)


def launch_problem(kind: LauncherKind, resources: AcceleratorResourcesConfig) -> str | None:
    """Why `build_launcher` would refuse, as far as this machine tells; nothing is started. None: it would not."""
    ray = _resolved(kind, resources) == "ray"
    try:
        if ray and importlib.util.find_spec("ray") is None:
            raise RuntimeError(_NO_RAY)
        if not ray or _running_cluster() is None:
            _check_gpus(resources)
    except RuntimeError as error:
        return str(error)
    return None


class LocalLauncher:
    """Everything in this process: one training worker, no Ray. For laptops, tests and pdb."""

    kind: Literal["local", "ray"] = "local"
    world_size = 1

    def __init__(self, resources: AcceleratorResourcesConfig):
        if resources.num_workers != 1:
            raise ValueError(
                f"launcher 'local' runs one worker, but resources.num_workers={resources.num_workers}; "
                "use --launcher ray, or set num_workers=1."
            )
        _check_gpus(resources)
        self._workers: dict[str, Any] = {}

    def spawn_on(self, rank: int, name: str, cls: type, /, *args: Any, **kwargs: Any) -> Handle:
        _check_rank(rank, self.world_size)
        if name in self._workers:
            raise ValueError(f"a worker named {name!r} exists already")
        worker = self._workers[name] = cls(*args, **kwargs)
        register(name, worker)
        return LocalHandle(worker)

    def spawn_cpu(
        self, name: str, cls: type, /, *args: Any, resources: CPUResourcesConfig, **kwargs: Any
    ) -> list[Handle]:
        return [LocalHandle(cls(*args, **kwargs)) for _ in range(resources.num_workers)]

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", _free_port()

    def shutdown(self) -> None:
        for name, worker in self._workers.items():
            unregister(name, worker)
        self._workers.clear()


class RayHandle:
    """A worker in a host actor. A cancelled call is cancelled there too. Numpy arrays come back read-only."""

    def __init__(self, actor: Any, name: str, frequent: frozenset[str] = frozenset()):
        self.actor, self.name, self.frequent = actor, name, frequent
        self._courier: Courier | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_courier": None}

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method in self.frequent:
            courier = self._courier
            if courier is None or courier.loop is not asyncio.get_running_loop():
                send, caller = self.actor.exchange.remote, secrets.token_hex(8)
                during = " or ".join(sorted(self.frequent))
                courier = self._courier = Courier(lambda orders: self._answer(send(caller, orders), during))
            return await courier.call(self.name, method, args, kwargs)
        outcome: Outcome = await self._answer(self.actor.call.remote(self.name, method, args, kwargs), method)
        return outcome.unwrap()

    async def _answer(self, ref: Any, method: str) -> Any:
        import ray

        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except ray.exceptions.RayActorError as error:
            raise WorkerLostError(f"worker {self.name!r} died during {method}(): {error}") from error


class RayLauncher:
    """One placement group, and in each of its bundles one actor (`Host`) for all workers of this rank.

    Joins the cluster of RAY_ADDRESS or the one that `ray start` made on this machine. Without one it starts
    its own, which nobody shares, so demands that the machine cannot meet are lowered there with a log line.
    """

    kind: Literal["local", "ray"] = "ray"

    def __init__(self, resources: AcceleratorResourcesConfig):
        self.world_size = resources.num_workers
        self._run = f"xtuner-{secrets.token_hex(4)}"
        self._on_gpu = resources.accelerator == "GPU"
        self._names: Counter[str] = Counter()
        self._cleanup = contextlib.ExitStack()
        address = _running_cluster()
        if address is None:
            _check_gpus(resources)
            _protect_own_cluster()
        self._ray = _import_ray()
        atexit.register(self.shutdown)
        try:
            _send_config_by_value(self._ray)
            self._owns_cluster = self._connect(address)
            self._exact = self._on_gpu and not self._owns_cluster
            bundle = self._bundle("train", resources)
            if self._on_gpu:
                bundle["GPU"] = resources.num_accelerators_per_worker
            hosts = self._start_hosts("train", bundle, resources.num_workers, resources.pg_pack_strategy)
            self._hosts, self._address = self._order(hosts)
        except BaseException:
            self.shutdown()
            raise

    def spawn_on(self, rank: int, name: str, cls: type, /, *args: Any, **kwargs: Any) -> Handle:
        _check_rank(rank, self.world_size)
        return self._create(self._hosts[rank : rank + 1], name, cls, args, kwargs)[0]

    def spawn_cpu(
        self, name: str, cls: type, /, *args: Any, resources: CPUResourcesConfig, **kwargs: Any
    ) -> list[Handle]:
        bundle = self._bundle(name, resources)
        hosts = self._start_hosts(name, bundle, resources.num_workers, resources.pg_pack_strategy)
        return self._create(hosts, name, cls, args, kwargs)

    def rendezvous(self) -> tuple[str, int]:
        return self._address, self._get([self._hosts[0].run.remote(_free_port)])[0].unwrap()

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        if self._ray.is_initialized():
            self._cleanup.close()

    def _connect(self, address: str | None) -> bool:
        """Join the cluster at `address`, or start one if None. Whether it was started."""
        ray = self._ray
        if ray.is_initialized():
            return False
        before = signal.getsignal(signal.SIGTERM)
        common: dict[str, Any] = {"namespace": self._run, "logging_level": "WARNING"}
        if address is not None:
            ray.init(address=address, **common)
        else:
            # Twice the cores: ranks get half of that, which is all of them; pools (judgers) take turns with them.
            ray.init(address="local", num_cpus=2 * _num_cores(), include_dashboard=False, **common)
        self._cleanup.callback(ray.shutdown)
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and before not in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, before)  # ray.init put its own in place of the program's
        get_logger().info(
            f"Ray: joined the cluster at {address}."
            if address
            else f"Ray: started a cluster for this run alone, {_num_cores()} cores."
        )
        return address is None

    def _bundle(self, what: str, asked: Resources) -> dict[str, float]:
        """What each worker reserves: as asked, or at most an even part of half of what is free."""
        cpus, count = asked.num_cpus_per_worker, asked.num_workers
        if self._exact:
            return {"CPU": cpus, "memory": asked.cpu_memory_per_worker}
        nodes = [n["Resources"].get("CPU", 0.0) for n in self._ray.nodes() if n["Alive"]]
        free = self._ray.available_resources().get("CPU", 0.0) / max(sum(nodes), 1.0)
        share = min(cpus, _largest_share([n * free / 2 for n in nodes], count))
        if share < cpus:
            get_logger().info(
                f"{what}: {count} workers x {cpus:g} CPUs asked, lowered to {share:g} each; memory is not reserved."
            )
        return {"CPU": share}

    def _start_hosts(self, what: str, bundle: dict[str, float], count: int, strategy: str) -> list[Any]:
        """A placement group of `count` bundles, and a host in each."""
        ray = self._ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._names[what] += 1
        name = f"{self._run}-{what}" + (f"#{self._names[what]}" if self._names[what] > 1 else "")
        group = placement_group([bundle] * count, strategy=strategy, name=name)
        self._cleanup.callback(remove_placement_group, group)
        deadline = float(os.environ.get("XTUNER_PG_READY_TIMEOUT", 120 if self._owns_cluster else 30))
        if not group.wait(deadline):
            raise RuntimeError(
                f"{what}: Ray could not place {count} x {_text(bundle)} ({strategy}) within {deadline:g} s. "
                f"The cluster has {_text(ray.cluster_resources())}; "
                f"free now: {_text(ray.available_resources())}. "
                "Ask for less (num_workers, num_cpus_per_worker, cpu_memory_per_worker), "
                "wait for others to end, or raise XTUNER_PG_READY_TIMEOUT (seconds)."
            )
        threads = int(os.environ.get("OMP_NUM_THREADS", "0").split(",")[0]) or max(1, int(bundle["CPU"]))
        path = [os.path.abspath(folder) for folder in sys.path]
        cls = ray.remote(Host)
        hosts = []
        for i in range(count):
            host = cls.options(
                name=f"{name}-{i}",
                namespace=self._run,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory"),
                max_concurrency=_MAX_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote(threads, path)
            self._cleanup.callback(ray.kill, host)
            hosts.append(host)
        return hosts

    def _order(self, hosts: list[Any]) -> tuple[list[Any], str]:
        """Hosts by node, then by GPU, so that ranks of a machine are neighbours; the address of rank 0."""
        places = [o.unwrap() for o in self._get([host.run.remote(_place) for host in hosts])]
        nodes = list(dict.fromkeys(node for node, _, _ in places))
        order = sorted(range(len(hosts)), key=lambda i: (nodes.index(places[i][0]), places[i][2], i))
        address = "127.0.0.1" if len(nodes) == 1 else places[order[0]][1]
        return [hosts[i] for i in order], address

    def _create(self, hosts: list[Any], name: str, cls: type, args: Any, kwargs: Any) -> list[Handle]:
        outcomes = self._get([host.create.remote(name, cls, args, kwargs) for host in hosts])
        for outcome in outcomes:
            outcome.unwrap()
        frequent: frozenset[str] = getattr(cls, "frequent_calls", frozenset())
        return [RayHandle(host, name, frequent) for host in hosts]

    def _get(self, refs: list[Any]) -> list[Outcome]:
        try:
            return self._ray.get(refs, timeout=_START_S)
        except self._ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"worker processes did not answer within {_START_S:g} s") from error
        except self._ray.exceptions.RayActorError as error:
            raise WorkerLostError(f"a worker process died while it started: {error}") from error


def _resolved(kind: LauncherKind, resources: AcceleratorResourcesConfig) -> LauncherKind:
    if kind != "auto":
        return kind
    return "local" if resources.num_workers == 1 else "ray"


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0..{world_size - 1}")


def _check_gpus(resources: AcceleratorResourcesConfig) -> None:
    """Refuse GPU workers that this machine has no GPUs for."""
    if resources.accelerator != "GPU":
        return
    if not torch.cuda.is_available():
        raise RuntimeError(
            "resources.accelerator='GPU', but torch sees no CUDA device here (torch.cuda.is_available() is "
            "False). Use --accelerator cpu, or install a CUDA build of torch and check nvidia-smi."
        )
    asked, found = resources.num_workers * resources.num_accelerators_per_worker, torch.cuda.device_count()
    if asked > found:
        raise RuntimeError(
            f"resources ask for {asked:g} GPUs (num_workers={resources.num_workers}), but this machine shows "
            f"{found} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). "
            f"Use --num-workers {found}, or join a Ray cluster that has them (RAY_ADDRESS)."
        )


def _import_ray() -> ModuleType:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise RuntimeError(_NO_RAY) from error
    return ray


def _running_cluster() -> str | None:
    """The user's cluster: one this program is in, RAY_ADDRESS, or what `ray start` noted, if it answers.

    Ray's own "auto" would also join a cluster that another program started for itself and takes down with it.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return sys.modules["ray"].get_runtime_context().gcs_address
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        return None if address == "local" else address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    note = Path(folder, "ray", "ray_current_cluster")
    if not note.is_file():
        return None
    address = note.read_text().strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError):
        get_logger().info(f"Ray: the cluster noted in {note} ({address}) does not answer.")
        return None
    return address


def _send_config_by_value(ray: ModuleType) -> None:
    """Functions of the user's config file travel as code: workers need not run the whole file to have them."""
    for module in list(sys.modules.values()):
        if getattr(module, CONFIG_MARK, False) is True:
            ray.cloudpickle.register_pickle_by_value(module)


def _protect_own_cluster() -> None:
    """Keep strangers out of a cluster of our own. Ray reads the mode when it is imported.

    Ray listens on all interfaces. By itself it would write a token to the home folder; a token in the
    environment, which its processes inherit, leaves nothing behind.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_MODE" not in os.environ and "RAY_AUTH_TOKEN" not in os.environ:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        if "ray" not in sys.modules:
            os.environ["RAY_AUTH_MODE"] = "token"


def _largest_share(capacities: list[float], count: int) -> float:
    """The largest c such that `count` pieces of size c fit into these capacities; a whole number above 1."""
    candidates = sorted({capacity / k for capacity in capacities for k in range(1, count + 1)}, reverse=True)
    for c in candidates:
        c = float(int(c)) if c >= 1 else int(c * 1000) / 1000
        if c > 0 and sum(int(capacity / c + 1e-9) for capacity in capacities) >= count:
            return c
    return 0.001


def _place() -> tuple[str, str, list[int]]:
    """Of this process: node id, node address, ids of its GPUs."""
    import ray

    context = ray.get_runtime_context()
    gpus = [int(i) if i.isdigit() else 0 for i in context.get_accelerator_ids().get("GPU", [])]
    return context.get_node_id(), ray.util.get_node_ip_address(), gpus


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text(resources: dict[str, float]) -> str:
    shown = {k: resources[k] for k in ("CPU", "GPU", "memory") if k in resources}
    return ", ".join(f"{v / 2**30:.1f} GiB memory" if k == "memory" else f"{v:g} {k}" for k, v in shown.items())
