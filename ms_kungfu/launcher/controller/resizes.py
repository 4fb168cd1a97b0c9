"""How the controller handles newer desired clusters.

A desired cluster comes from a client, from the program, or from a revision by the controller itself.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from typing import Callable

from ms_kungfu.cluster import WRITER_WHO_EVICTS, Cluster
from ms_kungfu.launcher.controller.context import JobContext
from ms_kungfu.launcher.controller.failures import WorkerFailures
from ms_kungfu.launcher.controller.nodes import JobNodes
from ms_kungfu.launcher.controller.revisions import StoreWatcher, in_loop
from ms_kungfu.launcher.state import policy
from ms_kungfu.launcher.state.hosts import HostError
from ms_kungfu.launcher.state.policy import Standing

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Resizes:
    """Implements `revisions.RevisionOwner`."""

    job: JobContext
    nodes: JobNodes
    failures: WorkerFailures
    _early: Cluster | None = None  # the newest cluster that was requested before the job had begun

    # ---- what the controller writes ----

    def next_revision(self) -> Cluster | None:
        job = self.job
        if job.course.is_over or job.coordinator.finishing:
            return None
        job.workers.end_kept_leavers()
        if not self.nodes.has_enough_who_stay():
            return None
        processes, server = job.workers.processes, job.begun.server
        try:
            return job.coordinator.revision(
                -1 if server is None else server.store.version,
                job.workers.broker.versions.ended_in(job.coordinator.newest),
                processes.living_members(),
                processes.taken_ports(),
            )
        except ValueError as error:
            self.drop_joining(str(error))
            return None

    def drop_joining(self, reason: str) -> None:
        _log.error('resize failed: reason="%s". No new worker is started', reason)
        self.job.coordinator.vacant.clear()

    # ---- what the store has ----

    def on_written(self, cluster: Cluster | None) -> None:
        """Process a write to this process's config server.

        None means that a client has deleted the cluster. The controller then writes the cluster again, because the job
        can't be resized if the store contains no cluster.
        """
        job = self.job
        coordinator, server = job.coordinator, job.begun.server
        if cluster is not None:
            self.on_cluster(cluster)
        elif server is not None and not job.course.is_over and not coordinator.finishing:
            desired = coordinator.newest
            again = replace(desired.following(desired.workers), version=server.store.version + 1)
            _log.warning('cluster restored: version=%d reason="a client deleted it"', again.version)
            with contextlib.suppress(HostError):  # if all workers in the cluster have failed, a revision follows
                server.put(again.to_json(), job.begun.writer)

    def check(self, cluster: Cluster) -> None:
        """Raise HostError if the job can't have the workers of `cluster`, or if a bug prevents the check."""
        try:
            self._check(cluster)
        except HostError:
            raise
        except Exception as error:
            _log.exception("internal error: where=check version=%d", cluster.version)
            raise HostError(f"internal error: {policy.bug(error)}") from error

    def _check(self, cluster: Cluster) -> None:
        job = self.job
        options, coordinator = job.options, job.coordinator
        members, ended = list(coordinator.newest.workers), []
        if job.has_begun:
            # A writer that lists only workers that have just failed didn't know of their failure. In this case,
            # `revised` keeps the training state.
            ended = job.workers.broker.versions.ended_in(coordinator.newest)
            members = [*job.workers.processes.living_members(), *ended]
        going = coordinator.going(members)
        coordinator.hosts.check(cluster, members, ended, going)
        if cluster.size < options.min_size and cluster.writer != job.begun.writer:
            raise HostError(f"size {cluster.size} is less than -min-np {options.min_size}; request more workers")

    def on_cluster(self, cluster: Cluster) -> None:
        """Start the new workers of a newer desired cluster.

        The members adopt the cluster after they have agreed on it.
        """
        job, coordinator = self.job, self.job.coordinator
        if cluster.version <= coordinator.last_version or job.course.is_over:
            return
        if not job.options.watch:
            _log.warning(
                'cluster ignored: version=%d workers=%d reason="the job has no -w"', cluster.version, cluster.size
            )
            return
        if not job.has_begun:
            self._early = cluster
            _log.info(
                "cluster desired: version=%d workers=%d. The job adopts it after it has begun",
                cluster.version, cluster.size,
            )  # fmt: skip
            return
        workers, broker, writer = job.workers, job.workers.broker, job.begun.writer
        coordinator.last_version = cluster.version
        try:
            self.check(cluster)
        except HostError as error:  # a separate config server doesn't know the job's hosts, so it accepts any cluster
            _log.error('cluster rejected: version=%d reason="%s"', cluster.version, error)
            broker.refuse(cluster.version, str(error))
            job.history.desired(cluster, coordinator.newest, writer, refused=str(error))
            job.revisions.write()
            return
        _log.info("cluster desired: version=%d workers=%d", cluster.version, cluster.size)
        job.history.desired(cluster, coordinator.newest, writer)
        workers.warn_of_crowd(cluster)
        living, joining = workers.processes.living_members(), workers.processes.of_standing(Standing.JOINING)
        if cluster.writer == WRITER_WHO_EVICTS:
            broker.leaves.note_evicted(set(coordinator.newest.workers) - set(cluster.workers))
        job.course.resizes()
        broker.admit(cluster)
        ended = broker.versions.ended_in(cluster)
        replacing = coordinator.accept(cluster, cluster.writer == writer, ended, living)
        self.failures.end_pause_if_filled()
        workers.ending.dismiss_unneeded(joining)
        if ended or coordinator.hosts.leaving or coordinator.has_other_hosts(cluster):
            job.revisions.write()
        workers.starting.missing(cluster, replacing)

    def watch(self) -> Callable[[], None]:
        """Follow the store. Return a function that stops following it."""
        job = self.job
        if not job.options.watch or job.begun.store is None:
            return lambda: None
        watcher = self.failures.watcher = StoreWatcher(
            job.begun.store,
            lambda: replace(job.coordinator.newest, version=job.coordinator.last_version),
            in_loop(self.on_cluster),
            job.machine,
            on_outage=in_loop(job.events.store_outage),
            puts_back=not job.leadership.moves,
        )
        return watcher.stop

    def begun(self) -> None:
        """Record that the first version is committed."""
        if self._early is not None:
            self.on_cluster(self._early)
