"""Two tokenizers and one text: shared tokens are found, and a translation spells the original."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from torch.utils._python_dispatch import TorchDispatchMode

from engine.proposer.byte_vocabulary import ByteVocabulary, TextReader, names_of
from engine.proposer.translation import (
    DraftVocabulary,
    ModelTokens,
    SameVocabulary,
    SharedTokens,
    VocabularyPair,
    are_names_of_one,
    choose_vocabulary,
)
from engine.sequence.sequence import num_equal
from protos.errors import ConfigError
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, write_tokenizer
from tests.engine.fixtures.checkpoints import Folders, write_checkpoint
from tests.engine.fixtures.pairs.foreign_pair import (
    COVERAGE,
    DRAFT_TEXTS,
    TARGET_TEXTS,
    new_tokenizer,
    write_foreign_pair,
)

TEXT = (
    "The draft's na\u00efve \u2014 word: \U0001f600\U0001f600 \u4f60\u597d,\n\n    def f(x):\n"
    "\treturn 'the tokens' * 12345  # ok "
)


def byte_vocabulary(folder: Path) -> ByteVocabulary:
    """Byte-level, of JSON."""
    return ByteVocabulary(write_tokenizer(folder), BYTE_VOCAB_SIZE)


def metaspace_vocabulary() -> ByteVocabulary:
    """A vocabulary of SentencePiece: a space before every text, and a token for each byte that has no character."""
    control = ["<unk>", "<s>", "</s>"]
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=control + byte_tokens, show_progress=False)
    core.train_from_iterator([text.replace(" ", "\u2581") for text in TARGET_TEXTS + DRAFT_TEXTS], trainer)
    return ByteVocabulary(_with_plain_bytes(core, byte_tokens), 340)


def _with_plain_bytes(core: Tokenizer, names: list[str]) -> Tokenizer:
    """Byte tokens are ordinary tokens, which the trainer cannot express."""
    content = json.loads(core.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] not in names]
    return Tokenizer.from_str(json.dumps(content))


@pytest.fixture
def vocabularies(tmp_path: Path) -> list[ByteVocabulary]:
    return [byte_vocabulary(tmp_path), metaspace_vocabulary()]


def test_any_part_of_a_text_is_spelled_exactly(vocabularies: list[ByteVocabulary]) -> None:
    dice = random.Random(0)
    for vocabulary in vocabularies:
        for _ in range(200):
            start, end = sorted(dice.sample(range(len(TEXT) + 1), 2))
            assert vocabulary.spell(vocabulary.encode(TEXT[start:end])).decode() == TEXT[start:end]


def test_bytes_that_are_no_text_are_spelled_one_by_one(vocabularies: list[ByteVocabulary]) -> None:
    for vocabulary in vocabularies:
        assert vocabulary.spell(vocabulary.encode_bytes(b"\xe4\xbd")) == b"\xe4\xbd"


def test_a_token_across_the_border_is_no_continuation(tmp_path: Path) -> None:
    vocabulary = ByteVocabulary(new_tokenizer(TARGET_TEXTS, 24), 100)
    word = max(vocabulary.id_of, key=len)  # one token
    assert vocabulary.encode_after(word[:-1], word) is None
    assert vocabulary.encode_after(word, word + b" to") == vocabulary.encode(" to")


def read_in_steps(reader: TextReader, target_ids: list[int], dice: random.Random) -> list[list[int]]:
    """Return the draft's tokens after each commit, and check the results of `extend`."""
    states, num_told, before = [], 0, []
    while num_told < len(target_ids):
        num_told += dice.randint(1, 5)
        num_same = reader.extend(target_ids[:num_told])
        assert num_same == num_equal(before, reader.token_ids)
        before = list(reader.token_ids)
        states.append(before)
    return states


@pytest.mark.parametrize("is_reversed", [False, True])
def test_what_the_draft_reads_spells_what_the_target_said(
    vocabularies: list[ByteVocabulary], is_reversed: bool
) -> None:
    target, draft = reversed(vocabularies) if is_reversed else vocabularies
    dice = random.Random(1)
    target_ids = target.encode(TEXT * 20)
    reader = TextReader(target, draft, {})
    num_told = 0
    while num_told < len(target_ids):
        num_told += dice.randint(1, 5)
        reader.extend(target_ids[:num_told])
        said = target.spell(target_ids[:num_told])
        assert draft.spell(reader.token_ids) + reader.held == said
        assert len(reader.held) < 4


