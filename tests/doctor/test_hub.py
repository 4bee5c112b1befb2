"""The Hub and its token: reached within the time, and no secret is printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.doctor import hub
from ds_bench.doctor.findings import run_check
from tests.support.doctor_machine import by_name, machine


def test_no_token_is_nothing_to_mend() -> None:
    found = by_name(hub.check(machine(), reached))["Hub token"]
    assert (found.level, found.remedy) == ("ok", None)
    assert "cannot" not in found.text


def reached(_address: str) -> None:
    return None


def refused(_address: str) -> None:
    raise OSError(111, "Connection refused")


def test_an_unreachable_hub_is_a_warning_that_presets_do_not_care_about() -> None:
    found = by_name(hub.check(machine(), refused))["Hub"]
    assert found.level == "warning"
    assert "Connection refused" in found.text
    assert "preset" in (found.remedy or "")


def test_offline_means_that_nobody_is_asked(subtests: pytest.Subtests) -> None:
    for name, value in product(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), ("1", "true", "YES", "on")):
        with subtests.test(name, value=value):
            asked: list[str] = []
            found = by_name(hub.check(machine(**{name: value}), asked.append))["Hub"]
            assert (found.level, asked) == ("ok", [])


def test_a_hub_that_never_answers_costs_no_more_than_the_time_it_gets() -> None:
    start = time.monotonic()
    found = by_name(hub.check(machine(), lambda _address: time.sleep(5), seconds=0.05))["Hub"]
    assert time.monotonic() - start < 2
    assert "no answer within 0.05 s" in found.text


@given(st.text(max_size=60))
def test_no_endpoint_however_odd_raises(endpoint: str) -> None:
    assert run_check("Hub", lambda: hub.check(machine(HF_ENDPOINT=endpoint), refused))


@pytest.mark.parametrize("reach", [reached, refused])
def test_a_password_in_the_endpoint_is_never_shown(reach: Callable[[str], None]) -> None:
    there = machine(HF_ENDPOINT="https://me:hunter2@mirror.example/hub")
    assert "hunter2" not in str(list(hub.check(there, reach)))


def test_a_file_address_is_not_opened() -> None:
    asked: list[str] = []
    assert by_name(hub.check(machine(HF_ENDPOINT="file:///etc/passwd"), asked.append))["Hub"].level == "warning"
    assert asked == []


def test_a_real_server_that_says_no_is_reachable() -> None:
    import http.server
    import threading

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        there = machine(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
        assert by_name(hub.check(there))["Hub"].level == "ok"


def test_a_token_is_told_of_and_never_printed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("placeholder-of-a-token")
    from_file = by_name(hub.check(machine(HF_HOME=str(tmp_path)), reached))["Hub token"]
    from_variable = by_name(hub.check(machine(HF_TOKEN="placeholder-of-a-token"), reached))["Hub token"]
    assert from_file.text.startswith("present")
    assert from_variable.text == "present (HF_TOKEN)"
    assert "placeholder" not in f"{from_file}{from_variable}"


def test_an_empty_token_file_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    assert by_name(hub.check(machine(HF_HOME=str(tmp_path)), reached))["Hub token"].text.startswith("none")


def test_without_a_home_there_is_no_token_and_no_error() -> None:
    assert by_name(hub.check(machine(), reached))["Hub token"].text.startswith("none")
