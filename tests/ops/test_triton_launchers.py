"""Launchers that several threads load are those they asked for; with C extensions like Triton's, built by Triton."""

import sys
import threading
from pathlib import Path

import pytest
from triton.runtime import build

from dsv4.ops import _triton_launchers

NAME = "__triton_launcher"
SOURCE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{ return PyModule_Create(&module); }}
"""


@pytest.fixture(scope="module")
def launchers(tmp_path_factory) -> list[str]:
    """Extensions 0, 1 and 2; ``launch`` of each returns its number."""
    made = []
    for number in range(3):
        folder = tmp_path_factory.mktemp(f"launcher{number}")
        source = folder / f"{NAME}.c"
        source.write_text(SOURCE.format(number=number))
        made.append(build._build(NAME, str(source), str(folder), [], [], [], []))
    return made


@pytest.fixture
def load():
    """As Triton has it, whatever is in place by now."""
    return getattr(build._load_module_from_path, "__wrapped__", build._load_module_from_path)


def test_why_it_is_needed(launchers, load):
    """If this fails, Python or Triton has changed and the guard can go."""
    for path in launchers:
        load(NAME, path)
    again = [load(NAME, path) for path in launchers]
    assert [module.launch() for module in again] == [2, 2, 2]


def test_every_load_has_a_module_of_its_own(launchers, load):
    guarded = _triton_launchers.alone(load)
    modules = [guarded(NAME, path) for path in launchers * 3]
    assert [module.launch() for module in modules] == [0, 1, 2] * 3
    assert all(module.__name__ == NAME for module in modules)


def test_threads(launchers, load):
    """More switches between threads than any prewarm has."""
    guarded, wrong, interval = _triton_launchers.alone(_triton_launchers.alone(load)), [], sys.getswitchinterval()

    def loads(number: int) -> None:
        for _ in range(400):
            module = guarded(NAME, launchers[number])
            sum(range(50))  # what lies between the load and the look at it
            if module.launch() != number:
                wrong.append(number)

    threads = [threading.Thread(target=loads, args=(number,)) for number in range(3)]
    sys.setswitchinterval(1e-7)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_cold_launches_put_the_guard_in_place(monkeypatch):
    loaded = []
    monkeypatch.setattr(build, "_load_module_from_path", lambda name, path: loaded.append(path) or sys)
    _triton_launchers._guarded.cache_clear()
    with _triton_launchers.loading():
        module = build._load_module_from_path(NAME, "somewhere")
    assert loaded == ["somewhere"] and module is not sys and module.version == sys.version
    _triton_launchers._guarded.cache_clear()


def test_a_release_without_the_function_loads_one_launcher_at_a_time(monkeypatch):
    monkeypatch.delattr(build, "_load_module_from_path")
    _triton_launchers._guarded.cache_clear()
    inside, most, lock = [], [], threading.Lock()

    def launch() -> None:
        with _triton_launchers.loading():
            with lock:
                inside.append(1)
                most.append(len(inside))
            Path(__file__).read_text()
            with lock:
                inside.pop()

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    _triton_launchers._guarded.cache_clear()
