import argparse
import sys

import pytest

from ms_kungfu._flags import UsageError, duration
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.launcher.state.hosts import parse_ports
from ms_kungfu.launcher.state.policy import Recover


def refusal(*arguments):
    with pytest.raises(UsageError) as caught:
        parse_command_line(arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("spelling", [["-np", "3"], ["--np", "3"], ["-np=3"], ["--np=3"]])
def test_flags_take_one_dash_or_two_and_a_blank_or_an_equals_sign(spelling):
    options = parse_command_line([*spelling, "sh"])
    assert options.size == 3
    assert options.command == ("sh",)


def test_flags_end_at_the_program_whose_own_flags_are_left_alone():
    options = parse_command_line(["-q", "sh", "-np", "7", "--", "-w"])
    assert options.size == 1
    assert options.quiet
    assert not options.watch
    assert options.command == ("sh", "-np", "7", "--", "-w")
    assert parse_command_line(["-np", "2", "--", "sh", "-c", "true"]).command == ("sh", "-c", "true")


def test_switches_take_a_value_only_after_an_equals_sign():
    options = parse_command_line(["-q", "-v=false", "-w=true", "sh"])
    assert (options.quiet, options.show_workers, options.watch) == (True, False, True)
    assert parse_command_line(["-q=false", "sh"]).quiet is False
    assert "neither true nor false" in refusal("-q=perhaps", "sh")


def test_every_flag_of_kungfu_run_is_known(tmp_path):
    words = (
        "-np 2 -q -v -w -builtin-config-port 9100 -config-server http://127.0.0.1:9100/config -H 127.0.0.1:4 "
        "-port-range 20000-20010 -port 40000 -strategy AUTO -timeout 1m30s -delay 10ms -init-version 3 "
        f"-logdir {tmp_path} -logfile launcher.log sh"
    )
    options = parse_command_line(words.split())
    assert (options.size, options.watch, options.builtin_port) == (2, True, 9100)
    assert (options.host.name, options.host.slots, options.hosts.limit) == ("127.0.0.1", 4, "127.0.0.1:4")
    assert (options.ports, options.control_port, options.init_version) == (range(20000, 20011), 40000, 3)
    assert (options.timeout_s, options.delay_s) == (90.0, 0.01)
    assert options.logfile == tmp_path / "launcher.log"


@pytest.mark.parametrize("help_flag", ["-h", "-help", "--help"])
def test_help_needs_no_program(help_flag):
    with pytest.raises(SystemExit, match="^0$"):
        parse_command_line([help_flag])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-n", "2", "sh"], "-n: -np N sets the number of workers"),
        (["-workers", "2", "sh"], "unknown flag -workers"),
        (["-confg-server", "x", "sh"], "did you mean -config-server?"),
        (["--log-dir=x", "sh"], "unknown flag --log-dir; did you mean -logdir?"),
        (["-zzzzzz", "sh"], "-help lists the flags"),
        (["-np"], "flag -np needs a value"),
        (["-np", "0", "sh"], "-np: 0 is out of range; it must be at least 1"),
        (["-np", "two", "sh"], "-np: 'two' is not a whole number"),
        (["-np", "1_0", "sh"], "-np: '1_0' is not a whole number"),
        (["-np", "\N{ARABIC-INDIC DIGIT TWO}", "sh"], "is not a whole number"),
        (["-timeout", "\N{ARABIC-INDIC DIGIT TWO}s", "sh"], "is not a duration"),
        (["-np", "2"], "no program to run"),
        (["no-such-program-here"], "program 'no-such-program-here' is not an executable file"),
        (["/tmp"], "program '/tmp' is not an executable file"),
        (["-nic", "no-such0", "sh"], "-nic no-such0: this machine has no such interface; its interfaces are lo"),
        (["-H", "10.255.255.254:2", "sh"], "this machine has none of the addresses of the hosts 10.255.255.254"),
        (["-H", "127.0.0.1:1,127.0.0.2:1", "sh"], "this machine matches several hosts: 127.0.0.1 and 127.0.0.2"),
        (["-H", "127.0.0.1:none", "sh"], "is not host:slots"),
        (["-H", "127.0.0.1:2", "-np", "3", "sh"], "-np 3: -H 127.0.0.1:2 has 2 slots"),
        (["-np", "3", "-port-range", "10000-10001", "sh"], "-port-range 10000-10001: too small for 3 workers"),
        (["-port-range", "2-1", "sh"], "'2-1' is not a range of ports"),
        (["-port", "70000", "sh"], "-port: 70000 is out of range; it must be from 1 to 65535"),
        (["-strategy", "FASTEST", "sh"], "unknown strategy 'FASTEST'"),
        (["-timeout", "soon", "sh"], "-timeout: 'soon' is not a duration; write it like 30s, 5m or 1h30m"),
        (["-config-server", "127.0.0.1:9100", "sh"], "is not a URL like http://127.0.0.1:9100/config"),
        (["-config-server", "http://a:b/config", "sh"], "is not a URL like"),
        (
            ["-builtin-config-port", "9100", "-config-server", "http://127.0.0.1:9101/config", "sh"],
            "give both the same",
        ),
        (["-k", "sh"], "-k: a job ends when its workers have ended"),
        (["-init-version", "-1", "-w", "sh"], "-init-version -1 requires -w and a separate config server"),
        (["-affinity", "some", "sh"], "'some' is neither auto nor none"),
    ],
)
def test_flag_that_cannot_be_honoured_is_refused_in_one_sentence(arguments, told):
    assert told in refusal(*arguments)


