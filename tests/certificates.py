"""A CA and what it signs, made by the openssl command, for tests of TLS."""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from pathlib import Path

import pytest

DAYS = "3650"


class Authority:
    """Writes PEM files into `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl command, which makes certificates, is not installed")
        self.folder, self.name = folder, name
        self.file = folder / f"{name}.pem"
        self._openssl(
            "req", "-x509", *_new_key(folder / f"{name}.key"), "-out", self.file, "-subj", f"/CN={name}", "-days", DAYS,
            "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip

    def sign(self, *names: str, usage: str = "serverAuth,clientAuth", days: str = DAYS) -> dict[str, str]:
        """The variables of a host that is called by these names and addresses."""
        stem = f"{self.name}-{names[0].replace(':', '-')}-{usage[:6]}{days}"
        key, request, signed, more = (self.folder / f"{stem}.{end}" for end in ("key", "csr", "pem", "ext"))
        self._openssl("req", "-new", *_new_key(key), "-out", request, "-subj", f"/CN={names[0]}")
        more.write_text(f"subjectAltName={','.join(map(_kind, names))}\nextendedKeyUsage={usage}\n")
        self._openssl(
            "x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self.folder / f"{self.name}.key",
            "-CAcreateserial", "-out", signed, "-days", days, "-extfile", more,
        )  # fmt: skip
        return {"KUNGFU_TLS_CERT": str(signed), "KUNGFU_TLS_KEY": str(key), "KUNGFU_TLS_CA": str(self.file)}

    def _openssl(self, *words: object) -> None:
        done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def _new_key(path: Path) -> list[object]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", path]


def _kind(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"
