"""What `mutants.py` breaks: one place each, the mistakes that are made in such code."""

from __future__ import annotations

from tests.campaigns.mutants import Mutant

_HOST = "ops_src/collectives/host"
_HOSTS = "ops_src/collectives/hosts"
_LAUNCHER = "ms_kungfu/launcher"

# fmt: off
_CPP = [
    # ---- ranks of one host
    Mutant(
        "staging-buffer-is-not-marked-in-use", f"{_HOST}/staging_buffers.cc",
        "compare_exchange_weak(used, used | bit,", "compare_exchange_weak(used, used,",
        ("cpp:Names.AnyNumberOfLargeOperationsMayBeInFlight", "cpp:PinnedBuffers.*"),
    ),
    Mutant(
        "staging-buffer-is-bound-by-a-store", f"{_HOST}/staging_buffers.cc",
        "if (word.compare_exchange_strong(seen, bound, std::memory_order_acq_rel, std::memory_order_acquire)) {",
        "if (word.store(bound); true) {",
        ("cpp:Names.*", "cpp:Recovery.*"),
    ),
    Mutant(
        "staging-buffer-is-given-back-too-early", f"{_HOST}/staging_buffers.cc",
        "std::memory_order_acq_rel) + 1 < members) return;", "std::memory_order_acq_rel) + 2 < members) return;",
        ("cpp:Names.*", "cpp:PinnedBuffers.*", "cpp:AllReduce.*"),
    ),
    Mutant(
        "failed-staging-buffer-keeps-its-counters", f"{_HOST}/staging_buffers.cc",
        "  if (failed) {\n", "  if (false) {\n",
        ("cpp:Mismatch.*", "cpp:WithoutOne.*", "cpp:Cluster.AMismatch*"),
    ),
    Mutant(
        "staging-buffer-is-reused-too-early", f"{_HOST}/exchange.cc",
        "if (chunk < shm::kBuffers) return;", "return;", ("cpp:AllReduce.*", "cpp:Recovery.*"),
    ),
    Mutant(
        "split-leaves-the-tail-out", f"{_HOST}/exchange.cc",
        "(bytes / num + shm::kLine) / shm::kLine * shm::kLine", "bytes / num / shm::kLine * shm::kLine",
        ("cpp:AllReduce.*",),
    ),
    Mutant(
        "signatures-are-not-compared", f"{_HOST}/exchange.cc",
        "equal = equal && mailbox.signature == flight.signature && (", "equal = equal && (", ("cpp:Mismatch.*",),
    ),
    Mutant(
        "weights-of-all-are-one", f"{_HOST}/exchange.cc",
        "weights.push_back(flight.Brings(r) ? static_cast<uint32_t>(mailbox.count >> kWeightShift) : 0);",
        "weights.push_back(flight.Brings(r) ? 1 : 0);", ("cpp:Weights.*",),
    ),
    Mutant(
        "complaint-is-not-waited-for", f"{_HOST}/exchange.cc",
        "    waiting_.Await(theirs.sequence, flight.sequence, r, flight);\n", "",
        ("cpp:Mismatch.*", "cpp:WithoutOne.*"),
    ),
    Mutant(
        "unbound-staging-buffer-counts-as-unfinished", f"{_HOST}/failure_rules.cc",
        "!flight.Brings(rank) || !flight.bound) return true;", "!flight.Brings(rank)) return true;",
        ("cpp:Recovery.*", "cpp:WithoutOne.*"),
    ),
    Mutant(
        "difference-doesn't-need-a-complaint", f"{_HOST}/failure_rules.cc",
        "  if (flight.differs) return false;\n", "", ("cpp:WithoutOne.AMismatch*",),
    ),
    Mutant(
        "split-is-finished-when-it-is-staged", f"{_HOST}/failure_rules.cc",
        "return flight.splits ? segment", "return false ? segment", ("cpp:Recovery.*", "cpp:WithoutOne.*"),
    ),
    Mutant(
        "leaving-is-always-a-loss", f"{_HOST}/failure_rules.cc",
        "== RankState::kLeft && !counter.Reached(target)) {", "== RankState::kLeft) {", ("cpp:Leaving.*",),
    ),
    Mutant(
        "deadline-never-passes", f"{_HOST}/waiting.cc",
        "const bool passed = flight.deadline->Passed(now);", "const bool passed = false;", ("cpp:Deadline.*",),
    ),
    Mutant(
        "busy-rank-doesn't-stop-the-deadline", f"{_HOST}/waiting.cc",
        "  if (busy) flight.deadline->CountFrom(now);\n", "",
        ("cpp:Deadline.CountsFromTheEndOfWhatARankDoesAlone",),
    ),
    Mutant(
        "held-deadlines-run", f"{_HOST}/waiting.cc",
        "  if (self_.control.deadlines_held()) flight.deadline->LeaveOut(now);\n", "",
        ("cpp:ClusterEnds.NoDeadlineRunsWhileTheyAreHeld", "cpp:Deadline.*"),
    ),
    Mutant(
        "retired-channel-is-used-again", f"{_HOST}/channel_table.cc",
        "if (!bound && free == shm::kChannels && !IsRetired(segment_.header(), i)) free = i;",
        "if (!bound && free == shm::kChannels) free = i;", ("cpp:WithoutOne.*", "cpp:Recovery.*"),
    ),
    Mutant(
        "table-lock-is-a-store", f"{_HOST}/channel_table.cc",
        "header.table_lock.compare_exchange_strong(seen, taken, std::memory_order_seq_cst)) {",
        "(header.table_lock.store(taken), true)) {", ("cpp:WithoutOne.TwoNeverHaveTheTable",),
    ),
    Mutant(
        "new-channel-is-not-declared", f"{_HOST}/channel_table.cc",
        "    lock.Declare(index);\n", "", ("cpp:WithoutOne.*", "cpp:Recovery.*"),
    ),
    Mutant(
        "failed-rank-ends-the-communicator", "ops_src/transport/shm/segment_control_block.cc",
        "(static_cast<uint32_t>(GaveUp::kForAll)) || HasFailed(r)) continue;",
        "(static_cast<uint32_t>(GaveUp::kForAll))) continue;", ("cpp:WithoutOne.*",),
    ),
    Mutant(
        "failure-wakes-no-rank", "ops_src/transport/shm/segment_control_block.cc",
        "/*used_only=*/true, [](Counter& word) { word.Stir(); });", "/*used_only=*/true, [](Counter&) {});",
        ("cpp:WithoutOne.SleepingRanksAreWoken",),
    ),
    # ---- between hosts
    Mutant(
        "doubling-gives-the-second-of-a-pair-its-part", f"{_HOSTS}/doubling.cc",
        "tag.Step(kResult), sum, bytes));", "tag.Step(kResult), in, bytes));", ("cpp:HostsAllReduce.*",),
    ),
    Mutant(
        "ring-leaves-the-remainder-out", f"{_HOSTS}/ring.cc",
        "segment * (count_ / hosts_) + std::min(segment, count_ % hosts_);", "segment * (count_ / hosts_);",
        ("cpp:HostsAllReduce.*",),
    ),
    Mutant(
        "ring-receives-over-what-it-adds", f"{_HOSTS}/ring.cc",
        "const void* const sources[] = {window + k % kWindow * kPieceBytes,",
        "const void* const sources[] = {window + (k + 1) % kWindow * kPieceBytes,", ("cpp:HostsAllReduce.*",),
    ),
    Mutant(
        "trees-leave-the-remainder-out", f"{_HOSTS}/trees.cc",
        "begin + count / trees + (t < count % trees ? 1 : 0);", "begin + count / trees;", ("cpp:HostsAllReduce.*",),
    ),
    Mutant(
        "broadcast-takes-host-0-for-its-root", f"{_HOSTS}/copies.cc",
        "BranchOf(shape, n, root, group.place());", "BranchOf(shape, n, 0, group.place());", ("cpp:HostsBroadcast.*",),
    ),
    Mutant(
        "all-gather-forgets-its-own-row", f"{_HOSTS}/copies.cc",
        "  if (own != row && bytes > 0) std::memcpy(own, row, bytes);\n", "", ("cpp:HostsAllGather.*",),
    ),
    Mutant(
        "meter-changes-its-mind-at-each-disturbance", f"{_HOSTS}/meter.cc",
        "  if (told != 0 && median * 2 <= uint64_t{told} * 3 && median * 3 >= uint64_t{told} * 2) return false;\n", "",
        ("cpp:MeterTest.*",),
    ),
    Mutant(
        "broadcast-doesn't-fail-with-its-root", f"{_HOSTS}/transport_operation.cc",
        "    if (!source || headers[h].none == 0) continue;\n    commit.status = KF_PEER_LOST;",
        "    if (true) continue;\n    commit.status = KF_PEER_LOST;",
        ("cpp:ClusterFailures.BroadcastFromAFailedRankFailsAtAllAndBreaksNothing",),
    ),
    Mutant(
        "older-epoch-is-heard", "ops_src/transport/tcp/frames.cc",
        "  if (header.epoch < epoch_) return;\n", "", ("cpp:Stranger.*", "cpp:Mesh.*"),
    ),
    Mutant(
        "host-may-send-any-length-unasked", "ops_src/transport/tcp/frames.cc",
        "if (header.length != header.total || header.total > kUnaskedBytes) {",
        "if (header.length != header.total) {", ("cpp:Stranger.*", "cpp:Mesh.*"),
    ),
    Mutant(
        "credit-of-what-is-dropped-is-lost", "ops_src/transport/tcp/frames.cc",
        "    if (!inbound.asked) Take(host, header.total);\n  } else {", "  } else {", ("cpp:Mesh.*",),
    ),
    Mutant(
        "tls-shows-certificates-to-anybody", "ops_src/transport/tcp/tls.cc",
        "api.SetVerify(context_, openssl::kVerifyPeer, nullptr);", "api.SetVerify(context_, 0, nullptr);",
        ("cpp:Tls.*",),
    ),
    Mutant(
        "tls-takes-any-name", "ops_src/transport/tcp/tls.cc", "  if (!name.empty()) {\n", "  if (false) {\n",
        ("cpp:Tls.*",),
    ),
    # ---- model store, background, shards
    Mutant(
        "torn-model-is-given", "ops_src/store/model_store.cc",
        "if (record.begun[version % 2].load(std::memory_order_acquire) == version) return version;", "return version;",
        ("cpp:ModelStore.*",),
    ),
    Mutant(
        "model-is-saved-over-the-latest", "ops_src/store/model_store.cc",
        "char* at = own.buffers[version % 2]->data();", "char* at = own.buffers[(version + 1) % 2]->data();",
        ("cpp:ModelStore.*",),
    ),
    Mutant(
        "model-is-read-without-its-tail", "ops_src/store/model_store.cc",
        "    std::memcpy(to, &word, bytes);\n", "", ("cpp:ModelStore.*",),
    ),
    Mutant(
        "model-of-an-older-cluster-is-taken", "ops_src/store/peer_store.cc",
        "begun_in_ == here.cluster_version && source_.version != 0", "begun_in_ && source_.version != 0",
        ("cpp:Exchange.*",),
    ),
    Mutant(
        "background-writes-outputs-at-once", "ops_src/runtime/background.cc",
        "pending->to_outputs = pending->waited_for;", "pending->to_outputs = true;", ("cpp:Background.*",),
    ),
    Mutant(
        "ticket-outlives-its-cluster", "ops_src/runtime/background.cc",
        "if (ran_on == nullptr || (communicator != nullptr && communicator != ran_on)) {", "if (ran_on == nullptr) {",
        ("cpp:Background.*",),
    ),
    Mutant(
        "lost-shards-go-to-no-rank", "ops_src/shards/partition.cc",
        "next < lost.size() * place / of_.size(); next++", "next < lost.size() * (place - 1) / of_.size(); next++",
        ("cpp:Shards*",),
    ),
    Mutant(
        "shards-with-other-speeds-are-assigned-alike", "ops_src/shards/partition.cc",
        "weights.empty() ? even : weights;", "even;", ("cpp:ShardsPartition.*",),
    ),
    Mutant(
        "last-shard-counts-in-full", "ops_src/shards/step.cc",
        "shard_ + 1 == plan_.shards && !is_norm ? plan_.last : 1;", "1;", ("cpp:ShardsStep.*",),
    ),
    Mutant(
        "shard-reads-the-one-before's-statistics", "ops_src/shards/step.cc",
        "  inside_.store(Inside::kShard, std::memory_order_relaxed);\n  RestoreStatistics();\n",
        "  inside_.store(Inside::kShard, std::memory_order_relaxed);\n", ("cpp:Shards*",),
    ),
    Mutant(
        "norm-forgets-the-tail", "ops_src/monitoring/gradient_norms.cc",
        "    for (; i < n; i++) lanes[0] += x[at + i] * x[at + i];\n", "", ("cpp:GradientNormsTest.*",),
    ),
    # ---- kernels
    Mutant(
        "kernel-takes-min-for-max", "kernels/common/groups.cc",
        '{"sum", "mean", "min", "max", "prod"}', '{"sum", "mean", "max", "min", "prod"}',
        ("tests/mindspore/test_primitives_and_optimizers.py::test_collectives_agree_with_numpy",),
    ),
]

