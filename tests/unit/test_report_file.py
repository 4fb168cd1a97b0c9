"""The report of a job: one file with the page and all events, in which no text of an event is HTML."""

import base64
import hashlib
import json
import re

import pytest

from ms_kungfu import job_events as e
from ms_kungfu.launcher import cli
from ms_kungfu.launcher.dashboard.report import FILE_NAME, write_report
from ms_kungfu.launcher.wire.codec import encode

BEGAN = e.LogBegan(time=1.0, version=1, job="job", ms_kungfu="0")


def log(folder, *events):
    folder.mkdir(exist_ok=True)
    path = folder / e.FILE_NAME
    path.write_bytes(b"".join(encode(event) + b"\n" for event in (BEGAN, *events)))
    return path


def report(path):
    write_report([path], path.with_name(FILE_NAME))
    return path.with_name(FILE_NAME).read_text()


def events_in(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_report_has_each_event_as_data_only(tmp_path):
    hurt = "</script><script>alert(1)</script><!--\u2028"
    page = report(log(tmp_path, e.JobStarted(time=2.0, workers=1, hosts=[hurt], command=hurt)))
    began, started = events_in(page)
    assert began["event"] == "log_began"
    assert started["command"] == hurt
    assert page.count("alert(1)") == 2
    assert "<script>alert" not in page


def test_report_needs_no_other_file_and_allows_no_other_script(tmp_path):
    page = report(log(tmp_path))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1]
    parts = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.DOTALL)
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts]
    assert len(digests) == 3
    assert policy == (
        f"default-src 'none'; script-src {digests[1]} {digests[2]}; style-src {digests[0]}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert page.index("Content-Security-Policy") < page.index("<style>")
    assert not re.search(r'(src|href)="(?!data:|#)', page)


def test_report_of_a_long_job_is_bounded_and_keeps_sums(tmp_path):
    steps = [e.Statistics(time=float(n), seconds=1.0, steps=2, samples=3, step=2 * n) for n in range(25_000)]
    found = events_in(report(log(tmp_path, *steps)))
    assert len(found) <= 20_000
    assert sum(event.get("steps", 0) for event in found) == 50_000
    assert found[-1]["step"] == 49_998


def test_report_command_merges_the_logs_of_several_controllers(tmp_path, capsys):
    second = log(tmp_path / "b", e.LeaderChanged(time=5.0, host="b", before="a"))
    first = log(tmp_path / "a", e.LeaderLost(time=4.0, host="a"))
    with first.open("ab") as cut:
        cut.write(b'{"event":"job_en')
    assert cli.main(["report", str(second.parent), "-o", str(tmp_path / "r.html"), str(first)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'r.html'}\n"
    kinds = [event["event"] for event in events_in((tmp_path / "r.html").read_text())]
    assert kinds == ["log_began", "log_began", "leader_lost", "leader_changed"]


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ([], 2, "give the -logdir of a job"),
        (["{tmp}/none"], 1, "No such file or directory"),
        (["{tmp}/empty"], 1, "the log contains no event"),
        (["{tmp}/logs", "-o", "{tmp}/none/x.html"], 1, "No such file or directory"),
        (["{tmp}/logs", "-x"], 2, "unknown flag -x"),
    ],
)
def test_report_command_says_why_it_cannot(words, code, error, tmp_path, capsys):
    log(tmp_path / "logs")
    (tmp_path / "empty").write_bytes(b"")
    assert cli.main(["report", *(word.format(tmp=tmp_path) for word in words)]) == code
    assert error in capsys.readouterr().err


def test_report_does_not_replace_its_log(tmp_path, capsys):
    path = log(tmp_path)
    before = path.read_bytes()
    assert cli.main(["report", str(tmp_path), "-o", str(path)]) == 2
    assert f"-o {path} is the event log; give another file" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_report_does_not_follow_a_planted_link(tmp_path):
    path, other = log(tmp_path / "logs"), tmp_path / "other"
    other.write_text("mine")
    path.with_name(FILE_NAME).symlink_to(other)
    path.with_name(f".{FILE_NAME}.new").symlink_to(other)
    with pytest.raises(OSError, match="symbolic link"):
        report(path)
    assert other.read_text() == "mine"
