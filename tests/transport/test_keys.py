"""The keys of a run are its owner's only."""

import stat

import pytest

from megasao.transport.keys import load_keys, load_server_key, make_run_keys, make_server_key, server_key_path


def test_keys_are_private_and_made_once(tmp_path):
    directory = tmp_path / "keys"
    keys = make_run_keys(directory)
    assert load_keys(directory) == keys == make_run_keys(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()] == [0o600]
    assert keys.server_secret not in repr(keys) and keys.client_secret not in repr(keys)


def test_keys_that_others_can_read_are_refused(tmp_path):
    make_run_keys(tmp_path)
    (tmp_path / "curve.json").chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        load_keys(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"server_public": 1}'])
def test_damaged_keys_are_refused(tmp_path, text):
    make_run_keys(tmp_path)
    (tmp_path / "curve.json").write_text(text)
    with pytest.raises(ValueError, match=r"curve\.json"):
        load_keys(tmp_path)


def test_missing_keys_are_named(tmp_path):
    with pytest.raises(ValueError, match="no CURVE keys at"):
        load_keys(tmp_path)


def test_the_key_of_servers_is_private_and_made_once(tmp_path):
    directory = tmp_path / "keys"
    key = make_server_key(directory)
    assert load_server_key(directory) == key == make_server_key(directory) != make_server_key(tmp_path / "other")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()] == [0o600]
    server_key_path(directory).chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        load_server_key(directory)


@pytest.mark.parametrize("text", ["", "short", "x" * 43 + "\n", "x" * 20 + " " + "x" * 22, "\u00e9" * 43])
def test_a_damaged_key_of_servers_is_refused(tmp_path, text):
    make_server_key(tmp_path)
    server_key_path(tmp_path).write_text(text)
    with pytest.raises(ValueError, match=r"sglang\.key"):
        load_server_key(tmp_path)


def test_a_missing_key_of_servers_is_named(tmp_path):
    with pytest.raises(ValueError, match="no key of SGLang servers at"):
        load_server_key(tmp_path)
