"""Settings: one order of sources, bounds, and messages that name what is wrong."""

from pathlib import Path

import pytest

from pscore.errors import ConfigError
from pscore.text import is_loopback
from psserver.access.certs import make
from psserver.process.embedded import start_embedded
from psserver.process.settings import metrics_ports, resolve
from psserver.process.shard_plan import with_own_port


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)


def test_flags_come_before_environment_before_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text("[server]\nshards = 2\nport = 7001\nlease_s = 5\n[log]\nlevel = 'debug'\n")
    monkeypatch.setenv("PACELINE_PORT", "7002")
    monkeypatch.setenv("PACELINE_SHARDS", "3")
    settings = resolve({"server.shards": 4}, file)
    assert settings.server.shards == 4
    assert settings.server.port == 7002
    assert settings.server.lease_s == 5.0
    assert settings.log.level == "debug"
    assert settings.server.grace_s == 10.0
    assert settings.origins["server.shards"] == "flag --shards"
    assert settings.origins["server.port"] == "environment PACELINE_PORT"
    assert settings.origins["server.lease_s"] == f"file {file}"
    assert settings.origins["log.level"] == f"file {file}"
    assert settings.origins["server.grace_s"] == "default"


def test_a_flag_that_is_not_given_is_none() -> None:
    assert resolve({"server.shards": None}).server.shards == 1


@pytest.mark.parametrize(
    ("name", "inside", "outside", "bounds"),
    [
        ("server.shards", (1, 64), (0, 65), "1..64"),
        ("server.port", (0, 64000), (-1, 65536), "0..65535"),
        ("server.threads", (1, 256), (0, 257), "1..256"),
        ("server.lease_s", (0.5, 3600.0), (0.4, 3601.0), "0.5..3600"),
        ("server.grace_s", (0.0, 600.0), (-0.1, 601.0), "0..600"),
        ("server.data_port", (1, 65535), (0, 65536), "1..65535"),
        ("metrics.port", (0, 65535), (-1, 65536), "0..65535"),
    ],
)
def test_bounds_are_reached_and_not_passed(
    name: str, inside: tuple[float, ...], outside: tuple[float, ...], bounds: str
) -> None:
    for value in inside:
        resolve({name: value})
    for value in outside:
        with pytest.raises(ConfigError) as caught:
            resolve({name: value})
        assert f"{name} is {value!r}" in str(caught.value)
        assert f"must be in {bounds}" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"log.format": "xml"}, "log.format is 'xml' (flag --log-format), must be text or json"),
        ({"server.shards": "two"}, "server.shards is 'two' (flag --shards), must be in 1..64"),
        ({"server.host": "0.0.0.0"}, "--insecure"),
        ({"server.host": "gpu7"}, "--insecure"),
        ({"server.port": 65530, "server.shards": 7}, "the last would have 65536"),
        ({"metrics.port": 65535, "server.shards": 2}, "metrics.port is 65535"),
        ({"server.port": 65000}, "metrics.port is by default"),
        ({"server.data_port": 65535, "server.shards": 2}, "server.data_port is 65535"),
        ({"server.data_port": 7071, "server.shards": 2}, "both take port 7071"),
        ({"server.data_port": 8070}, "metrics.port and server.data_port both take port 8070"),
        ({"server.insecure": True}, "--insecure has no effect: only this machine"),
        ({"server.insecure": "maybe"}, "(flag --insecure), must be true or false"),
        ({"server.state_dir": " /srv/state"}, "server.state_dir is ' /srv/state': it begins or"),
        ({"server.alive_file": "alive "}, "server.alive_file is 'alive '"),
        ({"server.timeline": "9" * 300}, "has a name of more than 255 bytes"),
    ],
)
def test_wrong_settings_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flags)
    assert message in str(caught.value)


def test_right_combinations_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve({"server.host": "0.0.0.0", "server.insecure": True})
    resolve({"server.port": 65000, "metrics.port": 0})
    monkeypatch.setenv("PACELINE_INSECURE", "1")  # May be that of several starts.
    resolve()
    resolve({"server.port": 65530, "server.shards": 6, "metrics.port": 0})


