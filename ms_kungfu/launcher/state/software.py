"""Check that all workers of a job use the same versions of ms_kungfu and MindSpore.

This module uses no clock and no I/O.

The versions of a host are compared when the host registers (registration.py). The versions of a worker are compared
when the worker requests its first slot, because a package may be replaced while a job runs. Without this check, a new
worker could use another protocol, or kernels that round differently.
"""

from __future__ import annotations

from msgspec import Struct

from ms_kungfu._version import VERSION
from ms_kungfu.launcher.wire.messages import Software


class JobsSoftware(Struct):
    """The versions with which new workers are compared.

    The program may run in another Python than the launcher, so the MindSpore version is that of the first worker that
    has MindSpore.

    Args:
        version: the launcher's version of ms_kungfu.
        mindspore: the MindSpore version of the job; "" if no worker has reported one.
        first: the worker that has reported the MindSpore version.
    """

    version: str = VERSION
    mindspore: str = ""
    first: str = ""

    def objection_to(self, where: str, said: Software | None) -> str:
        """Return why the joining worker `where`, which has reported the versions `said`, can't take part.

        The result is "" if the worker can take part. If the job has no MindSpore version yet, it adopts the worker's.
        """
        version, mindspore = ("of an unknown version", "") if said is None else (said.ms_kungfu, said.mindspore)
        if version != self.version:
            return (
                f"ms_kungfu is {version} in {where}, but {self.version} in its launcher; all processes of a job "
                f"require the "
                "same version: restart the job after an installation"
            )
        # A worker without MindSpore reports no MindSpore version. If the MindSpore package has no metadata, a worker
        # knows its version only after the import.
        if mindspore and self.mindspore and mindspore != self.mindspore:
            return (
                f"MindSpore is {mindspore} in {where}, but {self.mindspore} in {self.first}; all workers of a job "
                f"require the "
                "same version: restart the job after an installation"
            )
        if mindspore and not self.mindspore:
            self.mindspore, self.first = mindspore, where
        return ""
