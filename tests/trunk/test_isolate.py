"""Child processes that abort, hang, raise and exit: the parent gets the right error and continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import pytest

from cutekernels import isolate
from cutekernels.isolate import Child, ChildDied, ChildTimeout, Pool, RemoteError, StartFailed
from tests.processes import python, until

HERE = Path(__file__).parents[2]
TARGET = "tests.trunk.test_isolate:obey"


def obey(order: tuple[str, Any]) -> Any:
    """The children's function: aborts, hangs, raises or exits, as requested."""
    verb, value = order
    if verb == "echo":
        return value
    if verb == "pid":
        return os.getpid()
    if verb == "env":
        return os.environ.get(value)
    if verb == "abort":
        print("about to abort", file=sys.stderr, flush=True)
        os.abort()
    if verb == "exit":
        sys.exit(value)
    if verb == "kill":
        os.kill(os.getpid(), value)
    if verb == "hang":
        time.sleep(value)
        return "late"
    if verb == "mark and hang":
        (Path(value) / str(os.getpid())).touch()
        time.sleep(600)
    if verb == "await":
        until(Path(value).exists)
        return value
    if verb == "spin":
        end = time.process_time() + value
        while time.process_time() < end:
            pass
        return value
    if verb == "out of memory":
        print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr, flush=True)
        os.abort()
    if verb == "raise":
        raise KeyError(value)
    if verb == "chatter":
        print("x" * value)
        print("y" * value, file=sys.stderr)
        return value
    if verb == "lambda":
        return lambda: None
    if verb == "grandchild":  # leaves a process behind, then dies
        print("left", subprocess.Popen(["sleep", "600"]).pid, flush=True)
        os._exit(5)
    if verb == "tool":  # like a compiler that runs ptxas
        tool = subprocess.Popen(["sleep", "60"])
        Path(value + ".half").write_text(f"{tool.pid} {os.getpid()}")
        Path(value + ".half").rename(value)
        tool.wait()
    raise AssertionError(verb)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def child() -> Iterator[Child]:
    with Child(TARGET) as one:
        yield one


def gone(pid: int) -> bool:
    """Whether the process has ended or is about to."""

    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(ended)
    return True


def test_answers_in_one_process(child: Child) -> None:
    assert child.ask(("echo", {"a": (1, 2.5)}), 10) == {"a": (1, 2.5)}
    first = child.ask(("pid", None), 10)
    assert first == child.ask(("pid", None), 10) == child.pid != os.getpid()


def test_abort_names_the_signal_and_quotes_stderr_then_respawns(child: Child) -> None:
    first = child.ask(("pid", None), 10)
    with pytest.raises(ChildDied, match="SIGABRT") as death:
        child.ask(("abort", None), 10)
    assert death.value.exitcode == -signal.SIGABRT
    assert "about to abort" in death.value.stderr
    assert "about to abort" in str(death.value)
    assert child.ask(("pid", None), 10) != first


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        (("exit", 3), "exited with code 3"),
        (("exit", 0), "exited with code 0"),
        (("kill", signal.SIGSEGV), "died of SIGSEGV"),
        (("kill", signal.SIGKILL), "died of SIGKILL"),
    ],
)
def test_every_way_to_end_is_a_death(child: Child, order: tuple[str, Any], cause: str) -> None:
    with pytest.raises(ChildDied) as death:
        child.ask(order, 10)
    assert death.value.cause == cause


def test_a_hang_is_killed_at_its_deadline(child: Child) -> None:
    pid = child.ask(("pid", None), 10)
    begin = time.monotonic()
    with pytest.raises(ChildTimeout, match=r"within 0\.3 s"):
        child.ask(("hang", 600), 0.3)
    assert time.monotonic() - begin < 60
    assert gone(pid)
    assert child.ask(("echo", 1), 10) == 1


@pytest.mark.parametrize(("order", "outside"), [(("hang", 60), True), (("spin", 60), False)])
def test_a_missed_deadline_tells_whether_the_child_had_cpu_time(
    child: Child, order: tuple[str, Any], outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    child.ask(("spin", 0.3), 10)  # of an earlier request, which does not count
    monkeypatch.setattr(isolate, "_FAIR_SHARE", 0.05)  # the machine of the tests may be loaded
    begin = time.monotonic()
    with pytest.raises(ChildTimeout) as miss:
        child.ask(order, 1.0)
    assert miss.value.cpu_s is not None and 0 <= miss.value.cpu_s < time.monotonic() - begin + 0.5
    assert miss.value.outside is outside


@pytest.mark.parametrize(
    ("order", "outside"),
    [
        (("kill", signal.SIGKILL), True),
        (("kill", signal.SIGTERM), True),
        (("kill", signal.SIGSEGV), False),
        (("abort", None), False),
        (("exit", 3), False),
        (("out of memory", None), True),
    ],
)
def test_a_death_tells_whether_it_came_from_outside(child: Child, order: tuple[str, Any], outside: bool) -> None:
    with pytest.raises(ChildDied) as death:
        child.ask(order, 10)
    assert death.value.outside is outside


def test_a_stopped_child_cannot_block_a_large_request(child: Child) -> None:
    pid = child.ask(("pid", None), 10)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ChildTimeout):
        child.ask(("echo", b"x" * 4_000_000), 0.5)
    assert gone(pid)


