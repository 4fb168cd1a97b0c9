"""The example for Kubernetes: no cluster runs it here, so it is looked at: YAML, schemas, and the commands in it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from ms_kungfu.launcher.options import JoinRequest, parse_command_line

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
FILES = ["etcd.yaml", "train.yaml"]


def documents(file):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra test)")
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def job_and_script():
    found = {each["kind"]: each for each in documents("train.yaml")}
    return found["Job"]["spec"], found["ConfigMap"]["data"]["start.sh"]


@pytest.mark.parametrize("file", FILES)
def test_each_document_is_one_of_kubernetes(file):
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed (extra test)")
    for document in documents(file):
        schemas.validate(document, schemas.latest_version(), strict=True)


@pytest.mark.parametrize("file", FILES)
def test_names_that_mean_each_other_are_the_same(file):
    found = documents(file)
    service = next(each for each in found if each["kind"] == "Service")
    template = next(each for each in found if each["kind"] in ("Job", "StatefulSet"))["spec"]["template"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None"
    for container in template["spec"]["containers"]:
        assert {"livenessProbe"} <= container.keys()
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted <= {"data"} | {each["name"] for each in template["spec"].get("volumes", ())}


class Pods:
    """The script runs, beside commands that write down what they are told and answer as the environment says."""

    STANDINS = {
        "kungfu-run": """
            printf '%s\\n' "$@" >>"$LOG"; echo . >>"$LOG"
            case $1 in
            status) echo "{\\"state\\": \\"$STATE\\", \\"exit_code\\": $ENDED, \\"size\\": 10}"; exit 0 ;;
            -join) [ ! -e "$JOINS" ] || exit "$(cat "$JOINS")" ;;
            esac
            [ -n "$RUNS" ] || exit 0
            trap 'echo leaves >>"$LOG"; kill $pid; exit 0' TERM  # as a host that leaves
            sleep 60 & pid=$!
            echo >"$RUNS"
            wait
        """,
        "getent": '[ "$2" != "$AWAY" ]',
    }

    def __init__(self, folder):
        self.folder = folder
        for name, text in self.STANDINS.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        spec, script = job_and_script()
        (folder / "start.sh").write_text(script)
        listed = spec["template"]["spec"]["containers"][0]["env"]
        self.given = {each["name"]: each["value"] for each in listed if "value" in each}
        self.given["STORE"] = self.given["STORE"].replace("$(JOB_UID)", "a1-b2")
        self.count = 0

    def start(self, index, joins=None, away="", ended="null", runs=False):
        """`joins`: with which code `-join` ends at once; `away`: a host without a name; `ended`: the job's code."""
        self.count += 1
        self.log, self.runs, answer = (self.folder / f"{name}{self.count}" for name in ("log", "runs", "joins"))
        if joins is not None:
            answer.write_text(str(joins))
        environment = {
            **self.given, "JOB_COMPLETION_INDEX": str(index), "LOG": str(self.log), "JOINS": str(answer), "AWAY": away,
            "ENDED": ended, "STATE": "unknown" if ended == "null" else "ended",
            "RUNS": str(self.runs) if runs else "", "PATH": f"{self.folder}:/usr/bin:/bin",
        }  # fmt: skip
        return subprocess.Popen(["bash", self.folder / "start.sh"], env=environment)

    def calls(self):
        told = self.log.read_text().replace("\n.\n", "\0")
        return [words for call in told.split("\0") if call.strip() and (words := call.split("\n"))[0] != "status"]

    def run(self, index, *answers, **more):
        code = self.start(index, *answers, **more).wait(60)
        return code, self.calls()


@pytest.fixture
def pods(tmp_path):
    return Pods(tmp_path)


def wait_until(happens):
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pods_join_or_begin_by_flags_that_there_are(pods, monkeypatch):
    monkeypatch.setenv("KUNGFU_JOB_SECRET", "5ec2" * 16)
    code, (asks, begins) = pods.run(0, 1)
    assert (code, asks[0]) == (0, "-join")
    assert begins[:2] == ["-w", "-H"]
    assert begins[2] == "train-0.train:4,train-1.train:4"
    assert begins[begins.index("-np") + 1] == "8"
    for index in (0, 1):  # the controller may have moved
        code, (joins,) = pods.run(index)
        assert (code, joins) == (0, ["-join", pods.given["STORE"], "-self", f"train-{index}.train:4"])
        assert isinstance(parse_command_line(joins), JoinRequest)
    code, calls = pods.run(1, 1)
    assert (code, [call[0] for call in calls]) == (0, ["-join", "-w"])
    code, calls = pods.run(3, 1)
    assert (code, [call[0] for call in calls]) == (1, ["-join"])
    # The flags of the first pods, without hosts that have no address here.
    words = [word for word in begins if word not in ("python", "/work/train.py")]
    at = words.index("-H")
    del words[at : at + 4]
    assert parse_command_line([*words, "sh"]).min_size == 2


@pytest.mark.parametrize("index", [0, 2])
def test_a_running_job_is_joined_while_one_of_the_first_pods_is_away(pods, index):
    code, calls = pods.run(index, away="train-1.train")
    assert (code, [call[0] for call in calls]) == (0, ["-join"])


def test_first_pods_start_together_and_join_a_job_that_was_faster(pods):
    (pods.folder / "sleep").write_text('#!/bin/bash\nexec /bin/sleep "$([ "$1" = 5 ] && echo 0.01 || echo "$1")"\n')
    (pods.folder / "sleep").chmod(0o755)
    pod = pods.start(0, 1, away="train-1.train")
    wait_until(lambda: pods.log.exists() and len(pods.calls()) > 2)
    (pods.folder / f"joins{pods.count}").unlink()  # now there is a job
    assert pod.wait(60) == 0
    assert {call[0] for call in pods.calls()} == {"-join"}
    code, calls = pods.run(0, 1, away="train-1.train")
    assert (code, {call[0] for call in calls}) == (1, {"-join"}), "it doesn't wait for ever"


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_pod_that_is_made_after_the_job_has_ended_well_ends_well(pods, index):
    assert pods.run(index, 1, away="train-1.train", ended="0") == (0, [])


def test_a_job_that_has_failed_is_begun_again(pods):
    code, calls = pods.run(0, 1, ended="10")
    assert (code, [call[0] for call in calls]) == (0, ["-join", "-w"])


@pytest.mark.parametrize("joins", [None, 1])
def test_terminated_pod_has_its_host_leave_and_its_index_incomplete(pods, joins):
    pod = pods.start(0, joins, runs=True)
    wait_until(lambda: pods.runs.exists())
    pod.terminate()
    assert pod.wait(60) == 143
    assert pods.log.read_text().endswith("leaves\n"), "kungfu-run was told"


def test_a_pod_that_is_sent_away_before_there_is_a_job_ends_in_time(pods):
    pod = pods.start(0, 1, away="train-1.train")
    wait_until(lambda: pods.log.exists() and pods.calls())
    pod.terminate()
    assert pod.wait(20) == 143
    assert "-w" not in {call[0] for call in pods.calls()}