def test_only_the_end_of_a_long_text_is_read_anew(vocabularies: list[ByteVocabulary]) -> None:
    target, draft = vocabularies
    states = read_in_steps(TextReader(target, draft, {}), target.encode(TEXT * 20), random.Random(2))
    for before, after in pairwise(states):
        num_same = num_equal(before, after)
        assert len(draft.spell(before[num_same:])) <= 260
    at_once = TextReader(target, draft, {})
    at_once.extend(target.encode(TEXT * 20))
    assert num_equal(at_once.token_ids, states[-1]) > 100  # mostly one and the same


def test_the_last_word_is_read_again_when_it_goes_on() -> None:
    target, draft = (ByteVocabulary(new_tokenizer(*each), 100) for each in ((DRAFT_TEXTS, 0), (TARGET_TEXTS, 24)))
    reader = TextReader(target, draft, {})
    letters = target.encode("of the")
    read = [[draft.bytes_of(each) for each in state] for state in read_in_steps(reader, letters, random.Random(0))]
    assert read[-1] == [b"of", b" the"] or read[-1] == [b"o", b"f", b" the"]
    assert reader.extend([*letters, *target.encode("se")]) < len(reader.token_ids)


def test_a_control_token_ends_the_text_and_is_read_by_its_role() -> None:
    target = ByteVocabulary(new_tokenizer(TARGET_TEXTS, 24), 100)
    draft = ByteVocabulary(new_tokenizer(DRAFT_TEXTS, 20, ["<start>", "<stop>"]), 100)
    pair = VocabularyPair(target, draft, ModelTokens(100, eos_token_ids=(0,)), ModelTokens(100, eos_token_ids=(1,)))
    special_ids = pair.special_ids()
    assert special_ids[0] == (1,)
    assert set(special_ids) == {0, 1}  # <turn> is text, as far as the draft has its letters
    reader = TextReader(target, draft, special_ids)
    reader.extend([*target.encode("the"), 0, *target.encode("end")])
    assert draft.spell(reader.token_ids) == b"theend"
    assert reader.token_ids.count(1) == 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_foreign_pair(tmp_path_factory.mktemp("foreign"))


def test_drafts_are_made_of_the_tokens_that_spell_the_same(folders: Folders) -> None:
    pair = choose_vocabulary(str(folders.target), str(folders.draft)).require_pair()
    translation = SharedTokens(pair)
    logits = torch.randn(3, pair.draft_tokens.vocab_size)
    aligned = translation.align(logits)
    for token_id in range(pair.target_tokens.vocab_size):
        own_id = pair.draft.id_of.get(pair.target.bytes_of(token_id))
        if token_id == 0:
            own_id = next(each for each in pair.draft.special_ids if pair.draft.names[each] == "<end>")
        if own_id is None:
            assert bool((aligned[:, token_id] == float("-inf")).all())
            assert pair.draft.spell(translation.to_draft([token_id])) == pair.target.bytes_of(token_id) or token_id == 1
        else:
            assert aligned[:, token_id].equal(logits[:, own_id])
            assert translation.to_draft([token_id]) == [own_id] == translation.feed(torch.tensor([token_id])).tolist()
    num_shared = int(aligned[0].isfinite().sum())
    assert 40 < num_shared < pair.target_tokens.vocab_size