def test_a_remote_exception_carries_type_message_and_traceback(child: Child) -> None:
    pid = child.ask(("pid", None), 10)
    with pytest.raises(RemoteError, match="KeyError: 'tile'") as error:
        child.ask(("raise", "tile"), 10)
    assert error.value.type_name == "KeyError"
    assert "obey" in error.value.traceback_text
    assert child.ask(("pid", None), 10) == pid, "an exception is no reason to lose the process"


def test_an_answer_that_does_not_pickle_is_a_remote_error(child: Child) -> None:
    with pytest.raises(RemoteError, match="pickle"):
        child.ask(("lambda", None), 10)
    assert child.ask(("echo", 1), 10) == 1


def test_a_flood_of_output_deadlocks_nobody_and_stays_off_stdout(
    child: Child, capfd: pytest.CaptureFixture[str]
) -> None:
    assert child.ask(("chatter", 3_000_000), 20) == 3_000_000
    assert child.ask(("echo", b"z" * 3_000_000), 20) == b"z" * 3_000_000
    with pytest.raises(ChildDied) as death:
        child.ask(("abort", None), 10)
    assert "yyyy" not in death.value.stderr, "the tail is of this request"
    assert capfd.readouterr().out == ""


def test_environment_overrides() -> None:
    with Child(TARGET, env={"CUDA_VISIBLE_DEVICES": "", "HOME": None}) as child:
        assert child.ask(("env", "CUDA_VISIBLE_DEVICES"), 10) == ""
        assert child.ask(("env", "HOME"), 10) is None
        assert child.ask(("env", "PATH"), 10) == os.environ["PATH"]


@pytest.mark.parametrize("target", ["no_such_module_here:f", "tests.trunk.test_isolate:no_such_function"])
def test_a_target_that_does_not_import_is_not_the_requests_fault(target: str) -> None:
    with Child(target) as child, pytest.raises(StartFailed, match="no_such"):
        child.ask(1, 10)


