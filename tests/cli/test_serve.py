"""`locret-stream serve` where it cannot begin; tests/serving has what it does once it has begun."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import locret_stream.cli.serve as verb
from locret_serve import starting
from locret_serve.settings import read_cluster
from locret_stream.errors import ConfigError
from locret_stream.named_models import BUNDLED
from locret_stream.serving import service
from locret_stream.serving.limits import Limits
from tests.cli.command import invoke
from tests.processes import run_python

LOST = """
import locret_stream.cli.serve as verb
verb._expect_free = lambda host, port: None
from locret_stream.__main__ import main
main()
"""


def test_a_model_without_a_chat_template_is_told_in_one_line(tiny: Path, tmp_path: Path):
    base = without_template(tiny, tmp_path / "base")
    code, out, err = invoke("serve", "--store", tmp_path / "store", "--port", 0, "--model", base, "--policy", "keydiff",
                            "--budget", 96, "--chunk-size", 32)
    assert (code, out) == (2, ""), err
    [line] = err.splitlines()
    assert line.startswith(f"locret-stream: the tokenizer of {base} has no chat template")
    assert "chat_template.jinja" in line and "template=" not in line, "what it names can be done"


def without_template(tiny: Path, folder: Path) -> Path:
    return Path(shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("chat_template*")))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stands for Ray, which is asked for nothing before the checks: what it was asked for."""
    asked: list[str] = []

    class Ray(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            asked.append(name)
            raise AssertionError(f"ray.{name} was asked for")

    fake = Ray("ray")
    fake.serve = ModuleType("ray.serve")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.serve", fake.serve)  # type: ignore[attr-defined]
    yield asked


@pytest.mark.parametrize(("more", "told"), [
    ((), "has no chat template"), (("--model", "nowhere/at/all"), "nowhere/at/all"),
    (("--policy", "keydif"), "unknown policy 'keydif'"), (("--timeout", "inf"), "expected a finite number of seconds")])
def test_with_ray_what_no_replica_could_serve_is_told_before_a_cluster_starts(
        tiny: Path, tmp_path: Path, ray: list[str], more: tuple[str, ...], told: str):
    base = without_template(tiny, tmp_path / "base")
    code, out, err = invoke("serve", "--ray", "--store", tmp_path / "store", "--port", 0, "--model", base, "--policy",
                            "keydiff", *more)
    assert (code, out, ray) == (2, "", []), err
    [line] = err.splitlines()
    assert line.startswith("locret-stream: ") and told in line and "Traceback" not in err, err


def test_a_cluster_elsewhere_may_have_what_this_machine_lacks(tiny: Path, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch):
    checked: list[bool] = []

    def many(*_: Any, check: Callable[[], None], **__: Any) -> None:
        check()
        checked.append(True)

    monkeypatch.setattr(starting, "run", many)
    common = ("serve", "--ray", "--ray-address", "far:6379", "--store", tmp_path / "store", "--policy", "keydiff")
    for model in ("/only/on/the/replicas", tiny, "bundled"):
        assert invoke(*common, "--model", model)[0] == 0, model
    assert checked == [True, True, True]
    code, _, err = invoke(*common, "--model", without_template(tiny, tmp_path / "base"))
    assert code == 2 and "has no chat template" in err and len(checked) == 3


def test_a_model_whose_files_show_a_template_is_not_loaded_for_it(tiny: Path, tmp_path: Path):
    settings = without_template(tiny, tmp_path / "settings")
    file = settings / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages }}"}))
    done = run_python("-c", "import sys; from locret_stream.cli.loading import has_chat_template as has\n"
                      "from locret_stream.cli.options import RuntimeOptions as Options\n"
                      "assert all([has(Options(model=each), elsewhere=False) for each in sys.argv[1:]])\n"
                      "print('torch' in sys.modules)", "bundled", BUNDLED, tiny, settings)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


UPLOADS = ("--upload-idle", 5, "--upload-least", 10, "--upload-resume", 7.5)


@pytest.mark.parametrize("where", [(), ("--ray",)])
def test_what_uploads_may_is_told_on_the_command_line(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...]):
    found: list[Limits] = []

    def many(cluster: dict[str, Any], **_: Any) -> None:
        found.append(read_cluster(cluster).limits)

    def one(runtime: Any, *, limits: Limits, **_: Any) -> None:
        found.append(limits)
        raise ConfigError("enough")

    monkeypatch.setattr(starting, "run", many)
    monkeypatch.setattr(service, "Service", one)
    monkeypatch.setattr(verb, "make_runtime", lambda *_, **__: SimpleNamespace(frames=SimpleNamespace(raw=False)))
    monkeypatch.setattr(verb, "describe_runtime", lambda _: "")
    invoke("serve", *where, "--store", tmp_path / "store", "--port", 0, *UPLOADS)
    assert [(each.upload_idle_s, each.upload_least_bytes, each.upload_resume_s) for each in found] == [(5, 10, 7.5)]


@pytest.mark.parametrize(("option", "value", "told"), [
    ("--upload-idle", 0, "--upload-idle"), ("--upload-least", 0, "--upload-least"),
    ("--upload-resume", -1, "--upload-resume"),
    ("--upload-resume", "inf", "upload_resume_s is inf"), ("--upload-idle", "nan", "--upload-idle")])
def test_limits_of_uploads_that_cannot_be(tmp_path: Path, option: str, value: object, told: str):
    code, out, err = invoke("serve", "--store", tmp_path / "store", "--port", 0, option, value)
    assert (code, out) == (2, "") and told in err, err


@pytest.mark.thorough
def test_a_port_that_is_lost_while_the_model_loads_is_told_as_a_mistake(small: list[str], tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_python("-c", LOST, "serve", "--store", tmp_path, "--port", port, *small, timeout_s=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    *before, line = done.stderr.splitlines()
    assert line.startswith(f"locret-stream: no server has started on 127.0.0.1:{port}; "), done.stderr
    assert "already in use" in before[-1], done.stderr


@pytest.mark.parametrize(("written", "why"), [
    ("{", "found no JSON"), ("[1]", "cannot be used"), ("{}", "cannot be used"),
    ('{"start_anchor": "x", "fields": {"content": {"content": "nonsense"}}}', "unknown content parser 'nonsense'")])
def test_a_response_template_that_cannot_be_used_is_told_in_one_line_before_a_model_is_loaded(
        tmp_path: Path, written: str, why: str):
    file = tmp_path / "replies.json"
    file.write_text(written)
    code, out, err = invoke("serve", "--store", tmp_path / "store", "--port", 0, "--response-template", file)
    assert (code, out) == (2, ""), err
    [line] = err.splitlines()
    assert line.startswith(f"locret-stream: --response-template {file}: ") and why in line and "ResponseParser" in line