_PYTHON = [
    # ---- what the launcher decides
    Mutant(
        "smallest-size-is-too-small", f"{_LAUNCHER}/state/policy.py",
        "if state.members - terminated < state.min_size:", "if state.members - terminated <= state.min_size:",
        ("tests/unit/test_launcher_policy.py",),
    ),
    Mutant(
        "shells-status-counts-as-a-programs", f"{_LAUNCHER}/state/policy.py",
        "0 < code <= 128 or code > 128 + signal.SIGRTMAX", "code > 0", ("tests/unit/test_launcher_policy.py",),
    ),
    Mutant(
        "late-joiner-is-replaced-once-more", f"{_LAUNCHER}/state/policy.py",
        "if event.late >= MOST_LATE:", "if event.late > MOST_LATE:", ("tests/unit/test_launcher_policy.py",),
    ),
    Mutant(
        "revision-counts-on-from-its-own-version", f"{_LAUNCHER}/state/policy.py",
        "replace(newest.following(keep), version=last_version + 1)", "newest.following(keep)",
        ("tests/unit/test_launcher_policy.py",),
    ),
    Mutant(
        "restarts-are-counted-for-ever", f"{_LAUNCHER}/state/coordinator.py",
        " if now - when < _RESTART_WINDOW_S]", "]", ("tests/unit/test_launcher_coordinator.py",),
    ),
    Mutant(
        "last-members-may-leave", f"{_LAUNCHER}/state/coordinator.py",
        "return set() if leaving.issuperset(living) else leaving", "return leaving",
        ("tests/unit/test_launcher_coordinator.py",),
    ),
    Mutant(
        "place-is-filled-twice", f"{_LAUNCHER}/state/coordinator.py",
        "        del self.vacant[: sum(peer in living for peer in joining)]\n", "",
        ("tests/unit/test_launcher_coordinator.py",),
    ),
    Mutant(
        "write-from-outside-becomes-the-launchers", f"{_LAUNCHER}/controller/revisions.py",
        "self.on_cluster(replace(written, writer=found.writer))", "self.on_cluster(written)",
        ("tests/unit/test_launcher_coordinator.py",),
    ),
    Mutant(
        "version-is-redefined", f"{_LAUNCHER}/state/versions.py",
        "if newest is not None and cluster.version <= newest.version:",
        "if newest is not None and cluster.version < newest.version:", ("tests/unit/test_cluster_versions.py",),
    ),
    Mutant(
        "excluded-process-belongs", f"{_LAUNCHER}/state/versions.py",
        "            and not any(incarnation <= v <= version for v in self.excluded.get(peer, []))\n", "",
        ("tests/unit/test_cluster_versions.py",),
    ),
    Mutant(
        "version-over-a-lost-host-comes-true", f"{_LAUNCHER}/state/versions.py",
        "        if self.lost_host_of(cluster) is not None:\n            return False\n", "",
        ("tests/unit/test_cluster_versions.py",),
    ),
    Mutant(
        "version-without-the-state-comes-true", f"{_LAUNCHER}/state/versions.py",
        "return self.committed is None or any(self._is_member(peer) for peer in cluster.workers)", "return True",
        ("tests/unit/test_cluster_versions.py",),
    ),
    Mutant(
        "late-end-is-of-the-successor", f"{_LAUNCHER}/state/versions.py",
        "if newest is not None and not self.is_out(peer, incarnation):", "if newest is not None:",
        ("tests/unit/test_cluster_versions.py",),
    ),
    Mutant(
        "refused-standby-is-not-started-again", f"{_LAUNCHER}/controller/prestarted.py",
        "self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self.keep)", "pass",
        ("tests/unit/test_prestarting.py",),
    ),
    Mutant(
        "starting-standby-needs-no-memory", f"{_LAUNCHER}/controller/prestarted.py",
        "2 + starting + i", "2 + i", ("tests/unit/test_prestarting.py",),
    ),
    Mutant(
        "kept-standby-ends-with-the-program", f"{_LAUNCHER}/controller/prestarted.py",
        "self.processes.standbys()[self._kept :]", "self.processes.standbys()", ("tests/unit/test_prestarting.py",),
    ),
    # ---- hosts, leases, the lease
    Mutant(
        "detached-connections-stay-open", f"{_LAUNCHER}/agent/transports.py",
        "                close_all(fd for with_one in connections for fd in with_one)\n", "",
        ("tests/multiprocess/test_hosts_control.py",),
    ),
    Mutant(
        "host-counts-before-it-is-confirmed", f"{_LAUNCHER}/controller/gathering.py",
        "while missing := self._missing_or_unconfirmed():", "while missing := self.missing():",
        ("tests/unit/test_gathering.py",),
    ),
    Mutant(
        "host-does-not-wait-for-a-full-store", f"{_LAUNCHER}/agent/succession.py",
        "            raise controller.store_error.with_traceback(None)", "            pass",
        ("tests/unit/test_next_controller.py",),
    ),
    Mutant(
        "lost-host-gets-workers", f"{_LAUNCHER}/state/hosts.py",
        "if self.state_of(host.name) is NodeState.ACTIVE)", "if self.state_of(host.name) is not NodeState.DRAINING)",
        ("tests/unit/test_launcher_hosts.py", "tests/unit/test_launcher_coordinator.py"),
    ),
    Mutant(
        "state-of-no-member-is-kept", f"{_LAUNCHER}/state/hosts.py",
        "if members and not set(cluster.workers) & set(members):", "if not members:",
        ("tests/unit/test_launcher_hosts.py",),
    ),
    Mutant(
        "leases-run-through-a-pause", f"{_LAUNCHER}/state/lost_hosts.py",
        "self._not_before = now + self._after_pause_s", "self._not_before = now", ("tests/unit/test_lost_hosts.py",),
    ),
    Mutant(
        "host-with-more-workers-goes", f"{_LAUNCHER}/state/lost_hosts.py",
        "sum(workers.get(host, 0) for host in hosts),", "-sum(workers.get(host, 0) for host in hosts),",
        ("tests/unit/test_lost_hosts.py",),
    ),
    Mutant(
        "deep-pause-doesn't-renew-the-lease", f"{_LAUNCHER}/controller/etcd_lease.py",
        "await asyncio.sleep(min(left_s, _LOOK_S))", "await asyncio.sleep(left_s)", ("tests/unit/test_etcd_lease.py",),
    ),
    Mutant(
        "version-is-told-before-it-is-on-record", f"{_LAUNCHER}/controller/etcd_lease.py",
        "return self._on_record >= version", "return True",
        ("tests/unit/test_etcd_lease.py",),
    ),
    Mutant(
        "host-with-another-mindspore-joins", f"{_LAUNCHER}/registration.py",
        "    if mindspore != own.mindspore:\n", "    if False:\n", ("tests/unit/test_registration.py",),
    ),
    Mutant(
        "seat-is-taken-from-its-holder", "ms_kungfu/cluster_store/leadership_lease.py",
        '        elif seen.holder:\n            raise LeadershipLostError(f"{seen.holder} has the lease")\n', "",
        ("tests/unit/test_leadership_lease.py",),
    ),
    Mutant(
        "seat-is-known-by-its-mark-alone", "ms_kungfu/cluster_store/leadership_lease.py",
        "(found.revision == self._held.revision or mark in self._tried)", "bool(mark)",
        ("tests/unit/test_leadership_lease.py",),
    ),
    Mutant(
        "cluster-is-written-without-the-seat", "ms_kungfu/cluster_store/etcd.py",
        "        if self.led_since is not None:\n", "        if False:\n", ("tests/unit/test_etcd_store.py",),
    ),
    Mutant(
        "own-write-isn't-known-again", "ms_kungfu/cluster_store/etcd.py",
        "        if kept.mark == mark:\n            return None\n", "", ("tests/unit/test_etcd_store.py",),
    ),
    Mutant(
        "stale-write-wins", "ms_kungfu/cluster_store/store.py",
        "elif held is not None and wanted.version != last_version + 1:",
        "elif held is not None and wanted.version < last_version:", ("tests/unit/test_config_store.py",),
    ),
    # ---- authentication
    Mutant(
        "deleting-needs-no-secret", "ms_kungfu/config_server/server.py",
        'self._server.refuse_stranger(request, "writing")\n        if refused is not None:',
        'self._server.refuse_stranger(request, "writing")\n'
        '        if refused is not None and request.method != "DELETE":',
        ("tests/multiprocess/test_config_server.py",),
    ),
    Mutant(
        "status-needs-no-secret", "ms_kungfu/config_server/server.py",
        'refuse_stranger(request, "the job\'s status")\n        if refused is not None:',
        'refuse_stranger(request, "the job\'s status")\n        if False:',
        ("tests/multiprocess/test_status.py::test_from_elsewhere_the_secret_shows_it_and_nothing_else_does",),
    ),
    Mutant(
        "any-secret-will-do", "ms_kungfu/config_server/server.py",
        'if not hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), self.secret.encode()):',
        "if not token.strip():", ("tests/multiprocess/test_config_server.py",),
    ),
    Mutant(
        "dashboard-takes-any-token", f"{_LAUNCHER}/dashboard/requests.py",
        'if scheme.lower() != "bearer" or not is_right:', 'if scheme.lower() != "bearer":',
        ("tests/unit/test_dashboard.py",),
    ),
    Mutant(
        "dashboard-serves-any-host", f"{_LAUNCHER}/dashboard/requests.py",
        "    if is_loopback(own):\n        return False", "    if is_loopback(own):\n        return True",
        ("tests/unit/test_dashboard.py",),
    ),
    Mutant(
        "dashboard-obeys-another-site", f"{_LAUNCHER}/dashboard/requests.py",
        'if origin is not None and origin.lower() != f"http://{host}".lower():', "if origin is None:",
        ("tests/unit/test_dashboard.py",),
    ),
    Mutant(
        "slow-client-of-the-dashboard-is-kept", f"{_LAUNCHER}/dashboard/server.py",
        "await asyncio.wait_for(write(), _WRITE_S)", "await write()",
        ("tests/unit/test_dashboard.py",),
    ),
    Mutant(
        "thinned-history-is-read-from-the-start", f"{_LAUNCHER}/dashboard/history.py",
        "return self._thinned <= number <= self.last", "return number <= self.last",
        ("tests/unit/test_dashboard.py",),
    ),
    Mutant(
        "others-may-read-the-secret", "ms_kungfu/config_server/secret_file.py",
        "if info.st_uid == os.geteuid() and not info.st_mode & 0o077:", "if info.st_uid == os.geteuid():",
        ("tests/unit/test_secret_file.py",),
    ),
    Mutant(
        "others-may-write-beside-the-secret", "ms_kungfu/config_server/secret_file.py",
        "if info.st_uid != os.geteuid() or info.st_mode & 0o077:", "if info.st_uid != os.geteuid():",
        ("tests/unit/test_secret_file.py",),
    ),
    Mutant(
        "worker-trusts-any-broker", "ms_kungfu/broker_protocol.py",
        'if not is_proof(_heard(connection, "proof").get("proof"), secret, "broker", theirs, nonce):',
        'if _heard(connection, "proof") is None:',
        ("tests/multiprocess/test_broker.py",),
    ),
    Mutant(
        "broker-trusts-any-worker", f"{_LAUNCHER}/handshake.py",
        "not is_proof(proof.proof, secret, roles.caller, challenge, nonce):", "False:",
        ("tests/multiprocess/test_broker.py",),
    ),
    Mutant(
        "65-bits-are-64", "ms_kungfu/_decoding.py",
        "<= number < 1 << 64:", "<= number <= 1 << 64:", ("tests/unit/test_decoding.py",),
    ),
    Mutant(
        "infinity-is-a-number", "ms_kungfu/_decoding.py",
        "    if math.isinf(number):\n", "    if False:\n", ("tests/unit/test_decoding.py",),
    ),
    Mutant(
        "nesting-in-texts-counts", "ms_kungfu/_decoding.py",
        """r'"[^"\\\\]*(?:\\\\.[^"\\\\]*)*"?|[""", """r'[""", ("tests/unit/test_decoding.py",),
    ),
    # ---- data
    Mutant(
        "block-begins-behind-the-remainder", "ms_kungfu/dataset/sharding.py",
        "first = place * each + min(place, extra)", "first = place * each", ("tests/unit/test_sharding.py",),
    ),
    Mutant(
        "dead-workers-share-is-lost", "ms_kungfu/dataset/sharding.py",
        "                back += self.share(rank)\n", "                pass\n", ("tests/unit/test_sharding.py",),
    ),
    Mutant(
        "full-steps-are-one-more", "ms_kungfu/dataset/sharding.py",
        "// (2 * global_batch) + 1)", "// (2 * global_batch) + 2)", ("tests/unit/test_sharding.py",),
    ),
    Mutant(
        "commit-counts-one-step", "ms_kungfu/dataset/sharding.py",
        "self.steps += len(steps)", "self.steps += 1", ("tests/unit/test_sharding.py",),
    ),
    Mutant(
        "torn-line-stays-in-the-ledger", "ms_kungfu/dataset/ledger.py",
        "os.ftruncate(self._file.fileno(), self._whole)", "pass", ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "ledger-isn't-synced", "ms_kungfu/dataset/ledger.py",
        "            os.fsync(self._file.fileno())\n", "", ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "lines-aren't-chained", "ms_kungfu/dataset/ledger.py",
        "            self._crc = crc\n", "", ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "audit-takes-any-delivery", "ms_kungfu/dataset/audit.py",
        "return np.array_equal(sharding.positions(given), sharding.positions(share))", "return True",
        ("tests/unit/test_ledger.py",),
    ),
    Mutant(
        "audit-misses-lines", "ms_kungfu/dataset/audit.py",
        "        if not follows or (ended and ends):\n", "        if False:\n", ("tests/unit/test_ledger.py",),
    ),
    # ---- training
    Mutant(
        "checkpoint-is-renamed-before-it-is-synced", "ms_kungfu/elastic/checkpoint.py",
        "            _flush(unfinished)\n            os.replace(unfinished, path)\n",
        "            os.replace(unfinished, path)\n            _flush(path)\n",
        ("tests/mindspore/elastic/test_checkpoint.py::test_checkpoint_is_on_the_disk_before_it_has_its_name",),
    ),
    Mutant(
        "one-checkpoint-too-few-is-kept", "ms_kungfu/elastic/checkpoint.py",
        "self.paths()[: -self._keep]", "self.paths()[: 1 - self._keep]",
        ("tests/mindspore/elastic/test_checkpoint.py::test_the_last_ones_are_kept",),
    ),
    Mutant(
        "older-job-writes-on", "ms_kungfu/elastic/checkpoint.py",
        "if (newest := self._newest_job()) > self.job:", "if (newest := self._newest_job()) > self.job + 1:",
        ("tests/mindspore/elastic/test_checkpoint.py::test_checkpoint_of_an_abandoned_job_does_not_count",),
    ),
    Mutant(
        "state-comes-from-the-highest-rank", "ms_kungfu/elastic/state_transfer.py",
        "return preferred if preferred in roots else roots[0]", "return preferred if preferred in roots else roots[-1]",
        ("tests/mindspore/elastic/test_state.py",),
    ),
    Mutant(
        "joiner-is-asked-for-the-state", "ms_kungfu/elastic/state_transfer.py",
        "roots = [rank for rank, answer in answers.items() if answer]", "roots = list(answers)",
        ("tests/mindspore/elastic/test_state.py",),
    ),
    Mutant(
        "mean-counts-joiners", "ms_kungfu/elastic/state_transfer.py",
        "np.split(total[:-1] / total[-1],", "np.split(total[:-1] / runtime.current_cluster_size(),",
        ("tests/mindspore/elastic/test_state.py",),
    ),
    Mutant(
        "broken-transfer-leaves-a-mixture", "ms_kungfu/elastic/state_transfer.py",
        "        for tensor, values in zip(tensors, before):\n            assign(tensor, values)\n        raise\n",
        "        raise\n", ("tests/mindspore/elastic/test_state.py",),
    ),
    Mutant(
        "pair-takes-the-other-model", "ms_kungfu/optimizers/pair.py",
        "ops.partial(move_toward, 0.5)", "ops.partial(move_toward, 1.0)",
        ("tests/mindspore/test_updates.py::test_pair_averaging_takes_half_of_each_model",),
    ),
    Mutant(
        "centre-has-no-momentum", "ms_kungfu/optimizers/synchronous.py",
        "ops.select(steady, mean + momentum * velocity, mean)", "ops.select(steady, mean + velocity, mean)",
        ("tests/mindspore/test_updates.py::test_central_model_is_carried_on_by_its_momentum_when_steady",),
    ),
    Mutant(
        "noise-scale-takes-the-mean-batch", "ms_kungfu/monitoring/noise_scale.py",
        "small = sum(1 / b for b in batches) / len(batches)", "small = len(batches) / sum(batches)",
        ("tests/unit/test_noise_scale.py",),
    ),
    Mutant(
        "stopped-launcher-finds-workers-hanging", f"{_LAUNCHER}/state/hangs.py",
        "min(now - self._last_look, _MAX_GAP_S)", "now - self._last_look", ("tests/unit/test_hang_watch.py",),
    ),
    Mutant(
        "fusion-group-is-over-its-limit", "ms_kungfu/fusion/plan.py",
        "if nbytes and nbytes + gradient.nbytes > mode.limit_mb * MB:", "if nbytes > mode.limit_mb * MB:",
        ("tests/unit/test_fusion_plan.py",),
    ),
    Mutant(
        "msrun-ranks-are-dealt-in-turn", "ms_kungfu/msrun/world.py",
        "players[rank * len(players) // size()]", "players[rank % len(players)]", ("tests/unit/test_world.py",),
    ),
    Mutant(
        "pause-counts-in-the-run-time", "ms_kungfu/_run_time.py",
        "self._paused += max(0.0, now - self._read - MOST_GAP_S)", "self._paused += 0.0",
        ("tests/unit/test_run_time.py",),
    ),
]

