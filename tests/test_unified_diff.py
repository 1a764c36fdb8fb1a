"""Patches: read, named and applied, exactly or not at all; those of this package, to the real sources."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_moe_ext import BuildError
from hybrid_moe_ext.patched import source
from hybrid_moe_ext.patched.patch_files import ALWAYS_ON, apply_patches, digest, patches_folder, read_patches
from hybrid_moe_ext.patched.unified_diff import PatchFault, _apply, apply_patch, parse
from tiny_llama import write_patch

LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "-- a\n", "++ b\n", "@@ -1 +1 @@\n", "\\ c\n"]), max_size=30)
HEAD = "diff --git a/f b/f\n--- a/f\n+++ b/f\n"


def applied(tmp_path: Path, before: str, patch: str) -> str:
    (tmp_path / "f").write_text(before)
    assert apply_patch(patch.encode(), tmp_path) == ["f"]
    return (tmp_path / "f").read_text()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine everything is
@given(before=LINES, after=LINES, context=st.integers(0, 4))
def test_what_difflib_tells_apart_is_put_together(before, after, context):
    if before == after:
        return
    patch = "text\n" + "".join(difflib.unified_diff(before, after, "a/f", "b/f", n=context)) + "-- \n2.39.5\n"
    (diff,) = parse(patch.encode())
    assert _apply(diff.hunks, "".join(before).encode(), "f") == "".join(after).encode()


def test_lines_that_moved_are_found_and_others_are_not(tmp_path):
    patch = HEAD + "@@ -2,3 +2,3 @@ f\n one\n-two\n+2\n three\n"
    assert applied(tmp_path, "0\none\ntwo\nthree\n", patch) == "0\none\n2\nthree\n"
    assert applied(tmp_path, "0\n0\n0\n0\none\ntwo\nthree\n", patch) == "0\n0\n0\n0\none\n2\nthree\n"
    (tmp_path / "f").write_text("one\ntwo \nthree\n")
    with pytest.raises(PatchFault, match=r"f is not what hunk 1 \(line 2\) expects"):
        apply_patch(patch.encode(), tmp_path)
    assert (tmp_path / "f").read_text() == "one\ntwo \nthree\n"


def test_ends_without_a_newline(tmp_path):
    none = "\\ No newline at end of file\n"
    assert applied(tmp_path, "a", HEAD + f"@@ -1 +1 @@\n-a\n{none}+b\n") == "b\n"
    assert applied(tmp_path, "a\n", HEAD + f"@@ -1 +1 @@\n-a\n+b\n{none}") == "b"
    assert applied(tmp_path, "a\nb", HEAD + f"@@ -1,2 +1,2 @@\n-a\n+c\n b\n{none}") == "c\nb"


def test_files_come_and_go(tmp_path):
    new = "diff --git a/x/n b/x/n\nnew file mode 100644\n--- /dev/null\n+++ b/x/n\n@@ -0,0 +1,2 @@\n+1\n+2\n"
    assert apply_patch(new.encode(), tmp_path) == ["x/n"] and (tmp_path / "x/n").read_text() == "1\n2\n"
    with pytest.raises(PatchFault, match="x/n is there already"):
        apply_patch(new.encode(), tmp_path)
    gone = "--- a/x/n\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-1\n-2\n"
    apply_patch(gone.encode(), tmp_path)
    assert not (tmp_path / "x/n").exists()
    with pytest.raises(PatchFault, match="x/n does not exist"):
        apply_patch(gone.encode(), tmp_path)


@pytest.mark.parametrize(
    ("patch", "fault"),
    [
        ("nothing\n", "changes no file"),
        (HEAD.replace("a/f", "a/../f").replace("b/f", "b/../f") + "@@ -1 +1 @@\n-a\n+b\n", "no path below a/"),
        (HEAD + "@@ -1,2 +1,2 @@\n-a\n+b\n", "cut off or damaged"),
        (HEAD + "@@ -x +1 @@\n-a\n+b\n", "no head of a hunk"),
        ("diff --git a/f b/g\nrename from f\nrename to g\n", "not supported"),
        ("diff --git a/f b/f\nGIT binary patch\n", "not supported"),
        (HEAD + "@@ -1 +1 @@\n-a\n+b\n" + HEAD + "@@ -1 +1 @@\n-b\n+c\n", "names a file twice"),
        ("@@ -1 +1 @@\n-a\n+b\n", "belongs to no file"),
    ],
)
def test_what_is_no_patch_is_refused_before_anything_is_written(tmp_path, patch, fault):
    (tmp_path / "f").write_text("a\n")
    with pytest.raises(PatchFault, match=fault):
        apply_patch(patch.encode(), tmp_path)
    assert (tmp_path / "f").read_text() == "a\n"


def test_a_message_may_say_what_a_diff_would(tmp_path):
    assert applied(tmp_path, "a\n", "rename from here to there\n---\n" + HEAD + "@@ -1 +1 @@\n-a\n+b\n") == "b\n"


def test_patches_are_read_in_order_with_their_switches(tmp_path):
    write_patch(tmp_path)
    write_patch(tmp_path, "Subject: [PATCH] ggml : short\n\nNo more.\n---\nSwitch: not here\n", "0000-first.patch")
    first, second = read_patches(tmp_path)
    assert (first.name, first.subject, first.switch) == ("0000-first", "ggml : short", ALWAYS_ON)
    assert second.subject == "llama : another answer to a question of some length that nobody asked"
    assert second.switch == "always, or when asked"
    assert digest([first, second]) != digest([second, first]) != digest([second])
    (tmp_path / "late.patch").touch()
    with pytest.raises(BuildError, match=r"late.patch has no number"):
        read_patches(tmp_path)


def test_a_patch_that_does_not_apply_is_named(tmp_path):
    folder = write_patch(tmp_path / "patches")
    with pytest.raises(BuildError, match=r"patch 0001-another-answer does not apply .*: src/llama.c does not exist"):
        apply_patches(folder, read_patches(folder), tmp_path)


def test_the_packages_own_patches_apply_to_the_pinned_sources(tmp_path):
    patches = read_patches(patches_folder())
    if not patches:
        pytest.skip("this package brings no patches")
    if not os.environ.get("LLAMA_CPP_SDIST"):
        pytest.skip("set LLAMA_CPP_SDIST to llama-cpp-python's source archive")
    archive = source.find_sdist(Path(os.environ["LLAMA_CPP_SDIST"]), tmp_path)
    sources = source.unpack(archive, tmp_path / "sources")
    apply_patches(patches_folder(), patches, sources)
    for patch in patches:
        changed = [d.new for d in parse((patches_folder() / f"{patch.name}.patch").read_bytes()) if d.new]
        assert changed and all((sources / path).is_file() for path in changed)
