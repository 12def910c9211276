"""What needs neither a cluster nor a model: settings, how many replicas there are, what was sent."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from locret_serve.remote import RemoteService
from locret_serve.scaling import by_slots, wanted
from locret_serve.sent import Sent
from locret_serve.settings import read_cluster
from locret_stream.conversation.parts import Call, End, Part
from locret_stream.errors import ConfigError
from locret_stream.serving.any_service import AnyService
from locret_stream.serving.errors import ApiError
from locret_stream.serving.service import Service
from locret_stream.serving.sessions import Sessions
from tests.processes import run_python
from tests.ray_serve.support import LocalReplicas, Many

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_cluster.yaml"
END = End(1, 0, 1, "stop", {})


def test_the_config_file_is_one_that_is_understood():
    (app,) = yaml.safe_load(EXAMPLE.read_text())["applications"]
    cluster = read_cluster(app["args"])
    assert cluster.model == "bundled" and cluster.max_replicas == 16 and cluster.limits.max_waiting == 32
    module, _, name = app["import_path"].partition(":")
    source = (Path(__file__).parents[2] / "adapters" / "ray_serve" / Path(*module.split("."))).with_suffix(".py")
    assert re.search(rf"^def {name}\(", source.read_text(), re.MULTILINE)


@pytest.mark.parametrize("args, told", [
    ({"store": "x", "replica": 3}, "replica"), ({}, "store"), ({"store": "x", "replicas": 0}, "at least 1"),
    ({"store": "x", "replicas": 3, "max_replicas": 2}, "at least replicas"), ({"store": "x", "cpus": "many"}, "cpus")])
def test_mistakes_in_settings_are_told(args: dict, told: str):
    with pytest.raises(ConfigError, match=told):
        read_cluster(args)


@pytest.mark.parametrize("load, replicas", [(0, 1), (5, 1), (6, 2), (12, 3), (1000, 10)])
def test_replicas_follow_the_requests(load: float, replicas: int):
    assert wanted(load, 8, 1, 10) == replicas
    context = SimpleNamespace(
        aggregated_metrics={"load": {"a": load / 2, "b": load / 2}, "slots": {"a": 8.0, "b": 8.0}},
        capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=10, target_num_replicas=2)
    assert by_slots(context) == (replicas, {})


def test_without_figures_the_replicas_stay():
    context = SimpleNamespace(aggregated_metrics=None, capacity_adjusted_min_replicas=1,
                              capacity_adjusted_max_replicas=10, target_num_replicas=4)
    assert by_slots(context) == (4, {})


def test_an_answer_that_is_begun_again_goes_on_behind_what_was_sent():
    sent, call = Sent(), Call("look", "{}", "call_1", 0)
    assert [sent.new_of(part) for part in (Part(reasoning="Hm"), Part("One "), Part("two", calls=(call,)))] == [
        Part(reasoning="Hm"), Part("One "), Part("two", calls=(call,))]
    sent.begin_again()
    again = Call("look", "{}", "call_2", 0)
    parts = [Part(reasoning="Hm, so"), Part("One two th"), Part("ree", calls=(again,)), END]
    assert [sent.new_of(part) for part in parts] == [Part(reasoning=", so"), Part(" th"), Part("ree"), END]


@pytest.mark.parametrize("parts", [
    [Part("On the")], [Part("One"), END], [Part("One two"), Part(calls=(Call("other", "{}", "x", 0),))],
    [Part(reasoning="x"), Part("One two"), END]])
def test_another_answer_is_found_out(parts: list[Part | End]):
    sent = Sent()
    sent.new_of(Part("One two", calls=(Call("look", "{}", "call_1", 0),)))
    sent.begin_again()
    with pytest.raises(ApiError, match="answers differently"):
        for part in parts:
            sent.new_of(part)


def test_the_remote_service_has_all_that_the_routes_ask_for_and_nothing_of_a_runtime():
    made = RemoteService(LocalReplicas([]), model="scripted")
    assert isinstance(made, AnyService) and not isinstance(made, Sessions)
    asked = {name for name, value in vars(AnyService).items() if callable(value) or isinstance(value, property)}
    assert asked >= {"answer", "chat", "forget", "upload", "until_idle"} and all(hasattr(made, name) for name in asked)
    used = set(re.findall(r"\bself\.(\w+)", inspect.getsource(AnyService)))
    assert [name for name in sorted(used) if not hasattr(made, name)] == []
    assert made.served == made.load == 0 and not made.draining
    for name in asked & (vars(Service).keys() | vars(Sessions).keys()) & vars(RemoteService).keys():
        theirs, ours = getattr(Service, name), getattr(RemoteService, name)
        if inspect.isfunction(theirs) and name != "__init__":
            assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters), name


def test_a_front_counts_what_it_let_in(served: Many):
    assert served.http.post("/v1/responses", json={"input": "one"}).status_code == 200
    assert served.service.served == 1 and served.service.load == 0


def test_importing_the_front_s_side_is_light():
    done = run_python("-c", "import sys, locret_serve.remote, locret_serve.memory, locret_serve.settings\n"
                      "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.skipif("ray" in sys.modules, reason="ray is loaded already")
def test_without_ray_the_command_says_what_to_install(tmp_path: Path):
    done = run_python("-c", "import sys; sys.modules['ray'] = None\n"
                      "from locret_stream.__main__ import main\nmain()", "serve", "--ray", "--store", tmp_path,
                      timeout_s=60)
    assert done.returncode == 2 and "locret-stream[ray]" in done.stderr and "Traceback" not in done.stderr, done.stderr
