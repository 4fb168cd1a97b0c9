"""Set up TLS with the files that ``KUNGFU_TLS_CERT``, ``KUNGFU_TLS_KEY`` and ``KUNGFU_TLS_CA`` name, and check them.

Both ends of a connection present a certificate that the CA has signed. The client also checks that the server's
certificate was issued for the name or address to which the client has connected. The server doesn't check the client's
name, because servers don't know their clients' names.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from ms_kungfu import env
from ms_kungfu._files import open_regular

_VARIABLES = (env.TLS_CERT, env.TLS_KEY, env.TLS_CA)


@dataclass(frozen=True)
class Tls:
    """The paths of PEM files: this host's certificate and its chain to the CA, the host's key, the CA's certificate."""

    certificate: str
    key: str
    ca: str

    def context(self, *, called: bool) -> ssl.SSLContext:
        """Return an ssl context for a server (`called`) or for a client. Raise ValueError for invalid files."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if called else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2  # some distributions have another default
        context.verify_mode = ssl.CERT_REQUIRED  # for a client, the context also checks host names
        for variable, path in zip(_VARIABLES, (self.certificate, self.key, self.ca)):
            try:
                os.close(open_regular(path))  # OpenSSL would block at a FIFO
            except OSError as error:
                raise ValueError(f"{variable.name}: {path} can't be read: {error.strerror}") from None
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                why = f"{env.TLS_KEY.name} is not the key of {env.TLS_CERT.name}"
            else:
                why = (
                    f"{env.TLS_CERT.name} must be the path of a certificate in PEM format, and {env.TLS_KEY.name} "
                    f"the path of its key in PEM format, without a password ({error.reason or error})"
                )
            raise ValueError(why) from None
        except ValueError:  # the key needs a password
            raise ValueError(
                f"{env.TLS_KEY.name}: {self.key} is protected by a password; use a key without a password"
            ) from None
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise ValueError(
                f"{env.TLS_CA.name} must be the path of the CA's certificate in PEM format ({error.reason or error})"
            ) from None
        return context

    def check(self, name: str = "") -> None:
        """Check that this host can use its certificate as the server `name`, and as a client.

        Raise ValueError if it can't.
        """
        caller, called = self.context(called=False), self.context(called=True)
        caller.check_hostname = bool(name)
        to_caller, to_called = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            caller.wrap_bio(to_caller, to_called, server_hostname=name or None),
            called.wrap_bio(to_called, to_caller, server_side=True),
        )
        try:
            for end in (*ends, *ends):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise ValueError(
                f"other hosts won't accept the certificate of {env.TLS_CERT.name} ({self.certificate}): "
                f"{error.verify_message}"
            ) from None
        except ssl.SSLError as error:
            raise ValueError(
                f"the TLS handshake fails with {env.TLS_CERT.name} and {env.TLS_CA.name}: {error}"
            ) from None


def from_environment(environ: Mapping[str, str] | None = None) -> Tls | None:
    """Return the TLS settings, or None if TLS is off. Raise ValueError if only some of the variables are set."""
    values = [variable.get(environ) for variable in _VARIABLES]
    if not any(values):
        return None
    missing = [variable.name for variable, value in zip(_VARIABLES, values) if not value]
    if missing:
        there = [variable.name for variable, value in zip(_VARIABLES, values) if value]
        raise ValueError(f"TLS also requires {' and '.join(missing)}; only {' and '.join(there)} is set")
    certificate, key, ca = (os.path.abspath(str(value)) for value in values)
    return Tls(certificate, key, ca)
