"""What the environment says of TLS: all of it or nothing, and files that will do."""

from __future__ import annotations

import ssl
import subprocess
from types import SimpleNamespace

import pytest

from ms_kungfu._tls import from_environment
from tests.certificates import Authority

_NAMES = ["KUNGFU_TLS_CERT", "KUNGFU_TLS_KEY", "KUNGFU_TLS_CA"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


def why_not(environ, name=""):
    with pytest.raises(ValueError, match=".") as raised:
        from_environment(environ).check(name)
    return str(raised.value)


def test_without_the_variables_there_is_none():
    assert from_environment({}) is None
    assert from_environment(dict.fromkeys(_NAMES, "")) is None


@pytest.mark.parametrize("given", [_NAMES[:1], _NAMES[1:], _NAMES[::2]])
def test_a_part_of_them_is_refused_by_the_names_of_the_others(given):
    missing = [name for name in _NAMES if name not in given]
    assert (
        why_not(dict.fromkeys(given, "/x"))
        == f"TLS also requires {' and '.join(missing)}; only {' and '.join(given)} is set"
    )


def test_a_certificate_that_the_others_accept_will_do(authority):
    tls = from_environment(authority.sign("10.0.0.1", "node1"))
    for name in ("10.0.0.1", "node1", ""):
        tls.check(name)


def test_certificate_that_other_hosts_would_reject_is_refused_here(authority, tmp_path):
    good = authority.sign("10.0.0.1")
    assert "IP address mismatch, certificate is not valid for '10.0.0.2'" in why_not(good, "10.0.0.2")
    assert "Hostname mismatch" in why_not(good, "node1")
    other = Authority(tmp_path, "other")
    assert why_not({**good, "KUNGFU_TLS_CA": str(other.file)}).startswith(
        "other hosts won't accept the certificate of KUNGFU_TLS_CERT"
    )
    assert "certificate has expired" in why_not(authority.sign("10.0.0.1", days="-1"))
    for usage in ("serverAuth", "clientAuth"):  # a host is both
        assert "certificate purpose" in why_not(authority.sign("10.0.0.1", usage=usage))


def test_files_that_are_something_else_are_named(authority, tmp_path):
    good = authority.sign("10.0.0.1")
    assert why_not({**good, "KUNGFU_TLS_CERT": "/nowhere"}) == (
        "KUNGFU_TLS_CERT: /nowhere can't be read: No such file or directory"
    )
    assert why_not({**good, "KUNGFU_TLS_KEY": authority.sign("10.0.0.2")["KUNGFU_TLS_KEY"]}) == (
        "KUNGFU_TLS_KEY is not the key of KUNGFU_TLS_CERT"
    )
    assert "KUNGFU_TLS_CA must be the path of the CA's certificate" in why_not(
        {**good, "KUNGFU_TLS_CA": good["KUNGFU_TLS_KEY"]}
    )
    assert "KUNGFU_TLS_CERT must be the path of a certificate" in why_not(
        {**good, "KUNGFU_TLS_CERT": good["KUNGFU_TLS_KEY"]}
    )
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", good["KUNGFU_TLS_KEY"], "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(command, check=True)
    assert "without a password" in why_not({**good, "KUNGFU_TLS_KEY": str(locked)})


@pytest.mark.parametrize("called", [False, True])
def test_minimum_version_is_tls_1_2_whatever_the_default(authority, monkeypatch, called):
    def lenient(protocol):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        return context

    tls = from_environment(authority.sign("10.0.0.1"))
    monkeypatch.setattr("ms_kungfu._tls.ssl", SimpleNamespace(**{**vars(ssl), "SSLContext": lenient}))
    assert tls.context(called=called).minimum_version == ssl.TLSVersion.TLSv1_2
