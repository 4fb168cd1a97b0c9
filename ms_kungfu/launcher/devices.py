"""Choose the device of each worker on this host.

The user decides which devices the job may use: with the list in CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES, or
with a rank table. By default, a job may use all devices of the machine. A worker never changes its device. A new worker
gets a free device, or shares a device if none is free.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from ms_kungfu import env
from ms_kungfu.devices import rank_table
from ms_kungfu.launcher.wire.messages import Device


class DeviceListError(ValueError):
    """The user's settings for devices are inconsistent; the message is for the user."""


class Kind(Struct, frozen=True):
    """A kind of device.

    `variable`: the environment variable that determines which devices the vendor's libraries see. The libraries number
    these devices from 0.
    """

    name: str
    variable: env.Variable[str | None]
    item: str  # regular expression for an entry in the variable
    refusal: str  # the error message for an entry that doesn't match `item`
    node: str  # regular expression for the name of a device's file in /dev

    def count(self, names: Iterable[str]) -> int:
        """Return the number of devices of this kind. `names`: the names of the files in the machine's /dev."""
        return sum(1 for name in names if re.fullmatch(self.node, name))


GPU = Kind(
    "GPU", env.CUDA_VISIBLE_DEVICES, r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+", "is neither a number nor a UUID", r"nvidia\d+"
)
ASCEND = Kind("Ascend device", env.ASCEND_RT_VISIBLE_DEVICES, r"\d+", "is not a number", r"davinci\d+")
_KINDS = (GPU, ASCEND)


class Devices(Struct, frozen=True):
    """The devices that the job may use on this host, in the order in which workers get them.

    If `kind` is None, there are no devices.
    """

    kind: Kind | None = None
    each: tuple[Device, ...] = ()

    def choose(self, staying: Sequence[int], leaving: Sequence[int]) -> int:
        """Return the index (0 or more) of the device for a new worker.

        `staying` and `leaving`: the device indices of the staying and of the leaving workers. The chosen device has the
        fewest staying workers. Among devices with equally few, it has the fewest leaving workers, and then the lowest
        index. If there are no devices, each worker gets an index of its own.
        """
        places = len(self.each) or len(staying) + len(leaving) + 1
        return min(range(places), key=lambda place: (staying.count(place), leaving.count(place), place))

    def environment(self, place: int) -> dict[str, str]:
        """Return the environment variables of a worker with this device index."""
        if self.kind is None:
            return {env.DEVICE_ID.name: str(place)}
        device = self.each[place]
        narrowed = {} if device.visible is None else {self.kind.variable.name: device.visible}
        return {env.DEVICE_ID.name: str(device.device_id), **narrowed}

    def name_of(self, place: int) -> str | None:
        """Return the name of the device, or None if there are no devices."""
        return None if self.kind is None else f"{self.kind.name} {self.each[place].name}"


def find(environ: Mapping[str, str], nodes: Collection[str], *, host: str, single: bool, allow_nvlink: bool) -> Devices:
    """Return the devices that a job on this host may use.

    `nodes`: the names of the files in /dev. `host`: this host's name in the cluster. `single`: true if the job will
    never have more than one worker. `allow_nvlink`: true if each worker sees all GPUs, and DEVICE_ID names its own
    GPU. If it is false, NCCL with CUDA before 10.1 finds no NVLink to GPUs that its process doesn't see.

    Raises DeviceListError and RankTableError.
    """
    table = rank_table.path_from(environ)
    named = {kind: names for kind in _KINDS if (names := _names(kind, environ, kind.count(nodes)))}
    if table is not None:
        return _only_one(_from_table(rank_table.read(table), host, named.get(ASCEND), environ), environ, single)
    if len(named) > 1:  # a kind of devices that the user has listed takes precedence over detected devices
        named = {kind: names for kind, names in named.items() if kind.variable.name in environ} or named
    if len(named) > 1:
        raise DeviceListError(
            "there are GPUs and Ascend devices, but a job uses only one kind: hide the other kind with an empty "
            "CUDA_VISIBLE_DEVICES= or ASCEND_RT_VISIBLE_DEVICES="
        )
    if not named:
        return Devices()
    ((kind, names),) = named.items()
    sees_all = kind is GPU and allow_nvlink
    each = tuple(Device(name, i if sees_all else 0, None if sees_all else name) for i, name in enumerate(names))
    return _only_one(Devices(kind, each), environ, single)


def names_listed(kind: Kind, text: str) -> list[str]:
    """Return the devices listed in the value of `kind`'s variable. Raises DeviceListError."""
    names: list[str] = []
    for item in (part.strip() for part in text.split(",")) if text.strip() else ():
        if re.fullmatch(r"-\d+", item):
            break  # like the vendors' libraries, ignore all entries from here on; "-1" usually hides all devices
        if not re.fullmatch(kind.item, item):
            raise DeviceListError(f"{kind.variable.name}={text}: {item!r} {kind.refusal}")
        if item in names:
            raise DeviceListError(f"{kind.variable.name}={text} lists {kind.name} {item} twice")
        names.append(item)
    return names


def _names(kind: Kind, environ: Mapping[str, str], count: int) -> list[str]:
    text = environ.get(kind.variable.name)
    return [str(i) for i in range(count)] if text is None else names_listed(kind, text)


def _from_table(
    table: rank_table.RankTable, host: str, visible: list[str] | None, environ: Mapping[str, str]
) -> Devices:
    """Return this host's devices in a rank table. MindSpore requires that a process sees all these devices."""
    servers = [s for s in table.servers if host in (s.id, s.extra.get("host_ip"), s.extra.get("host_nic_ip"))]
    if len(table.servers) == 1:
        servers = list(table.servers)
    if not servers:
        raise DeviceListError(
            f"rank table {rank_table.path_from(environ)}: none of its {len(table.servers)} servers is called {host}; "
            "name this host by its server_id (-H)"
        )
    found = []
    for device in sorted(servers[0].devices, key=lambda device: device.rank):
        name = str(device.device_id)
        number = device.device_id
        if ASCEND.variable.name in environ:  # this variable renumbers the devices that it lists
            if name not in (visible or []):
                raise DeviceListError(
                    f"rank table {rank_table.path_from(environ)} gives device {name} to rank {device.rank}, but "
                    f"{ASCEND.variable.name}={environ[ASCEND.variable.name]} hides it"
                )
            number = (visible or []).index(name)
        found.append(Device(name, number, None))
    return Devices(ASCEND, tuple(found))


def _only_one(devices: Devices, environ: Mapping[str, str], single: bool) -> Devices:
    """If the user has set DEVICE_ID, return only that device. Ignore a DEVICE_ID from an outer job's launcher."""
    text = environ.get(env.DEVICE_ID.name)
    if not text or environ.get(env.SELF.name) or devices.kind is None:
        return devices
    if not single:
        raise DeviceListError(
            f"DEVICE_ID={text} names one device, but the job may have several workers; unset it, or list the job's "
            f"devices in {devices.kind.variable.name}"
        )
    for place, device in enumerate(devices.each):
        if text == str(device.device_id if device.visible is None else place):
            return Devices(devices.kind, (device,))
    raise DeviceListError(
        f"DEVICE_ID={text} is none of the job's {len(devices.each)} devices ({devices.kind.name} "
        f"{', '.join(device.name for device in devices.each)})"
    )
