"""What a host says of itself when it comes to the controller, and what is told to it: checked before it is believed."""

import msgspec
import pytest
from msgspec.structs import replace

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.launcher.devices import GPU, Device, Devices
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.launcher.registration import devices_of, flags_of, objection, other_command, registration_of
from ms_kungfu.launcher.wire.codec import Reads
from ms_kungfu.launcher.wire.messages import CpuIsa, Launch, Registration

GPUS = Devices(GPU, (Device("0", 0, "0"), Device("GPU-1", 0, "GPU-1")))
HEAD = Registration("a", "1.0", "2.10.0", {"-np": "2", "-H": "a:1,b:1"}, [0, 1])
OTHER = Registration("b", "1.0", "2.10.0", {"-np": "2", "-H": "a:1,b:1"}, [4], "GPU", GPUS.each, b"logs")


def test_registration_of_host_names_its_devices_and_folder(tmp_path):
    for logdir, devices in ((tmp_path / "l\udcff", GPUS), (None, Devices())):
        options = parse_command_line([*([] if logdir is None else ["-logdir", str(logdir)]), "true"])
        made = registration_of(options, devices, [0, 1], (1,), CpuIsa("AVX2", "AVX512_CORE"))
        registration = Reads(Registration)(msgspec.json.encode(made))
        assert registration == made
        assert devices_of(registration) == devices
        assert registration.logdir == (b"" if logdir is None else bytes(tmp_path) + b"/l\xff")


@pytest.mark.parametrize(
    "change",
    [{"host": 1}, {"cores": []}, {"cores": 5}, {"cores": ["0"]}, {"flags": []}, {"flags": 5}, {"flags": {"-np": 2}},
     {"devices": {}}, {"devices": 5}, {"more": 1}, {"logdir": None}, {"logdir": "%"},
     {"device_kind": "toaster"}, {"devices": [{"name": "0"}]}],
)  # fmt: skip
def test_malformed_registration_is_refused(change):
    Reads(Registration).convert(msgspec.to_builtins(OTHER))
    with pytest.raises(ProtocolError):
        Reads(Registration).convert({**msgspec.to_builtins(OTHER), **change})
    with pytest.raises(ProtocolError):
        Reads(Registration).convert("hello")


def test_host_like_the_head_node_may_take_part():
    assert objection(OTHER, HEAD, {"a": None}) == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": "1.1"}, "ms_kungfu is 1.1 on b, but 1.0 on a; install the same on all hosts"),
        (
            {"mindspore": ""},
            "MindSpore is not installed on b, but 2.10.0 on a; install the same on all hosts",
        ),
        (
            {"flags": {"-np": "3", "-H": "a:1,b:1"}},
            "-np is 3 on b, but 2 on a; give the same flags on all hosts",
        ),
        ({"host": "a"}, "a has already registered"),
    ],
)
def test_unfit_host_is_rejected_with_the_reason(change, sentence):
    assert objection(replace(OTHER, **change), HEAD, {"a": None}) == sentence


def test_flags_that_only_a_host_has_may_differ(monkeypatch, tmp_path):
    monkeypatch.setenv("KUNGFU_JOB_SECRET", "00" * 16)
    hosts = ["-H", "127.0.0.1:1,127.0.0.2:1", "-builtin-config-port", "9100", "-w"]
    head, other = (
        flags_of(parse_command_line([*hosts, "-self", host, *flags, "true"]))
        for host, flags in (("127.0.0.1", []), ("127.0.0.2", ["-q", "-logdir", str(tmp_path), "-v=false"]))
    )
    assert head == other
    assert head != flags_of(parse_command_line([*hosts, "-self", "127.0.0.1", "-recover", "replace", "true"]))


LAUNCH = Launch(3, "b.10000", 1, False, {"RANK_ID": "1", "KUNGFU_STANDBY": None}, (0, 1), 2, True)


@pytest.mark.parametrize(
    "change",
    [{"log_name": "../../etc/passwd"}, {"environment": {"X": 1}}, {"cores": ["0"]}, {"key": "3"}, {"more": 1}],
)
def test_malformed_launch_message_is_refused(change):
    with pytest.raises(ProtocolError):
        Reads(Launch).convert({**msgspec.to_builtins(LAUNCH), **change})


HEADS = ["python", "/opt/a.py", "--epochs", "1", "--data=/opt/set.csv"]


@pytest.mark.parametrize(
    "command",
    [
        HEADS,
        ["/usr/bin/python3.11", *HEADS[1:]],
        ["python", "a.py", "--epochs", "1", "--data=/home/me/set.csv"],
    ],
)
def test_interpreters_and_the_folders_of_files_may_differ(command):
    assert other_command("b", command, "a", HEADS, exists=lambda path: path.startswith("/opt/")) == ""


@pytest.mark.parametrize(
    ("at", "word"), [(1, "b.py"), (1, "/opt/b.py"), (3, "2"), (4, "--data=/opt/others.csv"), (4, "--date=/opt/set.csv")]
)
def test_different_argument_is_reported_with_both_commands(at, word):
    command = [*HEADS[:at], word, *HEADS[at + 1 :]]
    assert other_command("b", command, "a", HEADS, exists=lambda path: path.startswith("/opt/")) == (
        f'b runs "{" ".join(command)}", but a runs "{" ".join(HEADS)}": all hosts should run the same training'
    )


def test_extra_argument_and_different_url_are_reported():
    assert other_command("b", [*HEADS, "-v"], "a", HEADS)
    assert other_command("b", ["python", "--url=http://b/x"], "a", ["python", "--url=http://a/x"])


def test_difference_of_long_commands_is_reported_as_plain_text():
    long = ["python", "-c", "x = 1\n" * 1000, "--epochs"]
    told = other_command("b", [*long, "2\x1b[2J", "more " * 1000], "a", [*long, "1"])
    assert len(told) < 500
    assert told.isprintable()
    assert "x = 1 --epochs 2\\x1b[2J more" in told
    assert '--epochs 1": all hosts should run the same training' in told
    assert told.startswith('b runs "...')