class Copies(TorchDispatchMode):
    """Counts the tensors that are copied to another device or kind, by their number of elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_the_tables_go_to_the_device_of_the_logits_once(folders: Folders) -> None:
    """The device `meta` replaces a GPU: nothing can be copied from it. The first ids of a round may be on the host."""
    pair = choose_vocabulary(str(folders.target), str(folders.draft)).require_pair()
    translation = SharedTokens(pair)
    logits = torch.empty(3, pair.draft_tokens.vocab_size, device="meta")
    translation.align(logits)
    with Copies() as copies:
        for _ in range(3):
            assert translation.feed(torch.tensor([2, 3, 4])).is_meta
            assert translation.feed(torch.empty(3, dtype=torch.long, device="meta")).is_meta
            assert translation.align(logits).is_meta
    assert copies.sizes == [3, 3, 3]


def test_what_the_target_has_no_token_for_is_counted(folders: Folders) -> None:
    pair = choose_vocabulary(str(folders.target), str(folders.draft)).require_pair()
    translation = SharedTokens(pair)
    shared = set(pair.shared_ids())
    lone = next(each for each in range(pair.draft_tokens.vocab_size) if each not in shared)
    logits = torch.zeros(4, pair.draft_tokens.vocab_size)
    logits[:3, next(iter(shared))] = 1.0
    logits[3, lone] = 1.0
    translation.align(logits)
    assert (translation.counts.num_tokens, translation.counts.num_lost) == (4, 1)


def test_the_choice_follows_what_the_tokenizers_share(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(draft: Path, **options: bool) -> DraftVocabulary:
        return choose_vocabulary(str(folders.target), str(draft), **options).vocabulary

    assert chosen(folders.target) is DraftVocabulary.SAME
    assert chosen(folders.draft) is DraftVocabulary.INTERSECTION
    monkeypatch.setattr(COVERAGE, 0.99)
    assert chosen(folders.draft) is DraftVocabulary.TEXT
    assert chosen(folders.draft, needs_ids=True) is DraftVocabulary.INTERSECTION
    (tmp_path / "config.json").write_text((folders.draft / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"without a tokenizer\.json of both they cannot be compared"):
        chosen(tmp_path)
    (tmp_path / "config.json").write_text((folders.target / "config.json").read_text())
    assert chosen(tmp_path) is DraftVocabulary.SAME  # no tokenizer: equal ids are assumed to be equal tokens


def test_a_few_other_names_are_still_the_same_vocabulary() -> None:
    names = {token_id: f"token {token_id}" for token_id in range(1000)}
    assert are_names_of_one(names, names)
    assert are_names_of_one({**names, 3: "<another>", 1000: "<new>"}, names)
    assert not are_names_of_one({token_id: names[token_id] for token_id in range(900)}, names)
    assert not are_names_of_one({token_id: names[999 - token_id] for token_id in names}, names)


def test_tokens_that_spell_nothing_will_do_where_they_are_the_same(folders: Folders, tmp_path: Path) -> None:
    """A tokenizer with a decoder of another kind, written by another version of its library."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((folders.target / "config.json").read_text())
        core = Tokenizer.from_file(str(folders.target / "tokenizer.json"))
        core.decoder = decoders.WordPiece()
        core.save(str(tmp_path / name / "tokenizer.json"), pretty=name == "draft")
    paths = str(tmp_path / "target"), str(tmp_path / "draft")
    assert choose_vocabulary(*paths).vocabulary is DraftVocabulary.SAME
    with pytest.raises(ConfigError, match="its tokens have no fixed bytes"):
        choose_vocabulary(paths[0], str(folders.draft))
    size = len(names_of(Tokenizer.from_file(str(folders.target / "tokenizer.json")), 1000))
    ours = ByteVocabulary.from_file(folders.target / "tokenizer.json", size)
    assert VocabularyPair(ours, ours, ModelTokens(size), ModelTokens(size)).coverage() == pytest.approx(1.0)


def test_padding_ids_that_only_the_target_has_never_reach_the_draft() -> None:
    translation = SameVocabulary(400, 402)
    assert not translation.is_identity
    assert translation.to_draft([5, 399, 400, 401]) == [5, 399, 0, 0]
    assert translation.align(torch.zeros(1, 400)).shape == (1, 402)


@pytest.mark.parametrize(("draft_size", "target_size"), [(300, 512), (512, 300), (300, 300)])
def test_one_tokenizer_is_one_whatever_the_padding(draft_size: int, target_size: int, tmp_path: Path) -> None:
    """Also where another version of the library has written the file."""
    for name, size in (("target", target_size), ("draft", draft_size)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, seed=0, vocab_size=size)
        core = write_tokenizer(tmp_path / name)
        core.save(str(tmp_path / name / "tokenizer.json"), pretty=name == "draft")
    choice = choose_vocabulary(str(tmp_path / "target"), str(tmp_path / "draft"))
    assert choice.vocabulary is DraftVocabulary.SAME
    translation = SameVocabulary(draft_size, target_size)
    assert translation.align(torch.zeros(1, draft_size)).shape == (1, target_size)


def test_models_without_a_tokenizer_are_compared_by_their_sizes(tmp_path: Path) -> None:
    for name, size in (("target", 300), ("draft", 400)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, seed=0, vocab_size=size)
    with pytest.raises(ConfigError, match="draft's vocabulary has 400 tokens and the target's 300; without"):
        choose_vocabulary(str(tmp_path / "target"), str(tmp_path / "draft"))
