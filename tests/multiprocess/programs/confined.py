"""confined.py DEV COMMAND...: runs the command as a container without /dev/shm and without ptrace would.

It is started in a mount namespace of its own (unshare -m). DEV: `absent`: /dev has a few devices and nothing else;
`read-only`: /dev/shm is there, empty, and no user can write to it.
"""

import ctypes
import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# x86-64's ptrace, process_vm_readv, process_vm_writev, kcmp, pidfd_getfd: what Docker's own profile refuses, or did.
REFUSED = (101, 310, 311, 312, 438)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
libc = ctypes.CDLL(None, use_errno=True)


def mount(*words):
    subprocess.run(["mount", *words], check=True)


def without_shm(how):
    mount("--make-rprivate", "/")
    if how == "read-only":
        mount("-t", "tmpfs", "-o", "ro,size=4k", "none", "/dev/shm")
        return
    aside = Path(f"/dev/shm/confined-{os.getpid()}")  # no name of ours: tests beside this one look for such
    aside.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "none", str(aside))
    for name in DEVICES:
        (aside / name).touch()
        mount("--bind", f"/dev/{name}", str(aside / name))
    mount("--move", str(aside), "/mnt")
    aside.rmdir()
    mount("--rbind", "/mnt", "/dev")
    os.symlink("/proc/self/fd", "/dev/fd")


def without_ptrace():
    """A filter by the system call's number (the first word of its data); its children have it, too."""
    refusals = [(JUMP_EQUAL, len(REFUSED) - i, 0, number) for i, number in enumerate(REFUSED)]
    code = b"".join(
        struct.pack("HBBI", *line)
        for line in [(LOAD, 0, 0, 0), *refusals, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    )
    program = ctypes.create_string_buffer(code)
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program)))
    for words in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0)):
        if libc.prctl(*words) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


without_shm(sys.argv[1])
without_ptrace()
try:
    Path("/dev/shm/x").touch()
    raise AssertionError("/dev/shm can be written to")
except OSError as error:
    assert error.errno == (errno.EROFS if sys.argv[1] == "read-only" else errno.ENOENT), error
assert libc.ptrace(0, 0, 0, 0) == -1
assert ctypes.get_errno() == errno.EPERM
print(f"confined: /dev has {sorted(os.listdir('/dev'))}", flush=True)
os.execv(sys.argv[2], sys.argv[2:])
