"""The corpus: split, skips and chat examples."""

from pathlib import Path

from models.training.tokens import Document, chat_examples, collect

SOURCE = '''def greet(name):
    """Say hello.

    More words.
    """
    return f"hello {name}"


def silent():
    return None
'''


def write_files(root: Path, names: list[str]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {name!r}\n", encoding="utf-8")


def test_no_file_both_trains_and_measures(tmp_path: Path) -> None:
    write_files(tmp_path, [f"package/module_{number}.py" for number in range(300)])
    corpus = collect(tmp_path)
    training = {document.name for document in corpus.training}
    held_out = {document.name for document in corpus.held_out}
    assert training.isdisjoint(held_out)
    assert len(training) + len(held_out) == 300
    assert held_out


def test_split_depends_on_the_name_alone() -> None:
    assert Document("ast.py", "one").is_held_out == Document("ast.py", "two").is_held_out


def test_site_packages_and_tables_are_left_out(tmp_path: Path) -> None:
    write_files(tmp_path, ["site-packages/a.py", "encodings/cp437.py", "_sysconfigdata_x.py", "kept.py"])
    corpus = collect(tmp_path)
    assert [document.name for document in corpus.training + corpus.held_out] == ["kept.py"]


def test_unreadable_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_bytes(b"")
    corpus = collect(tmp_path)
    assert not corpus.training + corpus.held_out


def test_documented_functions_become_chats() -> None:
    (messages,) = chat_examples(Document("greet.py", SOURCE))
    assert messages[-2]["content"] == "Write a Python function `greet`. Say hello."
    assert messages[-1]["content"].startswith("def greet(name):")


def test_broken_source_yields_no_chat() -> None:
    assert list(chat_examples(Document("broken.py", "def f(:\n"))) == []