@pytest.mark.parametrize("flag", ["debug-port", "P", "elastic-mode", "t0", "auto-recover", "u", "schedule"])
@pytest.mark.parametrize("spelling", ["-{} 1 sh", "--{}=1 sh"])
def test_a_flag_of_kungfus_without_a_meaning_here_is_named_with_its_reason(flag, spelling):
    sentence = refusal(*spelling.format(flag).split())
    assert sentence.startswith(f"-{flag}: ")
    assert len(sentence) > len(flag) + 20
    assert "did you mean" not in sentence


def test_script_without_python_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert refusal("train.py", "--epochs", "3") == (
        "train.py is a Python script; write kungfu-run ... python train.py --epochs 3"
    )
    (tmp_path / "train.py").chmod(0o755)
    assert parse_command_line(["./train.py"]).command == ("./train.py",)


@pytest.mark.parametrize("options", [[], ["-u"], ["-W", "ignore"], ["-Xdev"], ["--"]])
def test_missing_script_is_refused_before_a_worker_starts(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(sys.executable, *options, "train.py", "-np", "3").startswith("script 'train.py', which")
    (tmp_path / "train.py").write_text("")
    assert parse_command_line([sys.executable, *options, "train.py"]).size == 1


@pytest.mark.parametrize("options", [["-m", "train"], ["-c", "pass"], ["-um", "train"], ["-"], ["-V"], []])
def test_python_option_is_not_taken_for_a_script(options):
    assert parse_command_line([sys.executable, *options]).size == 1


def test_watching_nothing_gets_a_config_server_on_a_free_port():
    assert parse_command_line(["-w", "sh"]).builtin_port == 0
    assert parse_command_line(["-w", "-config-server", "http://127.0.0.1:9100/config", "sh"]).builtin_port is None
    assert parse_command_line(["sh"]).builtin_port is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h30m", 5400), ("1.5s", 1.5), ("200ms", 0.2), ("10", 10), ("0", 0), ("1m0.5s", 60.5)]
)
def test_durations_are_read_as_go_writes_them(text, seconds):
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "1x", "-1s", "1s2", "1 s", "inf", "nan"])
def test_other_durations_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        duration(text)


def test_port_range_includes_both_ends():
    assert list(parse_ports("7-9")) == [7, 8, 9]


# ---- recovery ----


def test_deaths_are_survived_in_watch_mode_and_only_there():
    assert parse_command_line(["sh"]).recover is Recover.FAIL
    assert parse_command_line(["-w", "sh"]).recover is Recover.SHRINK
    assert parse_command_line(["-recover", "fail", "sh"]).recover is Recover.FAIL
    assert parse_command_line(["-w", "-recover", "replace", "sh"]).recover is Recover.REPLACE
    assert refusal("-recover", "replace", "sh").startswith("-recover replace requires -w")
    assert refusal("-min-np", "1", "sh").startswith("-min-np requires -w")
    assert refusal("-standby", "1", "sh").startswith("-standby requires -w")
    assert "'hope' is none of shrink, replace, fail" in refusal("-w", "-recover", "hope", "sh")


def test_limits_of_recovery_are_checked():
    words = "-w -np 4 -min-np 3 -recover replace -max-restarts 2 -standby 1 sh"
    options = parse_command_line(words.split())
    assert (options.min_size, options.max_restarts, options.standbys) == (3, 2, 1)
    assert refusal("-w", "-np", "2", "-min-np", "3", "sh") == "-np 2 is less than -min-np 3"
    assert refusal("-w", "-max-restarts", "2", "sh").startswith("-max-restarts requires -recover=replace or -standby")
    assert "at least 1" in refusal("-w", "-min-np", "0", "sh")


def test_the_time_after_which_a_worker_hangs(monkeypatch):
    assert parse_command_line(["sh"]).peer_timeout_s == 30.0
    monkeypatch.setenv("KUNGFU_PEER_TIMEOUT", "5")
    assert parse_command_line(["sh"]).peer_timeout_s == 5.0
    assert parse_command_line(["-peer-timeout", "500ms", "sh"]).peer_timeout_s == 0.5
    assert parse_command_line(["-peer-timeout", "0", "sh"]).peer_timeout_s is None
    monkeypatch.setenv("KUNGFU_PEER_TIMEOUT", "soon")
    assert refusal("sh") == "KUNGFU_PEER_TIMEOUT must be a number of seconds up to 2e6, 0 for never, got 'soon'"


def test_wrong_variable_is_refused_before_a_worker_starts(monkeypatch):
    monkeypatch.setenv("KUNGFU_COLLECTIVE_TIMEOUT", "1e300")
    assert refusal("sh") == "KUNGFU_COLLECTIVE_TIMEOUT must be a positive number of seconds up to 2e6, got '1e300'"


def test_vector_instructions_have_onednns_names_in_any_case():
    assert parse_command_line(["sh"]).cpu_isa == "auto"
    assert parse_command_line(["-cpu-isa", "Native", "sh"]).cpu_isa == "native"
    assert parse_command_line(["--cpu-isa=avx512_core", "sh"]).cpu_isa == "AVX512_CORE"
    assert "-cpu-isa: 'avx9' is none of auto, native, sse41, avx, avx2," in refusal("-cpu-isa", "avx9", "sh")


def test_a_fixed_number_of_cores(monkeypatch):
    monkeypatch.setattr("ms_kungfu.launcher.options.core_count", lambda: 3)
    assert parse_command_line(["sh"]).cores_per_worker is None
    assert parse_command_line(["-cores-per-worker", "3", "sh"]).cores_per_worker == 3
    assert "4 is more than the 3 cores" in refusal("-cores-per-worker", "4", "sh")
    assert "at least 1" in refusal("-cores-per-worker", "0", "sh")
    assert "-affinity none" in refusal("-cores-per-worker", "1", "-affinity", "none", "sh")
