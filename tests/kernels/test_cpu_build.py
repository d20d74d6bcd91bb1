"""Building the CPU kernels: once per machine, and a clear answer where it cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.kernels.cpu import CannotBuild, build


def fake_build(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[Path]:
    """The library paths that were built, each as an empty file, instead of compiling."""
    built: list[Path] = []

    def write(library: Path, flags: tuple[str, ...]) -> None:
        built.append(library)
        library.touch()

    monkeypatch.setenv("TWOSTROKE_CACHE", str(cache))
    monkeypatch.setattr(build, "_build", write)
    monkeypatch.setattr(build, "_load", lambda library: None)
    return built


def test_it_builds_once_and_again_only_when_something_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = fake_build(monkeypatch, tmp_path)
    build.load_native()
    build.load_native()
    assert len(built) == 1
    monkeypatch.setattr(build, "_flags", lambda: ("-O1",))
    build.load_native()
    assert len(set(built)) == 2
    assert all(path.is_relative_to(tmp_path) for path in built)


def test_who_waited_for_another_build_uses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = fake_build(monkeypatch, tmp_path)
    library = tmp_path / "cpu-key" / "library.so"
    build._build_once(library, ())
    build._build_once(library, ())  # saw no library before, but gets the lock after the first
    assert built == [library]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotBuild, match="no C\\+\\+ compiler 'no-such-compiler' on the PATH"):
        build.load_native()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CannotBuild, match="set TWOSTROKE_CACHE"):
        build.load_native()
