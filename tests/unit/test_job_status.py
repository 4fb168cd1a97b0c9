"""What a job tells of itself: the reasons of its changes, the table, and sockets of launchers that are gone."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from ms_kungfu.cluster import WRITER_WHO_EVICTS, Cluster, PeerID, writer_of_workers
from ms_kungfu.cluster_store import LeadershipState
from ms_kungfu.config_server import secret_file
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher import commands, status_command
from ms_kungfu.launcher.agent.job_status import JobStatusAnswer
from ms_kungfu.launcher.agent.leading import OwnController
from ms_kungfu.launcher.cli import main
from ms_kungfu.launcher.controller.history import History
from ms_kungfu.launcher.controller.status import describe
from ms_kungfu.launcher.state.hosts import Host, Hosts
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot
from ms_kungfu.launcher.state.outline import outline
from ms_kungfu.launcher.state.policy import Standing
from ms_kungfu.launcher.state.states import JobState, WorkerState
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.status_command import as_text
from ms_kungfu.launcher.status_socket import StatusServer, jobs_of_this_user, never_raises
from ms_kungfu.launcher.wire.documents import Change

JOB = "a1b2"


def cluster(version, size, writer=""):
    return Cluster(tuple(PeerID("h", 10000 + i) for i in range(size)), (), version, writer)


def test_each_change_has_its_own_reasons():
    now = iter(range(100))
    history = History(lambda: next(now))
    history.begun(cluster(0, 2))
    history.desired(cluster(1, 4, writer_of_workers(JOB)), cluster(0, 2), JOB)
    history.committed(cluster(1, 4), 100)
    history.note("worker 3 died")
    history.note("worker 2 died")
    history.desired(cluster(2, 5, "x"), cluster(1, 4), JOB)
    history.desired(cluster(3, 3, JOB), cluster(2, 5), JOB)
    history.committed(cluster(3, 3), None)
    history.desired(cluster(4, 9, "x"), cluster(3, 3), JOB, refused="too many")
    history.desired(cluster(5, 2, JOB), cluster(3, 3), JOB)
    told = {change.version: change for change in history.changes}
    assert told[0].chosen_at == told[0].wanted_at == 0
    assert (told[1].chosen_at, told[1].after_step, "schedule" in told[1].why) == (2, 100, True)
    assert (told[2].chosen_at, told[2].why) == (
        None,
        "requested from outside: kungfu-run resize, or another client",
    )
    assert (told[3].why, told[3].size_before, told[3].after_step) == ("worker 3 died; worker 2 died", 4, None)
    assert told[3].chosen_at is not None
    assert told[4].refused == "too many"
    assert told[5].why == "the launcher", "the reasons of version 3 are not those of version 5"
    left = cluster(5, 2).without([PeerID("h", 10000)])
    history.desired(replace(left, version=6, writer=WRITER_WHO_EVICTS), cluster(5, 2), JOB)
    assert history.changes[-1].why == "requested from outside: kungfu-run evict, of h:10000"


def test_resize_request_older_than_the_version_is_dropped():
    """A controller was lost with two workers while another size was wanted."""
    history = History(lambda: 1000.0)
    history.begun(cluster(0, 3))
    history.desired(cluster(1, 3, "x"), cluster(0, 3), JOB, refused="too many")
    history.desired(cluster(2, 1, "x"), cluster(0, 3), JOB)
    history.note("host a is lost: nothing came from it")
    history.note("worker 0 (a:1) was on host a, which was lost: nothing came from it; the others go on without it")
    history.note("worker 1 (a:2) was on host a, which was lost: nothing came from it; the others go on without it")
    history.note("worker 2 was on host b, which was lost: by a reason of its own")
    for _ in range(2):
        history.note("host b controls the job from now on")
    history.desired(cluster(3, 1, JOB), cluster(2, 1), JOB)
    told = as_text(document(changes=[msgspec.to_builtins(change) for change in history.changes]), 0)
    assert "version 2: 3 -> 1 worker, desired; requested from outside" in told
    history.committed(cluster(3, 1), None)
    told = as_text(document(changes=[msgspec.to_builtins(change) for change in history.changes]), 0).splitlines()
    assert "version 1: 3 -> 3 workers, rejected: too many;" in told[-3]
    assert "version 2: 3 -> 1 worker, superseded; requested from outside" in told[-2]
    assert told[-1].endswith(
        "version 3: 3 -> 1 worker; host a is lost: nothing came from it; worker 2 was on host b, which was lost: by a "
        "reason of its own; host b controls the job from now on"
    )
    history.desired(cluster(4, 2, "x"), cluster(3, 1), JOB)
    assert (history.changes[-1].size_before, history.changes[-1].state) == (1, "desired")


def test_hosts_are_those_that_the_job_has_by_now():
    begun_with = Hosts((Host("a", 2), Host("b", 2)), "a")
    options = SimpleNamespace(hosts=begun_with, host=begun_with.own, command=["train"], watch=True)
    nobody = SimpleNamespace(
        broker=SimpleNamespace(versions=SimpleNamespace(current=None)), processes=[], options=options
    )
    nobody.begun = SimpleNamespace(writer=JOB, url=None)
    hosts = begun_with.joined_by(Host("c", 1)).without("b")
    coordinator = SimpleNamespace(hosts=hosts, newest=cluster(1, 2))
    document = outline(options, JobState.STARTING, "", 0.0)
    describe(document, nobody, coordinator, History(lambda: 0))
    assert [tuple(host.values()) for host in document["hosts"]] == [
        ("a", False, "active"),
        ("b", True, "removed"),
        ("c", False, "active"),
    ]


def test_only_the_last_changes_are_kept():
    history = History(lambda: 0)
    for version in range(1, 100):
        history.desired(cluster(version, 2), cluster(version - 1, 1), JOB)
    assert [change.version for change in history.changes] == list(range(80, 100))


def process(**more):
    return {
        "rank": 0, "host": "a", "peer": "a:10000", "pid": 7, "device": None, "step": 12, "step_s": 0.0123,
        "step_ended_s_ago": 3.2, "state": "running", "why": "", **more,
    }  # fmt: skip


def document(**more):
    return {
        "state": "running", "why": "", "launcher": {"host": "a", "pid": 5}, "started_at": 1000.0, "command": ["train"],
        "follows_changes": True, "config_server": None, "hosts": [{"name": "a", "lost": False, "state": "active"}],
        "cluster": {"version": 0, "size": 1}, "wanted": None, "processes": [process()], "changes": [], **more,
    }  # fmt: skip


def test_the_table_has_a_column_for_devices_where_there_are_some():
    plain = as_text(document(), 1003.0).splitlines()
    assert plain[0].endswith("(3 s): train")
    assert plain[-2].split() == ["rank", "host", "name", "pid", "step", "step", "time", "ended", "state"]
    assert plain[-1].split() == ["0", "a", "a:10000", "7", "12", "12.3", "ms", "3", "s", "ago", "running"]
    gpus = document(processes=[process(device="GPU 1"), process(rank=None, peer=None, step=None, step_s=None)])
    rows = as_text(gpus, 1003.0).splitlines()[-3:]
    assert rows[0].split()[4] == "device"
    assert "GPU 1" in rows[1]
    assert rows[2].split()[:5] == ["-", "a", "-", "7", "-"]
    hosts = [{"name": "a", "lost": True, "state": "removed"}, {"name": "b", "lost": False, "state": "active"}]
    assert "hosts: a (removed), b" in as_text(document(hosts=hosts), 0)


def test_rank_of_a_joining_worker_is_shown_with_its_version_if_ambiguous():
    """Rank 1 of three has died, so rank 2 is to be 1, and the joiner 2."""
    joining = process(rank=2, peer="b:10000", why="joining, not ready yet", standing="joining", joined_with=3)
    member = process(rank=2, standing="member", joined_with=0)
    rows = as_text(document(cluster={"version": 2, "size": 3}, processes=[member, joining]), 0).splitlines()[-2:]
    assert rows[0].endswith("ago  running")
    assert rows[1].split()[0] == "2"
    assert rows[1].endswith("running: joining, not ready yet, as rank 2 of version 3")
    assert as_text(document(cluster={"version": 3, "size": 3}, processes=[joining]), 0).endswith(
        "running: joining, not ready yet"
    )


MEMBER, JOINING, LEAVING, STANDBY = Standing.MEMBER, Standing.JOINING, Standing.LEAVING, Standing.STANDBY


@pytest.mark.parametrize(
    ("standing", "more", "ready", "state", "why"),
    [
        (MEMBER, {"state": WorkerState.UNKILLABLE, "killed_because": "hangs"}, True, "unkillable", "it hangs"),
        (MEMBER, {"state": WorkerState.KILLED, "killed_because": "hung"}, True, "killed", "it hung"),
        (MEMBER, {"state": WorkerState.DISMISSED}, True, "dismissed", "not needed"),
        (MEMBER, {"state": WorkerState.STARTING, "pid": None}, True, "starting", ""),
        (MEMBER, {"stopped": True}, True, "running", "stopped by a signal"),
        (MEMBER, {"state": WorkerState.FAILING, "gave_up": True}, True, "failing", "can't go on, expected to exit"),
        (MEMBER, {"state": WorkerState.STUCK, "gave_up": True}, True, "stuck", "can't go on, expected to exit"),
        (STANDBY, {"standby": 1}, True, "running", "standby, ready"),
        (STANDBY, {"standby": 2}, True, "running", "standby, not ready yet"),
        (JOINING, {}, True, "running", "joining, ready"),
        (JOINING, {}, False, "running", "joining, not ready yet"),
        (LEAVING, {"state": WorkerState.OVERDUE}, True, "overdue", "has left the cluster, its program still runs"),
        (LEAVING, {}, True, "running", "has left the cluster, its program still runs"),
        (MEMBER, {"peer": PeerID("h", 10007)}, True, "running", "leaves after this step"),
        (MEMBER, {}, True, "running", ""),
        (MEMBER, {}, False, "running", "hasn't joined yet"),
    ],
)
def test_process_state_is_shown_with_what_it_waits_for(standing, more, ready, state, why):
    one = SimpleNamespace(
        **{
            "rank": 0, "host": "h", "peer": PeerID("h", 10000), "pid": 7, "incarnation": 0, "device": None,
            "state": WorkerState.RUNNING, "killed_because": "", "standby": None, "stopped": False, "key": 1,
            "gave_up": False, **more,
        }
    )  # fmt: skip

    class Processes(list):
        def standing(self, process):
            return standing

        def of_standing(self, wanted):
            return [each for each in self if standing is wanted]

    broker = SimpleNamespace(
        versions=SimpleNamespace(current=cluster(0, 2)), is_ready=lambda peer, incarnation: ready,
        requests=SimpleNamespace(ready_standbys={1}),
        facts=SimpleNamespace(progress=lambda peer, incarnation: (12, 0.25, 3.0)),
    )  # fmt: skip
    begun, agents = (
        SimpleNamespace(writer=JOB, url=None),
        {"h": SimpleNamespace(devices=SimpleNamespace(name_of=lambda device: None))},
    )
    agent = SimpleNamespace(
        broker=broker, processes=Processes([one]), begun=begun, agents=agents,
        hanging=SimpleNamespace(is_stopped=lambda process: one.stopped),
    )  # fmt: skip
    coordinator = SimpleNamespace(hosts=Hosts((Host("h", 2),), "h"), newest=cluster(1, 2), leaving=set())
    told = document(wanted=None, state="resizing")
    describe(told, agent, coordinator, History(lambda: 0))
    assert (told["processes"][0]["state"], told["processes"][0]["why"]) == (state, why)
    assert (told["processes"][0]["step"], told["processes"][0]["step_ended_s_ago"]) == (12, 3.0)
    waits = "cluster version 1 waits for 1 worker to start"
    goes = "the workers adopt cluster version 1 at their next step"
    assert told["why"] == (waits if standing is JOINING and not ready else goes)


def test_change_is_shown_with_its_step_and_the_source_of_resizes():
    history = History(lambda: 0)
    history.desired(cluster(1, 4, "x"), cluster(0, 2), JOB)
    history.committed(cluster(1, 4), 100)
    changes = [msgspec.to_builtins(change) for change in history.changes]
    text = as_text(document(changes=changes, config_server="http://a:1/config", follows_changes=False), 0)
    assert "config server http://a:1/config, which it doesn't follow (-w)" in text
    assert "version 1: 2 -> 4 workers, after step 100; requested from outside" in text
    now = time.time()
    assert "-" not in as_text(document(started_at=now), now).partition("since ")[2].partition(" (")[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"started_at": 1e400}, {"started_at": 1e18}, {"started_at": None}, {"processes": [process(step_s="x")]},
        {"job": [1]}, {"hosts": 7}, {"cluster": {"size": 1}},
    ],
)  # fmt: skip
def test_malformed_status_is_reported_and_hides_no_other_job(wrong, monkeypatch, capsys):
    jobs = [document(**wrong), document(command=["the good one"])]
    monkeypatch.setattr(status_command, "jobs_of_this_user", lambda timeout_s: iter(jobs))
    assert main(["status"]) == 1
    out = capsys.readouterr().out
    assert "the answer isn't a job's status" in out
    assert "the good one" in out


def test_status_of_other_jobs_is_printed_without_control_characters(monkeypatch, capsys):
    hostile = document(command=["\x1b[2J", "a\nb", "\udcff", "é"], why="\x1b]0;x\x07")
    monkeypatch.setattr(status_command, "jobs_of_this_user", lambda timeout_s: iter([hostile]))
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(r": \x1b[2J a\nb \udcff é")


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "utf-8:strict"}])
def test_printing_has_no_characters_that_it_can_not_print(environment):
    program = "from ms_kungfu._processes import printing\nwith printing('p'): print('\\xe9 \\udcff', flush=True)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, check=True
    )
    assert done.stdout.strip() in (rb"\xe9 \udcff", "é \\udcff".encode())


def test_output_to_a_full_disk_is_an_error_and_to_a_closed_pipe_is_none():
    program = "from ms_kungfu._processes import printing\nwith printing('p'): print('x' * 100000, flush=True)"
    for shell, code, told in (("{} > /dev/full", 1, "p: the output can't be written: No space left on device"),
                              ("{} | true", 0, "")):  # fmt: skip
        command = shell.format(f'"{sys.executable}" -c "{program}"')
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert (done.returncode, done.stderr.strip()) == (code, told)


def test_bug_in_the_status_is_the_answer_and_the_job_continues(caplog):
    def fails():
        raise KeyError("rank")

    answer = never_raises(fails)
    assert answer() == answer() == {"error": "internal error: KeyError('rank')"}
    assert len(caplog.records) == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(secret_file, "_EVERYBODYS", ())
    return tmp_path / "run" / "ms_kungfu"


def test_socket_of_a_killed_launcher_is_skipped_and_removed(folder):
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "77.x.status"))
    assert list(jobs_of_this_user(1)) == []
    assert os.listdir(folder) == []


def test_launcher_that_hangs_up_is_ending_and_silent_one_does_not_answer(folder):
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as ending, socket.socket(socket.AF_UNIX) as silent:
        ending.bind(str(folder / "77.x.status"))
        silent.bind(str(folder / "78.x.status"))
        ending.listen()
        silent.listen()

        def hang_up():
            connection, _ = ending.accept()
            connection.sendall(b'{"job":')
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        first, second = jobs_of_this_user(0.5)
        thread.join()
    assert first == {"error": "the job of process 77 is just ending"}
    assert second["error"].startswith("the job of process 78 doesn't answer within 0.5 s")


def test_status_folder_is_private_and_a_foreign_one_is_not_used(folder):
    async def serve():
        async def answer():
            return {"job": "mine"}

        server = StatusServer(answer)
        found = await asyncio.get_running_loop().run_in_executor(None, lambda: list(jobs_of_this_user(10)))
        server.close()
        return server.path, found

    path, found = asyncio.run(serve())
    assert (path.parent, found) == (folder, [{"job": "mine"}])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not path.exists()
    folder.chmod(0o770)
    path, found = asyncio.run(serve())
    assert path.parent != folder
    assert found == [{"job": "mine"}]


def test_status_command_with_a_closed_pipe_prints_no_error(folder):
    """... | head"""
    code = "import sys; from ms_kungfu.launcher.cli import main; sys.exit(main(['status']))"
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        done = subprocess.run([sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["status", "URL"], ["resize", "2", "-config-server", "URL"]])
def test_a_store_that_is_not_there_is_asked_for(words, capsys, monkeypatch):
    monkeypatch.setenv("KUNGFU_JOB_SECRET", "ab" * 16)
    for url, why in [("etcd://127.0.0.1:1/job", "127.0.0.1:1: "), ("http://127.0.0.1:1/config", "[Errno 111] ")]:
        assert main([url if word == "URL" else word for word in words]) == 1
        assert capsys.readouterr().err.endswith(f"config server {url}: {why}Connection refused; is it running?\n")


# ---- of a job whose controller moves, by what it has left in the store ----

ELECTED = Cluster((PeerID("a", 10000),), (PeerID("a", 38080), PeerID("b", 38080)), 0, slots={"a": 2, "b": 2})
LOST = {"c": float("inf")}


def told_at_the_url(monkeypatch, capsys, holder="", cluster=ELECTED, **snapshot):
    hosts = tuple(Host(name, 2) for name in "abc")
    versions = ClusterVersions(clusters={0: ELECTED}, committed=0, lost_hosts=LOST)
    left = LeaderSnapshot(
        **{"job": JOB, "head": "a", "first": ELECTED, "hosts": hosts, "versions": versions, **snapshot}
    )
    store = SimpleNamespace(needs_secret=False, get=lambda: cluster, status=lambda: None)
    monkeypatch.setattr(status_command, "open_store", lambda *_, **__: store)
    found = LeadershipState(left.to_json(), 3, holder, 2 if holder else 0)
    monkeypatch.setattr(status_command, "open_leadership", lambda *_, **__: SimpleNamespace(look=lambda: found))
    monkeypatch.setattr(status_command, "jobs_of_this_user", lambda _: [])
    assert status_command.status(["etcd://e:2379/job"]) == 0
    return capsys.readouterr().out


def test_failed_controller_is_named_with_the_hosts_that_may_succeed_it(monkeypatch, capsys):
    told = told_at_the_url(monkeypatch, capsys)
    assert (
        "unknown, version 0 of 1 worker is desired: the controller on a has failed, and no host controls the job "
        "now" in told
    )
    assert "; b takes over within the time of a lease (-host-timeout), unless kungfu-run has ended there, too" in told
    assert "hosts: a, b, c (removed)" in told
    alone = {"hosts": (Host("a", 2), Host("c", 2))}
    assert "has failed, and the job has ended: no other host" in told_at_the_url(monkeypatch, capsys, **alone)


def test_status_names_the_leader_and_the_end_of_the_job(monkeypatch, capsys):
    told = told_at_the_url(monkeypatch, capsys, holder="b")
    assert "b controls the job; kungfu-run status on that host shows more" in told
    assert "; if it has failed, a takes over when its lease expires (-host-timeout)" in told
    told = told_at_the_url(monkeypatch, capsys, holder="a", end=(3, "kungfu-run: worker 0 failed"))
    assert "  ended: exit code 3, kungfu-run: worker 0 failed" in told
    assert "10000" not in told, "nobody works"


def test_end_of_a_job_of_several_hosts_is_ignored_for_a_single_host_job(monkeypatch, capsys):
    told = told_at_the_url(monkeypatch, capsys, cluster=cluster(4, 1), end=(0, None))
    assert "has only the desired cluster; run this command on a host of the job" in told


@pytest.mark.parametrize(
    ("led_since", "state", "why"),
    [
        (7, "running", "the controller on a has failed; this host waits for the next controller"),
        (None, "starting", "waits for kungfu-run on a"),
    ],
)
def test_host_without_a_controller_reports_whether_it_has_had_one(led_since, state, why):
    hosts = Hosts((Host("a", 2), Host("b", 2)), "b")
    options = SimpleNamespace(hosts=hosts, host=hosts.own, command=["train"], watch=True)
    own, succession = OwnController(None, None), SimpleNamespace(head_name="a", since=led_since)
    answer = JobStatusAnswer(options, 0.0, own, succession, lambda message: None, lambda: False)
    told = asyncio.run(answer.ask())
    assert (told["state"], told["why"]) == (state, why)


def test_next_controller_reports_the_status_of_the_previous_one():
    """As of the record's last entry, which is written before the version in it is chosen."""
    before = History(lambda: 5.0)
    before.begun(cluster(0, 2))
    before.desired(cluster(1, 3), cluster(0, 2), "job")
    told = [Change(**change) for change in json.loads(json.dumps(list(map(msgspec.to_builtins, before.changes))))]
    after = History(lambda: 9.0)
    after.resumed(told, cluster(1, 3))
    assert [(change.version, change.chosen_at) for change in after.changes] == [(0, 5.0), (1, 9.0)]
    assert after.knows(cluster(1, 3))
    assert not after.knows(cluster(2, 3))


