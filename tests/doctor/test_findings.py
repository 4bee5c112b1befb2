"""Checks of programs, ops, packages and the Hub, on machines made up in a folder."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import shlex
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bench.doctor import compilers, hub, packages
from ds_bench.doctor import ops as compiled
from ds_bench.doctor.findings import Finding, SystemAccess, ask_program, attempt, find_program, ok
from ds_bench.errors import PreflightError
from ds_bench.launch import ops

# The C compiler has the name that Python was built with: gcc, or x86_64-linux-gnu-gcc where Debian built it.
C_COMPILER = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
PROGRAMS = ("c++", "g++", "cc", "gcc", "clang", "ninja", "nvcc", C_COMPILER)
EVERYTHING = {name: f"/usr/bin/{name}" for name in PROGRAMS}


def machine(
    root: Path = Path("/nowhere"),
    programs: Mapping[str, str] = EVERYTHING,
    ask: Callable[[Sequence[str], str], str | None] = lambda _command, _text: "",
    **environ: str,
) -> SystemAccess:
    return SystemAccess(root=root, environ=environ, which=programs.get, ask=ask)


def without(*names: str) -> dict[str, str]:
    return {name: path for name, path in EVERYTHING.items() if name not in names}


def by_name(findings: Sequence[Finding] | Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# ------------------------------------------------------------------ a check that breaks


def test_a_check_that_breaks_off_keeps_what_it_had_found() -> None:
    def check() -> Iterator[Finding]:
        yield ok("first", "fine")
        raise ValueError("garbage")

    assert [(each.name, each.level, each.text) for each in attempt("second", check)] == [
        ("first", "ok", "fine"),
        ("second", "warning", "could not be read: garbage"),
    ]


def test_a_preflight_error_is_a_problem_with_its_remedy() -> None:
    def check() -> Iterator[Finding]:
        raise PreflightError("no disk", remedy="buy one")
        yield

    (found,) = attempt("disk", check)
    assert (found.level, found.text, found.remedy) == ("problem", "no disk", "buy one")


def test_ctrl_c_is_not_swallowed_by_a_check() -> None:
    def check() -> Iterator[Finding]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        attempt("any", check)


# ------------------------------------------------------------------ programs


def test_a_program_that_fails_or_is_not_there_gives_no_answer() -> None:
    assert ask_program(["false"]) is None
    assert ask_program(["/no/such/program"]) is None
    assert ask_program(["bad\0name"]) is None
    assert ask_program(["cat"], "text") == "text"


def test_ninja_is_found_beside_the_interpreter_of_an_environment_that_is_not_activated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_program("ninja") is not None


@pytest.mark.parametrize(("missing", "level"), [("c++", "problem"), ("ninja", "problem")])
def test_without_a_compiler_or_ninja_no_op_can_be_used(missing: str, level: str) -> None:
    there = machine(programs=without(missing))
    found = {each.level for each in compilers.check(there, "cpu", None) if each.remedy}
    assert found == {level}
    assert not compilers.can_build(there)


def test_a_compiler_named_by_cxx_is_the_one_looked_for() -> None:
    there = machine(programs=without("c++"), CXX="clang -v", CC="clang")
    assert {each.level for each in compilers.check(there, "cpu", None)} == {"ok"}
    assert compilers.can_build(there)


@pytest.mark.parametrize(("variable", "name"), [("CC", "C compiler"), ("CXX", "C++ compiler")])
def test_a_compiler_that_is_not_there_is_blamed_on_the_variable_that_names_it(variable: str, name: str) -> None:
    there = machine(programs=without("/nonexist"), **{variable: "/nonexist"})
    found = by_name(compilers.check(there, "cpu", None))[name]
    assert found.level != "ok"
    assert f"/nonexist, which ${variable} names" in found.text
    assert f"unset {variable}" in (found.remedy or "")


def test_no_token_is_nothing_to_mend() -> None:
    found = by_name(hub.check(machine(), reached))["Hub token"]
    assert (found.level, found.remedy) == ("ok", None)
    assert "cannot" not in found.text


def test_a_cxx_with_an_open_quote_is_a_finding_and_no_traceback() -> None:
    found = by_name(compilers.check(machine(CXX="'g++"), "cpu", None))
    assert "could not be read" in found["C++ compiler"].text
    assert found["ninja"].level == "ok"


def nvcc(version: str) -> Callable[[Sequence[str], str], str | None]:
    text = f"nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {version}, V{version}.88\n"
    return lambda command, _text: text if command[0].endswith("/nvcc") else ""


def toolkit(version: str, torch_cuda: str, **environ: str) -> Finding:
    return by_name(compilers.check(machine(ask=nvcc(version), **environ), "cuda", torch_cuda))["CUDA toolkit"]


@pytest.mark.parametrize(
    ("installed", "torch_cuda", "level"),
    [
        ("12.8", "12.8", "ok"),
        ("12.4", "12.8", "ok"),
        ("12.7", "12.8", "warning"),  # there was no 12.7; DeepSpeed's table has none
        ("11.8", "12.8", "warning"),
        ("12.8", "12.7", "warning"),
        ("13.0", "13.0", "ok"),
        ("13.1", "13.0", "warning"),  # DeepSpeed's table ends at 12
        ("12.10", "12.8", "warning"),  # 12.10 is not 12.1
    ],
)
def test_a_toolkit_fits_torch_by_deepspeeds_own_rule(installed: str, torch_cuda: str, level: str) -> None:
    assert toolkit(installed, torch_cuda).level == level


def test_the_minor_versions_that_may_mix_are_those_of_the_installed_deepspeed() -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "ops/op_builder/builder.py"
    assigned = {
        target.id: node.value
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    table = ast.literal_eval(assigned["cuda_minor_mismatch_ok"])
    ours = {major: {f"{major}.{minor}" for minor in minors} for major, minors in compilers.MINORS_THAT_MIX.items()}
    assert ours == {major: set(versions) for major, versions in table.items()}


def test_without_a_toolkit_torchs_adamw_stands_in_and_that_is_said() -> None:
    there = machine(ask=lambda _command, _text: None)
    found = by_name(compilers.check(there, "cuda", "12.8"))["CUDA toolkit"]
    assert found.level == "warning"
    assert "torch's AdamW" in found.text


def test_a_cpu_build_of_torch_needs_no_toolkit() -> None:
    assert by_name(compilers.check(machine(), "cpu", None))["CUDA toolkit"].level == "ok"


def test_cuda_home_goes_before_the_nvcc_on_path() -> None:
    asked: list[str] = []

    def ask(command: Sequence[str], _text: str) -> str:
        asked.append(command[0])
        return ""

    compilers.toolkit_release(machine(ask=ask, CUDA_HOME="/opt/cuda"))
    compilers.toolkit_release(machine(ask=ask))
    compilers.toolkit_release(machine(Path("/root-of-test"), programs={}, ask=ask))
    assert asked == ["/opt/cuda/bin/nvcc", "/usr/bin/nvcc", "/root-of-test/usr/local/cuda/bin/nvcc"]


# ------------------------------------------------------------------ ops


def compiled_ops(
    there: SystemAccess, folder: Path, accelerator: str = "cpu", *, cuda: str | None = None, nvme: bool = False
) -> dict[str, Finding]:
    return by_name(compiled.check(there, accelerator, folder, torch_cuda=cuda, nvme_asked=nvme))  # type: ignore[arg-type]


def test_each_op_names_the_strategies_that_need_it() -> None:
    users = compiled.users("cpu")
    assert len(users[ops.SHARED_MEMORY]) == 8
    assert users[ops.CPU_ADAM] == ["cpu_optimizer", "cpu_full", "nvme"]
    assert users[ops.ASYNC_IO] == ["nvme"]
    assert compiled.users("cuda")[ops.FUSED_ADAM] == ["zero0", "zero1", "zero2", "zero3", "none"]


def test_an_op_with_our_mark_is_built_and_one_without_can_be(tmp_path: Path) -> None:
    (tmp_path / f"{ops.CPU_ADAM}.ready").write_text("[]")
    found = compiled_ops(machine(), tmp_path)
    assert found["CPUAdam op"].text.startswith("built")
    assert found["CPUAdam op"].remedy is None
    assert found["ShareMemComm op"].text.startswith("not built yet, but can be")
    assert {each.level for each in found.values()} == {"ok"}


def test_an_op_cannot_be_built_without_ninja(tmp_path: Path) -> None:
    found = compiled_ops(machine(programs=without("ninja")), tmp_path)
    assert found["CPUAdam op"].level == "problem"
    assert "ninja" in found["CPUAdam op"].text


def test_with_another_cuda_than_torchs_the_build_decides(tmp_path: Path) -> None:
    found = compiled_ops(machine(ask=nvcc("11.8")), tmp_path, "cuda", cuda="12.8")
    assert {each.text.partition(",")[0] for each in found.values()} == {"not built yet"}


def test_without_a_toolkit_only_the_ops_that_link_against_cuda_cannot_be_built(tmp_path: Path) -> None:
    there = machine(ask=lambda command, _text: None if command[0].endswith("nvcc") else "")
    found = compiled_ops(there, tmp_path, "cuda", cuda="12.8")
    assert found["FusedAdam op"].level == "warning"
    assert "install the CUDA toolkit" in (found["AsyncIO op"].remedy or "")
    assert found["CPUAdam op"].text.startswith("not built yet, but can be")


@pytest.mark.parametrize(("nvme", "level"), [(True, "problem"), (False, "warning")])
def test_missing_libaio_is_a_problem_only_where_nvme_is_asked_for(tmp_path: Path, nvme: bool, level: str) -> None:
    there = machine(ask=lambda command, _text: None if "-laio" in command else "")
    found = compiled_ops(there, tmp_path, nvme=nvme)["AsyncIO op"]
    assert found.level == level
    assert "libaio-dev" in (found.remedy or "")


def test_a_build_that_failed_before_is_told_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / f"{ops.CPU_ADAM}.log"
    log.touch()
    found = compiled_ops(machine(), tmp_path)["CPUAdam op"]
    assert found.level == "problem"
    assert str(log) in found.text


def test_an_op_that_another_run_is_building_has_not_failed(tmp_path: Path) -> None:
    (tmp_path / f"{ops.CPU_ADAM}.log").touch()
    with (tmp_path / "builder").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert compiled_ops(machine(), tmp_path)["CPUAdam op"].level == "ok"


def test_what_a_build_says_goes_before_what_the_cache_shows(tmp_path: Path) -> None:
    states = {
        ops.CPU_ADAM: ops.OpState(op=ops.CPU_ADAM, ready=False, reason="no g++"),
        ops.SHARED_MEMORY: ops.OpState(op=ops.SHARED_MEMORY, ready=True),
    }
    found = by_name(compiled.check(machine(), "cpu", tmp_path, torch_cuda=None, nvme_asked=False, states=states))
    assert found["CPUAdam op"].level == "problem"
    assert "no g++" in found["CPUAdam op"].text
    assert found["ShareMemComm op"].text.startswith("built")


def test_the_compilers_flags_of_the_user_find_libaio_in_an_odd_place() -> None:
    asked: list[Sequence[str]] = []

    def ask(command: Sequence[str], _text: str) -> str:
        asked.append(command)
        return ""

    assert compiled.has_libaio(machine(ask=ask, CFLAGS="-I/opt/aio/include", LDFLAGS="-L/opt/aio/lib"))
    assert "-I/opt/aio/include" in asked[0]
    assert list(asked[0]).index("-L/opt/aio/lib") < list(asked[0]).index("-laio")


def test_a_real_compiler_finds_no_library_that_does_not_exist() -> None:
    broken = SystemAccess(environ={"CFLAGS": "-include /no/such/header.h"})
    assert not compiled.has_libaio(broken)


def test_stale_locks_of_ours_and_of_the_users_own_programs_are_told_apart(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    theirs = tmp_path / ".cache/torch_extensions/py311_cpu/cpu adam"
    (ours / "cpu_adam").mkdir(parents=True)
    theirs.mkdir(parents=True)
    (ours / "cpu_adam" / "lock").touch()
    (theirs / "lock").touch()
    mine, yours = compiled.check_locks(machine(HOME=str(tmp_path)), ours)
    assert compiled.BUILD in (mine.remedy or "")
    assert yours.remedy == f"rm '{theirs}/lock'"  # quoted: the path has a space in it


def test_a_lock_that_somebody_holds_is_not_stale(tmp_path: Path) -> None:
    (tmp_path / "cpu_adam").mkdir()
    with (tmp_path / "cpu_adam" / "lock").open("w"):
        (found,) = compiled.check_locks(machine(HOME=str(tmp_path)), tmp_path)
    assert found.level == "ok"


# ------------------------------------------------------------------ packages


def versions(**installed: str) -> Callable[[str], str | None]:
    return installed.get


def checked(requirements: Sequence[str], installed: Callable[[str], str | None]) -> dict[str, Finding]:
    return by_name(packages.check(requirements, installed, lambda _name: ()))


def test_a_package_outside_its_range_is_a_problem_and_the_remedy_names_the_range() -> None:
    found = checked(["deepspeed>=0.19.8,<0.20"], versions(deepspeed="0.19.6"))
    assert found["deepspeed"].level == "problem"
    assert found["deepspeed"].remedy in (
        'pip install "deepspeed<0.20,>=0.19.8"',
        'pip install "deepspeed>=0.19.8,<0.20"',
    )


def test_a_missing_package_is_a_problem() -> None:
    assert "not installed" in checked(["rich>=14"], versions())["rich"].text


def test_a_local_version_like_that_of_a_cpu_build_is_within_the_range() -> None:
    assert checked(["torch>=2.11"], versions(torch="2.13.0+cpu"))["packages"].level == "ok"


def test_a_nightly_build_is_compared_as_a_version_and_not_refused_for_being_one() -> None:
    assert "torch" not in checked(["torch>=2.11"], versions(torch="2.14.0.dev20260101+cu130"))


def test_a_version_that_is_none_is_told_as_unreadable() -> None:
    assert "could not be read" in checked(["torch>=2.11"], versions(torch="garbage version"))["torch"].text


def test_what_an_installed_package_asks_of_another_is_checked_too() -> None:
    needs = {"transformers": ["tokenizers<0.30,>=0.22", 'flax; extra == "flax"', "not a (requirement"]}
    found = by_name(
        packages.check(
            ["transformers>=5"],
            versions(transformers="5.23.0", tokenizers="0.19.0"),
            lambda name: needs.get(name, ()),
        )
    )
    assert found["tokenizers"].level == "problem"
    assert "transformers 5.23.0 needs" in found["tokenizers"].text
    assert found.keys() == {"packages", "tokenizers"}


def test_the_ranges_come_from_the_checkout_and_hold_here() -> None:
    assert any(line.startswith("deepspeed") for line in packages.our_requirements())
    assert {each.level for each in packages.check()} == {"ok"}


@pytest.mark.parametrize("content", [None, "no toml [", '[project]\nname = "another"\ndependencies = ["x"]\n'])
def test_another_projects_file_beside_the_package_is_not_ours(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "pyproject.toml"
    if content is not None:
        path.write_text(content)
    assert "x" not in packages.our_requirements(path)


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "level"),
    [
        ("580.65.06", "13.0", "ok"),
        ("575.57", "13.0", "warning"),
        ("525.60.13", "12.8", "ok"),
        ("515.105.01", "12.8", "warning"),
        ("450.80.02", "11.8", "ok"),
        ("580.65.06", "99.0", "warning"),
        ("garbage", "12.8", "warning"),
    ],
)
def test_the_driver_must_be_of_the_branch_that_torchs_cuda_needs(driver: str, torch_cuda: str, level: str) -> None:
    (found,) = packages.check_driver(driver, torch_cuda)
    assert found.level == level


def test_without_driver_or_cuda_there_is_nothing_to_say_of_the_driver() -> None:
    assert [*packages.check_driver(None, "12.8"), *packages.check_driver("580.65", None)] == []


# ------------------------------------------------------------------ the Hub


def reached(_address: str) -> None:
    return None


def refused(_address: str) -> None:
    raise OSError(111, "Connection refused")


def test_an_unreachable_hub_is_a_warning_that_presets_do_not_care_about() -> None:
    found = by_name(hub.check(machine(), refused))["Hub"]
    assert found.level == "warning"
    assert "Connection refused" in found.text
    assert "preset" in (found.remedy or "")


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_offline_means_that_nobody_is_asked(name: str, value: str) -> None:
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
    assert attempt("Hub", lambda: hub.check(machine(HF_ENDPOINT=endpoint), refused))


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
