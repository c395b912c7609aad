"""Find settings of ranks and backends that cannot work together."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.cluster import FsdpBackend, InProcessCluster, TorchrunCluster
from homeostat.config.combinations.sequence import find_sequence_conflicts
from homeostat.config.ray_cluster import RayCluster
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem


def find_cluster_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of `cluster` and `trainer.backend`, with its reason and remedy."""
    backend, is_alone = config.trainer.backend, isinstance(config.cluster, InProcessCluster)
    if not isinstance(backend, FsdpBackend):
        if not is_alone:
            yield Problem(
                "cluster.type",
                "the local trainer has the whole model in one process, so the ranks would have "
                "nothing to do.",
                "Set trainer.backend.type=fsdp, or remove cluster.",
            )
        return
    if is_alone:
        yield Problem(
            "trainer.backend.type",
            "fsdp shards the model over the ranks of a cluster, and with cluster.type=in_process "
            "there are no ranks.",
            "Set cluster.type=torchrun or ray (one process is enough), or "
            "trainer.backend.type=local.",
        )
        return
    yield from _shard(backend, config.cluster.processes)
    yield from _ray(config)
    yield from _nodes(config)
    yield from find_sequence_conflicts(config, backend)
    yield from _model(config)
    yield from _one_process_only(config)


def _ray(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if not isinstance(cluster, RayCluster):
        return
    if cluster.placement == "colocated" and not config.num_engines:
        yield Problem(
            "cluster.placement",
            "colocated lets engines share the devices of trainer ranks, and this run has no "
            "engine in a separate process.",
            "Remove it.",
        )
    if cluster.address is None and cluster.nodes > 1:
        yield Problem(
            "cluster.nodes",
            "without cluster.address the run starts a Ray cluster on this machine only.",
            "Set cluster.address to the address of a Ray cluster, or remove this key.",
        )
    if cluster.address is None:
        for name in sorted({"on_lost_node", "node_timeout_s"} & cluster.model_fields_set):
            yield Problem(
                f"cluster.{name}",
                "without cluster.address the run starts a Ray cluster on this machine only, so "
                "it cannot continue without this machine.",
                "Set cluster.address to the address of a Ray cluster, or remove this key.",
            )
    if "CUDA_VISIBLE_DEVICES" in cluster.env:
        yield Problem(
            "cluster.env",
            "Ray sets CUDA_VISIBLE_DEVICES to give each worker its devices.",
            "Remove CUDA_VISIBLE_DEVICES from cluster.env.",
        )


def _nodes(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if isinstance(cluster, TorchrunCluster) and cluster.processes % cluster.nodes:
        each, rest = divmod(cluster.processes, cluster.nodes)
        yield Problem(
            "cluster.nodes",
            f"every machine must have the same number of ranks, and {cluster.processes} ranks "
            f"(cluster.processes) cannot be divided evenly over {cluster.nodes} machines "
            f"({cluster.processes} = {each} x {cluster.nodes} + {rest}).",
            "Set it to a divisor of cluster.processes.",
        )


def _shard(backend: FsdpBackend, num_ranks: int) -> Iterator[Problem]:
    place, replicas = "trainer.backend.replicas", backend.replicas
    if backend.shard == "hybrid" and replicas is None:
        yield Problem(
            place,
            "with hybrid sharding, weights are split within a replica, and the number of replicas "
            "is not set.",
            "Set it to a divisor of cluster.processes, or set trainer.backend.shard=full.",
        )
    if backend.shard == "full" and replicas is not None:
        yield Problem(
            place,
            "with full sharding, weights are split over all ranks, so there are no replicas.",
            "Remove it, or set trainer.backend.shard=hybrid.",
        )
    if (backend.shard == "hybrid") == (replicas is not None):
        try:
            backend.mesh(num_ranks)
        except ConfigError as error:
            yield from error.problems


def _model(config: RunConfig) -> Iterator[Problem]:
    if config.model.implementation == "transformers":
        yield Problem(
            "model.implementation",
            "fsdp can shard only the layers of the native decoder.",
            "Set model.implementation=native, or trainer.backend.type=local.",
        )
    if not config.model.meta_init:
        yield Problem(
            "model.meta_init",
            "a rank has memory only for its own share, so the model is always built on the meta "
            "device first.",
            "Set it to true.",
        )


def _one_process_only(config: RunConfig) -> Iterator[Problem]:
    if config.trainer.on_oom == "halve" and "on_oom" in config.trainer.model_fields_set:
        yield Problem(
            "trainer.on_oom",
            "if a rank runs out of memory, the others wait for it, so the step cannot be retried.",
            "Remove it: then the run halts and reports which settings would help.",
        )
    if config.observe.profiler is not None:
        yield Problem(
            "observe.profiler",
            "the profiler traces only the main process, and the ranks are other processes.",
            "Remove it, or profile with cluster.type=in_process and trainer.backend.type=local.",
        )
    samples = config.is_rl and not (config.debug and config.debug.mode == "train_only")
    if samples and config.engine.shares_weights:
        yield Problem(
            "engine.type",
            "the native engine would share the trainer's weights, and these are sharded over "
            "ranks.",
            "Set engine.own_process=true, or engine.type=vllm.",
        )
