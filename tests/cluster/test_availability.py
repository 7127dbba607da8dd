"""What is missing is said in one line, with how to get it, by everybody in the same words."""

from __future__ import annotations

import errno
import sys

import pytest

from lockstep import cluster
from lockstep.cluster import availability, tools
from lockstep.cluster.availability import Feature, explain
from lockstep.commands import doctor

FEATURES: tuple[Feature, ...] = ("bandwidth", "hosts", "slurm")
DENIED = PermissionError(errno.EPERM, "unshare: Operation not permitted")


@pytest.mark.parametrize("feature", FEATURES)
def test_elsewhere_than_on_linux(feature: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(availability, "_works", set())
    monkeypatch.setattr(availability.platform, "system", lambda: "Darwin")
    missing = cluster.available(feature)
    assert missing is not None
    assert str(missing) == (
        f"{availability.SUBJECTS[feature]}: only Linux has network namespaces, and this is Darwin "
        "(use a Linux machine, or a virtual one)"
    )


@pytest.mark.parametrize(
    ("setting", "value", "what", "remedy"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor", "sysctl kernel.apparmor_restrict"),
        ("kernel/unprivileged_userns_clone", "0", "closed to ordinary users", "kernel.unprivileged_userns_clone=1"),
    ],
)
def test_who_has_closed_user_namespaces(
    setting: str, value: str, what: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability, "_setting", lambda name: value if name == setting else "")
    for error in (DENIED, tools.ToolFailed("ip link: RTNETLINK answers: Operation not permitted")):
        missing = explain("hosts", error)
        assert what in missing.what and remedy in missing.remedy


def test_errors_on_the_way_become_what_is_missing() -> None:
    assert "sudo apt install iproute2" in str(explain("bandwidth", FileNotFoundError("no tc")))
    assert "max_user_namespaces" in explain("hosts", OSError(errno.ENOSPC, "unshare: No space left on device")).remedy
    unknown = tools.ToolFailed("tc qdisc add: Error: Specified qdisc kind is unknown.")
    assert "this kernel lacks a part" in explain("bandwidth", unknown).what
    assert str(explain("bandwidth", OSError(errno.EIO, "odd"))) == "slow links: [Errno 5] odd"


def test_slurm_needs_hosts_and_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_works", set())
    monkeypatch.setattr(availability.tools, "find", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(availability, "_try", lambda feature: explain(feature, DENIED))
    missing = cluster.available("slurm")
    assert missing is not None and missing.feature == "slurm" and "namespaces" in missing.what
    monkeypatch.setattr(availability, "_try", lambda feature: None)
    monkeypatch.setattr(availability, "PLUGINS", ("usr",))  # a folder that is there, without the plugins
    missing = cluster.available("slurm")
    assert missing is not None and "no auth_none.so" in missing.what


def test_what_was_missing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who has followed the remedy need not restart the kernel."""
    monkeypatch.setattr(availability, "_works", set())
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(availability.tools, "find", lambda name: None)
    assert cluster.available("bandwidth") is not None
    monkeypatch.setattr(availability.tools, "find", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(availability, "_try", lambda feature: None)
    assert cluster.available("bandwidth") is None


def test_there_is_no_other_feature() -> None:
    with pytest.raises(ValueError, match="no such feature: 'kubernetes'"):
        cluster.available("kubernetes")  # type: ignore[arg-type]


@pytest.mark.parametrize("feature", FEATURES)
def test_the_doctor_says_what_a_cell_would(feature: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = cluster.Missing(feature, "no such luck", "sudo get some")
    monkeypatch.setattr(cluster, "available", lambda asked: missing if asked == feature else None)
    found = doctor._cluster(feature, "a lesson")
    assert found.state is doctor.State.ABSENT and found.remedy == "sudo get some"
    assert found.text == "no such luck: a lesson will be shown as not run"
    monkeypatch.setattr(cluster, "available", lambda asked: None)
    assert doctor._cluster(feature, "a lesson").state is doctor.State.GOOD
