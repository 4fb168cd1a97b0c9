import errno
import os
import stat

import pytest

from ms_kungfu.config_server import secret_file
from ms_kungfu.config_server.secret_file import SecretFileError, read_secret, secret_from, write_secret

URL = "http://127.0.0.1:9100/config"


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(secret_file, "_EVERYBODYS", (str(tmp_path / "tmp"),))
    monkeypatch.delenv("TMPDIR", raising=False)
    return tmp_path


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_file_and_folder_are_for_the_user_alone(umask):
    before = os.umask(umask)
    try:
        path = write_secret(URL, "abc").path
    finally:
        os.umask(before)
    assert mode(path) == 0o600
    assert mode(path.parent) & 0o077 == 0
    assert os.listdir(path.parent) == [path.name]


def test_secret_is_found_by_url_whatever_loopback_is_called():
    write_secret(URL, "abc")
    assert read_secret("http://localhost:9100/config") == "abc"
    assert read_secret("http://127.0.0.1:9101/config") is None
    assert read_secret("http://10.1.2.3:9100/config") is None


def test_secret_file_is_found_by_a_shell_without_the_variable(monkeypatch, own_folders):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_folders / "missing"))
    write_secret(URL, "abc")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_folders / "run"))
    assert read_secret(URL) == "abc"


def test_secret_file_is_found_with_any_temporary_folder(monkeypatch, own_folders):
    (own_folders / "other").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_folders / "missing"))
    for mine, theirs in (("other", None), (None, "other")):
        for each in (mine, theirs):
            if each is None:
                monkeypatch.delenv("TMPDIR", raising=False)
            else:
                monkeypatch.setenv("TMPDIR", str(own_folders / each))
            if each is mine:
                write_secret(URL, "abc")
        assert read_secret(URL) == "abc"


def test_one_of_the_users_own_is_taken_where_the_common_one_can_not_be(monkeypatch, own_folders):
    (own_folders / "other").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_folders / "missing"))
    monkeypatch.setenv("TMPDIR", str(own_folders / "other"))
    monkeypatch.setattr(secret_file, "_EVERYBODYS", (str(own_folders / "gone"),))
    assert own_folders / "other" in write_secret(URL, "abc").path.parents
    monkeypatch.delenv("TMPDIR")
    with pytest.raises(SecretFileError, match="can't be written to a file"):
        write_secret(URL, "abc")


def test_nothing_is_left_where_it_cannot_be_written(monkeypatch, own_folders):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(SecretFileError, match="No space left"):
        write_secret(URL, "abc")
    assert not [path for path in own_folders.rglob("*") if path.is_file()]


def test_removal_spares_the_file_of_a_later_server():
    first = write_secret(URL, "one")
    second = write_secret(URL, "two")
    first.remove()
    assert read_secret(URL) == "two"
    second.remove()
    assert read_secret(URL) is None
    second.remove()


def test_a_link_in_place_of_the_file_is_replaced_and_not_followed(own_folders):
    path = write_secret(URL, "abc").path
    path.unlink()
    target = own_folders / "target"
    target.write_text("mine")
    path.symlink_to(target)
    assert read_secret(URL) is None
    write_secret(URL, "abc")
    assert target.read_text() == "mine"
    assert not path.is_symlink()


def test_a_link_in_place_of_the_folder_is_not_followed(own_folders):
    elsewhere = own_folders / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (own_folders / "run" / "ms_kungfu").symlink_to(elsewhere)
    path = write_secret(URL, "abc").path
    assert own_folders / "tmp" in path.parents
    assert os.listdir(elsewhere) == []


def test_a_folder_that_others_can_enter_is_refused(own_folders, monkeypatch):
    for name in ("run/ms_kungfu", f"tmp/ms_kungfu-{os.geteuid()}"):
        (own_folders / name).mkdir()
        (own_folders / name).chmod(0o755)
    with pytest.raises(SecretFileError, match="must belong to this user alone"):
        write_secret(URL, "abc")


def test_a_file_that_others_can_read_is_not_trusted():
    path = write_secret(URL, "abc").path
    path.chmod(0o644)
    assert read_secret(URL) is None


def test_the_environment_comes_first():
    write_secret(URL, "abc")
    assert secret_from({"KUNGFU_JOB_SECRET": "def"}, URL) == "def"
    assert secret_from({}, URL) == "abc"