# What a review asked for by name.
_REVIEWED = [
    Mutant(
        "finish-in-another-epoch", f"{_HOSTS}/transport_operation.cc",
        "  if (epoch_ != epoch) return false;\n", "", ("cpp:HostLoss.*",),
    ),
    Mutant(
        "outcome-of-another-epochs-headers", f"{_HOSTS}/transport_operation.cc",
        '    if (Epoch() != place.epoch) throw Error(KF_STALE, "the hosts go on in a new epoch");\n', "",
        ("cpp:HostLoss.*",),
    ),
    Mutant(
        "acknowledge-in-the-first-epoch-alone", f"{_HOSTS}/transport_operation.cc",
        "places_.hosts() > 2) Acknowledge(", "places_.hosts() > 2 && place.epoch == kFirstEpoch) Acknowledge(",
        ("cpp:HostLoss.*",),
    ),
    Mutant(
        "ending-without-waiting-operations", f"{_HOSTS}/transport.cc",
        "name->begun + name->waiting.size(), name->given", "name->begun, name->given", ("cpp:HostLoss.*",),
    ),
    Mutant(
        "tls-never-updates-its-key", "ops_src/transport/tcp/tls.cc",
        "    if (api.UpdateKey(session_, openssl::kUpdateOneWay) != 1) return false;\n", "", ("cpp:Tls.*",),
    ),
    Mutant(
        "noted-choice-isn't-checked-again", f"{_LAUNCHER}/controller/broker.py",
        "        if not self.versions.may_be_committed(version):\n", "        if False:\n",
        ("tests/multiprocess/test_broker.py",),
    ),
    Mutant(
        "checkpoint-isn't-synced", "ms_kungfu/elastic/checkpoint.py", "            _flush(unfinished)\n", "",
        ("tests/mindspore/elastic/test_checkpoint.py::test_checkpoint_is_on_the_disk_before_it_has_its_name",),
    ),
    Mutant(
        "checkpoints-name-isn't-synced", "ms_kungfu/elastic/checkpoint.py", "            _flush(self.folder)\n", "",
        ("tests/mindspore/elastic/test_checkpoint.py::test_checkpoint_is_on_the_disk_before_it_has_its_name",),
    ),
    Mutant(
        "exclusions-are-kept-for-ever", f"{_LAUNCHER}/state/versions.py",
        "*(v for v in out if v >= oldest)]", "*out]", ("tests/unit/test_cluster_versions.py",),
    ),
]

# fmt: on

MUTANTS = [*_CPP, *_PYTHON, *_REVIEWED]