@pytest.mark.parametrize(
    ("body", "says"), [("import os; os.abort()", "SIGABRT"), ("import time; time.sleep(60)", "0.5 s")]
)
def test_a_process_that_dies_or_hangs_while_starting(
    body: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_start.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    start_s = 0.5 if "sleep" in body else 30
    with Child("bad_start:f", start_deadline_s=start_s) as child, pytest.raises(StartFailed, match=says):
        child.ask(1, 10)


def test_a_start_that_is_killed_from_outside_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed_once.py").write_text(
        "import os, pathlib\n"
        "mark = pathlib.Path(__file__).with_name('mark')\n"
        "if not mark.exists():\n    mark.touch(); os.kill(os.getpid(), 9)\n"
        "def f(x): return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Child("killed_once:f") as child:
        assert child.ask(1, 10) == 1
    (tmp_path / "mark").unlink()
    (tmp_path / "killed_once.py").write_text("import os; os.kill(os.getpid(), 9)")
    with Child("killed_once:f") as child, pytest.raises(StartFailed, match="SIGKILL.*fewer --jobs or --lanes"):
        child.ask(1, 10)


def test_a_start_without_room_names_it_and_leaves_no_descriptor(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(isolate.tempfile, "TemporaryFile", full)
    with pytest.raises(StartFailed, match="No space left on device; free descriptors .* and space in TMPDIR"):
        child.ask(("echo", 1), 10)
    assert sorted(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    assert child.ask(("echo", 1), 10) == 1


def test_a_malformed_target_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"package\.module:function"):
        Child("tests.trunk.test_isolate.obey")


def test_a_death_is_seen_though_a_grandchild_lives_and_takes_it_along(child: Child) -> None:
    with pytest.raises(ChildDied, match="code 5") as death:
        child.ask(("grandchild", None), 30)
    assert gone(int(death.value.stderr.removeprefix("left ")))


def test_a_child_that_died_between_requests_costs_nobody_a_request(child: Child) -> None:
    pid = child.ask(("pid", None), 10)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, and left for the child object to find
    assert child.ask(("pid", None), 10) != pid


def test_what_needs_the_same_process_dies_with_it(child: Child) -> None:
    pid = child.ask(("pid", None), 10)
    assert child.ask(("pid", None), 10, fresh=False) == pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ChildDied, match="SIGKILL") as death:
        child.ask(("pid", None), 10, fresh=False)
    assert death.value.outside
    assert child.ask(("pid", None), 10) != pid


def test_closing_a_child_that_is_just_starting_ends_it(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """close() finds no process to kill yet; without care it would wait for the whole request."""
    real, end_it = subprocess.Popen, child._signal_group
    closing, looked = threading.Thread(target=child.close), threading.Event()

    def look_for_a_process() -> None:
        end_it()
        looked.set()

    def slow_to_start(*args: Any, **kwargs: Any) -> Any:
        closing.start()
        assert looked.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(child, "_signal_group", look_for_a_process)
    monkeypatch.setattr(subprocess, "Popen", slow_to_start)
    with pytest.raises(StartFailed, match="closed"):
        child.ask(("hang", 60), 100)
    closing.join()
    assert child.pid is None


def test_a_closed_child_stays_closed(child: Child) -> None:
    pid = child.ask(("pid", None), 10)
    child.close()
    assert gone(pid)
    with pytest.raises(StartFailed, match="closed"):
        child.ask(("echo", 1), 10)


def replies(pool: Pool, tasks: Sequence[Any], hang_s: float = 100) -> Iterator[tuple[int, Any]]:
    """``(index, reply or failure)`` of each task as it ends. ``hang_s``: the deadline of those that hang."""
    index_of = {pool.submit(task, hang_s if task[0] == "hang" else 100): index for index, task in enumerate(tasks)}
    for future in as_completed(index_of):
        yield index_of[future], future.exception() or future.result()


def test_pool_loses_only_the_tasks_that_fail() -> None:
    tasks = [("echo", 0), ("abort", None), ("echo", 2), ("raise", "k"), ("hang", 600), ("echo", 5), ("exit", 1)]
    with Pool(TARGET, 2) as pool:
        outcomes = dict(replies(pool, tasks, 0.5))
        assert sorted(outcomes) == list(range(len(tasks)))
        assert [outcomes[i] for i in (0, 2, 5)] == [0, 2, 5]
        assert isinstance(outcomes[1], ChildDied)
        assert isinstance(outcomes[3], RemoteError)
        assert isinstance(outcomes[4], ChildTimeout)
        assert isinstance(outcomes[6], ChildDied)
        again = dict(replies(pool, [("pid", None)] * 3))
        assert len(set(again.values())) <= 2


def test_pool_yields_as_completed(tmp_path: Path) -> None:
    order = []
    with Pool(TARGET, 2) as pool:
        for index, _ in replies(pool, [("await", str(tmp_path / "echoed")), ("echo", 1), ("echo", 2)]):
            order.append(index)
            if len(order) == 2:
                (tmp_path / "echoed").touch()
    assert order[-1] == 0


def test_leaving_a_pool_early_kills_its_processes() -> None:
    with Pool(TARGET, 2) as pool:
        asked = [("pid", None), ("hang", 0.2), ("pid", None)]
        pids = {pid for _, pid in replies(pool, asked) if isinstance(pid, int)}
        next(replies(pool, [("echo", 1), ("hang", 600), ("hang", 600), ("hang", 600)], 200))
        begin = time.monotonic()
    assert time.monotonic() - begin < 60
    assert all(gone(pid) for pid in pids)


SCRIPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
from cutekernels.isolate import Child, Pool
sys.path.insert(0, {here!r})
with Pool({target!r}, 2) as pool:
    for pid in [pool.submit(("pid", None), 30) for _ in range(2)]:
        print(pid.result(), flush=True)
    for hung in [pool.submit(("mark and hang", {marks!r}), 200) for _ in range(4)]:
        hung.result()
"""


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_no_orphans_when_the_parent_goes(blow: signal.Signals, tmp_path: Path) -> None:
    """An unguarded script on purpose: a spawned child must not run it a second time."""
    script = textwrap.dedent(SCRIPT.format(here=str(HERE), target=TARGET, marks=str(tmp_path)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    )
    assert parent.stdout is not None
    pids = {int(parent.stdout.readline()) for _ in range(2)}
    until(lambda: len(list(tmp_path.iterdir())) == 2)  # the second round is under way: the children are busy
    parent.send_signal(blow)
    assert parent.wait(60) != 0
    parent.stdout.close()
    assert all(gone(pid) for pid in pids)


ENDS = """
import os, sys, threading, time
from cutekernels.isolate import Child
sys.path.insert(0, {here!r})
threading.Thread(target=Child({target!r}).ask, args=(("tool", {place!r}), 100), daemon=True).start()
while not os.path.exists({place!r}):
    time.sleep(0.01)
"""


def test_what_a_child_started_goes_with_the_parent_too(tmp_path: Path) -> None:
    place = tmp_path / "pids"
    script = textwrap.dedent(ENDS.format(here=str(HERE), target=TARGET, place=str(place)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    python(script, env=env)
    assert all(gone(int(pid)) for pid in place.read_text().split())
