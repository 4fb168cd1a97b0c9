"""The example for Kubernetes: nobody here runs it, so it is looked at: YAML, schemas, and the commands in it."""

from __future__ import annotations

import subprocess
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


def test_pods_join_or_begin_by_flags_that_there_are(tmp_path, monkeypatch):
    """The script runs, with a kungfu-run that writes down what it is told."""
    spec, script = job_and_script()
    given = {each["name"]: each["value"] for each in spec["template"]["spec"]["containers"][0]["env"]}
    for name, text in {
        "kungfu-run": 'printf "%s\\n" "$@" >>"$LOG"; echo . >>"$LOG"; [ "$1" != -join ] || exit "$JOINS"',
        "getent": "true",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "start.sh").write_text(script)

    def pod(index, joins):
        log = tmp_path / f"log{index}{joins}"
        environment = {
            **given, "JOB_COMPLETION_INDEX": str(index), "LOG": str(log), "JOINS": str(joins),
            "PATH": f"{tmp_path}:/usr/bin:/bin",
        }  # fmt: skip
        done = subprocess.run(["bash", tmp_path / "start.sh"], env=environment, capture_output=True, text=True)
        return done.returncode, [
            call.split("\n") for call in log.read_text().replace("\n.\n", "\0").split("\0") if call
        ]

    monkeypatch.setenv("KUNGFU_JOB_SECRET", "5ec2" * 16)
    for name in ("begins", "joins"):
        monkeypatch.delenv(name, raising=False)
    code, (begins,) = pod(0, 1)
    assert code == 0
    assert begins[:2] == ["-w", "-H"]
    assert begins[2] == "train-0.train:4,train-1.train:4"
    assert begins[begins.index("-np") + 1] == "8"
    code, (joins,) = pod(1, 0)
    assert (code, joins) == (0, ["-join", given["STORE"], "-self", "train-1.train:4"])
    assert isinstance(parse_command_line(joins), JoinRequest)
    code, calls = pod(1, 1)
    assert (code, [call[0] for call in calls]) == (0, ["-join", "-w"])
    code, calls = pod(3, 1)
    assert (code, [call[0] for call in calls]) == (1, ["-join"])
    # The flags of the first pods, without hosts that have no address here.
    words = [word for word in begins if word not in ("python", "/work/train.py")]
    at = words.index("-H")
    del words[at : at + 4]
    assert parse_command_line([*words, "sh"]).min_size == 2