def test_a_port_that_kubernetes_sets_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PORT", "tcp://10.0.0.1:7070")
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        resolve()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1\n", "server.prot is unknown"),
        ("[sever]\nport = 1\n", "['sever']"),
        ("port = 1\n", "'port' outside of a table"),
        ("[server\n", "is not TOML"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "paceline.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(file=file)
    assert message in str(caught.value)


def test_a_file_of_an_editor_of_windows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "conf.toml"
    file.write_bytes(b"\xef\xbb\xbf[server]\r\nshards = 3\r\n")
    assert resolve({}, file).server.shards == 3


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PORT", "")
    assert resolve().server.port == 7070


def test_an_empty_index_does_not_start_all_shards_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_SHARD_INDEX", "")
    with pytest.raises(ConfigError, match="PACELINE_SHARD_INDEX is empty: all 2 shards would star"):
        resolve({"server.shards": 2, "server.cluster": "c"})
    assert resolve({}).server.shards == 1
    given = {"server.shards": 2, "server.cluster": "c", "server.shard_index": 1}
    assert resolve(given).server.shard_index == 1


def test_loopback_is_told_from_the_rest() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "gpu7", "")))


def test_metrics_follow_the_port_unless_told_otherwise() -> None:
    assert metrics_ports(resolve({"server.shards": 2})) == [8070, 8071]
    assert metrics_ports(resolve({"server.shards": 2, "metrics.port": 9000})) == [9000, 9001]
    assert metrics_ports(resolve({"server.shards": 2, "metrics.port": 0})) == [None, None]
    assert metrics_ports(resolve({"server.shards": 2, "server.port": 0})) == [0, 0]


def test_threads_are_the_cores_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert resolve({"server.shards": 3}).server.threads_each == 2
    assert resolve({"server.shards": 16}).server.threads_each == 1
    assert resolve({"server.threads": 5}).server.threads_each == 5


def test_one_shard_of_a_cluster_has_the_port_and_the_cores_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    settings = resolve({"server.shards": 4, "server.shard_index": 3, "server.cluster": "c"})
    assert list(settings.server.indices) == [3]
    assert metrics_ports(settings) == [8070]
    assert settings.server.threads_each == 8
    assert list(resolve({"server.shards": 4}).server.indices) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"shards": 2, "shard_index": 2, "cluster": "c"}, "shard_index is 2, must be in 0..1"),
        ({"shards": 2, "shard_index": 1}, "without server.cluster: give --cluster the same name"),
        ({"cluster": ""}, "server.cluster is ''"),
        ({"cluster": "a b"}, "server.cluster is 'a b', must be 1 to 64 letters"),
        ({"cluster": "a" * 65}, "must be 1 to 64 letters"),
    ],
)
def test_wrong_shards_of_a_cluster_are_refused(part: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({f"server.{name}": value for name, value in part.items()})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"standby_of": "a:1", "standby_at": "b:1"}, "name two other places"),
        ({"standby_of": "a:1", "state_dir": None}, "needs journals that outlive its process"),
        ({"standby_at": "a:1", "durability": "memory"}, "needs journals that outlive its process"),
        ({"standby_at": "a:1", "shard_index": None}, "of one shard: give --shard-index"),
        ({"standby_at": "a:1,b:1"}, "'a:1,b:1' names several"),
        ({"standby_of": "a:1", "own_address": "b:1,c:1"}, "'b:1,c:1' names several"),
        ({"standby_register": "/shared"}, "needs --standby-of or --standby-at"),
    ],
)
def test_wrong_places_of_a_shard_are_refused(
    tmp_path: Path, given: dict[str, object], message: str
) -> None:
    part = {"shards": 2, "shard_index": 1, "cluster": "c", "state_dir": tmp_path, **given}
    with pytest.raises(ConfigError, match=message):
        resolve({f"server.{name}": value for name, value in part.items()})