def test_a_cluster_that_is_not_on_record_has_its_place_all_the_same():
    after = History(lambda: 9.0)
    after.resumed([], cluster(4, 3))
    assert [(change.version, change.size, change.chosen_at) for change in after.changes] == [(4, 3, 9.0)]


# ---- which job a command changes ----


def running(pid, url="http://127.0.0.1:9100/config", **more):
    """The answer of a launcher; `url`: None without -w."""
    values = {"launcher": {"host": "h", "pid": pid}, "config_server": url, "follows_changes": url is not None}
    return document(job=f"job of {pid}", command=["python", "train.py"], **values, **more)


@pytest.mark.parametrize(
    ("words", "jobs", "code", "told"),
    [
        ([], {7: None}, 2, "7  python train.py  (without -w) was started without -w, so its size can't change"),
        (["7"], {7: None, 8: "http://h:1/config"}, 2, "7  python train.py  (without -w) was started without -w"),
        ([], {7: None, 8: "http://h:1/config"}, 2,
         "2 jobs of this user run here; give the process ID or the URL, e.g. kungfu-run resize NUMBER 7:\n"
         "  7  python train.py  (without -w)\n  8  python train.py  http://h:1/config\n"),
        ([], {}, 2, "no job of this user runs here"),
        (["9"], {7: "http://h:1/config"}, 2, "process 9 isn't a kungfu-run of this user on this machine"),
        (["9", "-config-server", "http://h:1/config"], {}, 2, "'9' and -config-server 'http://h:1/config' both name"),
        (["x"], {}, 2, "'x' is neither a process ID nor a URL"),
        (["8"], {7: None, 8: "http://h:1/config"}, 1, "asked http://h:1/config"),
        ([], {8: "http://h:1/config"}, 1, "asked http://h:1/config"),
        (["http://h:2/config"], {8: "http://h:1/config"}, 1, "asked http://h:2/config"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["resize", "evict"])
def test_command_without_a_job_changes_the_only_one(monkeypatch, capsys, command, words, jobs, code, told):
    def answers(timeout_s, pid=None):
        return ((each, running(each, url)) for each, url in jobs.items() if pid in (None, each))

    def opened(url, *arguments, **more):
        raise ConfigServerError(f"asked {url}")

    monkeypatch.delenv("KUNGFU_CONFIG_SERVER", raising=False)
    monkeypatch.setattr(commands, "jobs_by_launcher", answers)
    monkeypatch.setattr(commands, "servers_of_this_user", lambda: ["http://h:1/config"] if jobs else [])
    monkeypatch.setattr(commands, "secret_for", lambda *_: "5ec7e7")
    monkeypatch.setattr(commands, "open_store", opened)
    assert main([command, "3", *words]) == code
    assert told.replace("resize", command) in capsys.readouterr().err