PART = {"server.shard_index": 0, "server.shards": 2, "server.cluster": "c"}
ADDRESSES = {"server.shard_addresses": "a:1, b:2"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"server.state_dir": None}, "they have no directory: give --state-dir"),
        (PART, "shard 0 does not know the addresses of the others: give --shard-addresses"),
        ({**PART, "server.shard_addresses": "a:1"}, "has 1 addresses for 2 shards: --shards"),
        (
            {**PART, "server.shard_addresses": "a:1,127.0.0.1:7070"},
            "has 127.0.0.1:7070 at place 1, and that is shard 0: give the addresses in the order",
        ),
        ({**PART, "server.shard_addresses": "a:0,b:0"}, "the port is '0'"),
        (
            {**PART, "server.shard_addresses": "a:1,b"},
            "'b' must look like host:port .* port is missing",
        ),
        (ADDRESSES, "is for shards that are started one by one"),
    ],
)
def test_checkpoints_that_cannot_be_taken_are_refused(
    tmp_path: Path, flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({"server.checkpoint_s": 5, "server.state_dir": tmp_path, **flags})


def test_checkpoints_are_taken_by_the_supervisor_of_shard_0(tmp_path: Path) -> None:
    given = {"server.checkpoint_s": 5, "server.state_dir": tmp_path}
    assert resolve(given).server.takes_checkpoints
    assert not resolve({**given, "server.checkpoint_s": 0}).server.takes_checkpoints
    assert not resolve({"server.state_dir": tmp_path, **PART}).server.takes_checkpoints
    assert not resolve({"server.state_dir": ".", **PART}).server.takes_checkpoints
    first = resolve({**given, **PART, **ADDRESSES}).server
    assert (first.takes_checkpoints, first.other_addresses) == (True, ["a:1", "b:2"])
    other = resolve({**given, **PART, **ADDRESSES, "server.shard_index": 1}).server
    assert (other.takes_checkpoints, other.other_addresses) == (False, [])


def test_shard_0_may_take_a_free_port(tmp_path: Path) -> None:
    given = {"server.state_dir": tmp_path, **PART, "server.shard_addresses": "a:0,b:2"}
    addresses = resolve(given).server.other_addresses
    assert with_own_port(addresses, 0, 41234) == ["a:41234", "b:2"]
    assert with_own_port(["a:1", "b:2"], 0, 41234) == ["a:1", "b:2"]
    assert with_own_port([], 0, 41234) == []


def test_checkpoints_over_tls_need_the_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, [], days=1, is_forced=False)
    flags = {
        "server.checkpoint_s": 5,
        "server.state_dir": tmp_path,
        "server.tls_cert": tmp_path / "server.pem",
        "server.tls_key": tmp_path / "server.key",
    }
    with pytest.raises(ConfigError, match="they are read over TLS: set PACELINE_TLS_CA"):
        resolve(flags)
    monkeypatch.setenv("PACELINE_TLS_CA", str(tmp_path / "ca.pem"))
    assert resolve(flags).server.takes_checkpoints


def test_every_setting_is_shown_with_its_origin() -> None:
    rows = resolve({"server.port": 8000}).rows()
    assert ("server.port", "8000", "flag --port") in rows
    assert ("metrics.port", "auto", "default") in rows
    assert len({name for name, _, _ in rows}) == len(rows)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PACELINE_PUBLISH", "night", "PACELINE_PUBLISH.* is 'night', must be JOB:every=K"),
        ("PACELINE_PUBLISH", "night:every=0", "'night' in .*PACELINE_PUBLISH.* must be an integer"),
        ("PACELINE_PUBLISH_MBIT", "x", "PACELINE_PUBLISH_MBIT.* in 0..1048576"),
        ("PACELINE_PUBLISH_MBIT", "-1", "PACELINE_PUBLISH_MBIT.* in 0..1048576"),
        ("PACELINE_PUBLISH_MBIT", "1048577", "PACELINE_PUBLISH_MBIT.* in 0..1048576"),
    ],
)
def test_a_wrong_variable_of_published_weights_is_named_also_by_embedded_shards(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        resolve({})
    with pytest.raises(ConfigError, match=message):
        start_embedded(1)
